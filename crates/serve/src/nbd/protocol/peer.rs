//! The other side's bytes: what clients send, encoded, and what servers answer, decoded.

use super::{
    Fields, IHAVEOPT, Malformed, NBDMAGIC, OPTION_REPLY_MAGIC, OptionHeader, REPLY_FLAG_DONE,
    REQUEST_MAGIC, Request, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, handshake, info, put,
    reply_type,
};

/// Whether an option's reply is an error ("Option reply types").
pub(in crate::nbd) const OPTION_ERROR: u32 = 1 << 31;

/// The server's greeting: its handshake flags, as far as they are known here.
pub(in crate::nbd) fn decode_greeting(bytes: &[u8; 18]) -> Result<u16, Malformed> {
    let mut fields = Fields(bytes);
    let magic = [u64::from_be_bytes(fields.array()?), u64::from_be_bytes(fields.array()?)];
    let flags = fields.u16()?;
    if magic != [NBDMAGIC, IHAVEOPT] {
        return Err(Malformed);
    }
    Ok(flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES))
}

/// An option with its data, which the caller keeps shorter than 4 GiB.
pub(in crate::nbd) fn option_message(option: u32, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(OptionHeader::BYTES + data.len());
    out.extend(IHAVEOPT.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(count(data.len()));
    out.extend(data);
    out
}

/// The data of `NBD_OPT_GO` for the export `name`.
pub(in crate::nbd) fn info_request(name: &[u8], infos: &[u16]) -> Vec<u8> {
    let mut out = string(name);
    out.extend(u16::try_from(infos.len()).expect("a few").to_be_bytes());
    infos.iter().for_each(|info| out.extend(info.to_be_bytes()));
    out
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
pub(in crate::nbd) fn meta_request(name: &[u8], queries: &[&str]) -> Vec<u8> {
    let mut out = string(name);
    out.extend(count(queries.len()));
    queries.iter().for_each(|query| out.extend(string(query.as_bytes())));
    out
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&count(bytes.len()), bytes].concat()
}

fn count(count: usize) -> [u8; 4] {
    u32::try_from(count).expect("a command line is short").to_be_bytes()
}

/// The head of a reply to an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::nbd) struct OptionReply {
    pub(in crate::nbd) option: u32,
    pub(in crate::nbd) kind: u32,
    pub(in crate::nbd) len: u32,
}

impl OptionReply {
    pub(in crate::nbd) const BYTES: usize = 20;

    pub(in crate::nbd) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        if u64::from_be_bytes(fields.array()?) != OPTION_REPLY_MAGIC {
            return Err(Malformed);
        }
        Ok(Self { option: fields.u32()?, kind: fields.u32()?, len: fields.u32()? })
    }
}

/// What an `NBD_REP_INFO` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::nbd) enum Info<'a> {
    Export {
        len: u64,
        flags: u16,
    },
    Description(&'a [u8]),
    BlockSize {
        minimum: u32,
        maximum: u32,
    },
    /// A kind that nobody asked for.
    Other,
}

impl<'a> Info<'a> {
    pub(in crate::nbd) fn decode(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(data);
        let found = match fields.u16()? {
            info::EXPORT => {
                Self::Export { len: u64::from_be_bytes(fields.array()?), flags: fields.u16()? }
            }
            info::DESCRIPTION => return Ok(Self::Description(fields.0)),
            info::BLOCK_SIZE => {
                let [minimum, _, maximum] = [fields.u32()?, fields.u32()?, fields.u32()?];
                Self::BlockSize { minimum, maximum }
            }
            _ => return Ok(Self::Other),
        };
        fields.end()?;
        Ok(found)
    }
}

/// The number and name of a context in an `NBD_REP_META_CONTEXT`.
pub(in crate::nbd) fn decode_context(data: &[u8]) -> Result<(u32, &[u8]), Malformed> {
    let mut fields = Fields(data);
    Ok((fields.u32()?, fields.0))
}

/// The name of an export in an `NBD_REP_SERVER`.
pub(in crate::nbd) fn decode_listed(data: &[u8]) -> Result<&[u8], Malformed> {
    Fields(data).string()
}

impl Request {
    pub(in crate::nbd) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        put(&mut out, 0, &REQUEST_MAGIC.to_be_bytes());
        put(&mut out, 4, &self.flags.to_be_bytes());
        put(&mut out, 6, &self.command.to_be_bytes());
        put(&mut out, 8, &self.cookie.to_be_bytes());
        put(&mut out, 16, &self.offset.to_be_bytes());
        put(&mut out, 24, &self.len.to_be_bytes());
        out
    }
}

/// What a reply begins with: all of a simple one without its data, and of a chunk all but its
/// length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::nbd) enum ReplyHead {
    Simple { cookie: u64, error: u32 },
    Chunk { cookie: u64, kind: u16, is_last: bool },
}

impl ReplyHead {
    pub(in crate::nbd) const BYTES: usize = 16;

    pub(in crate::nbd) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        match fields.u32()? {
            SIMPLE_REPLY_MAGIC => {
                let error = fields.u32()?;
                Ok(Self::Simple { error, cookie: u64::from_be_bytes(fields.array()?) })
            }
            STRUCTURED_REPLY_MAGIC => {
                let (flags, kind) = (fields.u16()?, fields.u16()?);
                let cookie = u64::from_be_bytes(fields.array()?);
                Ok(Self::Chunk { cookie, kind, is_last: flags & REPLY_FLAG_DONE != 0 })
            }
            _ => Err(Malformed),
        }
    }
}

/// What the chunk of a reply has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::nbd) enum ChunkKind {
    None,
    Data,
    Hole,
    Status,
    Error,
}

impl ChunkKind {
    /// Unknown kinds of errors are errors; other unknown kinds make no sense.
    pub(in crate::nbd) fn decode(kind: u16) -> Result<Self, Malformed> {
        match kind {
            reply_type::NONE => Ok(Self::None),
            reply_type::OFFSET_DATA => Ok(Self::Data),
            reply_type::OFFSET_HOLE => Ok(Self::Hole),
            reply_type::BLOCK_STATUS => Ok(Self::Status),
            kind if kind & REPLY_ERROR != 0 => Ok(Self::Error),
            _ => Err(Malformed),
        }
    }
}

/// The bit of the kinds of chunks that are errors.
const REPLY_ERROR: u16 = 1 << 15;

/// The number and text in a chunk that is an error; a text that does not fit is left out.
pub(in crate::nbd) fn decode_error(data: &[u8]) -> Result<(u32, &[u8]), Malformed> {
    let mut fields = Fields(data);
    let error = fields.u32()?;
    let text_len = fields.u16().map_or(0, usize::from);
    Ok((error, fields.bytes(text_len).unwrap_or_default()))
}

/// Descriptors of a status that are looked at: a server may send millions, and a status that ends
/// early is one, too.
const DESCRIPTORS_MAX: usize = 1 << 18;

/// The context of a block status, and its descriptors: lengths and flags. Of very many the first.
pub(in crate::nbd) fn decode_status(data: &[u8]) -> Result<(u32, Vec<(u64, u32)>), Malformed> {
    let mut fields = Fields(data);
    let id = fields.u32()?;
    let (descriptors, []) = fields.0.as_chunks::<8>() else { return Err(Malformed) };
    if descriptors.is_empty() {
        return Err(Malformed);
    }
    let descriptors = descriptors.iter().take(DESCRIPTORS_MAX).map(|bytes| {
        let mut fields = Fields(bytes);
        Ok((u64::from(fields.u32()?), fields.u32()?))
    });
    Ok((id, descriptors.collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::super::{Done, chunk_error, chunk_status, greeting, info_block_size, info_export};
    use super::super::{ErrorCode, InfoRequest, MetaRequest, put_option_reply, simple_reply};
    use super::*;

    /// Both sides stand here: what one encodes the other decodes.
    #[test]
    fn sides_understand_each_other() {
        assert_eq!(decode_greeting(&greeting()), Ok(3));
        let sent = option_message(7, &info_request(b"web", &[1, 3]));
        let (head, data) = sent.split_first_chunk().expect("a header");
        let header = OptionHeader::decode(head).expect("a header");
        assert_eq!((header.option, header.len as usize), (7, data.len()));
        let asked = InfoRequest::decode(data).expect("well formed");
        assert!(asked.name == b"web" && asked.asks_for(3) && !asked.asks_for(2));
        let queries = meta_request(b"web", &["base:allocation", "x"]);
        let asked = MetaRequest::decode(&queries).expect("well formed");
        assert_eq!(asked.queries, [&b"base:allocation"[..], b"x"]);
        let mut reply = Vec::new();
        put_option_reply(&mut reply, 7, 3, &[&info_export(512, 1)]);
        let (head, data) = reply.split_first_chunk().expect("a header");
        let expected = OptionReply { option: 7, kind: 3, len: 12 };
        assert_eq!(OptionReply::decode(head), Ok(expected));
        assert_eq!(Info::decode(data), Ok(Info::Export { len: 512, flags: 1 }));
        let sizes = info_block_size(1, 4096, 1 << 20);
        let decoded = Info::BlockSize { minimum: 1, maximum: 1 << 20 };
        assert_eq!(Info::decode(&sizes), Ok(decoded));

        let request = Request { flags: 8, command: 7, cookie: 5, offset: 1 << 40, len: 512 };
        assert_eq!(Request::decode(&request.encode()), Ok(request));
        let simple = simple_reply(9, Some(ErrorCode::Io));
        assert_eq!(ReplyHead::decode(&simple), Ok(ReplyHead::Simple { cookie: 9, error: 5 }));
        let error = chunk_error(9, ErrorCode::NoSpc, Some(512));
        let (head, rest) = error.split_first_chunk().expect("a head");
        let Ok(ReplyHead::Chunk { cookie: 9, kind, is_last: true }) = ReplyHead::decode(head)
        else {
            panic!("it is a chunk");
        };
        assert_eq!(ChunkKind::decode(kind), Ok(ChunkKind::Error));
        let text = ErrorCode::NoSpc.text().as_bytes();
        assert_eq!(decode_error(&rest[4..]), Ok((28, text)));
        let mut status = chunk_status(Done::No, 9, 1, 2)[20..].to_vec();
        status.extend([0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0]);
        assert_eq!(decode_status(&status), Ok((1, vec![(512, 3), (1024, 0)])));
        for len in [4, 5, 11, 13, 19] {
            assert_eq!(decode_status(&status[..len]), Err(Malformed), "{len}");
        }
        let long = [&[0; 4][..], &[0, 0, 2, 0, 0, 0, 0, 3].repeat(DESCRIPTORS_MAX + 1)].concat();
        let (_, first) = decode_status(&long).expect("it may be long");
        assert_eq!(first.len(), DESCRIPTORS_MAX);
        assert_eq!(first[DESCRIPTORS_MAX - 1], (512, 3));
    }
}

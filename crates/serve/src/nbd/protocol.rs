//! The bytes of NBD: constants, and pure encoders and decoders of every message. No I/O, no state.
//! Here are those that a server needs; those of a client are in [`peer`].
//!
//! Everything that is decoded here was written by a stranger: each decoder takes exactly the bytes
//! that the message announced and refuses what does not fit them to the byte.

pub(super) mod peer;

use super::limits::NAME_BYTES_MAX;
use mica_block::{Error, ErrorKind};

// "Newstyle negotiation".
const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Zeros after the reply to EXPORT_NAME, unless the client declined them.
pub(super) const EXPORT_NAME_PADDING: usize = 124;

/// "Handshake flags" and "Client flags": the client answers with the bits that it takes.
pub(super) mod handshake {
    pub(in crate::nbd) const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub(in crate::nbd) const NO_ZEROES: u16 = 1 << 1;
}

/// "Transmission flags".
pub(super) mod transmission {
    pub(in crate::nbd) const HAS_FLAGS: u16 = 1 << 0;
    pub(in crate::nbd) const READ_ONLY: u16 = 1 << 1;
    pub(in crate::nbd) const SEND_FLUSH: u16 = 1 << 2;
    pub(in crate::nbd) const SEND_FUA: u16 = 1 << 3;
    pub(in crate::nbd) const SEND_TRIM: u16 = 1 << 5;
    pub(in crate::nbd) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(in crate::nbd) const SEND_DF: u16 = 1 << 7;
    pub(in crate::nbd) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(in crate::nbd) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// "Option types".
pub(super) mod option {
    pub(in crate::nbd) const EXPORT_NAME: u32 = 1;
    pub(in crate::nbd) const ABORT: u32 = 2;
    pub(in crate::nbd) const LIST: u32 = 3;
    pub(in crate::nbd) const STARTTLS: u32 = 5;
    pub(in crate::nbd) const INFO: u32 = 6;
    pub(in crate::nbd) const GO: u32 = 7;
    pub(in crate::nbd) const STRUCTURED_REPLY: u32 = 8;
    pub(in crate::nbd) const LIST_META_CONTEXT: u32 = 9;
    pub(in crate::nbd) const SET_META_CONTEXT: u32 = 10;
}

/// "Option reply types".
pub(super) mod option_reply {
    pub(in crate::nbd) const ACK: u32 = 1;
    pub(in crate::nbd) const SERVER: u32 = 2;
    pub(in crate::nbd) const INFO: u32 = 3;
    pub(in crate::nbd) const META_CONTEXT: u32 = 4;
    pub(in crate::nbd) const ERR_UNSUP: u32 = 1 << 31 | 1;
    pub(in crate::nbd) const ERR_POLICY: u32 = 1 << 31 | 2;
    pub(in crate::nbd) const ERR_INVALID: u32 = 1 << 31 | 3;
    pub(in crate::nbd) const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    pub(in crate::nbd) const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    pub(in crate::nbd) const ERR_TOO_BIG: u32 = 1 << 31 | 9;
}

/// Information types of "NBD_REP_INFO".
pub(super) mod info {
    pub(in crate::nbd) const EXPORT: u16 = 0;
    pub(in crate::nbd) const NAME: u16 = 1;
    pub(in crate::nbd) const DESCRIPTION: u16 = 2;
    pub(in crate::nbd) const BLOCK_SIZE: u16 = 3;
}

/// "Request types".
pub(super) mod command {
    pub(in crate::nbd) const READ: u16 = 0;
    pub(in crate::nbd) const WRITE: u16 = 1;
    pub(in crate::nbd) const DISC: u16 = 2;
    pub(in crate::nbd) const FLUSH: u16 = 3;
    pub(in crate::nbd) const TRIM: u16 = 4;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 6;
    pub(in crate::nbd) const BLOCK_STATUS: u16 = 7;
}

/// "Command flags".
pub(super) mod command_flag {
    pub(in crate::nbd) const FUA: u16 = 1 << 0;
    pub(in crate::nbd) const NO_HOLE: u16 = 1 << 1;
    pub(in crate::nbd) const DF: u16 = 1 << 2;
    pub(in crate::nbd) const REQ_ONE: u16 = 1 << 3;
    pub(in crate::nbd) const FAST_ZERO: u16 = 1 << 4;
}

const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

const REPLY_FLAG_DONE: u16 = 1 << 0;

/// "Structured reply types".
mod reply_type {
    pub(super) const NONE: u16 = 0;
    pub(super) const OFFSET_DATA: u16 = 1;
    pub(super) const OFFSET_HOLE: u16 = 2;
    pub(super) const BLOCK_STATUS: u16 = 5;
    pub(super) const ERROR: u16 = 1 << 15 | 1;
    pub(super) const ERROR_OFFSET: u16 = 1 << 15 | 2;
}

/// The context that every export has, "The `base:` metadata namespace".
pub(super) const BASE_ALLOCATION: &[u8] = b"base:allocation";
/// "`base:allocation` metadata context": writing here may need space.
pub(super) const STATE_HOLE: u32 = 1 << 0;
/// See [`STATE_HOLE`]: reads as zeros.
pub(super) const STATE_ZERO: u32 = 1 << 1;

/// "Error values": the only ones that a client may see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum ErrorCode {
    Perm = 1,
    Io = 5,
    NoMem = 12,
    Inval = 22,
    NoSpc = 28,
    Overflow = 75,
    NotSup = 95,
}

impl ErrorCode {
    pub(super) fn value(self) -> u32 {
        self as u32
    }

    /// The code that a client gets for an error of the disk. Total: unknown kinds are EIO. ENOTSUP
    /// is not used: the protocol reserves it for fast zeroing.
    pub(super) fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::Invalid | ErrorKind::Limit => Self::Inval,
            ErrorKind::Denied => Self::Perm,
            ErrorKind::NoSpace => Self::NoSpc,
            ErrorKind::Io => match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
                Some(rustix::io::Errno::NOMEM) => Self::NoMem,
                Some(
                    rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT | rustix::io::Errno::FBIG,
                ) => Self::NoSpc,
                _ => Self::Io,
            },
            _ => Self::Io,
        }
    }

    /// What may be shown to the client's user. Says nothing about the server's files: the log does.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Perm => "not permitted",
            Self::Io => "the disk failed here; the server's log says why",
            Self::NoMem => "the server is out of memory",
            Self::Inval => "the request is malformed or beyond the end of the disk",
            Self::NoSpc => "no space left on the disk's storage, or beyond the end of the disk",
            Self::NotSup => "writing zeros would not be faster than writing data",
            Self::Overflow => "too long for one reply",
        }
    }
}

/// The bytes contradict the protocol or their own lengths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Malformed;

/// A reader of fields that never reads beyond its bytes.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, tail) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, tail) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = tail;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    /// A string with its length before it.
    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let len = usize::try_from(self.u32()?).map_err(|_| Malformed)?;
        if len > NAME_BYTES_MAX {
            return Err(Malformed);
        }
        self.bytes(len)
    }

    fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed) }
    }
}

fn put<const N: usize>(out: &mut [u8; N], at: usize, field: &[u8]) {
    out[at..at + field.len()].copy_from_slice(field);
}

/// The server's greeting.
pub(super) fn greeting() -> [u8; 18] {
    let mut out = [0; 18];
    put(&mut out, 0, &NBDMAGIC.to_be_bytes());
    put(&mut out, 8, &IHAVEOPT.to_be_bytes());
    let flags = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
    put(&mut out, 16, &flags.to_be_bytes());
    out
}

/// The client's answer to the greeting. Unknown bits are refused, as "Client flags" demands.
pub(super) fn decode_client_flags(bytes: [u8; 4]) -> Result<u16, Malformed> {
    let known = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
    let flags = u16::try_from(u32::from_be_bytes(bytes)).map_err(|_| Malformed)?;
    if flags & !known == 0 { Ok(flags) } else { Err(Malformed) }
}

/// The head of an option.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct OptionHeader {
    pub(super) option: u32,
    pub(super) len: u32,
}

impl OptionHeader {
    pub(super) const BYTES: usize = 16;

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        if u64::from_be_bytes(fields.array()?) != IHAVEOPT {
            return Err(Malformed);
        }
        Ok(Self { option: fields.u32()?, len: fields.u32()? })
    }
}

/// Appends one reply to an option.
pub(super) fn put_option_reply(out: &mut Vec<u8>, option: u32, reply: u32, data: &[&[u8]]) {
    let len: usize = data.iter().map(|part| part.len()).sum();
    let len = u32::try_from(len).expect("replies are short");
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(reply.to_be_bytes());
    out.extend(len.to_be_bytes());
    data.iter().for_each(|part| out.extend(*part));
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct InfoRequest<'a> {
    pub(super) name: &'a [u8],
    infos: &'a [u8],
}

impl<'a> InfoRequest<'a> {
    pub(super) fn decode(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = usize::from(fields.u16()?);
        let infos = fields.bytes(count * 2)?;
        fields.end()?;
        Ok(Self { name, infos })
    }

    pub(super) fn asks_for(&self, info: u16) -> bool {
        self.infos.chunks_exact(2).any(|asked| asked == info.to_be_bytes())
    }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct MetaRequest<'a> {
    pub(super) name: &'a [u8],
    pub(super) queries: Vec<&'a [u8]>,
}

impl<'a> MetaRequest<'a> {
    pub(super) fn decode(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(data);
        let name = fields.string()?;
        let count = fields.u32()?;
        // No capacity is taken on the client's word: the data ends before a wrong count does.
        let mut queries = Vec::new();
        for _ in 0..count {
            queries.push(fields.string()?);
        }
        fields.end()?;
        Ok(Self { name, queries })
    }
}

/// `NBD_INFO_EXPORT`, and without its first two bytes the reply to `NBD_OPT_EXPORT_NAME`.
pub(super) fn info_export(len: u64, flags: u16) -> [u8; 12] {
    let mut out = [0; 12];
    put(&mut out, 0, &info::EXPORT.to_be_bytes());
    put(&mut out, 2, &len.to_be_bytes());
    put(&mut out, 10, &flags.to_be_bytes());
    out
}

/// `NBD_INFO_BLOCK_SIZE`.
pub(super) fn info_block_size(minimum: u32, preferred: u32, maximum: u32) -> [u8; 14] {
    let mut out = [0; 14];
    put(&mut out, 0, &info::BLOCK_SIZE.to_be_bytes());
    put(&mut out, 2, &minimum.to_be_bytes());
    put(&mut out, 6, &preferred.to_be_bytes());
    put(&mut out, 10, &maximum.to_be_bytes());
    out
}

/// "Request message".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) flags: u16,
    pub(super) command: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) len: u32,
}

impl Request {
    pub(super) const BYTES: usize = 28;

    #[inline]
    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        if fields.u32()? != REQUEST_MAGIC {
            return Err(Malformed);
        }
        Ok(Self {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: u64::from_be_bytes(fields.array()?),
            offset: u64::from_be_bytes(fields.array()?),
            len: fields.u32()?,
        })
    }

    /// Bytes that follow the header.
    #[inline]
    pub(super) fn payload_len(&self) -> u32 {
        if self.command == command::WRITE { self.len } else { 0 }
    }
}

/// "Simple reply message", without its data.
#[inline]
pub(super) fn simple_reply(cookie: u64, error: Option<ErrorCode>) -> [u8; 16] {
    let mut out = [0; 16];
    put(&mut out, 0, &SIMPLE_REPLY_MAGIC.to_be_bytes());
    put(&mut out, 4, &error.map_or(0, ErrorCode::value).to_be_bytes());
    put(&mut out, 8, &cookie.to_be_bytes());
    out
}

/// Whether a chunk is the last of its reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Done {
    Yes,
    No,
}

/// Puts "Structured reply chunk message" at the start of `out`; `N` and `data_len` together are
/// its whole length.
#[inline]
fn chunk<const N: usize>(done: Done, kind: u16, cookie: u64, data_len: u32) -> [u8; N] {
    let flags = if done == Done::Yes { REPLY_FLAG_DONE } else { 0 };
    let fixed = u32::try_from(N - CHUNK_HEADER_BYTES).expect("a few bytes");
    let mut out = [0; N];
    put(&mut out, 0, &STRUCTURED_REPLY_MAGIC.to_be_bytes());
    put(&mut out, 4, &flags.to_be_bytes());
    put(&mut out, 6, &kind.to_be_bytes());
    put(&mut out, 8, &cookie.to_be_bytes());
    put(&mut out, 16, &(fixed + data_len).to_be_bytes());
    out
}

const CHUNK_HEADER_BYTES: usize = 20;

/// `NBD_REPLY_TYPE_NONE`: success without content.
pub(super) fn chunk_none(cookie: u64) -> [u8; 20] {
    chunk(Done::Yes, reply_type::NONE, cookie, 0)
}

/// `NBD_REPLY_TYPE_OFFSET_DATA`, without its data.
#[inline]
pub(super) fn chunk_data(done: Done, cookie: u64, offset: u64, data_len: u32) -> [u8; 28] {
    let mut out = chunk(done, reply_type::OFFSET_DATA, cookie, data_len);
    put(&mut out, 20, &offset.to_be_bytes());
    out
}

/// `NBD_REPLY_TYPE_OFFSET_HOLE`.
#[inline]
pub(super) fn chunk_hole(done: Done, cookie: u64, offset: u64, hole_len: u32) -> [u8; 32] {
    let mut out = chunk(done, reply_type::OFFSET_HOLE, cookie, 0);
    put(&mut out, 20, &offset.to_be_bytes());
    put(&mut out, 28, &hole_len.to_be_bytes());
    out
}

/// `NBD_REPLY_TYPE_BLOCK_STATUS` for the context `id`, without its `count` descriptors.
pub(super) fn chunk_status(done: Done, cookie: u64, id: u32, count: usize) -> [u8; 24] {
    let data_len = u32::try_from(count * STATUS_EXTENT_BYTES).expect("a bounded count");
    let mut out = chunk(done, reply_type::BLOCK_STATUS, cookie, data_len);
    put(&mut out, 20, &id.to_be_bytes());
    out
}

/// Bytes of a descriptor: its length, its flags.
pub(super) const STATUS_EXTENT_BYTES: usize = 8;

/// `NBD_REPLY_TYPE_ERROR`, or `NBD_REPLY_TYPE_ERROR_OFFSET` where it is known which byte failed.
pub(super) fn chunk_error(cookie: u64, error: ErrorCode, offset: Option<u64>) -> Vec<u8> {
    let text = error.text().as_bytes();
    let text_len = u16::try_from(text.len()).expect("a short text");
    let offset_len = if offset.is_some() { 8 } else { 0 };
    let kind = if offset.is_some() { reply_type::ERROR_OFFSET } else { reply_type::ERROR };
    let mut head: [u8; 26] = chunk(Done::Yes, kind, cookie, u32::from(text_len) + offset_len);
    put(&mut head, 20, &error.value().to_be_bytes());
    put(&mut head, 24, &text_len.to_be_bytes());
    let mut out = head.to_vec();
    out.extend(text);
    out.extend(offset.into_iter().flat_map(u64::to_be_bytes));
    out
}

#[cfg(test)]
mod tests;

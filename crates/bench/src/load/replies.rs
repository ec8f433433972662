//! Parses replies, simple and structured, as they arrive.

use anyhow::{Result, bail, ensure};
use mica_tests::nbd;
use std::io::Read;

/// Room for replies; more than any single one takes.
const ROOM_BYTES: usize = 16 << 20;

/// What the server said about a request.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    /// Number of the request.
    pub(crate) cookie: u64,
    /// What it says.
    pub(crate) what: Content<'a>,
    /// Whether it is the last piece for the request.
    pub(crate) last: bool,
}

/// What a piece of a reply holds.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Content<'a> {
    /// Bytes of the disk, from this offset on; `None` stands for the request's own.
    Data(Option<u64>, &'a [u8]),
    /// Zeros.
    Zeros(u64, u64),
    /// Nothing, or something without bytes of the disk.
    Other,
    /// The request failed.
    Failed(u32),
}

/// Bytes that were received and are not parsed yet.
pub(crate) struct Replies {
    room: Vec<u8>,
    start: usize,
    end: usize,
}

impl Replies {
    /// Nothing yet.
    pub(crate) fn new() -> Self {
        Self { room: vec![0; ROOM_BYTES], start: 0, end: 0 }
    }

    /// Takes what the socket has, at least a byte.
    pub(crate) fn receive(&mut self, stream: &mut impl Read) -> Result<()> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end > self.room.len() / 2 {
            self.room.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let count = stream.read(&mut self.room[self.end..])?;
        ensure!(count > 0, "the server ended the connection");
        self.end += count;
        Ok(())
    }

    /// The next piece that has arrived as a whole. `read_len` says how many bytes a successful
    /// simple reply to a request carries.
    pub(crate) fn next(&mut self, read_len: impl Fn(u64) -> usize) -> Result<Option<Piece<'_>>> {
        let bytes = &self.room[self.start..self.end];
        let Some(magic) = bytes.first_chunk() else { return Ok(None) };
        let (len, piece) = match u32::from_be_bytes(*magic) {
            nbd::SIMPLE_REPLY_MAGIC => match simple(bytes, read_len) {
                Some(found) => found,
                None => return Ok(None),
            },
            nbd::CHUNK_MAGIC => match chunk(bytes)? {
                Some(found) => found,
                None => return Ok(None),
            },
            other => bail!("a reply starts with {other:#010x}"),
        };
        self.start += len;
        Ok(Some(piece))
    }
}

/// A simple reply, if it has arrived as a whole, and its length.
fn simple(bytes: &[u8], read_len: impl Fn(u64) -> usize) -> Option<(usize, Piece<'_>)> {
    let (head, rest) = bytes.split_first_chunk::<{ nbd::SIMPLE_REPLY_BYTES }>()?;
    let error = be32(head, 4);
    let cookie = be64(head, 8);
    let what = match error {
        0 => Content::Data(None, rest.get(..read_len(cookie))?),
        error => Content::Failed(error),
    };
    let len = head.len() + if let Content::Data(_, data) = what { data.len() } else { 0 };
    Some((len, Piece { cookie, what, last: true }))
}

/// A chunk, if it has arrived as a whole, and its length.
fn chunk(bytes: &[u8]) -> Result<Option<(usize, Piece<'_>)>> {
    let Some((head, rest)) = bytes.split_first_chunk::<{ nbd::CHUNK_BYTES }>() else {
        return Ok(None);
    };
    let flags = u16::from_be_bytes([head[4], head[5]]);
    let kind = u16::from_be_bytes([head[6], head[7]]);
    let cookie = be64(head, 8);
    let len = be32(head, 16) as usize;
    ensure!(len < ROOM_BYTES / 2, "a chunk of {len} bytes");
    let Some(data) = rest.get(..len) else { return Ok(None) };
    let what = match kind {
        nbd::CHUNK_DATA => {
            ensure!(len > 8, "a data chunk of {len} bytes");
            Content::Data(Some(be64(data, 0)), &data[8..])
        }
        nbd::CHUNK_HOLE => {
            ensure!(len == 12, "a hole chunk of {len} bytes");
            Content::Zeros(be64(data, 0), u64::from(be32(data, 8)))
        }
        kind if kind & 1 << 15 != 0 => {
            ensure!(len >= 4, "an error chunk of {len} bytes");
            Content::Failed(be32(data, 0))
        }
        _ => Content::Other,
    };
    let piece = Piece { cookie, what, last: flags & nbd::CHUNK_DONE != 0 };
    Ok(Some((head.len() + len, piece)))
}

/// The big-endian number at `at`, which the caller knows to be present.
fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

/// The big-endian number at `at`, which the caller knows to be present.
fn be64(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_in_halves_is_taken_once_it_is_whole() {
        let mut replies = Replies::new();
        let mut reply = nbd::SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        reply.extend([0; 4]);
        reply.extend(7_u64.to_be_bytes());
        reply.extend([1, 2, 3]);
        replies.receive(&mut &reply[..18]).expect("bytes");
        assert!(replies.next(|_| 3).expect("no rubbish").is_none());
        replies.receive(&mut &reply[18..]).expect("bytes");
        let piece = replies.next(|_| 3).expect("no rubbish").expect("whole");
        assert_eq!((piece.cookie, piece.last), (7, true));
        assert_eq!(piece.what, Content::Data(None, &[1, 2, 3]));
        assert!(replies.next(|_| 3).expect("no rubbish").is_none());
    }

    #[test]
    fn garbage_is_refused() {
        let mut replies = Replies::new();
        replies.receive(&mut &[0xff; 32][..]).expect("bytes");
        assert!(replies.next(|_| 0).is_err());
    }
}

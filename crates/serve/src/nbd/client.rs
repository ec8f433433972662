//! The client's side: exports of other servers, for reading.
//!
//! ```text
//! uri          what the user named
//!   └▶ greeting    options, until an export is chosen; waits for each answer
//!        ├▶ secure     what is under all that follows, if the URI says nbds://
//!        └▶ link       requests of any task ─▶ the socket ─▶ a thread that takes the answers
//!             ├ reply      what came of one request so far
//!             └ parts      what the contexts say, put together
//! ```
//!
//! Requests go out over one connection, any number of them before the first answer: servers often
//! take one client only, and one that is asked ahead always has something to do. Whoever asks
//! needs no thread: one thread of the link takes all answers, straight into the buffers that wait
//! for them.
//!
//! Invariants
//! - I1 What a server says is checked against what was asked, and takes memory only as it comes, up
//!   to a stated maximum: a server may be anybody.
//! - I2 Each request has one outcome: its answer, an error that the server reports for it, or why
//!   there is no connection any more. The first that breaks the protocol ends the connection.
//! - I3 Each byte of a read comes once: no byte is left as it was, and none of a buffer is given to
//!   its owner before all have come.
//! - I4 Requests are whole blocks of the server and at most as long as it takes. Those that are not
//!   are widened and divided here, so that callers know of sectors only.

mod greeting;
mod link;
mod parts;
mod reply;
mod secure;
mod uri;

#[cfg(test)]
mod tests;

pub use crate::tls::Trust;
pub use greeting::Greeting;
pub use parts::Part;
pub use uri::{Place, Uri};

use super::protocol::{command, transmission};
use link::Link;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::{Buf, join_all};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use parts::{cut, whole_sectors};

/// The context of what a part is allocated.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// A flag of that: writing here may need space.
pub const HOLE: u32 = super::protocol::STATE_HOLE;
/// A flag of that: it reads as zeros.
pub const ZERO: u32 = super::protocol::STATE_ZERO;

/// Bytes that are asked about at once: in 32 bits with room for whole blocks.
const STATUS_BYTES_MAX: u64 = (4 << 30) - (1 << 20);

/// What a server says of an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Export {
    /// Length in bytes. What servers export need not be whole sectors.
    pub len: u64,
    /// What it is called for people; often empty.
    pub description: String,
    /// Requests are multiples of this, a power of two.
    block_min: u64,
    /// Reads are at most this long, a multiple of a block.
    read_max: u64,
    flags: u16,
}

impl Export {
    /// Whether nobody writes to it through this server.
    pub fn is_read_only(&self) -> bool {
        self.flags & transmission::READ_ONLY != 0
    }

    /// `range`, made of whole blocks (I4), as far as the export reaches.
    fn in_blocks(&self, range: GuestRange) -> Result<GuestRange> {
        let start = range.start().bytes() & !(self.block_min - 1);
        let end = range.end().bytes().next_multiple_of(self.block_min).min(self.len);
        GuestRange::between(GuestOffset::new(start), GuestOffset::new(end))
            .filter(|blocks| !blocks.is_empty() && range.end().bytes() <= self.len)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, "it lies beyond the end of the export"))
    }
}

/// A connection to one export, for tasks on any thread. It ends when this is dropped.
pub struct Client {
    link: Link,
    export: Export,
}

impl Client {
    /// What the server said of the export.
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Fills `buf` with the bytes from `at` on, none of which lies beyond the end.
    ///
    /// Errors: what the server reports, or why there is no connection any more; the content of the
    /// buffer is then unspecified.
    pub async fn read(&self, at: u64, mut buf: Buf) -> (Result<()>, Buf) {
        let len = buf.len();
        let range = GuestRange::new(GuestOffset::new(at), len as u64);
        let blocks = match range.map(|range| self.export.in_blocks(range)) {
            Some(Ok(blocks)) => blocks,
            Some(Err(error)) => return (Err(error), buf),
            None => return (Err(Error::new(ErrorKind::Invalid, "a read is too long")), buf),
        };
        if Some(blocks) == range && !buf.is_foreign() {
            return self.read_blocks(at, buf).await;
        }
        let start = blocks.start().bytes();
        let skipped = usize::try_from(at - start).expect("less than a block");
        let wide = Buf::new(usize::try_from(blocks.len()).expect("a block more at both ends"));
        let (result, wide) = self.read_blocks(start, wide).await;
        if result.is_ok() {
            buf.put(0, &wide[skipped..skipped + len]);
        }
        (result, buf)
    }

    /// Reads whole blocks, in as many requests as it takes.
    async fn read_blocks(&self, at: u64, mut buf: Buf) -> (Result<()>, Buf) {
        let request_max = usize::try_from(self.export.read_max).expect("at most 32 MiB");
        if buf.len() <= request_max {
            return self.link.read(at, buf).await;
        }
        let mut requests = Vec::new();
        let mut from = at;
        while !buf.is_empty() {
            let piece = buf.split_to(request_max.min(buf.len()));
            let start = from;
            from += piece.len() as u64;
            requests.push(self.link.read(start, piece));
        }
        let (mut whole, mut outcome) = (buf, Ok(()));
        for (result, piece) in join_all(requests).await {
            outcome = outcome.and(result);
            if whole.is_empty() {
                whole = piece;
            } else {
                whole.join(piece);
            }
        }
        (outcome, whole)
    }

    /// What the contexts that were selected say of the parts of `range`, from its start on: at
    /// least of a sector. All parts are whole sectors, as `range` must be.
    ///
    /// # Errors
    /// What the server reports for the first sector, or why there is no connection any more.
    pub async fn status(&self, range: GuestRange) -> Result<Vec<Part>> {
        let (mut parts, mut told) = (Vec::new(), 0);
        let mut wanted = range.len();
        // A server may stop within a sector: then the rest of that is asked for.
        while wanted > 0 {
            let more = match self.some_status(range.start().bytes() + told, wanted).await {
                Ok(more) => more,
                // What is known of whole sectors is an answer.
                Err(_) if told >= SECTOR_BYTES => {
                    cut(&mut parts, told / SECTOR_BYTES * SECTOR_BYTES);
                    break;
                }
                Err(error) => return Err(error),
            };
            told += more.iter().map(|part| part.len).sum::<u64>();
            parts.extend(more);
            wanted = told.next_multiple_of(SECTOR_BYTES) - told;
        }
        Ok(whole_sectors(&parts))
    }

    /// At least of a byte.
    async fn some_status(&self, at: u64, len: u64) -> Result<Vec<Part>> {
        let range = GuestRange::new(GuestOffset::new(at), len.min(STATUS_BYTES_MAX));
        let range = range.ok_or_else(|| Error::new(ErrorKind::Invalid, "beyond 64 bits"))?;
        let blocks = self.export.in_blocks(range)?;
        let mut skipped = at - blocks.start().bytes();
        let mut left = range.len();
        let mut parts = Vec::new();
        for part in self.link.status(blocks.start().bytes(), blocks.len()).await? {
            let before = skipped.min(part.len);
            skipped -= before;
            let len = (part.len - before).min(left);
            left -= len;
            if len > 0 {
                parts.push(Part { len, ..part });
            }
        }
        match parts.is_empty() {
            true => Err(broken("an empty block status")),
            false => Ok(parts),
        }
    }
}

/// A server that does not keep to the protocol.
fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Io, what)
}

/// What a server calls something, for a terminal.
fn plain(bytes: &[u8]) -> String {
    const CHARS_MAX: usize = 300;
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|letter| !letter.is_control()).take(CHARS_MAX).collect()
}

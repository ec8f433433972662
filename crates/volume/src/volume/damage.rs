//! Says where on the disk what could not be read is, and of which volume or snapshot: errors of
//! reading name objects of the store.

use super::Volume;
use crate::place::BLOCK_BYTES;
use crate::reader::blocks_of;
use crate::shared::Shared;
use mica_block::{Error, ErrorKind, Result, Which};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};
use std::ops::Range;

/// How many parts are read again to find where the damage is, at most.
const PROBES_MAX: u32 = 64;

impl Volume {
    /// The same, of which this is a snapshot.
    pub(crate) fn reading_snapshot(self, which: &Which) -> Self {
        let label = match which {
            Which::Label(label) => label.clone(),
            Which::Number(number) => number.to_string(),
        };
        // It is said once, before anybody reads.
        let _ = self.shared.snapshot.set(label);
        self
    }
}

impl Shared {
    /// What is read, for messages.
    fn what(&self) -> String {
        let name = self.heads.name.as_str();
        self.snapshot.get().map_or_else(|| name.to_owned(), |label| format!("{name}@{label}"))
    }

    /// With the first block of `range` that cannot be read, if `error` is damage.
    pub(super) async fn located(&self, error: Error, range: GuestRange) -> Error {
        if error.kind() != ErrorKind::Corrupt {
            return error;
        }
        let bad = self.first_damaged(range).await;
        let (what, len, at) = (self.what(), bad.len(), bad.start().bytes());
        with_place(&error, &format!("{what}: {len} bytes at {at} of the disk"))
    }

    /// With the place from which on the map cannot be read, if `error` is damage.
    pub(super) fn located_in_map(&self, error: Error, range: GuestRange) -> Error {
        if error.kind() != ErrorKind::Corrupt {
            return error;
        }
        let (what, at) = (self.what(), range.start().bytes());
        with_place(&error, &format!("{what}: its map at {at} of the disk, or behind that"))
    }

    /// The first block of `range` that is damaged, found by halves, as each part that is read again
    /// costs requests. As much as is known if the store cannot say more.
    async fn first_damaged(&self, range: GuestRange) -> GuestRange {
        let mut blocks = blocks_of(range);
        let mut bad = range;
        for _ in 0..PROBES_MAX {
            let half = (blocks.end - blocks.start) / 2;
            let is_last = half == 0;
            let tried = if is_last { blocks.clone() } else { blocks.start..blocks.start + half };
            let Some(part) = part_of(range, &tried).filter(|part| *part != bad) else { break };
            match self.probe(part).await {
                Err(error) if error.kind() == ErrorKind::Corrupt => (blocks, bad) = (tried, part),
                Ok(()) if !is_last => blocks.start = tried.end,
                // It can be read now, or nobody knows.
                _ => break,
            }
        }
        bad
    }

    /// Whether `part` can be read.
    async fn probe(&self, part: GuestRange) -> Result<()> {
        let mut view = self.view(part);
        view.resolve(&self.tree).await?;
        let room = Buf::new(usize::try_from(part.len()).expect("a part of what was read"));
        view.read(&self.tree, part, room).await.0.map(drop)
    }
}

/// What `range` has of `blocks`.
fn part_of(range: GuestRange, blocks: &Range<u64>) -> Option<GuestRange> {
    const SIZE: u64 = BLOCK_BYTES as u64;
    let start = GuestOffset::new(blocks.start * SIZE).max(range.start());
    let end = GuestOffset::new(blocks.end * SIZE).min(range.end());
    GuestRange::between(start, end)
}

/// All in one text: some show no causes, and the object is as important as the place.
fn with_place(error: &Error, place: &str) -> Error {
    Error::new(error.kind(), format!("{place}: {}", error.in_one_line()))
}

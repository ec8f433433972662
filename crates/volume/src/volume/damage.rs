//! Says where on the disk what could not be read is, and of which volume or snapshot: errors of
//! reading name objects of the store.

use super::Volume;
use crate::place::BLOCK_BYTES;
use crate::reader::blocks_of;
use crate::shared::Shared;
use mica_block::{Error, ErrorKind, Which};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};

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
        let bad = self.first_damaged(range).await.unwrap_or(range);
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

    async fn first_damaged(&self, range: GuestRange) -> Option<GuestRange> {
        const SIZE: u64 = BLOCK_BYTES as u64;
        for block in blocks_of(range) {
            let start = range.start().bytes().max(block * SIZE);
            let end = range.end().bytes().min((block + 1) * SIZE);
            let part = GuestRange::new(GuestOffset::new(start), end - start)?;
            let mut view = self.view(part);
            let room = Buf::new(usize::try_from(part.len()).ok()?);
            let is_read = view.resolve(&self.tree).await.is_ok()
                && view.read(&self.tree, part, room).await.0.is_ok();
            if !is_read {
                return Some(part);
            }
        }
        None
    }
}

/// All in one text: some show no causes, and the object is as important as the place.
fn with_place(error: &Error, place: &str) -> Error {
    Error::new(error.kind(), format!("{place}: {}", error.in_one_line()))
}

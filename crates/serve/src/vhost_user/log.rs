//! The dirty log: which pages of guest memory the device wrote, so that a machine can migrate while
//! it runs (vhost-user, "Migration").
//!
//! A bit per page of 4 KiB, in a file that the front end shares. It is set after the bytes are
//! written: the front end that finds it copies the page then.

use super::lost::{FilePart, Lost, Pages, Watched};
use super::memory::Memory;
use mica_block::{Error, ErrorKind, Result};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use vm_memory::{FileOffset, GuestAddress, MmapRegion, VolatileMemory};

const PAGE_BITS: u32 = 12;

/// A mapped log.
pub(super) struct DirtyLog {
    map: Watched<MmapRegion>,
}

impl DirtyLog {
    /// Maps this `part` of `file`, which has a bit for each page of `memory`.
    ///
    /// # Errors
    /// `Invalid` if it has not; else any error of the system.
    pub(super) fn map(
        file: File,
        part: FilePart,
        memory: &Memory,
        lost: &Arc<Lost>,
    ) -> Result<Self> {
        let FilePart { offset, len } = part;
        let invalid = |what: &str| Error::new(ErrorKind::Invalid, format!("the dirty log: {what}"));
        let metadata = file.metadata().map_err(|error| Error::from_io("the dirty log", error))?;
        let end = offset.checked_add(len).ok_or_else(|| invalid("an offset beyond 64 bits"))?;
        if !metadata.is_file() || metadata.len() < end {
            return Err(invalid("its file is not as long as it says"));
        }
        if len < memory.end().div_ceil(8 << PAGE_BITS) {
            return Err(invalid("it is too short for the guest's memory"));
        }
        let size = usize::try_from(len).map_err(|_| invalid("it is too long"))?;
        let pages = Pages::of(&file, lost);
        let map = MmapRegion::from_file(FileOffset::new(file, offset), size)
            .map_err(|error| Error::new(ErrorKind::Io, format!("the dirty log: {error}")))?;
        let place = (map.as_ptr().cast_const(), size);
        Ok(Self { map: Watched::new(map, place, &pages) })
    }

    /// Marks the pages of `len` bytes at `at`.
    pub(super) fn mark(&self, at: GuestAddress, len: u64) {
        let Some(last) = len.checked_sub(1).and_then(|rest| at.0.checked_add(rest)) else { return };
        for page in at.0 >> PAGE_BITS..=last >> PAGE_BITS {
            let Ok(byte) = usize::try_from(page / 8) else { return };
            // The log may be shorter than memory that was added later; nothing there is marked.
            let Ok(bits) = self.map.get_atomic_ref::<AtomicU8>(byte) else { return };
            bits.fetch_or(1 << (page % 8), Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost_user::memory::Region;
    use vhost::vhost_user::message::VhostUserMemoryRegion;

    fn file(len: u64) -> File {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(len).expect("a length");
        file
    }

    #[test]
    fn pages_that_are_touched_are_marked_and_no_others() {
        let layout = VhostUserMemoryRegion::new(0, 1 << 20, 0, 0);
        let lost = Arc::default();
        let region = Region::map(layout, file(1 << 20), &lost).expect("maps");
        let memory = Memory::new(vec![region], &lost);
        let memory = memory.expect("one region");
        let shared = file(64);
        let map = |file, len| DirtyLog::map(file, FilePart { offset: 0, len }, &memory, &lost);
        assert!(map(file(64), 31).is_err(), "a bit is missing");
        assert!(map(file(63), 64).is_err(), "longer than its file");
        let log = map(shared.try_clone().expect("a file"), 64);
        let log = log.expect("long enough");
        log.mark(GuestAddress(4095), 2);
        log.mark(GuestAddress(9 << 12), 1 << 12);
        log.mark(GuestAddress(0x5000), 0);
        log.mark(GuestAddress(u64::MAX), 1);
        let mut bytes = [0; 64];
        std::os::unix::fs::FileExt::read_exact_at(&shared, &mut bytes, 0).expect("readable");
        assert_eq!(bytes[..3], [0b11, 0b10, 0]);
        assert!(bytes[3..].iter().all(|byte| *byte == 0));
    }
}

//! Writes to the page cache, done by whoever asks for them.
//!
//! A file system that cannot tell beforehand whether a write would wait (ext4) has the ring hand
//! each one to a thread of the kernel. That costs several times what the write itself does, which
//! is to copy a few pages. So small writes are tried at once, and the ring gets them where trying
//! turned out to wait: for dirty pages to be written, for a journal, for a lock. Other file systems
//! (XFS, Btrfs) are asked not to wait, and the ring gets what would.
//!
//! Invariant: of an executor's time not more than one part in [`PAUSE_FACTOR`] is lost to waiting,
//! as its other tasks may belong to other disks.

use crate::buf::Buf;
use crate::file::{Access, File};
use rustix::io::{Errno, ReadWriteFlags, pwrite, pwritev2};
use std::io::IoSlice;
use std::time::{Duration, Instant};

/// Longest write that is tried: copying more takes longer than giving it to a thread.
const LENGTH_MAX: usize = 64 << 10;
/// A write that took longer waited for something.
const WAITED_MIN: Duration = Duration::from_micros(200);
/// For how many times as long as a write waited no other is tried.
const PAUSE_FACTOR: u32 = 20;

/// Whether writes of an executor are done in place.
#[derive(Default)]
pub(super) struct InPlace {
    /// No write is tried before this.
    not_before: Option<Instant>,
}

impl InPlace {
    /// Writes `buf` at `offset` and gives the count, or nothing if that is to be left to others:
    /// so it is with all that fails.
    pub(super) fn write(&mut self, file: &File, buf: &Buf, offset: u64) -> Option<usize> {
        if file.access() != Access::Buffered || buf.len() > LENGTH_MAX {
            return None;
        }
        if !file.waits_untold() {
            match pwritev2(file, &[IoSlice::new(buf)], offset, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP) => file.set_waits_untold(),
                written => return written.ok(),
            }
        }
        let start = now();
        if self.not_before.is_some_and(|not_before| start < not_before) {
            return None;
        }
        let written = pwrite(file, buf, offset);
        self.note(start, start.elapsed());
        written.ok()
    }

    /// Notes how long a write took that was begun at `start`.
    fn note(&mut self, start: Instant, took: Duration) {
        if took >= WAITED_MIN {
            self.not_before = Some(start + took * (PAUSE_FACTOR + 1));
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "how to wait for the system is no matter of the clock"
)]
pub(super) fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::pread;

    fn made() -> (tempfile::NamedTempFile, File) {
        let made = tempfile::NamedTempFile::new().unwrap();
        let opened = made.reopen().unwrap();
        (made, File::new(opened.into(), Access::Buffered))
    }

    #[test]
    fn small_writes_are_done_where_they_do_not_wait() {
        let (_made, file) = made();
        let mut in_place = InPlace::default();
        for offset in [0, 9000] {
            assert_eq!(in_place.write(&file, &Buf::from_slice(&[7; 3000]), offset), Some(3000));
            let mut read = [0; 3000];
            assert_eq!(pread(&file, &mut read, offset), Ok(3000));
            assert_eq!(read, [7; 3000]);
        }
    }

    #[test]
    fn long_and_direct_ones_are_left_to_the_ring() {
        let (made, file) = made();
        let mut in_place = InPlace::default();
        assert_eq!(in_place.write(&file, &Buf::zeroed(LENGTH_MAX + 1), 0), None);
        let direct = File::new(made.reopen().unwrap().into(), Access::Direct);
        assert_eq!(in_place.write(&direct, &Buf::zeroed(4096), 0), None);
        assert_eq!(made.as_file().metadata().unwrap().len(), 0);
    }

    #[test]
    fn what_fails_is_left_to_the_ring() {
        let (made, _) = made();
        let read_only = std::fs::File::open(made.path()).unwrap();
        let file = File::new(read_only.into(), Access::Buffered);
        assert_eq!(InPlace::default().write(&file, &Buf::zeroed(512), 0), None);
    }

    #[test]
    fn one_that_waited_keeps_others_from_being_tried() {
        let (_made, file) = made();
        file.set_waits_untold();
        let (mut in_place, buf) = (InPlace::default(), Buf::zeroed(512));
        in_place.note(now(), WAITED_MIN / 2);
        assert_eq!(in_place.write(&file, &buf, 0), Some(512), "it was but slow");
        in_place.note(now(), Duration::from_secs(100));
        assert_eq!(in_place.write(&file, &buf, 0), None);
        // 21 times a wait, it and its pause are over.
        let long_ago = now().checked_sub(Duration::from_secs(22)).unwrap();
        in_place.note(long_ago, Duration::from_secs(1));
        assert_eq!(in_place.write(&file, &buf, 0), Some(512));
    }
}

//! Writes to the page cache, done by the executor itself.
//!
//! A file system that cannot tell beforehand whether a write would wait (ext4) has the ring hand
//! each one to a thread of the kernel. That costs several times what the write does, which is to
//! copy a few pages; a thread of our own costs as much. But a write may wait: for dirty pages, for
//! a journal, for a file system that is frozen. So this is done only where it was allowed, because
//! nothing but the one disk would wait with it, and the ring gets all that follows one that waited.
//!
//! Invariants
//! - I1 Nothing is written in place unless [`crate::Handle::allow_writes_in_place`] was called.
//! - I2 After a write that waited, none is done in place for [`PAUSE_FACTOR`] times as long.
//! - I3 What fails is done again by the ring, which tells why.

use crate::buf::{BUF_ALIGN, Buf};
use crate::file::{Access, File};
use crate::remote::Remote;
use rustix::io::pwrite;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest write that is done in place: a longer one is worth a thread.
const LENGTH_MAX: usize = 64 << 10;
/// A write that took longer waited for something.
const WAITED_MIN: Duration = Duration::from_micros(200);
const PAUSE_FACTOR: u32 = 20;

/// Whether writes of an executor are done in place.
pub(super) struct InPlace {
    remote: Arc<Remote>,
    /// No write is done in place before this.
    not_before: Option<Instant>,
}

impl InPlace {
    pub(super) fn new(remote: Arc<Remote>) -> Self {
        Self { remote, not_before: None }
    }

    /// Writes `buf` at `offset` and gives the count, or nothing if that is to be left to the ring.
    pub(super) fn write(&mut self, file: &File, buf: &Buf, offset: u64) -> Option<usize> {
        // A part of a page may have to be read first.
        let is_fit = buf.len() <= LENGTH_MAX
            && buf.len().is_multiple_of(BUF_ALIGN)
            && offset.is_multiple_of(BUF_ALIGN as u64)
            && file.access() == Access::Buffered;
        if !is_fit || !self.remote.writes_in_place() || !file.lacks_nowait_writes() {
            return None;
        }
        let start = now();
        if self.not_before.is_some_and(|not_before| start < not_before) {
            return None;
        }
        self.remote.set_is_writing(true);
        let written = pwrite(file, buf, offset);
        self.remote.set_is_writing(false);
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

    /// A file, if it is on a file system of that kind.
    fn made() -> Option<(tempfile::NamedTempFile, File)> {
        let made = tempfile::NamedTempFile::new().unwrap();
        let file = File::new(made.reopen().unwrap().into(), Access::Buffered);
        if !file.lacks_nowait_writes() {
            println!("SKIPPED: the temporary folder is not on ext4");
            return None;
        }
        Some((made, file))
    }

    fn allowed() -> InPlace {
        let in_place = InPlace::new(Arc::new(Remote::new().unwrap()));
        in_place.remote.allow_writes_in_place();
        in_place
    }

    #[test]
    fn small_writes_are_done_where_that_is_allowed() {
        let Some((_made, file)) = made() else { return };
        let mut in_place = allowed();
        for offset in [0, 12 << 10] {
            let buf = Buf::from_slice(&[7; 8192]);
            assert_eq!(in_place.write(&file, &buf, offset), Some(8192));
            let mut read = [0; 8192];
            assert_eq!(pread(&file, &mut read, offset), Ok(8192));
            assert_eq!(read, [7; 8192]);
        }
        let mut in_place = InPlace::new(Arc::new(Remote::new().unwrap()));
        assert_eq!(in_place.write(&file, &Buf::zeroed(4096), 0), None);
    }

    #[test]
    fn all_else_is_left_to_the_ring() {
        let Some((made, file)) = made() else { return };
        let mut in_place = allowed();
        assert_eq!(in_place.write(&file, &Buf::zeroed(LENGTH_MAX + 4096), 0), None, "long");
        assert_eq!(in_place.write(&file, &Buf::zeroed(512), 0), None, "a part of a page");
        assert_eq!(in_place.write(&file, &Buf::zeroed(4096), 512), None, "parts of two");
        let direct = File::new(made.reopen().unwrap().into(), Access::Direct);
        assert_eq!(in_place.write(&direct, &Buf::zeroed(4096), 0), None, "past the page cache");
        let read_only = std::fs::File::open(made.path()).unwrap();
        let read_only = File::new(read_only.into(), Access::Buffered);
        assert_eq!(in_place.write(&read_only, &Buf::zeroed(4096), 0), None, "one that fails");
        assert_eq!(made.as_file().metadata().unwrap().len(), 0);
    }

    #[test]
    fn one_that_waited_leaves_the_next_to_the_ring() {
        let Some((_made, file)) = made() else { return };
        let (mut in_place, buf) = (allowed(), Buf::zeroed(4096));
        in_place.note(now(), WAITED_MIN / 2);
        assert_eq!(in_place.write(&file, &buf, 0), Some(4096), "it was but slow");
        in_place.note(now(), Duration::from_secs(100));
        assert_eq!(in_place.write(&file, &buf, 0), None);
        // 21 times a wait, it and its pause are over.
        let long_ago = now().checked_sub(Duration::from_secs(22)).unwrap();
        in_place.note(long_ago, Duration::from_secs(1));
        assert_eq!(in_place.write(&file, &buf, 0), Some(4096));
    }
}

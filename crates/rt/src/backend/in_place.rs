//! Writes to the page cache, done by the executor itself.
//!
//! Where the file system cannot tell beforehand whether a write would wait, each one needs a
//! thread. That costs several times what the write does, which is to copy a few pages. But a write
//! may block, and everything else on the executor with it. So whoever opened the file decides
//! ([`File::write_in_place`]), and after a write that blocked the next ones are given to threads.
//!
//! Invariants
//! - I1 Nothing is written in place unless the file says so at that moment.
//! - I2 After a write that blocked, none is done in place for [`PAUSE_FACTOR`] times as long. One
//!   that took long because another thread had the processor has not blocked.
//! - I3 A write that fails is retried by a thread, which reports why.
//! - I4 No page has to be read first: of those that a write changes only in part, both ends are
//!   cached.

use super::now;
use super::offload::Offload;
use crate::buf::{BUF_ALIGN, Buf};
use crate::file::{Access, File};
use crate::remote::Remote;
use nix::sys::resource::{UsageWho, getrusage};
use rustix::io::pwrite;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest write that is done in place: a longer one is worth a thread.
const LENGTH_MAX: usize = 64 << 10;
/// A write that slept, and took longer than this, was blocked on something.
const WAITED_MIN: Duration = Duration::from_micros(200);
const PAUSE_FACTOR: u32 = 20;

/// Whether writes of an executor are done in place.
pub(super) struct InPlace {
    remote: Arc<Remote>,
    /// No write is done in place before this.
    not_before: Option<Instant>,
    /// How many times the thread had gone to sleep when that was last asked.
    sleeps: Option<i64>,
    /// Whether it may have done so since.
    may_have_slept: bool,
}

impl InPlace {
    pub(super) fn new(remote: Arc<Remote>) -> Self {
        Self { remote, not_before: None, sleeps: None, may_have_slept: true }
    }

    /// Writes `buf` at `offset` and returns the count, or `None` to leave the write to a thread.
    pub(super) fn write(
        &mut self,
        file: &File,
        buf: &Buf,
        offset: u64,
        offload: &mut Offload,
    ) -> Option<usize> {
        if !is_fit(file, buf) {
            return None;
        }
        let start = now();
        if self.not_before.is_some_and(|not_before| start < not_before) {
            return None;
        }
        // From here on only the write puts it to sleep.
        self.has_slept();
        self.remote.set_is_writing(true);
        // A question about a page that is not cached begins to read it, and may block, too.
        let written = are_ends_cached(file, buf.len(), offset).then(|| pwrite(file, buf, offset));
        self.remote.set_is_writing(false);
        let took = start.elapsed();
        offload.note(took);
        if took >= WAITED_MIN {
            self.may_have_slept = true;
            if self.has_slept() {
                self.note_block(start, took);
            }
        }
        written?.ok()
    }

    /// The thread may go to sleep for other reasons than a write.
    pub(super) fn note_rest(&mut self) {
        self.may_have_slept = true;
    }

    /// Whether the thread has gone to sleep since this was last asked.
    pub(super) fn has_slept(&mut self) -> bool {
        if !std::mem::take(&mut self.may_have_slept) {
            return false;
        }
        let before = std::mem::replace(&mut self.sleeps, sleeps());
        // Not known counts as slept.
        self.sleeps.is_none() || before != self.sleeps
    }

    /// Records that a write that began at `start` was blocked, and how long it took.
    fn note_block(&mut self, start: Instant, took: Duration) {
        self.not_before = Some(start + took * (PAUSE_FACTOR + 1));
    }
}

/// Whether a write to `file` may be done in place (I1).
pub(super) fn is_fit(file: &File, buf: &Buf) -> bool {
    buf.len() <= LENGTH_MAX && file.access() == Access::Buffered && file.is_written_in_place()
}

/// Whether the pages of which a write changes only a part are in the page cache: otherwise they
/// have to be read first. A header, for instance, that is written with every group always is.
fn are_ends_cached(file: &File, len: usize, offset: u64) -> bool {
    let is_whole = |at: u64| at.is_multiple_of(BUF_ALIGN as u64);
    let Some(end) = offset.checked_add(len as u64) else { return false };
    (is_whole(offset) || is_surely_cached(file, offset))
        && (is_whole(end) || is_surely_cached(file, end - 1))
}

/// Whether the byte at `at` can be read without waiting.
fn is_surely_cached(file: &File, at: u64) -> bool {
    file.probe(at) == Ok(1)
}

/// How many times this thread has gone to sleep: unlike a thread that lost its processor to another
/// one, it gave it up (getrusage(2), `ru_nvcsw`).
fn sleeps() -> Option<i64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).ok()?;
    Some(usage.voluntary_context_switches())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::pread;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A file that is written in place while the flag says so.
    fn made(access: Access) -> (tempfile::NamedTempFile, File, Arc<AtomicBool>) {
        let made = tempfile::NamedTempFile::new().unwrap();
        let is_allowed = Arc::new(AtomicBool::new(true));
        let file = File::new(made.reopen().unwrap().into(), access);
        (made, file.write_in_place(Arc::clone(&is_allowed)), is_allowed)
    }

    fn write(in_place: &mut InPlace, file: &File, buf: &Buf, offset: u64) -> Option<usize> {
        in_place.write(file, buf, offset, &mut Offload::default())
    }

    fn in_place() -> InPlace {
        InPlace::new(Arc::new(Remote::new().unwrap()))
    }

    #[test]
    fn small_writes_are_done_while_that_is_allowed() {
        let (made, file, is_allowed) = made(Access::Buffered);
        // A new one each time: on a busy machine any write may take long, and then comes a pause.
        for offset in [0, 12 << 10] {
            let buf = Buf::from_slice(&[7; 8192]);
            assert_eq!(write(&mut in_place(), &file, &buf, offset), Some(8192));
            let mut read = [0; 8192];
            assert_eq!(pread(&file, &mut read, offset), Ok(8192));
            assert_eq!(read, [7; 8192]);
        }
        is_allowed.store(false, Ordering::Relaxed);
        assert_eq!(write(&mut in_place(), &file, &Buf::zeroed(4096), 0), None, "no longer");
        let plain = File::new(made.reopen().unwrap().into(), Access::Buffered);
        assert_eq!(
            write(&mut in_place(), &plain, &Buf::zeroed(4096), 0),
            None,
            "it was never allowed"
        );
    }

    #[test]
    fn everything_else_is_left_to_a_thread() {
        let (_, direct, _) = made(Access::Direct);
        let (made, file, is_allowed) = made(Access::Buffered);
        assert_eq!(write(&mut in_place(), &file, &Buf::zeroed(LENGTH_MAX + 4096), 0), None, "long");
        assert_eq!(write(&mut in_place(), &file, &Buf::zeroed(512), 0), None, "a part of a page");
        assert_eq!(
            write(&mut in_place(), &file, &Buf::zeroed(4096), 512),
            None,
            "parts of two pages"
        );
        assert_eq!(
            write(&mut in_place(), &direct, &Buf::zeroed(4096), 0),
            None,
            "past the page cache"
        );
        let read_only = std::fs::File::open(made.path()).unwrap();
        let read_only = File::new(read_only.into(), Access::Buffered).write_in_place(is_allowed);
        assert_eq!(
            write(&mut in_place(), &read_only, &Buf::zeroed(4096), 0),
            None,
            "one that fails"
        );
        assert_eq!(made.as_file().metadata().unwrap().len(), 0);
    }

    #[test]
    fn parts_of_pages_are_written_if_these_are_cached() {
        let (made, file, _) = made(Access::Buffered);
        assert_eq!(write(&mut in_place(), &file, &Buf::from_slice(&[1; 8192]), 0), Some(8192));
        assert_eq!(write(&mut in_place(), &file, &Buf::from_slice(&[2; 8]), 88), Some(8));
        assert_eq!(write(&mut in_place(), &file, &Buf::from_slice(&[3; 200]), 4000), Some(200));
        let mut wanted = [1; 8192];
        wanted[88..96].fill(2);
        wanted[4000..4200].fill(3);
        assert_eq!(std::fs::read(made.path()).unwrap(), wanted);
        assert_eq!(
            write(&mut in_place(), &file, &Buf::from_slice(&[4; 8]), 8188),
            None,
            "at the end"
        );
    }

    #[test]
    fn one_that_waited_leaves_the_next_to_a_thread() {
        let (_made, file, _) = made(Access::Buffered);
        let (mut in_place, buf) = (in_place(), Buf::zeroed(4096));
        in_place.note_block(now(), Duration::from_secs(100));
        assert_eq!(write(&mut in_place, &file, &buf, 0), None);
        // After 21 times its duration the wait and the pause that follows it are over.
        let long_ago = now().checked_sub(Duration::from_secs(22)).unwrap();
        in_place.note_block(long_ago, Duration::from_secs(1));
        assert_eq!(write(&mut in_place, &file, &buf, 0), Some(4096));
    }

    #[test]
    fn thread_that_slept_is_told_from_one_that_was_busy() {
        let before = sleeps().unwrap();
        let start = now();
        while start.elapsed() < WAITED_MIN * 2 {
            std::hint::spin_loop();
        }
        assert_eq!(sleeps(), Some(before));
        std::thread::park_timeout(WAITED_MIN);
        assert!(sleeps().unwrap() > before);
    }
}

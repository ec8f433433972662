//! What the kernel reports of this process: memory, processor time, descriptors, threads.
//!
//! Invariants
//! - I1 The files of /proc are opened before the sandbox is entered, which allows no others, and
//!   only read afterwards.
//! - I2 What cannot be told is left out; nothing fails because of it.

use parking_lot::Mutex;
use rustix::fs::{CWD, Mode, OFlags, RawDir, SeekFrom, openat, seek};
use rustix::io::pread;
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use rustix::system::uname;
use rustix::time::{ClockId, Timespec, clock_gettime};
use serde::Serialize;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Room for `/proc/self/stat`, which is one line.
const STAT_BYTES_MAX: usize = 1024;
/// Room for entries of a directory, read at a time.
const ENTRIES_BYTES: usize = 16 << 10;

/// The files that it is read from.
#[derive(Debug)]
pub(crate) struct OwnProcess {
    stat: Option<OwnedFd>,
    /// `/proc/self/fd`: a list with a position, which one thread at a time reads.
    descriptors: Mutex<Option<OwnedFd>>,
    host: String,
}

/// What the kernel reports.
#[derive(Serialize, Clone, Copy, Default, PartialEq, Debug)]
pub(crate) struct ProcessFigures {
    /// Of all threads, in user mode and in the kernel.
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_bytes: u64,
    pub(crate) virtual_bytes: u64,
    pub(crate) threads: u64,
    pub(crate) open_descriptors: u64,
    /// `None` if there is no limit.
    pub(crate) max_descriptors: Option<u64>,
    /// Since 1970.
    pub(crate) start_seconds: f64,
}

impl OwnProcess {
    /// Opens them (I1).
    pub(crate) fn open() -> Self {
        let open = |path: &str, more| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | more;
            openat(CWD, path, flags, Mode::empty()).ok()
        };
        Self {
            stat: open("/proc/self/stat", OFlags::empty()),
            descriptors: Mutex::new(open("/proc/self/fd", OFlags::DIRECTORY)),
            host: uname().nodename().to_string_lossy().into_owned(),
        }
    }

    /// The name of this machine.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// The current figures. Zeros stand for what cannot be told (I2).
    pub(crate) fn figures(&self) -> ProcessFigures {
        let mut stat = [0; STAT_BYTES_MAX];
        let read = self.stat.as_ref().and_then(|file| pread(file, &mut stat, 0).ok()).unwrap_or(0);
        let stat = std::str::from_utf8(stat.get(..read).unwrap_or_default()).ok();
        let of_kernel = stat.and_then(of_stat).unwrap_or_default();
        ProcessFigures {
            cpu_seconds: seconds(clock_gettime(ClockId::ProcessCPUTime)),
            open_descriptors: self.open_descriptors(),
            max_descriptors: getrlimit(Resource::Nofile).current,
            start_seconds: started(of_kernel.start_ticks),
            resident_bytes: of_kernel.resident_pages.saturating_mul(page_size() as u64),
            virtual_bytes: of_kernel.virtual_bytes,
            threads: of_kernel.threads,
        }
    }

    fn open_descriptors(&self) -> u64 {
        let folder = self.descriptors.lock();
        folder.as_ref().map_or(0, |folder| entries(folder.as_fd()))
    }
}

/// What `/proc/PID/stat` says.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Stat {
    threads: u64,
    start_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

/// Fields of proc_pid_stat(5). The second is the name of the program in parentheses, which may have
/// spaces and parentheses in it.
fn of_stat(line: &str) -> Option<Stat> {
    let (_, fields) = line.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace().skip(17);
    let mut number = |skipped: usize| fields.nth(skipped)?.parse().ok();
    Some(Stat {
        threads: number(0)?,
        start_ticks: number(1)?,
        virtual_bytes: number(0)?,
        resident_pages: number(0)?,
    })
}

/// Entries of a directory that is open, without `.` and `..`.
fn entries(folder: BorrowedFd<'_>) -> u64 {
    if seek(folder, SeekFrom::Start(0)).is_err() {
        return 0;
    }
    let mut room = [MaybeUninit::uninit(); ENTRIES_BYTES];
    let mut list = RawDir::new(folder, &mut room);
    let mut count = 0_u64;
    while let Some(Ok(entry)) = list.next() {
        count += u64::from(!entry.file_name().to_bytes().starts_with(b"."));
    }
    count
}

/// When a process started that did so this many ticks after the machine did.
fn started(ticks: u64) -> f64 {
    let up = seconds(clock_gettime(ClockId::Boottime));
    let now = seconds(clock_gettime(ClockId::Realtime));
    #[expect(clippy::cast_precision_loss, reason = "milliseconds are known")]
    let after = ticks as f64 / clock_ticks_per_second().max(1) as f64;
    now - up + after
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds are shown")]
fn seconds(time: Timespec) -> f64 {
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_the_kernel_is_read_whatever_the_program_is_called() {
        let line = "7 (a) b) (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 1234 4096000 321 \
                    18446744073709551615 1";
        let expected =
            Stat { threads: 9, start_ticks: 1234, virtual_bytes: 4_096_000, resident_pages: 321 };
        assert_eq!(of_stat(line), Some(expected));
        assert_eq!(of_stat(""), None);
        assert_eq!(of_stat("7 (a) S 1 7"), None);
        assert_eq!(of_stat("7 (a) S 1 7 7 0 -1 0 1 2 3 4 5 6 7 8 20 0 x 0 1 2 3"), None);
    }

    #[test]
    fn figures_are_those_of_this_process() {
        let own = OwnProcess::open();
        let before = own.figures();
        assert!(before.resident_bytes > 1 << 20 && before.virtual_bytes >= before.resident_bytes);
        assert!(before.threads >= 1 && before.cpu_seconds > 0.0, "{before:?}");
        let max = before.max_descriptors.unwrap_or(u64::MAX);
        assert!((4..=max).contains(&before.open_descriptors), "{before:?}");
        // The tests of other modules open files meanwhile, unless each has a process of its own.
        let files: Vec<_> = (0..100).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let after = own.figures();
        assert!(after.open_descriptors > before.open_descriptors, "{before:?} {after:?}");
        assert!((after.start_seconds - before.start_seconds).abs() < 1.0, "{before:?} {after:?}");
        assert!(!own.host().is_empty());
        drop(files);
    }
}

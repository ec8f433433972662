//! The lock of a directory in which a socket is put in its place: of two servers, or threads, that
//! find the same leftover only one replaces it.

use parking_lot::{Condvar, Mutex};
use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

const ATTEMPTS: u32 = 250;
const PAUSE: rustix::event::Timespec = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// As long as all attempts together.
const TURN_LIMIT: Duration = Duration::from_secs(5);

/// The lock, while it is held.
pub(crate) struct DirectoryLock {
    /// Released before the turn ends.
    _file: OwnedFd,
    turn: Turn,
}

/// The turn of one thread of this process.
struct Turn(PathBuf);

/// Directories that threads of this process have the turn for.
static TURNS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
static TURN_ENDED: Condvar = Condvar::new();

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

impl DirectoryLock {
    /// Whether it is the one of the directory of `path`.
    pub(crate) fn is_of(&self, path: &Path) -> bool {
        self.turn.0 == directory_of(path)
    }
}

/// Locks the directory of `path`.
pub(crate) fn lock_directory(path: &Path) -> io::Result<DirectoryLock> {
    let directory = directory_of(path);
    let locked = || {
        let what = format!("{} is locked by another program", directory.display());
        io::Error::new(io::ErrorKind::ResourceBusy, what)
    };
    // Threads of this process wait for each other, and do not have to try again and again.
    let turn = Turn::take(directory).ok_or_else(locked)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let file = rustix::fs::open(directory, flags, Mode::empty())?;
    // Any user that may read the directory can hold this lock, so it must not hold us up.
    for _ in 0..ATTEMPTS {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            outcome => return Ok(outcome.map(|()| DirectoryLock { _file: file, turn })?),
        }
        let _ = rustix::event::poll(&mut [], Some(&PAUSE));
    }
    Err(locked())
}

impl Turn {
    /// `None` if another thread does not end its own.
    fn take(directory: &Path) -> Option<Self> {
        let mut turns = TURNS.lock();
        let is_taken = |turns: &mut BTreeSet<PathBuf>| turns.contains(directory);
        TURN_ENDED.wait_while_for(&mut turns, is_taken, TURN_LIMIT);
        turns.insert(directory.to_owned()).then(|| Self(directory.to_owned()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        TURNS.lock().remove(&self.0);
        TURN_ENDED.notify_all();
    }
}

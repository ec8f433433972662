//! The lock of a volume that this machine has open: a file beneath the directory of its store.
//!
//! Who owns a volume is decided by its heads, never here. But a head cannot tell whether a writer
//! that did not close is dead; the system can, if it was on this machine: it gives up the locks of
//! a process that ends, however it ends.
//!
//! Invariants
//! - I1 A lock is held from before the volume is opened for writing until after it is closed.
//! - I2 Whoever has the lock has that of the file which has the name: one that was removed since it
//!   was opened counts for nothing.

use mica_block::{Error, ErrorKind, Result};
use mica_rt::sleep;
use mica_volume::VolumeName;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, fstat, mkdirat, openat, stat, unlink};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The folder of locks in a store's directory: no object can be in it.
const FOLDER: &str = ".locks";
/// How long the system may take to give up the locks of a process that was killed.
const RELEASE_TRIES: u32 = 50;
const RELEASE_PAUSE: Duration = Duration::from_millis(20);
/// Bytes of a process's number, at most.
const NUMBER_BYTES_MAX: u64 = 20;

/// A lock that is held.
#[derive(Debug)]
pub(super) struct VolumeLock {
    file: File,
    path: PathBuf,
}

impl VolumeLock {
    /// Takes the lock of `name` in the store at `directory`.
    ///
    /// # Errors
    /// `Denied` if another process has it; any error of the system.
    pub(super) async fn take(directory: &Path, name: &VolumeName) -> Result<Self> {
        let path = directory.join(FOLDER).join(name.as_str());
        let failed = |error: Errno| {
            Error::from_io(format!("locking the volume: {}", path.display()), error.into())
        };
        for _ in 0..RELEASE_TRIES {
            let file = open(directory, &path).map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if has_name(&file, &path) => {
                    let mut lock = Self { file, path };
                    lock.sign();
                    return Ok(lock);
                }
                // Removed meanwhile.
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => sleep(RELEASE_PAUSE).await,
                Err(error) => return Err(failed(error)),
            }
        }
        let by = match holder(&path) {
            Some(number) => format!("process {number} of this machine"),
            None => "another process".to_owned(),
        };
        let what = format!("volume {} is open: {by} has it; end that first", name.as_str());
        Err(Error::new(ErrorKind::Denied, what))
    }

    /// Removes the lock of a volume that is no more.
    pub(super) fn remove(self) {
        // If it cannot be removed, it is a small file too many.
        let _ = unlink(&self.path);
    }

    /// Says in the file who has it, for messages. Nothing depends on that.
    fn sign(&mut self) {
        let number = format!("{}\n", std::process::id());
        let _ = self.file.set_len(0).and_then(|()| self.file.write_all(number.as_bytes()));
    }
}

/// Opens the file of a lock, which is made if it is not there.
fn open(directory: &Path, path: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || openat(CWD, path, flags, Mode::RUSR | Mode::WUSR).map(File::from);
    match open() {
        Err(Errno::NOENT) => match mkdirat(CWD, directory.join(FOLDER), Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => open(),
            Err(error) => Err(error),
        },
        opened => opened,
    }
}

/// Whether this file is the one that has the name (I2).
fn has_name(file: &File, path: &Path) -> bool {
    match (fstat(file), stat(path)) {
        (Ok(own), Ok(named)) => (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino),
        _ => false,
    }
}

/// The process that says in the file that it has the lock.
fn holder(path: &Path) -> Option<u32> {
    let mut text = String::new();
    File::open(path).ok()?.take(NUMBER_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

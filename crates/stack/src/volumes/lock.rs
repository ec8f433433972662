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
//! - I3 As long as a volume was not closed, its file names the log in which the last writer had
//!   what the store may lack. Nobody goes on without that log unless somebody wants it by force.

use mica_block::{Error, ErrorKind, Result};
use mica_rt::sleep;
use mica_volume::VolumeName;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, fstat, mkdirat, openat, stat, unlink};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The folder of locks in a store's directory: no object can be in it.
const FOLDER: &str = ".locks";
/// How long the system may take to give up the locks of a process that was killed.
const RELEASE_TRIES: u32 = 50;
const RELEASE_PAUSE: Duration = Duration::from_millis(20);
/// Bytes of the file, at most: the number of a process, and a path.
const NOTE_BYTES_MAX: u64 = 8192;
/// What a log's path follows in the file.
const LOG: &[u8] = b"log ";

/// A lock that is held.
#[derive(Debug)]
pub(super) struct VolumeLock {
    file: File,
    path: PathBuf,
    /// The log of a writer that did not close the volume (I3).
    left: Option<PathBuf>,
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
                    let left = Note::read(&path).log;
                    let lock = Self { file, path, left };
                    lock.sign(lock.left.as_deref());
                    return Ok(lock);
                }
                // Removed meanwhile.
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => sleep(RELEASE_PAUSE).await,
                Err(error) => return Err(failed(error)),
            }
        }
        let by = match Note::read(&path).process {
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

    /// The log of a writer that did not close the volume.
    pub(super) fn left(&self) -> Option<&Path> {
        self.left.as_deref()
    }

    /// Says in the file who has it, for messages, and with which log.
    pub(super) fn sign(&self, log: Option<&Path>) {
        let mut note = format!("{}\n", std::process::id()).into_bytes();
        if let Some(log) = log {
            note.extend([LOG, log.as_os_str().as_bytes(), b"\n"].concat());
        }
        // At no time the file has less than it had.
        let written = self.file.write_all_at(&note, 0);
        let written = written.and_then(|()| self.file.set_len(note.len() as u64));
        if let Err(error) = written {
            tracing::warn!(%error, "cannot write {}", self.path.display());
        }
    }

    /// The volume was closed: nobody needs a log of it.
    pub(super) fn clear(&self) {
        self.sign(None);
    }
}

/// What the file says.
#[derive(Default)]
struct Note {
    process: Option<u32>,
    log: Option<PathBuf>,
}

impl Note {
    fn read(path: &Path) -> Self {
        let mut bytes = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(NOTE_BYTES_MAX).read_to_end(&mut bytes));
        if read.is_err() {
            return Self::default();
        }
        let mut lines = bytes.split(|byte| *byte == b'\n');
        let number = lines.next().and_then(|line| std::str::from_utf8(line).ok());
        let log = lines.find_map(|line| line.strip_prefix(LOG)).map(OsStr::from_bytes);
        Self { process: number.and_then(|text| text.parse().ok()), log: log.map(PathBuf::from) }
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

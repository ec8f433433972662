//! Marks of merges that have changed nothing yet: locked as long as their process lives.
//!
//! The lock is that of the whole file (`flock`). Where a file system has none, nothing shows that a
//! process is dead, and its marks count.

use super::{CONTENT_BYTES_MAX, PLANNED};
use crate::temporary::{is_at, sleep};
use mica_block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

/// How often, and after which time each, somebody is waited for who only looks at a mark.
const LOOKS: u32 = 50;
const LOOK: Duration = Duration::from_millis(10);

/// The content of the mark in `file`, wherever that was read before.
pub(super) fn content_of(file: &File) -> io::Result<Vec<u8>> {
    let len = file.metadata()?.len().min(CONTENT_BYTES_MAX);
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    let mut at = 0;
    while at < bytes.len() {
        match file.read_at(&mut bytes[at..], at as u64)? {
            0 => break,
            more => at += more,
        }
    }
    bytes.truncate(at);
    Ok(bytes)
}

/// Whether the process whose planned mark is in `file` is dead. If it is, nobody else changes the
/// mark as long as `file` is open.
pub(super) fn is_dead(file: &File) -> io::Result<bool> {
    // Others may look at the same time.
    if flock(file, FlockOperation::NonBlockingLockShared).is_err() {
        return Ok(false);
    }
    // It may have begun, and even ended, since it was read.
    let is_planned = content_of(file)?.ends_with(PLANNED);
    if !is_planned {
        let _ = flock(file, FlockOperation::Unlock);
    }
    Ok(is_planned)
}

/// Removes the mark `at`, which is in `file` and of a dead process, if nobody else is about to put
/// one there (I4). If that fails it counts no more than before.
pub(super) fn take_back(at: &Path, file: &File) {
    let is_alone = flock(file, FlockOperation::NonBlockingLockExclusive).is_ok();
    if is_alone
        && content_of(file).is_ok_and(|bytes| bytes.ends_with(PLANNED))
        && is_at(at, file)
        && std::fs::remove_file(at).is_ok()
    {
        tracing::info!("{} is taken back: its merge was killed before it began", at.display());
    }
    let _ = flock(file, FlockOperation::Unlock);
}

/// Locks the mark `at`, if there is one, so that another may take its place.
///
/// # Errors
/// `Denied` if a merge is under way that put it there; else what the system reports.
pub(super) fn lock_old(at: &Path) -> Result<Option<File>> {
    let failed = |error| Error::from_io(format!("opening {}", at.display()), error);
    for _ in 0..LOOKS {
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(at) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_at(at, &file) => return Ok(Some(file)),
            // Somebody took it back just now.
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => sleep(LOOK),
            // Without locks nobody takes marks back.
            Err(_) => return Ok(Some(file)),
        }
    }
    let what = format!("another merge of these layers is under way, as {} says", at.display());
    Err(Error::new(ErrorKind::Denied, what))
}

/// Has the planned mark in `file`, which is locked, count from now on, durably. One that counts
/// already stays as it is.
pub(super) fn make_count(file: &File) -> io::Result<()> {
    let bytes = content_of(file)?;
    match bytes.strip_suffix(PLANNED) {
        None => Ok(()),
        Some(counts) => {
            file.set_len(counts.len() as u64)?;
            file.sync_all()
        }
    }
}

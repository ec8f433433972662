//! QEMU's image locks, so that mica and QEMU do not interfere with each other.
//!
//! A process that has an image open holds shared locks on single bytes of the file, which say what
//! it does with the image and what it does not let others do. Nobody waits for a lock: each process
//! takes its own bytes first and then checks for conflicting bytes of others, so that of two that
//! open at the same time at least one sees the other.
//!
//! | byte    | its holder                               |
//! |---------|------------------------------------------|
//! | 100 + i | uses permission i                        |
//! | 200 + i | does not let others use permission i     |
//!
//! Permission 0 is reading consistent data, 1 writing, 2 writing without changing what is read, 3
//! changing the length.
//!
//! Who wants to be alone with an image, to change for a moment what nobody reads, is kept out by
//! all others, and does not let others read. That is not for long, so that it is waited for.
//!
//! The locks belong to the open file description (see [`mica_rt::File`]): closing it ends them. A
//! store that is read gives up its descriptor when descriptors are scarce ([`crate::Handles`]), and
//! has no lock until it reopens the file. Then it takes the locks, and fails the read if it cannot,
//! or if the file was written in the meantime. That is a limitation: a writer is not kept out in
//! between, and is noticed only if the file has a time of its last change, which a block device has
//! not.

mod holder;

pub use holder::{Holder, LockQuestion, find_holder, search_holders_with};

use holder::holder;
use mica_block::{Error, Result, may_be_released_within};
use mica_rt::File;
use rustix::io::Errno;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Whether QEMU's locks of images are taken and honoured.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Locking {
    /// An image that is being read has no writer, and one that is being written has no other user.
    #[default]
    On,
    /// An image that is being read may be written by others (`--force-share`): what is read may be
    /// inconsistent. For writing as [`Locking::On`].
    ForceShare,
    /// Locks are neither taken nor checked.
    Off,
}

/// What an image is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Reader,
    Writer,
    /// Nobody else has it open.
    Alone,
}

const USED: u64 = 100;
const UNSHARED: u64 = 200;

const CONSISTENT_READ: u64 = 0;
const WRITE: u64 = 1;
const WRITE_UNCHANGED: u64 = 2;
const RESIZE: u64 = 3;
/// All bytes with a meaning.
const ALL: u64 = UNSHARED + RESIZE + 1 - USED;

/// Time for somebody who wants to be alone with an image to be done with it.
const ALONE_LIMIT: Duration = Duration::from_secs(5);

/// Time for finding an image again that was replaced: once is enough.
const REPLACED_LIMIT: Duration = Duration::from_secs(1);

/// What is done with an image.
#[derive(Clone, Copy)]
struct Permissions {
    used: &'static [u64],
    /// What nobody else may do meanwhile.
    unshared: &'static [u64],
}

fn permissions(role: Role, locking: Locking) -> Option<Permissions> {
    let (used, unshared): (&[u64], &[u64]) = match (role, locking) {
        (_, Locking::Off) => return None,
        (Role::Reader, Locking::On) => (&[CONSISTENT_READ], &[WRITE, RESIZE]),
        (Role::Reader, Locking::ForceShare) => (&[CONSISTENT_READ], &[]),
        (Role::Writer, Locking::On | Locking::ForceShare) => {
            (&[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE])
        }
        (Role::Alone, Locking::On | Locking::ForceShare) => (
            &[CONSISTENT_READ, WRITE_UNCHANGED],
            &[CONSISTENT_READ, WRITE, WRITE_UNCHANGED, RESIZE],
        ),
    };
    Some(Permissions { used, unshared })
}

/// Takes the locks of `role` on `file`, which are held until it is closed. Returns whether it has
/// any: they may be off, or unknown to the file system. After an error the caller closes it.
pub(crate) fn take(file: &File, path: &Path, role: Role, locking: Locking) -> Result<bool> {
    let Some(wanted) = permissions(role, locking) else { return Ok(false) };
    // While it holds its bytes it keeps others out, also those that come to read what somebody
    // reads already: so it looks first. What is not known now is found out below.
    if role == Role::Alone && file.is_locked_elsewhere(USED, ALL).unwrap_or(false) {
        refuse_conflicts(file, path, wanted)?;
    }
    if !hold(file, path, wanted)? {
        return Ok(false);
    }
    // Usually nobody else has the image open.
    let is_shared = file.is_locked_elsewhere(USED, ALL);
    if is_shared.map_err(|error| failed_to_lock(path, error))? {
        refuse_conflicts(file, path, wanted)?;
    }
    Ok(true)
}

/// Fails if another process uses what is not to be shared, or does not share what is used.
fn refuse_conflicts(file: &File, path: &Path, wanted: Permissions) -> Result<()> {
    let unshared = wanted.unshared.iter().map(|at| match *at {
        CONSISTENT_READ => (USED, "has the image open"),
        at => (USED + at, "holds the image for writing"),
    });
    let used = wanted.used.iter().map(|at| match *at {
        CONSISTENT_READ => (UNSHARED, "changes the image and allows nobody to read it"),
        at => (UNSHARED + at, "has the image open and allows nobody to write it"),
    });
    for (byte, how) in unshared.chain(used) {
        if file.is_locked_elsewhere(byte, 1).map_err(|error| failed_to_lock(path, error))? {
            return Err(conflict(file, path, byte, how));
        }
    }
    Ok(())
}

/// Takes the locks of a reader on `file`, while another descriptor of this process has those of a
/// writer: there is no other one that they could conflict with.
pub(crate) fn take_beside_writer(file: &File, path: &Path, locking: Locking) -> Result<()> {
    match permissions(Role::Reader, locking) {
        Some(wanted) => hold(file, path, wanted).map(drop),
        None => Ok(()),
    }
}

/// Locks the bytes for what is used, and for what is not shared. Returns whether the file system
/// has locks.
fn hold(file: &File, path: &Path, wanted: Permissions) -> Result<bool> {
    let Permissions { used, unshared } = wanted;
    let own = used.iter().map(|at| USED + at).chain(unshared.iter().map(|at| UNSHARED + at));
    for byte in own {
        match file.lock_shared(byte, 1) {
            Ok(()) => {}
            Err(error) if knows_no_locks(&error) => {
                warn_once(path, &error);
                return Ok(false);
            }
            Err(error) if is_refusal(&error) => {
                return Err(conflict(file, path, byte, "has locked the image exclusively"));
            }
            Err(error) => return Err(failed_to_lock(path, error)),
        }
    }
    Ok(true)
}

fn failed_to_lock(path: &Path, error: io::Error) -> Error {
    Error::from_io(format!("locking {}", path.display()), error)
}

/// The error of opening the image at `path` for writing while a disk of this process reads it,
/// whether or not it has a descriptor, and so its locks, at the moment.
pub(crate) fn read_here(path: &Path) -> Error {
    let what = format!(
        "{}: another disk of this process has the image open and allows nobody to write it",
        path.display()
    );
    Error::of_held(path, what, None)
}

/// The error of opening the image at `path` when another process has just put another file there,
/// or none. Who looks again finds that one.
pub(crate) fn taken_away(path: &Path) -> Error {
    let what = format!(
        "{}: another process has removed, renamed or replaced the image meanwhile",
        path.display()
    );
    Error::from_io(what, may_be_released_within(REPLACED_LIMIT))
}

/// Takes the locks of a writer on `file`, which has those of a reader; after an error it has those
/// of a reader still.
pub(crate) fn upgrade(file: &File, path: &Path, locking: Locking) -> Result<()> {
    take(file, path, Role::Writer, locking).map(drop).inspect_err(|_| {
        for used in [WRITE, RESIZE] {
            // Closing the file releases them, too.
            let _ = file.unlock_range(USED + used, 1);
        }
    })
}

fn is_refusal(error: &io::Error) -> bool {
    let refusals = [Errno::AGAIN, Errno::ACCESS].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|errno| refusals.contains(&errno))
}

fn knows_no_locks(error: &io::Error) -> bool {
    let unknown = [Errno::INVAL, Errno::NOLCK, Errno::OPNOTSUPP, Errno::NOSYS];
    let unknown = unknown.map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|errno| unknown.contains(&errno))
}

fn warn_once(path: &Path, error: &io::Error) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            path = %path.display(),
            %error,
            "this file system has no locks: nothing keeps other programs from writing to images"
        );
    }
}

fn conflict(file: &File, path: &Path, byte: u64, how: &str) -> Error {
    let holder = holder(file, byte);
    let what = format!("{}: another process {how} ({holder})", path.display());
    let cause = match byte {
        UNSHARED => Some(may_be_released_within(ALONE_LIMIT)),
        _ => holder.cause(file),
    };
    Error::of_held(path, what, cause)
}

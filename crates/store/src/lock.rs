//! QEMU's locks of images, so that mica and QEMU keep out of each other's way.
//!
//! Whoever has an image open holds shared locks of single bytes of the file, which tell what it
//! does with the image and what it does not let others do meanwhile. Nobody waits for a lock: each
//! takes its own bytes first and then looks whether somebody else's contradict them, so that of two
//! who come at once at least one sees the other.
//!
//! | byte    | who holds it                             |
//! |---------|------------------------------------------|
//! | 100 + i | uses permission i                        |
//! | 200 + i | does not let others use permission i     |
//!
//! Permission 0 is reading what stays consistent, 1 writing, 2 writing what reads the same as
//! before, 3 changing the length.
//!
//! The locks belong to the open file description (see [`mica_rt::File`]): closing it ends them. A
//! store that is read gives its descriptor up when descriptors are short ([`crate::Handles`]), and
//! has no lock until it opens the file again. It takes the locks then, and fails the read if it
//! cannot, or if the file was written to meanwhile. That is a limit: a writer is not kept out then,
//! and is noticed only where the file has a time of its last change, which a block device has not.

use mica_block::{Error, ErrorKind, Result};
use mica_rt::File;
use rustix::fs::fstat;
use rustix::io::Errno;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether QEMU's locks of images are taken and honoured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Locking {
    /// An image that is read has no writer meanwhile, one that is written nobody else.
    #[default]
    On,
    /// An image that is read may be written by others meanwhile (`--force-share`): what is read may
    /// contradict itself. For writing as [`Locking::On`].
    ForceShare,
    /// No lock is taken and none is looked at.
    Off,
}

/// What an image is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Reader,
    Writer,
}

const USED: u64 = 100;
const UNSHARED: u64 = 200;

const CONSISTENT_READ: u64 = 0;
const WRITE: u64 = 1;
const RESIZE: u64 = 3;
/// All bytes that have a meaning.
const ALL: u64 = UNSHARED + RESIZE + 1 - USED;

/// The permissions that `role` uses, and those that it does not share.
fn permissions(role: Role, locking: Locking) -> Option<(&'static [u64], &'static [u64])> {
    match (role, locking) {
        (_, Locking::Off) => None,
        (Role::Reader, Locking::On) => Some((&[CONSISTENT_READ], &[WRITE, RESIZE])),
        (Role::Reader, Locking::ForceShare) => Some((&[CONSISTENT_READ], &[])),
        (Role::Writer, Locking::On | Locking::ForceShare) => {
            Some((&[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE]))
        }
    }
}

/// Takes the locks of `role` on `file`, which hold until it is closed. After an error the caller
/// closes it.
pub(crate) fn take(file: &File, path: &Path, role: Role, locking: Locking) -> Result<()> {
    let Some((used, unshared)) = permissions(role, locking) else { return Ok(()) };
    let failed = |error| Error::from_io(format!("locking {}", path.display()), error);
    let own = used.iter().map(|at| USED + at).chain(unshared.iter().map(|at| UNSHARED + at));
    for byte in own {
        match file.lock_shared(byte, 1) {
            Ok(()) => {}
            Err(error) if knows_no_locks(&error) => {
                warn_once(path, &error);
                return Ok(());
            }
            Err(error) if is_refusal(&error) => {
                return Err(conflict(file, path, byte, "locked the image for itself"));
            }
            Err(error) => return Err(failed(error)),
        }
    }
    // Most often nobody else has the image open.
    if !file.is_locked_elsewhere(USED, ALL).map_err(failed)? {
        return Ok(());
    }
    let unshared = unshared.iter().map(|at| (USED + at, "holds the image for writing"));
    let used = used.iter().map(|at| match *at {
        CONSISTENT_READ => (UNSHARED, "changes the image and lets nobody read it"),
        at => (UNSHARED + at, "has the image open and lets nobody write it"),
    });
    for (byte, how) in unshared.chain(used) {
        if file.is_locked_elsewhere(byte, 1).map_err(failed)? {
            return Err(conflict(file, path, byte, how));
        }
    }
    Ok(())
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
    let who = holder(file, byte).unwrap_or_else(|| "perhaps a running QEMU".to_owned());
    let what = format!("{}: another process {how} ({who})", path.display());
    Error::new(ErrorKind::Denied, what)
}

/// Most descriptors of other processes that are looked at to name who holds a lock.
const DESCRIPTORS_MAX: usize = 1 << 16;

/// Program and number of a process that locks `byte`. A lock of an open file description names no
/// process, but each process tells the locks behind its descriptors.
fn holder(file: &File, byte: u64) -> Option<String> {
    let inode = fstat(file).ok()?.st_ino;
    let own = format!("/proc/{}/fdinfo/{}", std::process::id(), file.as_fd().as_raw_fd());
    let is_process = |name: &str| name.bytes().all(|digit| digit.is_ascii_digit());
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok())
    };
    let processes = names(Path::new("/proc")).filter(|name| is_process(name));
    let descriptors = processes.flat_map(|process| {
        let folder = format!("/proc/{process}/fdinfo");
        let numbers = names(Path::new(&folder)).collect::<Vec<_>>();
        numbers.into_iter().map(move |number| (process.clone(), format!("{folder}/{number}")))
    });
    for (process, descriptor) in descriptors.take(DESCRIPTORS_MAX) {
        let Ok(told) = fs::read_to_string(&descriptor) else { continue };
        if descriptor != own && told.lines().any(|line| locks_byte(line, inode, byte)) {
            let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            let name: String = name.chars().filter(|letter| !letter.is_control()).collect();
            return Some(format!("{name}, process {process}"));
        }
    }
    None
}

/// Whether a line of a descriptor's information tells a lock of `byte` of this inode:
/// `lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 101`. Not compared is the device: some file
/// systems show another number there than to those who ask for it.
fn locks_byte(line: &str, inode: u64, byte: u64) -> bool {
    let Some(lock) = line.strip_prefix("lock:") else { return false };
    let mut words = lock.split_ascii_whitespace().rev();
    let (Some(end), Some(start), Some(file)) = (words.next(), words.next(), words.next()) else {
        return false;
    };
    let end = if end == "EOF" { Ok(u64::MAX) } else { end.parse::<u64>() };
    let (Ok(start), Ok(end)) = (start.parse::<u64>(), end) else { return false };
    let is_file = file.rsplit(':').next().and_then(|number| number.parse().ok()) == Some(inode);
    is_file && (start..=end).contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::locks_byte;

    #[test]
    fn locks_are_read_as_the_kernel_tells_them() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101";
        assert!(locks_byte(line, 1234, 100) && locks_byte(line, 1234, 101));
        assert!(!locks_byte(line, 1234, 102) && !locks_byte(line, 1234, 99));
        assert!(!locks_byte(line, 234, 100));
        let whole = "lock:\t2: POSIX  ADVISORY  WRITE 77 00:2b:1234 0 EOF";
        assert!(locks_byte(whole, 1234, 203));
        for nonsense in ["", "pos:\t0", "lock:", "lock:\tEOF EOF EOF", "lock: 1 2"] {
            assert!(!locks_byte(nonsense, 1234, 100), "{nonsense}");
        }
    }
}

//! The new file of a sidecar, before it is put in its place.
//!
//! It has a name of its own in the directory of the sidecar, so a process that is killed leaves it
//! behind. The next one that writes sidecars there removes those that nobody has locked. Where
//! files cannot be locked, it removes those that nobody can still be writing.

use super::Spot;
use mica_rt::{Access, File};
use mica_store::Located;
use rustix::fd::{AsFd as _, OwnedFd};
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat, renameat, statat,
    unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;
use std::ffi::CStr;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PREFIX: &[u8] = b".mica-index-";
const SUFFIX: &[u8] = b".tmp";
/// Seconds after which a new file is taken for one that a killed process left, where nobody can
/// lock it. One is written, synced and renamed at once, on slow storage in seconds; a build that
/// loses one to this fails, and is repeated.
const ABANDONED_SECONDS: i64 = 3600;

/// The new file of a sidecar that is not in its place yet; removed when dropped.
pub(super) struct Temporary {
    directory: OwnedFd,
    name: String,
    pub(super) file: Arc<File>,
}

impl Temporary {
    /// Creates it beside the sidecar of `layer`, with `content`.
    pub(super) fn create(spot: &Spot, layer: &Located, content: &[u8]) -> io::Result<Self> {
        let directory = spot.open_directory()?;
        // Anyone who may read the layer may read its index.
        let mode = Mode::from_raw_mode(layer.mode() & 0o044 | 0o600);
        let (name, file) = create_new(&directory, mode)?;
        let mut file = std::fs::File::from(file);
        let written = file.write_all(content);
        let file = Arc::new(File::new(file.into(), Access::Buffered));
        let temporary = Self { directory, name, file };
        written.map(|()| temporary)
    }

    /// Removes from its directory what killed processes left there; returns how many. What cannot
    /// be read or removed stays.
    pub(super) fn remove_abandoned(&self) -> usize {
        let now = match fstat(self.file.as_fd()) {
            Ok(stat) => stat.st_mtime,
            Err(_) => return 0,
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(entries) = openat(&self.directory, ".", flags, Mode::empty()).and_then(Dir::new)
        else {
            return 0;
        };
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_owned()));
        names
            .filter(|name| is_temporary(name.to_bytes()))
            .filter(|name| {
                let abandoned = self.open_abandoned(name, now);
                abandoned.is_some_and(|file| remove_own(&self.directory, name, &file))
            })
            .count()
    }

    /// The file called `name`, if nobody writes it. Nobody else can take it until it is closed.
    fn open_abandoned(&self, name: &CStr, now: i64) -> Option<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&self.directory, name, flags, Mode::empty()).ok()?;
        let is_ours = fstat(&file).is_ok_and(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                && stat.st_uid == rustix::process::geteuid().as_raw()
        });
        let age = || fstat(&file).map_or(0, |stat| now.saturating_sub(stat.st_mtime));
        let is_abandoned = is_ours
            && match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => true,
                Err(Errno::WOULDBLOCK) => false,
                Err(_) => age() > ABANDONED_SECONDS,
            };
        is_abandoned.then_some(file)
    }

    pub(super) fn put_at(self, spot: &Spot) -> io::Result<()> {
        renameat(&self.directory, &self.name, &self.directory, &spot.name)?;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // It is not there any more if it was put in its place.
        let _ = unlinkat(&self.directory, &self.name, AtFlags::empty());
    }
}

/// Creates a file of a new name in `directory`, and locks it.
fn create_new(directory: &OwnedFd, mode: Mode) -> rustix::io::Result<(String, OwnedFd)> {
    /// Names that a killed process of the same number may have left.
    const ATTEMPTS: usize = 64;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for _ in 0..ATTEMPTS {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".mica-index-{}-{number}.tmp", std::process::id());
        match openat(directory, &name, flags, mode) {
            Ok(file) if lock(directory, &name, &file) => return Ok((name, file)),
            // Somebody took it for one that was left.
            Ok(_) => {}
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    Err(Errno::EXIST)
}

/// Locks the new `file`, unless files cannot be locked there. Returns whether it still has its
/// `name`: somebody may have had it locked, and removed it, since it was created.
fn lock(directory: &OwnedFd, name: &str, file: &OwnedFd) -> bool {
    let locked = flock(file, FlockOperation::NonBlockingLockExclusive);
    locked != Err(Errno::WOULDBLOCK) && has_name(directory, name, file)
}

/// Whether `file` is what `name` names.
fn has_name(directory: &OwnedFd, name: impl Arg, file: &OwnedFd) -> bool {
    let there = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW);
    there.is_ok_and(|there| {
        fstat(file).is_ok_and(|own| (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino))
    })
}

/// Removes `file`, which this process has locked, unless another one has its `name` by now. Returns
/// whether it did.
fn remove_own(directory: &OwnedFd, name: &CStr, file: &OwnedFd) -> bool {
    has_name(directory, name, file) && unlinkat(directory, name, AtFlags::empty()).is_ok()
}

/// Whether [`create_new`] makes such names.
fn is_temporary(name: &[u8]) -> bool {
    let inner = name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(SUFFIX));
    let is_number = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_digit);
    inner.is_some_and(|inner| {
        let mut parts = inner.split(|byte| *byte == b'-');
        parts.by_ref().take(2).filter(|part| is_number(part)).count() == 2 && parts.next().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn file_that_another_one_took_the_name_of_is_not_removed_for_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("new");
        let directory = OwnedFd::from(fs::File::open(folder.path()).expect("open"));
        let old = OwnedFd::from(fs::File::create(&path).expect("made"));
        fs::rename(&path, folder.path().join("sidecar")).expect("put in its place");
        assert!(!remove_own(&directory, c"new", &old));
        let other = OwnedFd::from(fs::File::create(&path).expect("made"));
        assert!(!remove_own(&directory, c"new", &old));
        assert!(path.exists());
        assert!(remove_own(&directory, c"new", &other));
        assert!(!path.exists());
    }
}

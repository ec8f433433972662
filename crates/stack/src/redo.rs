//! The redo logs of writers, kept for the next process to open an image: one file for each image
//! that is being written, in a memory-backed file system, in a [`folder`] of this user.
//!
//! A file is named by its image's device and inode: an image that was renamed, or that is now
//! mounted elsewhere, still has it. So nothing shows that an image was deleted after its writer was
//! killed, and its file stays until the machine restarts, or a new image has that inode and is
//! written to. It is as large as the metadata that this writer had changed since its last flush.
//!
//! Invariants
//! - I1 A file is trusted only if it is a regular one of this user, that nobody else can write and
//!   that has no other name. It is never reached through a symbolic link.
//! - I2 No file exists before the first write or after a clean close. An unused log is kept beside
//!   it as `….lost`, one for each image, until the machine restarts: nothing reads it.
//! - I3 A writer keeps its file locked as long as it lives, whatever happens to the image's own
//!   locks: some file systems lack them, and users can turn them off. So nobody reads or removes
//!   the file of a living writer.
//! - I4 If a file is not in the usual directory, a note in this user's usual folder gives its
//!   place: for a hint to a process that looks in the wrong place, and nothing else.

pub(crate) mod folder;
pub(crate) mod logs;

use mica_block::{Error, ErrorKind, Identity, RedoMemory, RedoOrigin, Result};
use mica_store::nanoseconds;
use parking_lot::{Mutex, MutexGuard};
use rustix::fd::OwnedFd;
use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, openat, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::ops::RangeInclusive;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// Where such files are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RedoPlace {
    /// Nowhere: a writer that is killed loses what was not flushed.
    Nowhere,
    /// In a folder of this user, which is created in this directory.
    Directory(PathBuf),
    /// The same, for logs of at most so many bytes, which have names of their own: where a log has
    /// what depends on its capacity.
    Limited(PathBuf, u64),
}

impl Default for RedoPlace {
    fn default() -> Self {
        Self::Directory(folder::usual_redo_directory().to_owned())
    }
}

impl RedoPlace {
    /// The same place, for logs of at most `bytes` each.
    pub(crate) fn limited(self, bytes: u64) -> Self {
        match self {
            Self::Directory(directory) | Self::Limited(directory, _) => {
                Self::Limited(directory, bytes)
            }
            Self::Nowhere => Self::Nowhere,
        }
    }

    fn directory(&self) -> Option<&Path> {
        match self {
            Self::Directory(directory) | Self::Limited(directory, _) => Some(directory),
            Self::Nowhere => None,
        }
    }

    fn capacity(&self) -> u64 {
        if let Self::Limited(_, bytes) = self { *bytes } else { CAPACITY }
    }

    /// The name of the file for the image identified by `identity`.
    fn name_of(&self, identity: Identity) -> String {
        let usual = name_of(identity);
        if let Self::Limited(_, bytes) = self { format!("{usual}-{bytes}") } else { usual }
    }
}

/// Maximum size of such a file. It takes as much memory as was written between two flushes.
const CAPACITY: u64 = 16 << 20;
/// The least that a test may limit it to.
const CAPACITY_MIN: u64 = 16 << 10;
/// What a test may limit it to.
pub(crate) const CAPACITIES: RangeInclusive<u64> = CAPACITY_MIN..=CAPACITY;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The end of the name of a note with a file's place.
const ELSEWHERE: &str = ".elsewhere";
const NOTE_BYTES_MAX: u64 = 4096;
/// How often a file that lost its name while it was being locked is reopened.
const TRIES_MAX: u32 = 8;

/// The file of one image.
pub(crate) struct RedoFile {
    folder: PathBuf,
    /// Its owner.
    user: u32,
    name: String,
    /// The name of the note of its place, whatever its capacity.
    note: String,
    capacity: u64,
    /// The folder with the note of its place, if that is not the usual one (I4).
    usual: Option<PathBuf>,
    boot: u128,
    /// How the file is locked while it is open (I3).
    lock: FlockOperation,
    file: Mutex<Option<File>>,
}

impl RedoFile {
    /// For the image identified by `identity`; `None` if there is no place for it.
    pub(crate) fn new(place: &RedoPlace, identity: Identity) -> Option<Self> {
        Self::of_user(place, identity, own_user())
    }

    fn of_user(place: &RedoPlace, identity: Identity, user: u32) -> Option<Self> {
        let directory = place.directory()?;
        let boot = boot_id()?;
        let folder = folder::path_of(directory, user);
        let (name, capacity) = (place.name_of(identity), place.capacity());
        let lock = FlockOperation::NonBlockingLockExclusive;
        let usual = folder::usual_redo_directory();
        let usual = (directory != usual).then(|| folder::path_of(usual, user));
        let (note, file) = (note_of(identity), Mutex::default());
        Some(Self { folder, user, name, note, capacity, usual, boot, lock, file })
    }

    /// Where this user has a file for the image, which was `created` then, if that is not in
    /// `place`.
    pub(crate) fn elsewhere(
        place: &RedoPlace,
        identity: Identity,
        created: SystemTime,
    ) -> Option<PathBuf> {
        let usual = folder::path_of(folder::usual_redo_directory(), own_user());
        Self::elsewhere_than(place, &usual, identity).filter(|file| is_since(file, created))
    }

    fn elsewhere_than(place: &RedoPlace, usual: &Path, identity: Identity) -> Option<PathBuf> {
        let own = place.directory().map(|directory| folder::path_of(directory, own_user()));
        // Only if the folder is this user's, and nobody else's.
        folder::find_of(usual, own_user()).ok().flatten()?;
        let noted = read_note(&usual.join(note_of(identity)));
        let files = [Some(usual.join(name_of(identity))), noted];
        files.into_iter().flatten().find(|file| {
            let found = file.symlink_metadata();
            let is_own = own.as_deref().is_some_and(|own| file.starts_with(own));
            !is_own && found.is_ok_and(|found| found.is_file() && found.uid() == own_user())
        })
    }

    /// Records in the usual folder where this file is. A failure only means that nobody gets the
    /// hint.
    fn write_note(&self) {
        let Some(usual) = &self.usual else { return };
        let written = folder::make(usual).and_then(|folder| {
            let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let flags = flags | OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
            let note = openat(&folder, &*self.note, flags, Mode::RUSR | Mode::WUSR);
            let note = File::from(note.map_err(|error| self.explain(error))?);
            let place = self.path();
            note.write_all_at(place.as_os_str().as_bytes(), 0).map_err(|error| self.explain(error))
        });
        if let Err(error) = written {
            tracing::debug!(%error, "cannot note the place of a redo log");
        }
    }

    fn remove_note(&self) {
        let Some(usual) = &self.usual else { return };
        if let Ok(Some(folder)) = folder::find_of(usual, self.user) {
            let _ = unlinkat(&folder, &*self.note, AtFlags::empty());
        }
    }

    /// The same, to read the log of a writer that died; `None` if the writer lives. Root also reads
    /// the log of the image's `owner`.
    ///
    /// # Errors
    /// Any error of the system.
    pub(crate) fn orphaned(place: &RedoPlace, identity: Identity, owner: u32) -> Result<Vec<Self>> {
        let own = own_user();
        let other = Some(owner).filter(|owner| own == 0 && *owner != 0);
        let mut found = Vec::new();
        for user in [Some(own), other].into_iter().flatten() {
            let Some(mut this) = Self::of_user(place, identity, user) else { continue };
            this.lock = FlockOperation::NonBlockingLockShared;
            match this.open(false) {
                Ok(file) => {
                    *this.lock() = file;
                    found.push(this);
                }
                Err(error) if error.kind() == ErrorKind::Denied => {
                    tracing::debug!(%error, "reading the image without its redo log");
                    return Ok(Vec::new());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// The file that another user has for the image, which `owner` owns. Only root and the owner
    /// count: anybody else could put a file there and keep the image from being opened.
    pub(crate) fn of_another(place: &RedoPlace, identity: Identity, owner: u32) -> Option<PathBuf> {
        let directory = place.directory()?;
        let own = own_user();
        let others = [0, owner].into_iter().filter(|user| *user != own);
        others.map(|user| (user, folder::path_of(directory, user))).find_map(|(user, folder)| {
            let path = folder.join(place.name_of(identity));
            let (folder, found) = (folder.symlink_metadata().ok()?, path.symlink_metadata().ok()?);
            let is_theirs = folder.is_dir() && folder.uid() == user && found.uid() == user;
            (is_theirs && found.is_file() && found.len() > 0).then_some(path)
        })
    }

    /// Whether it is there, and was written to at this time or later.
    pub(crate) fn is_since(&self, time: SystemTime) -> bool {
        is_since(&self.path(), time)
    }

    fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    fn lock(&self) -> MutexGuard<'_, Option<File>> {
        self.file.lock()
    }

    fn explain(&self, error: impl Into<std::io::Error>) -> Error {
        Error::from_io(self.path().display().to_string(), error.into())
    }

    /// Opens the file (I1) and locks it (I3); `None` if it does not exist and is not to be created.
    fn open(&self, create: bool) -> Result<Option<File>> {
        for _ in 0..TRIES_MAX {
            let Some(file) = self.open_unlocked(create)? else { return Ok(None) };
            self.take_lock(&file)?;
            let stat = fstat(&file).map_err(|error| self.explain(error))?;
            if stat.st_nlink > 0 {
                return self.check_ours(file, &stat, create);
            }
            // The process that had it locked before has removed it.
        }
        Err(self.explain(Errno::BUSY))
    }

    fn open_unlocked(&self, create: bool) -> Result<Option<File>> {
        let folder = match create {
            true => Some(folder::make(&self.folder)?),
            // Something that is not ours is there: that must not keep the image from being opened.
            false => folder::find_of(&self.folder, self.user).unwrap_or_else(|error| {
                tracing::warn!(?error, "not searching for unflushed writes");
                None
            }),
        };
        let Some(folder) = folder else { return Ok(None) };
        let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        // A process that serves for reading only may have fewer rights here.
        let is_shared = self.lock == FlockOperation::NonBlockingLockShared;
        let flags = flags | if is_shared { OFlags::RDONLY } else { OFlags::RDWR };
        let flags = if create { flags | OFlags::CREATE } else { flags };
        match openat(&folder, &self.name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(Some(file.into())),
            Err(Errno::NOENT) if !create => Ok(None),
            Err(error @ (Errno::LOOP | Errno::ACCESS | Errno::NXIO)) if !create => {
                tracing::warn!(path = %self.path().display(), %error, "not a redo log of this user");
                Ok(None)
            }
            Err(error) => Err(self.explain(error)),
        }
    }

    fn take_lock(&self, file: &File) -> Result<()> {
        match flock(file, self.lock) {
            Ok(()) => Ok(()),
            Err(Errno::WOULDBLOCK) => {
                let what = "a living process has the image open for writing or reading";
                let context = format!("{}: {what}", self.path().display());
                Err(Error::new(ErrorKind::Denied, context))
            }
            // Nobody can have locked it there, so nothing proves that its writer is dead.
            Err(error) if self.lock == FlockOperation::NonBlockingLockShared => {
                Err(Error::new(ErrorKind::Denied, self.explain(error).to_string()))
            }
            Err(error) => {
                tracing::debug!(path = %self.path().display(), %error, "cannot lock the redo log");
                Ok(())
            }
        }
    }

    /// A file is identified by its inode and, since that is given to another one later, by the time
    /// of its creation, if the file system knows it.
    fn origin_of(&self, file: Option<&File>) -> RedoOrigin {
        let found = file.and_then(|file| file.metadata().ok());
        let memory = found.map_or(0, |found| {
            let created = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            u128::from(found.ino()) | created.map_or(0, |time| time.as_nanos()) << 64
        });
        RedoOrigin { boot: self.boot, memory }
    }

    /// The file, which is opened if it exists and was not opened yet.
    fn there(&self) -> Result<MutexGuard<'_, Option<File>>> {
        let mut file = self.lock();
        if file.is_none() {
            *file = self.open(false)?;
        }
        Ok(file)
    }

    /// The file, if it exists, which is locked, and its folder, if the name in it still belongs to
    /// this file: it may be another's by now (I3).
    fn take(&self) -> Option<(File, Option<OwnedFd>)> {
        let mut file = self.lock();
        let there = match file.take().map_or_else(|| self.open(false), |file| Ok(Some(file))) {
            Ok(there) => there?,
            Err(error) => {
                tracing::warn!(%error, "cannot remove the redo log");
                return None;
            }
        };
        let folder = folder::find_of(&self.folder, self.user).ok().flatten();
        let folder = folder.filter(|folder| {
            let named = statat(folder, &self.name, AtFlags::SYMLINK_NOFOLLOW);
            matches!((named, fstat(&there)), (Ok(named), Ok(own)) if is_same(&named, &own))
        });
        Some((there, folder))
    }

    /// Whether the name of the log leads to `file`; if that cannot be seen, whether any name does.
    fn has_its_name(&self, file: &File) -> bool {
        let Ok(own) = fstat(file) else { return false };
        match statat(CWD, self.path(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => is_same(&named, &own),
            Err(Errno::NOENT) => false,
            Err(_) => own.st_nlink > 0,
        }
    }

    /// `file`, if it is a private file of this user.
    fn check_ours(&self, file: File, stat: &Stat, create: bool) -> Result<Option<File>> {
        let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_uid == self.user
            && stat.st_mode & 0o077 == 0
            && stat.st_nlink == 1;
        // If it belongs to somebody else, then this user has none here.
        if !is_ours && !create {
            tracing::warn!(path = %self.path().display(), "not a private file: ignoring it");
            return Ok(None);
        }
        if !is_ours {
            let what =
                "is not a private file of this user: remove it, or choose another --redo-dir";
            let context = format!("{} {what}", self.path().display());
            return Err(Error::new(ErrorKind::Denied, context));
        }
        Ok(Some(file))
    }
}

/// Which boot of the machine this is.
fn boot_id() -> Option<u128> {
    static KNOWN: OnceLock<u128> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Some(*known);
    }
    let text = std::fs::read_to_string(BOOT_ID).ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let boot = u128::from_str_radix(&digits, 16).ok()?;
    Some(*KNOWN.get_or_init(|| boot))
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether it is the same file.
fn is_same(one: &Stat, other: &Stat) -> bool {
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}

/// Whether the file at `path` was written to at this time or later.
fn is_since(path: &Path, time: SystemTime) -> bool {
    let found = path.symlink_metadata().and_then(|found| found.modified());
    found.is_ok_and(|modified| modified >= time)
}

/// The contents of the note at `path`, in a folder that only this user can access.
fn read_note(path: &Path) -> Option<PathBuf> {
    let mut note = OpenOptions::new();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let note = note.read(true).custom_flags(i32::try_from(flags.bits()).ok()?).open(path).ok()?;
    let mut text = Vec::new();
    note.take(NOTE_BYTES_MAX).read_to_end(&mut text).ok()?;
    Some(PathBuf::from(OsString::from_vec(text))).filter(|place| place.is_absolute())
}

fn note_of(identity: Identity) -> String {
    format!("{}{ELSEWHERE}", name_of(identity))
}

fn name_of(identity: Identity) -> String {
    let Identity { device, inode, .. } = identity;
    format!("{device:x}-{inode:x}.redo")
}

impl RedoMemory for RedoFile {
    fn renew(&self) -> Result<RedoOrigin> {
        self.remove();
        let mut file = self.lock();
        *file = self.open(true)?;
        if let Some(there) = &*file {
            // Somebody may have put one there in the meantime.
            there.set_len(0).map_err(|error| self.explain(error))?;
        }
        self.write_note();
        Ok(self.origin_of(file.as_ref()))
    }

    fn origin(&self) -> Result<RedoOrigin> {
        Ok(self.origin_of(self.there()?.as_ref()))
    }

    fn now_ns(&self) -> i128 {
        mica_store::now_ns()
    }

    fn changed_ns(&self) -> Result<i128> {
        let file = self.there()?;
        let Some(file) = &*file else { return Ok(0) };
        let stat = fstat(file).map_err(|error| self.explain(error))?;
        Ok(nanoseconds(stat.st_ctime, stat.st_ctime_nsec))
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn read_at(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let file = self.there()?;
        let mut done = 0;
        while let Some(file) = &*file
            && done < buf.len()
        {
            match file.read_at(&mut buf[done..], at + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.explain(error)),
            }
        }
        buf[done..].fill(0);
        Ok(())
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let mut file = self.lock();
        let Some(there) = &*file else { return Err(self.explain(Errno::NOENT)) };
        // Of the two headers, which are written in turn, one is here. A file that lost its name in
        // the meantime (the end of a session removes its user's files) is of no use to a successor.
        if at == 0 && !self.has_its_name(there) {
            *file = None;
            return Err(self.explain(Errno::NOENT));
        }
        there.write_all_at(bytes, at).map_err(|error| self.explain(error))
    }

    fn remove(&self) {
        let Some((there, folder)) = self.take() else { return };
        self.remove_note();
        // If its name cannot be removed, it is emptied instead.
        if let Err(error) = there.set_len(0) {
            tracing::warn!(path = %self.path().display(), %error, "cannot truncate the redo log");
        }
        if let Some(folder) = folder
            && let Err(error) = unlinkat(&folder, &self.name, AtFlags::empty())
        {
            tracing::warn!(path = %self.path().display(), %error, "cannot remove the redo log");
        }
        // Locked until it no longer has a name (I3).
        drop(there);
    }

    fn set_aside(&self) -> Option<PathBuf> {
        let (there, folder) = self.take()?;
        let name = format!("{}.lost", self.name);
        let renamed = folder
            .map_or(Err(Errno::NOENT), |folder| renameat(&folder, &self.name, &folder, &name));
        if let Err(error) = renamed {
            tracing::debug!(path = %self.path().display(), %error, "cannot keep the redo log");
            *self.lock() = Some(there);
            self.remove();
            return None;
        }
        self.remove_note();
        Some(self.folder.join(name))
    }
}

#[cfg(test)]
mod tests;

//! A file that was found but not opened.
//!
//! Opening a name has side effects: a FIFO hangs, a tape rewinds, a watchdog is armed. So a name is
//! first resolved with O_PATH, which has none; the result is checked; and only then that very inode
//! is opened, through its descriptor, so that nobody can swap the name in between.

use crate::kind::{FileKind, no_direct, not_an_image, open_flags};
use crate::lock;
use crate::nameless;
use crate::node::Node;
use crate::stamp::nanoseconds;
use mica_block::{Error, ErrorKind, Identity, Result};
use mica_rt::{Access, File, FileSystem};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat, open, openat, readlink, stat};
use rustix::io::Errno;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A file that was found but not opened. It pins an inode and can read nothing.
#[derive(Debug)]
pub struct Located {
    /// Its file system, once that was asked for; dropped before the descriptor.
    system: OnceLock<Option<Arc<FileSystem>>>,
    fd: OwnedFd,
    path: PathBuf,
    stat: Stat,
    kind: FileKind,
    /// Where it is, once that was asked for.
    real_path: OnceLock<PathBuf>,
}

impl Located {
    /// Finds what `path` names, through symbolic links.
    ///
    /// # Errors
    /// Any error of the system; `Invalid` if it is neither a regular file nor a block device.
    pub fn find(path: &Path) -> Result<Self> {
        Self::find_with(path, absolute(path)?, OFlags::empty())
    }

    /// As [`Self::find`], for a caller that knows the `absolute` name of `path`.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn find_absolute(path: &Path, absolute: PathBuf) -> Result<Self> {
        Self::find_with(path, absolute, OFlags::empty())
    }

    /// Finds what `path` names, but not if that is a symbolic link.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn find_no_follow(path: &Path) -> Result<Self> {
        Self::find_with(path, absolute(path)?, OFlags::NOFOLLOW)
    }

    /// The absolute name is used again to reopen the file, from whatever working directory.
    fn find_with(path: &Path, absolute: PathBuf, flags: OFlags) -> Result<Self> {
        match Self::find_raw(&absolute, flags) {
            Ok(Ok(located)) => Ok(located),
            Ok(Err(what)) => Err(not_an_image(&absolute, what)),
            Err(error) => Err(failed_to_open(path, error.into())),
        }
    }

    /// Finds `path`; the inner error says what it is, if it is not a file that can hold an image.
    pub(crate) fn find_raw(
        path: &Path,
        flags: OFlags,
    ) -> rustix::io::Result<std::result::Result<Self, &'static str>> {
        Self::find_raw_in(CWD, path, path, flags)
    }

    /// Finds what has this `name` in `folder`, which is the directory of `path`, but not if that is
    /// a symbolic link.
    pub(crate) fn find_in(folder: &OwnedFd, name: &str, path: &Path) -> Result<Self> {
        match Self::find_raw_in(folder.as_fd(), Path::new(name), path, OFlags::NOFOLLOW) {
            Ok(Ok(located)) => Ok(located),
            Ok(Err(what)) => Err(not_an_image(path, what)),
            Err(error) => Err(failed_to_open(path, error.into())),
        }
    }

    fn find_raw_in(
        folder: BorrowedFd<'_>,
        name: &Path,
        path: &Path,
        flags: OFlags,
    ) -> rustix::io::Result<std::result::Result<Self, &'static str>> {
        let fd = openat(folder, name, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty())?;
        let stat = fstat(&fd)?;
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => FileKind::Regular,
            FileType::BlockDevice => FileKind::BlockDevice,
            FileType::Directory => return Ok(Err("a directory")),
            FileType::Fifo => return Ok(Err("a FIFO")),
            FileType::Socket => return Ok(Err("a socket")),
            FileType::CharacterDevice => return Ok(Err("a character device")),
            FileType::Symlink => return Ok(Err("a symbolic link")),
            FileType::Unknown => return Ok(Err("of an unknown type")),
        };
        let (system, real_path) = (OnceLock::new(), OnceLock::new());
        Ok(Ok(Self { system, fd, path: path.to_owned(), stat, kind, real_path }))
    }

    /// The name by which it was found, made absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The device and inode of the file, or of the device's node.
    pub(crate) fn node(&self) -> Node {
        Node { device: self.stat.st_dev, inode: self.stat.st_ino }
    }

    /// Length of a regular file when it was found. The length of a block device is known once open.
    pub fn known_len(&self) -> Option<u64> {
        match self.kind {
            FileKind::Regular => Some(self.regular_len()),
            FileKind::BlockDevice => None,
        }
    }

    /// User that owns it.
    pub fn owner(&self) -> u32 {
        self.stat.st_uid
    }

    /// Whether it had several names when it was found.
    pub(crate) fn has_other_names(&self) -> bool {
        self.stat.st_nlink > 1
    }

    /// Its permission bits.
    pub fn mode(&self) -> u32 {
        self.stat.st_mode & 0o7777
    }

    /// Where the inode is, or was when this was asked first, without symbolic links.
    ///
    /// # Errors
    /// `Io` where /proc is not mounted.
    pub fn real_path(&self) -> Result<PathBuf> {
        if let Some(known) = self.real_path.get() {
            return Ok(known.clone());
        }
        let failed = |error: Errno| {
            let what = format!("asking /proc where {} is", self.path.display());
            Error::from_io(what, error.into())
        };
        let target = readlink(proc_path(&self.fd), Vec::new()).map_err(failed)?;
        let path = PathBuf::from(std::ffi::OsString::from_vec(target.into_bytes()));
        Ok(self.real_path.get_or_init(|| path).clone())
    }

    /// The identity of this file, which has `len` bytes. The times of a block device are at
    /// infinity: the system does not record its last change, so nothing derived from it may be
    /// trusted.
    pub fn identity(&self, len: u64) -> Identity {
        let stat = &self.stat;
        match self.kind {
            FileKind::Regular => Identity {
                device: stat.st_dev,
                inode: stat.st_ino,
                len,
                mtime_ns: nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
                ctime_ns: match self.keeps_change_times() {
                    true => nanoseconds(stat.st_ctime, stat.st_ctime_nsec),
                    false => i128::MAX,
                },
            },
            // All nodes of one device are one file; no regular file has inode 0.
            FileKind::BlockDevice => Identity {
                device: stat.st_rdev,
                inode: 0,
                len,
                mtime_ns: i128::MAX,
                ctime_ns: i128::MAX,
            },
        }
    }

    /// See [`crate::mount_generation`].
    pub(crate) fn mount_generation(&self) -> Option<u64> {
        crate::mount_generation::of(self.kind, &self.stat)
    }

    /// Whether its file system has a change time that nobody can set. FAT and exFAT report the time
    /// of the last write instead, the former with a resolution of two seconds.
    fn keeps_change_times(&self) -> bool {
        const WITHOUT: [u64; 2] = [0x4d44, 0x2011_bab0];
        let magic = self.system().map(|system| u64::try_from(system.magic()));
        !matches!(magic, Some(Ok(magic)) if WITHOUT.contains(&magic))
    }

    fn system(&self) -> Option<&Arc<FileSystem>> {
        self.system.get_or_init(|| FileSystem::of(&self.fd, self.stat.st_dev).ok()).as_ref()
    }

    pub(crate) fn regular_len(&self) -> u64 {
        u64::try_from(self.stat.st_size).unwrap_or(0)
    }

    /// Whether this process may read it.
    pub(crate) fn check_readable(&self) -> Result<()> {
        use rustix::fs::{Access, AtFlags, accessat};
        match accessat(CWD, proc_path(&self.fd), Access::READ_OK, AtFlags::EACCESS) {
            Err(error @ (Errno::ACCESS | Errno::PERM)) => {
                Err(Error::from_io(format!("opening {}", self.path.display()), error.into()))
            }
            // Any other error is reported by the open that follows.
            _ => Ok(()),
        }
    }

    /// Opens it for reading.
    pub(crate) fn open_reader(&self, access: Access) -> rustix::io::Result<File> {
        let fd = self.open(open_flags(access))?;
        Ok(match self.system() {
            Some(system) => File::on(fd, access, self.kind.file_type(), Arc::clone(system)),
            None => File::new(fd, access),
        })
    }

    /// Opens it for reading and writing.
    pub(crate) fn open_writable(&self, access: Access) -> Result<File> {
        let what = format!("opening {} for writing", self.path.display());
        match self.open(OFlags::RDWR | open_flags(access)) {
            Ok(fd) => Ok(File::new(fd, access)),
            Err(Errno::INVAL) if access == Access::Direct => Err(no_direct(&self.path)),
            Err(error @ Errno::ROFS) => {
                Err(Error::new(ErrorKind::Denied, format!("{what}: {}", io::Error::from(error))))
            }
            Err(error) => Err(Error::from_io(what, error.into())),
        }
    }

    /// Refreshes what may have changed since it was found, from the opened `file`.
    pub(crate) fn refresh(&mut self, file: &File) -> Result<()> {
        self.stat = fstat(file).map_err(|error| {
            Error::from_io(format!("asking about {}", self.path.display()), error.into())
        })?;
        Ok(())
    }

    /// As [`Self::refresh`], once `file` is locked: whoever had it locked until then may have given
    /// its name to another file. Under another name it is another image's: a state that was kept,
    /// or what is left of a file that was replaced, and about to be removed.
    ///
    /// # Errors
    /// As [`Self::refresh`]; one that is worth a retry if that happened.
    pub(crate) fn refresh_locked(&mut self, file: &File) -> Result<()> {
        self.refresh(file)?;
        // Names in /proc lead to files that have no others.
        let is_elsewhere = || match stat(&self.path) {
            Ok(found) => Node { device: found.st_dev, inode: found.st_ino } != self.node(),
            Err(error) => matches!(error, Errno::NOENT | Errno::NOTDIR),
        };
        match self.kind == FileKind::Regular && is_elsewhere() {
            true => Err(lock::taken_away(&self.path)),
            false => Ok(()),
        }
    }

    /// Opens this inode, whatever the name refers to by now; for reading unless `flags` add to
    /// that.
    pub(crate) fn open(&self, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        if let Some(fd) = nameless::descriptor(self.node(), flags) {
            return fd;
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | flags;
        match openat(CWD, proc_path(&self.fd), flags, Mode::empty()) {
            // Without /proc the name is opened, and the result is compared. O_NONBLOCK keeps a FIFO
            // that was swapped in from hanging us; it must not stay, because io_uring refuses to
            // wait for such a file.
            Err(Errno::NOENT) => {
                let fd = open(&self.path, flags | OFlags::NONBLOCK, Mode::empty())?;
                let stat = fstat(&fd)?;
                if (stat.st_dev, stat.st_ino) != (self.stat.st_dev, self.stat.st_ino) {
                    return Err(Errno::STALE);
                }
                rustix::fs::fcntl_setfl(&fd, flags & OFlags::DIRECT)?;
                Ok(fd)
            }
            result => result,
        }
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| failed_to_open(path, error))
}

fn failed_to_open(path: &Path, error: io::Error) -> Error {
    Error::from_io(format!("opening {}", path.display()), error)
}

fn proc_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

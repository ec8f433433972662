//! The directory that a store of objects is in: folders, and files in them.

use crate::handles::{Handles, SetAside};
use mica_block::{Error, ErrorKind, ObjectName, Result};
use mica_rt::{Access, File};
use parking_lot::{Mutex, MutexGuard};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fsync, mkdirat, openat};
use rustix::io::Errno;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

/// The directory.
pub(super) struct Root {
    file: Arc<File>,
    path: PathBuf,
    pub(super) handles: Arc<Handles>,
    /// Folders whose names are durable, and those of the folders that they are in.
    durable: Mutex<HashSet<String>>,
    /// When new files of killed processes were last removed, by the clock of the file system.
    pub(super) tidied: AtomicI64,
    /// What is known of the space in reserve.
    pub(super) reserve: Mutex<Reserve>,
    _descriptor: SetAside,
}

/// Folders that are known to be durable at most: others cost a few syncs more.
const DURABLE_MAX: usize = 4096;
/// How often a folder is made, at most, that others remove meanwhile: each time a probe of theirs
/// has ended.
const MADE_AGAIN_MAX: u32 = 100;

/// How folders are opened.
pub(super) const FOLDER_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What a process knows of the space in reserve.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reserve {
    /// Nothing: it is to be looked for.
    Unknown,
    /// It is there, or cannot be.
    Settled,
    /// It was given up, and this process may be about to use the room.
    GivenUp,
}

impl Root {
    pub(super) fn open(path: &Path, handles: &Arc<Handles>) -> Result<Self> {
        let failed = |error| {
            Error::from_io(format!("opening the directory of objects {}", path.display()), error)
        };
        let path = path.canonicalize().map_err(failed)?;
        let fd = openat(CWD, &path, FOLDER_FLAGS, Mode::empty())
            .map_err(|error| failed(error.into()))?;
        Ok(Self {
            file: Arc::new(File::new(fd, Access::Buffered)),
            path,
            handles: Arc::clone(handles),
            durable: Mutex::default(),
            tidied: AtomicI64::new(0),
            reserve: Mutex::new(Reserve::Unknown),
            _descriptor: handles.set_aside(1),
        })
    }

    pub(super) fn file(&self) -> &Arc<File> {
        &self.file
    }

    pub(super) fn name(&self) -> String {
        format!("file://{}", self.path.display())
    }

    /// The path of what has this name.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a folder; `""` is the directory itself. `None` if it is not there.
    pub(super) fn open_folder(&self, name: &str) -> Result<Option<OwnedFd>> {
        self.walk(name, |_, _, _| Err(Errno::NOENT))
    }

    /// Opens a folder that is made if it is not there, as are those that it is in.
    pub(super) fn make_folder(&self, name: &str) -> Result<OwnedFd> {
        for _ in 1..MADE_AGAIN_MAX {
            if let Some(folder) = self.try_to_make_folder(name)? {
                return Ok(folder);
            }
        }
        let made = self.try_to_make_folder(name)?;
        made.ok_or_else(|| self.failed("making the folder", name, Errno::NOENT.into()))
    }

    /// `None` if somebody removed one of them meanwhile.
    fn try_to_make_folder(&self, name: &str) -> Result<Option<OwnedFd>> {
        self.walk(name, |parent, part, folder| {
            match mkdirat(parent, part, Mode::RWXU) {
                // It may have been there before, and somebody removed it.
                Ok(()) => drop(self.durable().remove(folder)),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error),
            }
            openat(parent, part, FOLDER_FLAGS, Mode::empty())
        })
    }

    /// Opens a folder part by part (I3). `missing` is called with the folder opened so far, the
    /// part that is not in it, and the name of both.
    fn walk(
        &self,
        name: &str,
        missing: impl Fn(&OwnedFd, &str, &str) -> rustix::io::Result<OwnedFd>,
    ) -> Result<Option<OwnedFd>> {
        let failed = |name: &str, error| match error {
            Errno::NOTDIR | Errno::LOOP => {
                let path = self.path_of(name);
                let what = format!("{} is not a folder: it is no part of a store", path.display());
                Error::new(ErrorKind::Invalid, what)
            }
            error => self.failed("opening the folder", name, error.into()),
        };
        let root = openat(&self.file, ".", FOLDER_FLAGS, Mode::empty());
        let mut folder = root.map_err(|error| failed("", error))?;
        let mut end = 0;
        for part in name.split('/').filter(|part| !part.is_empty()) {
            end += part.len() + usize::from(end > 0);
            let opened = match openat(&folder, part, FOLDER_FLAGS, Mode::empty()) {
                Err(Errno::NOENT) => match missing(&folder, part, &name[..end]) {
                    Err(Errno::NOENT) => return Ok(None),
                    made => made,
                },
                opened => opened,
            };
            folder = opened.map_err(|error| failed(&name[..end], error))?;
        }
        Ok(Some(folder))
    }

    /// Makes the names in `folder` durable, and those of the folders that it is in.
    pub(super) fn make_durable(&self, name: &str, folder: &impl AsFd) -> Result<()> {
        let failed = |name: &str, error: Errno| self.failed("making durable", name, error.into());
        fsync(folder).map_err(|error| failed(name, error))?;
        let mut inner = name;
        while !inner.is_empty() && !self.durable().contains(inner) {
            let outer = folder_of(inner);
            let opened = self.open_folder(outer)?.ok_or_else(|| failed(outer, Errno::NOENT))?;
            fsync(&opened).map_err(|error| failed(outer, error))?;
            inner = outer;
        }
        self.note_durable(name);
        Ok(())
    }

    /// The names of the folder `name`, and of those that it is in, are durable: of an object that
    /// was put just now, or that has no name in `.tmp` any more (I2 of `directory.rs`).
    pub(super) fn note_durable(&self, name: &str) {
        let mut durable = self.durable();
        let mut inner = name;
        while !inner.is_empty() && !durable.contains(inner) {
            if durable.len() >= DURABLE_MAX {
                durable.clear();
            }
            durable.insert(inner.to_owned());
            inner = folder_of(inner);
        }
    }

    /// Whether the name of a folder is known to be durable.
    #[cfg(test)]
    pub(super) fn knows_durable(&self, name: &str) -> bool {
        self.durable().contains(name)
    }

    pub(super) fn check_regular(&self, name: &ObjectName, stat: &Stat) -> Result<()> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(()),
            _ => Err(self.not_regular(name)),
        }
    }

    pub(super) fn not_regular(&self, name: &ObjectName) -> Error {
        let path = self.path_of(name.as_str());
        let what = format!("{} is not a regular file: it is no object", path.display());
        Error::new(ErrorKind::Invalid, what)
    }

    /// The error of `doing` something to what has this name. That nothing can be written is no
    /// outage, which would be waited for.
    pub(super) fn failed(&self, doing: &str, name: &str, error: io::Error) -> Error {
        let what = format!("{doing} {}", self.path_of(name).display());
        match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem => {
                Error::new(ErrorKind::Denied, format!("{what}: {error}"))
            }
            _ => Error::from_io(what, error),
        }
    }

    fn durable(&self) -> MutexGuard<'_, HashSet<String>> {
        self.durable.lock()
    }
}

/// The folder that a folder is in.
fn folder_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

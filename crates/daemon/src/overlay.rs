//! The file of an ephemeral disk's overlay. It belongs to the disk's settings, and is there for as
//! long as they are.

use mica_block::{Error, ErrorKind, Result};
use mica_store::NamelessFile;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// The overlay of an ephemeral disk. Its file is made when it is needed.
#[derive(Clone, Default, Debug)]
pub(crate) struct Overlay(Arc<Mutex<Option<Arc<NamelessFile>>>>);

impl Overlay {
    /// One for a disk that is ephemeral.
    pub(crate) fn wanted(is_ephemeral: bool) -> Option<Self> {
        is_ephemeral.then(Self::default)
    }

    /// Its file, which `make` makes if there is none yet.
    ///
    /// # Errors
    /// Those of `make`, and of the system.
    pub(crate) fn file(&self, make: impl FnOnce() -> Result<OwnedFd>) -> Result<Arc<NamelessFile>> {
        let mut file = self.0.lock();
        if let Some(file) = &*file {
            return Ok(Arc::clone(file));
        }
        let made = Arc::new(NamelessFile::new(make()?)?);
        *file = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Whether its disk was ever opened, so that something may be written to it.
    pub(crate) fn is_used(&self) -> bool {
        let file = self.0.lock();
        file.as_ref().is_some_and(|file| !file.is_empty().unwrap_or(false))
    }
}

/// What each disk has is its own.
impl PartialEq for Overlay {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Overlay {}

/// Makes a file in `folder` for reading and writing that has no name, and can be given none.
///
/// # Errors
/// `Unsupported` if its file system has no such files; otherwise those of the system.
pub(crate) fn nameless_file(folder: &Path) -> Result<OwnedFd> {
    // Without O_EXCL, linkat could name it.
    let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR).map_err(|error| failed(folder, error))
}

fn failed(folder: &Path, error: Errno) -> Error {
    let what = format!("making a file to be thrown away in {} (TMPDIR)", folder.display());
    // How file systems and kernels without such files refuse them.
    let is_unsupported = matches!(error, Errno::OPNOTSUPP | Errno::ISDIR);
    if !is_unsupported {
        return Error::from_io(what, error.into());
    }
    let why = "the file system there has no files without a name (O_TMPFILE), so only disks that \
               are there when the server starts can be ephemeral: start it with another TMPDIR";
    Error::new(ErrorKind::Unsupported, format!("{what}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{AtFlags, CWD, linkat};
    use std::os::fd::AsRawFd;

    #[test]
    fn file_that_is_thrown_away_cannot_be_given_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = nameless_file(folder.path()).unwrap();
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        let name = |target: &str| {
            linkat(CWD, &link, CWD, folder.path().join(target), AtFlags::SYMLINK_FOLLOW)
        };
        assert_eq!(name("named"), Err(Errno::NOENT));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn file_system_without_nameless_files_is_told_from_other_failures() {
        for error in [Errno::OPNOTSUPP, Errno::ISDIR] {
            let said = failed(Path::new("/t"), error);
            assert_eq!(said.kind(), ErrorKind::Unsupported);
            assert!(said.in_one_line().contains("start it with another TMPDIR"), "{said}");
        }
        let full = failed(Path::new("/t"), Errno::NOSPC).in_one_line();
        assert!(full.contains("/t (TMPDIR)") && !full.contains("O_TMPFILE"), "{full}");
    }
}

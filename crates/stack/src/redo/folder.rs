//! The folder with one user's logs. Everybody may create files in its parent, so a name there
//! proves nothing; but only this user can have put anything into the folder. A process in a sandbox
//! needs nothing but this folder.
//!
//! Invariants
//! - I1 A folder is used only if it is one, not a symbolic link to one, of this user, and nobody
//!   else may write to it. If others may create files beside it, they must not be able to rename
//!   it: the sticky bit of `/dev/shm` ensures that.
//! - I2 Others may look a name up in it, but not list it: a process that opens an image can report
//!   that another user left a log ([`super::RedoFile::of_another`]).

use mica_block::{Error, ErrorKind, Result};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{CWD, FileType, Mode, OFlags, chmod, fstat, mkdirat, open};
use rustix::io::Errno;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where the logs of `user` are, below a `directory` that many may use.
pub(super) fn path_of(directory: &Path, user: u32) -> PathBuf {
    directory.join(format!("mica-{user}"))
}

/// The folder of this user's logs below `directory`, created if it does not exist.
///
/// # Errors
/// Any error of the system; `Denied` if others can change it.
pub fn redo_folder(directory: &Path) -> Result<PathBuf> {
    let path = path_of(directory, rustix::process::geteuid().as_raw());
    make(&path).map(|_| path)
}

/// The folder for what says of this user's writers of volumes that they live, below `directory`,
/// created if it does not exist: one of its own in that of the logs, so that a process in a sandbox
/// which needs these files can do nothing to the logs.
///
/// # Errors
/// As [`redo_folder`].
pub fn volumes_folder(directory: &Path) -> Result<PathBuf> {
    let path = redo_folder(directory)?.join("volumes");
    // If it is there, or cannot be made, that shows when it is opened.
    let _ = mkdirat(CWD, &path, Mode::RWXU);
    match find(&path)? {
        Some(_) => Ok(path),
        None => Err(Error::from_io(format!("making {}", path.display()), Errno::NOENT.into())),
    }
}

/// The directory in which logs are, unless another is given.
pub fn usual_redo_directory() -> &'static Path {
    // Memory-backed and present on every Linux.
    Path::new("/dev/shm")
}

/// Whether this user has no folder for logs below `directory`, and one cannot be made.
pub fn lacks_redo_folder(directory: &Path) -> bool {
    let path = path_of(directory, rustix::process::geteuid().as_raw());
    redo_folder(directory).is_err() && !path.exists()
}

/// The folder of the logs of the owner of `image`, if it exists and that is another user whose logs
/// this process, as root, reads.
pub fn redo_folder_of_owner(directory: &Path, image: &Path) -> Option<PathBuf> {
    let owner = std::fs::metadata(image).ok()?.uid();
    if owner == 0 || !rustix::process::geteuid().is_root() {
        return None;
    }
    let path = path_of(directory, owner);
    find_of(&path, owner).ok()?.map(|_| path)
}

/// Opens the folder at `path`, created if it does not exist.
pub(super) fn make(path: &Path) -> Result<OwnedFd> {
    let mode = Mode::RWXU | Mode::XGRP | Mode::XOTH;
    let made = mkdirat(CWD, path, mode);
    // A process that may not create it may still use it.
    let Some(folder) = find(path)? else {
        let error = made.err().unwrap_or(Errno::NOENT);
        return Err(Error::from_io(format!("making {}", path.display()), error.into()));
    };
    if made.is_ok() {
        // Whatever the process's umask (I2). If this fails, others get no hint.
        let _ = chmod(format!("/proc/self/fd/{}", folder.as_raw_fd()), mode);
    }
    Ok(folder)
}

/// Opens the folder at `path`, if there is one (I1).
pub(super) fn find(path: &Path) -> Result<Option<OwnedFd>> {
    find_of(path, rustix::process::geteuid().as_raw())
}

/// As [`find`], for the folder of `user`.
pub(super) fn find_of(path: &Path, user: u32) -> Result<Option<OwnedFd>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let failed = |error: Errno| Error::from_io(path.display().to_string(), error.into());
    let folder = match open(path, flags, Mode::empty()) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(not_ours(path)),
        Err(error) => return Err(failed(error)),
    };
    let stat = fstat(&folder).map_err(failed)?;
    let is_ours = FileType::from_raw_mode(stat.st_mode) == FileType::Directory
        && stat.st_uid == user
        && stat.st_mode & 0o022 == 0;
    if is_ours { Ok(Some(folder)) } else { Err(not_ours(path)) }
}

fn not_ours(path: &Path) -> Error {
    let what =
        "is not a folder that only this user can change: remove it, or choose another --redo-dir";
    Error::new(ErrorKind::Denied, format!("{} {what}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn folder_is_made_once_and_others_list_nothing_in_it() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = redo_folder(place.path()).expect("made");
        let mode = fs::metadata(&folder).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o711, "{mode:o}");
        fs::write(folder.join("log"), b"x").expect("ours");
        assert_eq!(redo_folder(place.path()).expect("there"), folder);
        assert!(folder.join("log").exists());
        let nowhere = place.path().join("none");
        assert_eq!(
            redo_folder(&nowhere).err().map(|error| error.kind()),
            Some(ErrorKind::NotFound)
        );
    }

    #[test]
    fn what_is_kept_of_volumes_has_a_folder_of_its_own() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = volumes_folder(place.path()).expect("made");
        assert_eq!(folder.parent(), redo_folder(place.path()).ok().as_deref());
        let mode = fs::metadata(&folder).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{mode:o}");
        fs::write(folder.join("volume"), b"x").expect("ours");
        assert_eq!(volumes_folder(place.path()).expect("there"), folder);
        assert!(folder.join("volume").exists());
        fs::set_permissions(&folder, Permissions::from_mode(0o770)).expect("ours");
        let error = volumes_folder(place.path()).expect_err("a group may write");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    }

    #[test]
    fn folder_that_somebody_else_put_there_is_refused() {
        let place = tempfile::tempdir().expect("a folder");
        let folder = path_of(place.path(), rustix::process::geteuid().as_raw());
        let elsewhere = place.path().join("elsewhere");
        fs::create_dir(&elsewhere).expect("made");
        let refused = |what: &str| {
            let error = redo_folder(place.path()).expect_err(what);
            assert_eq!(error.kind(), ErrorKind::Denied, "{what}: {error}");
            assert_eq!(find(&folder).err().map(|error| error.kind()), Some(ErrorKind::Denied));
        };
        symlink(&elsewhere, &folder).expect("a link");
        refused("a link");
        fs::remove_file(&folder).expect("ours");
        fs::write(&folder, b"").expect("a file");
        refused("a file");
        fs::remove_file(&folder).expect("ours");
        fs::create_dir(&folder).expect("made");
        fs::set_permissions(&folder, Permissions::from_mode(0o770)).expect("ours");
        refused("a folder that a group may write");
        fs::set_permissions(&folder, Permissions::from_mode(0o700)).expect("ours");
        redo_folder(place.path()).expect("ours alone");
        if std::os::unix::fs::chown(&folder, Some(12_345), None).is_ok() {
            refused("another user's");
        }
    }
}

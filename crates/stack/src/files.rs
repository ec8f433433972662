//! Which file a name leads to, whatever it is called, and the names by which images name each
//! other.

use crate::policy::looks_like_protocol;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::Access;
use mica_store::Node;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which file is at `path`, following links; `None` if there is none.
pub fn node_of(path: &Path) -> Option<Node> {
    let found = fs::metadata(path).ok()?;
    Some(Node { device: found.dev(), inode: found.ino() })
}

/// Which of `paths` is `name`, or another name of the same file.
pub fn position_of(paths: &[PathBuf], name: &Path) -> Option<usize> {
    let wanted = node_of(name);
    paths.iter().position(|path| path == name || wanted.is_some() && node_of(path) == wanted)
}

/// The folder of the file at `path`.
pub(crate) fn folder_of(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Makes the names in the folder of `file` durable.
///
/// # Errors
/// What the system reports.
pub fn sync_folder_of(file: &Path) -> Result<()> {
    let folder = folder_of(file);
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| Error::from_io(format!("syncing {}", folder.display()), error))
}

/// No error if a folder could not be synced because it may not be opened, as in a sandbox.
pub(crate) fn unless_denied(synced: Result<()>) -> Result<()> {
    match synced {
        Err(error) if error.kind() == ErrorKind::Denied => Ok(()),
        synced => synced,
    }
}

/// The folder of `file`, for calls on it.
///
/// # Errors
/// What the system reports.
pub(crate) fn open_folder_of(file: &Path) -> Result<Arc<mica_rt::File>> {
    let folder = folder_of(file);
    let opened = File::open(folder)
        .map_err(|error| Error::from_io(format!("opening {}", folder.display()), error))?;
    Ok(Arc::new(mica_rt::File::new(opened.into(), Access::Buffered)))
}

/// The name by which the image at `new` names `base` beneath it: relative in one folder.
///
/// # Errors
/// If one of the folders, or `base`, is not there.
pub fn base_name(base: &Path, new: &Path) -> Result<OsString> {
    let found = |path: &Path| {
        let found = path.canonicalize();
        found.map_err(|error| Error::from_io(format!("finding {}", path.display()), error))
    };
    match base.file_name() {
        Some(name) if found(folder_of(base))? == found(folder_of(new))? => Ok(plain_name(name)),
        _ => Ok(found(base)?.into_os_string()),
    }
}

/// `name` of a file in the folder of an image, as that names it: a colon before any slash would be
/// that of a protocol.
pub(crate) fn plain_name(name: &OsStr) -> OsString {
    let mut plain = OsString::new();
    if looks_like_protocol(name.as_bytes()) {
        plain.push("./");
    }
    plain.push(name);
    plain
}

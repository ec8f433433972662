//! Files without a name: what is in them ends with the last process that has them open.
//!
//! Invariants
//! - I1 The stores of this process open such a file by the path that its owner is told, for as long
//!   as the owner has it, and nobody else does: so stores may share one open file, with its locks.
//! - I2 They duplicate the owner's descriptor. In a sandbox the system would refuse to open it once
//!   more, as no rule speaks for a file that has no name.

use crate::node::Node;
use mica_block::{Error, Result};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::fcntl_dupfd_cloexec;
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file without a name that this process has open for reading and writing. Dropping it ends it,
/// once no store has it open.
#[derive(Debug)]
pub struct NamelessFile {
    fd: Arc<OwnedFd>,
    node: Node,
    path: PathBuf,
}

/// Those of this process.
static KNOWN: Mutex<BTreeMap<Node, Arc<OwnedFd>>> = Mutex::new(BTreeMap::new());

impl NamelessFile {
    /// Lets stores open `fd`, which is open for reading and writing.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(fd: OwnedFd) -> Result<Self> {
        let stat = fstat(&fd).map_err(|error| failed(error.into()))?;
        let (node, path) = (Node { device: stat.st_dev, inode: stat.st_ino }, path_of(&fd));
        let fd = Arc::new(fd);
        known().insert(node, Arc::clone(&fd));
        Ok(Self { fd, node, path })
    }

    /// By which this process opens it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether `path` is that of one of this process.
    pub fn is_at(path: &Path) -> bool {
        known().values().any(|fd| path_of(fd) == path)
    }

    /// Whether nothing was written to it yet.
    ///
    /// # Errors
    /// Those of the system.
    pub fn is_empty(&self) -> Result<bool> {
        fstat(&self.fd).map(|stat| stat.st_size == 0).map_err(|error| failed(error.into()))
    }

    /// Makes it empty.
    ///
    /// # Errors
    /// Those of the system.
    pub fn clear(&self) -> Result<()> {
        rustix::fs::ftruncate(&self.fd, 0).map_err(|error| failed(error.into()))
    }
}

impl Drop for NamelessFile {
    fn drop(&mut self) {
        // Before its descriptor is closed: another file gets its inode afterwards.
        known().remove(&self.node);
    }
}

/// A descriptor of the file at `node`, if that is such a file.
pub(crate) fn descriptor(node: Node, flags: OFlags) -> Option<rustix::io::Result<OwnedFd>> {
    let fd = known().get(&node).cloned()?;
    let duplicated = fcntl_dupfd_cloexec(&fd, 0);
    Some(duplicated.and_then(|fd| {
        if flags.contains(OFlags::DIRECT) {
            fcntl_setfl(&fd, fcntl_getfl(&fd)? | OFlags::DIRECT)?;
        }
        Ok(fd)
    }))
}

fn path_of(fd: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

fn known() -> MutexGuard<'static, BTreeMap<Node, Arc<OwnedFd>>> {
    KNOWN.lock()
}

fn failed(error: std::io::Error) -> Error {
    Error::from_io("using a file without a name", error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheMode, Handles, Located, Locking, WritableFile};
    use mica_block::Store;

    #[test]
    fn stores_open_a_file_without_a_name_until_its_owner_drops_it() {
        let file = NamelessFile::new(tempfile::tempfile().unwrap().into()).unwrap();
        assert!(file.is_empty().unwrap());
        let handles = Handles::new(4);
        let open = || {
            let mut located = Located::find(file.path()).unwrap();
            WritableFile::open(&mut located, CacheMode::Writeback, Locking::On, &handles).unwrap()
        };
        let store = open();
        rustix::fs::ftruncate(&file.fd, 5).unwrap();
        assert_eq!(store.len().unwrap(), 5);
        drop(store);
        // What it held is still there, and it can be written again.
        assert_eq!(open().len().unwrap(), 5);
        file.clear().unwrap();
        assert!(file.is_empty().unwrap());
        let node = file.node;
        assert!(descriptor(node, OFlags::empty()).is_some());
        assert!(NamelessFile::is_at(file.path()) && !NamelessFile::is_at(Path::new("/proc")));
        drop(file);
        assert!(descriptor(node, OFlags::empty()).is_none());
    }
}

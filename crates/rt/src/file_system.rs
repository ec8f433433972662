//! The file systems of open files, each asked once what it is.
//!
//! - I1 What is known of a device number counts only while a file of that device is open: after it
//!   was unmounted the number may be another file system's. So a file system is known as long as
//!   somebody holds it, and whoever holds it has a file of it open.

use parking_lot::Mutex;
use rustix::fd::AsFd;
use rustix::fs::{FsWord, fstatfs};
use std::sync::{Arc, Weak};

/// A mounted file system.
#[derive(Debug)]
pub struct FileSystem {
    device: u64,
    magic: FsWord,
}

/// Those that somebody holds. Usually there is one.
static KNOWN: Mutex<Vec<Weak<FileSystem>>> = Mutex::new(Vec::new());

impl FileSystem {
    /// That of `file`, whose `stat` has this device number. To be dropped before `file` is closed
    /// (I1).
    ///
    /// # Errors
    /// Any error of the system.
    pub fn of(file: impl AsFd, device: u64) -> rustix::io::Result<Arc<Self>> {
        let known = || KNOWN.lock();
        let found = known().iter().filter_map(Weak::upgrade).find(|known| known.device == device);
        if let Some(found) = found {
            return Ok(found);
        }
        // Not under the lock: the storage of one file system may hang.
        let magic = fstatfs(file)?.f_type;
        let new = Arc::new(Self { device, magic });
        let mut known = known();
        known.retain(|known| known.strong_count() > 0);
        known.push(Arc::downgrade(&new));
        Ok(new)
    }

    /// What the system calls file systems of its kind.
    pub fn magic(&self) -> FsWord {
        self.magic
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn file_system_is_known_only_while_it_is_held() {
        let file = tempfile::tempfile().expect("made");
        // A number that no device has, so that no other test holds it.
        let device = u64::MAX;
        let held = FileSystem::of(&file, device).expect("asked");
        let again = FileSystem::of(&file, device).expect("known");
        assert!(Arc::ptr_eq(&held, &again));
        let before = Arc::downgrade(&held);
        drop((held, again));
        assert!(before.upgrade().is_none(), "nothing else keeps it");
        let other = FileSystem::of(&file, file.metadata().expect("there").dev()).expect("asked");
        assert_eq!(other.magic(), fstatfs(&file).expect("asked").f_type);
    }
}

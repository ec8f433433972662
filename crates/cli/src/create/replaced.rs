//! A file whose place a new one takes once that is complete. Until then it is there as it was, and
//! locked.
//!
//! Invariants
//! - I1 The new file has the old one's mode, owner and attributes before anything is written to it.
//!   Where it cannot have them the old one is overwritten in place, as are an empty file, which
//!   somebody may have made for this and know by its descriptor, and one that has other names, too.

use mica_block::{Error, ErrorKind, Result, Store, StoreIdentity};
use mica_stack::unfinished_place;
use rustix::fs::{
    Access, AtFlags, CWD, Gid, Mode, Statx, StatxFlags, Uid, XattrFlags, access, fchmod, fchown,
    fsetxattr, lgetxattr, llistxattr, statx,
};
use rustix::io::Errno;
use std::ffi::CString;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where names are those of descriptors.
const DESCRIPTORS: [&str; 5] = ["/proc", "/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr"];
/// Longest list of names of attributes, and longest value, as of Linux.
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;

/// A file that is to be replaced.
pub(super) struct Replaced {
    /// Where it really is.
    real: PathBuf,
    found: Metadata,
    /// Has it locked.
    store: Arc<dyn Store>,
}

impl Replaced {
    /// The file at `path`, if another one can take its place; `store` has it locked.
    ///
    /// # Errors
    /// If it cannot be asked how long it is; `Denied` if `path` is another file by now.
    pub(super) fn of(path: &Path, store: &Arc<dyn Store>) -> Result<Option<Self>> {
        // A descriptor is what its owner means, not what has the name of that file.
        let is_descriptor = DESCRIPTORS.iter().any(|place| path.starts_with(place));
        if store.len()? == 0 || is_descriptor {
            return Ok(None);
        }
        let Ok(real) = path.canonicalize() else { return Ok(None) };
        let Ok(found) = real.symlink_metadata() else { return Ok(None) };
        let locked = store.identity();
        if (StoreIdentity::File { device: found.dev(), inode: found.ino() }) != locked {
            let what = "another process has put another file there meanwhile";
            return Err(Error::new(ErrorKind::Denied, format!("{}: {what}", path.display())));
        }
        let folder = real.parent().unwrap_or(Path::new("/"));
        let is_alone = found.is_file() && found.nlink() == 1;
        let can_be = is_alone
            && access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
            && is_same_mount(&real, folder);
        let store = Arc::clone(store);
        Ok(can_be.then_some(Self { real, found, store }))
    }

    /// Where it really is.
    pub(super) fn path(&self) -> &Path {
        &self.real
    }

    /// The file itself, which it has locked.
    pub(super) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Where the new one is made.
    pub(super) fn place(&self) -> Option<PathBuf> {
        unfinished_place(&self.real)
    }

    /// Its device and inode.
    pub(super) fn node(&self) -> (u64, u64) {
        (self.found.dev(), self.found.ino())
    }

    /// Gives the `new` file, which is empty, what is known of this one but its content. Returns
    /// whether it has that now.
    pub(super) fn describe(&self, new: &File) -> bool {
        self.try_describe(new).is_ok_and(|()| self.is_like(new))
    }

    fn try_describe(&self, new: &File) -> rustix::io::Result<()> {
        let (uid, gid) = (Uid::from_raw(self.found.uid()), Gid::from_raw(self.found.gid()));
        if !self.is_owned_as(new) {
            fchown(new, Some(uid), Some(gid))?;
        }
        // After the owner, who changes it; before the attributes, as those may have a longer list
        // of who may do what.
        fchmod(new, Mode::from_raw_mode(self.found.mode() & 0o7777))?;
        for (name, value) in attributes_of(&self.real)? {
            fsetxattr(new, &*name, &value, XattrFlags::empty())?;
        }
        Ok(())
    }

    fn is_owned_as(&self, new: &File) -> bool {
        let ids = |found: &Metadata| (found.uid(), found.gid());
        new.metadata().is_ok_and(|new| ids(&new) == ids(&self.found))
    }

    fn is_like(&self, new: &File) -> bool {
        self.is_owned_as(new) && new.metadata().is_ok_and(|new| new.mode() == self.found.mode())
    }
}

/// Whether nothing is mounted at `file` itself.
fn is_same_mount(file: &Path, folder: &Path) -> bool {
    let mount = |path: &Path| {
        let asked = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::MNT_ID).ok();
        let knows = |asked: &Statx| {
            StatxFlags::from_bits_retain(asked.stx_mask).contains(StatxFlags::MNT_ID)
        };
        asked.filter(knows).map(|asked| asked.stx_mnt_id)
    };
    // An older system does not tell: then giving the name fails.
    mount(file) == mount(folder)
}

/// The extended attributes of a file, and among them lists of who may do what.
fn attributes_of(path: &Path) -> rustix::io::Result<Vec<(CString, Vec<u8>)>> {
    let mut names = vec![0; ATTRIBUTE_BYTES_MAX];
    let len = match llistxattr(path, &mut names[..]) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut attributes = Vec::new();
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let name = CString::new(name).map_err(|_| Errno::INVAL)?;
        let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
        let len = lgetxattr(path, &*name, &mut value[..])?;
        value.truncate(len);
        attributes.push((name, value));
    }
    Ok(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_store::{CacheMode, Handles, Located, Locking, WritableFile};
    use std::fs;

    fn locked(path: &Path) -> Arc<dyn Store> {
        let mut located = Located::find(path).expect("there");
        let (cache, handles) = (CacheMode::Writeback, Handles::new(4));
        let store = WritableFile::open(&mut located, cache, Locking::On, &handles);
        Arc::new(store.expect("opened"))
    }

    /// The story: two runs replaced the same file; the second had locked what the first removed,
    /// and replaced the new one under a server.
    #[test]
    fn only_the_file_that_is_locked_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let (name, new) = (folder.path().join("name"), folder.path().join("new"));
        fs::write(&name, "old").expect("written");
        fs::write(&new, "new").expect("written");
        let store = locked(&name);
        assert!(Replaced::of(&name, &store).expect("asked").is_some());
        fs::rename(&new, &name).expect("replaced");
        let said = Replaced::of(&name, &store).err().expect("another file");
        assert_eq!(said.kind(), ErrorKind::Denied, "{said}");
    }
}

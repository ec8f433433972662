//! A file whose place a new one takes once that is complete. Until then it is there as it was, and
//! locked.
//!
//! Invariants
//! - I1 The new file has the old one's mode, owner and attributes, and no others, before anything
//!   is written to it. Until then its owner alone may open it.
//!   Where it cannot have them the old one is overwritten in place, as are an empty file, which
//!   somebody may have made for this and know by its descriptor, and one that has other names, too.

use mica_block::{Error, ErrorKind, Result, Store, StoreIdentity};
use mica_stack::unfinished_place;
use rustix::fs::{
    Access, AtFlags, CWD, Gid, Mode, Statx, StatxFlags, Uid, XattrFlags, access, fchmod, fchown,
    flistxattr, fremovexattr, fsetxattr, lgetxattr, llistxattr, statx,
};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where names are those of descriptors.
const DESCRIPTORS: [&str; 5] = ["/proc", "/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr"];
/// The attribute that says who may do what.
const ACCESS_LIST: &CStr = c"system.posix_acl_access";
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
        let attributes = attributes_of(&self.real)?;
        // Where there is a list of who may do what, the mode has its mask where others have the
        // rights of the group, who would have them until the list is there (I1).
        let has_list = attributes.iter().any(|(name, _)| **name == *ACCESS_LIST);
        let mask = if has_list { 0o070 } else { 0 };
        // As a list that it has from its folder, whose mask the mode would set.
        let is_foreign = |name: &CString| attributes.iter().all(|(old, _)| old != name);
        for name in names_in(|names| flistxattr(new, names))?.into_iter().filter(is_foreign) {
            fremovexattr(new, &*name)?;
        }
        // After the owner, who changes it; before the attributes, as that list has more.
        fchmod(new, Mode::from_raw_mode(self.found.mode() & 0o7777 & !mask))?;
        for (name, value) in &attributes {
            fsetxattr(new, &**name, value, XattrFlags::empty())?;
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
    let mut attributes = Vec::new();
    for name in names_in(|names| llistxattr(path, names))? {
        let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
        let len = lgetxattr(path, &*name, &mut value[..])?;
        value.truncate(len);
        attributes.push((name, value));
    }
    Ok(attributes)
}

/// The names of attributes that `list` puts there.
fn names_in(
    list: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<Vec<CString>> {
    let mut names = vec![0; ATTRIBUTE_BYTES_MAX];
    let len = match list(&mut names) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let names = names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names.map(|name| CString::new(name).map_err(|_| Errno::INVAL)).collect()
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

    /// The story: a folder gives what is made in it to somebody who could not read the old file.
    #[test]
    fn new_file_has_no_attributes_but_those_of_the_old_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let (name, new) = (folder.path().join("name"), folder.path().join("new"));
        fs::write(&name, "old").expect("written");
        let new = File::create_new(&new).expect("made");
        let set = |attribute, value| {
            let is_set = rustix::fs::setxattr(&name, attribute, value, XattrFlags::empty());
            is_set.is_ok()
                && fsetxattr(&new, "user.new", b"of the folder", XattrFlags::empty()).is_ok()
        };
        if !set("user.old", &b"old"[..]) {
            return;
        }
        // Of the owner, user 12345, the group, the mask and others (version 2).
        let list = |entries: &[(u16, u16, u32)]| {
            let mut list = vec![2, 0, 0, 0];
            for (tag, rights, id) in entries {
                list.extend([tag.to_le_bytes(), rights.to_le_bytes()].concat());
                list.extend(id.to_le_bytes());
            }
            list
        };
        let none = u32::MAX;
        let rights = [(1, 6, none), (2, 6, 12345), (4, 4, none), (16, 6, none), (32, 4, none)];
        let acl = "system.posix_acl_access";
        let has_acl = fsetxattr(&new, acl, &list(&rights), XattrFlags::empty()).is_ok();
        let replaced = Replaced::of(&name, &locked(&name)).expect("asked").expect("can be");
        assert!(replaced.describe(&new));
        let names = names_in(|names| flistxattr(&new, names)).expect("listed");
        let has = |name: &str| names.iter().any(|own| own.to_bytes() == name.as_bytes());
        assert!(has("user.old") && !has("user.new") && !has(acl), "{has_acl}: {names:?}");
        let mode = |file: std::io::Result<Metadata>| file.expect("there").mode();
        assert_eq!(mode(new.metadata()), mode(fs::metadata(&name)));
        // One that the old one has gives the group less than the mode looks like.
        if has_acl {
            let set = rustix::fs::setxattr(&name, acl, &list(&rights), XattrFlags::empty());
            set.expect("as above");
            drop(replaced);
            let replaced = Replaced::of(&name, &locked(&name)).expect("asked").expect("can be");
            let new = File::create_new(folder.path().join("newer")).expect("made");
            assert!(replaced.describe(&new));
            let mut found = [0; 64];
            let len = rustix::fs::fgetxattr(&new, acl, &mut found[..]).expect("it has one");
            assert_eq!(found[..len], list(&rights));
        }
    }
}

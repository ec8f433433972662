//! A new file that takes the name of another one gets its mode and its list of who may do what. A
//! process in a sandbox may not do that, and has another one do it.
//!
//! Invariants
//! - A1 Whoever asks, nothing changes that somebody has: the new file is an empty one of this
//!   process's user, has one name, and is open for writing.
//! - A2 It gets who may read, write and execute it, and nothing else.

use mica_block::{Error, ErrorKind, Result};
use rustix::fd::AsFd;
use rustix::fs::{
    FileType, Mode, OFlags, XattrFlags, fchmod, fcntl_getfl, fgetxattr, fremovexattr, fsetxattr,
    fstat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

/// The attribute that has the list.
const LIST: &str = "system.posix_acl_access";
/// Longest value of an attribute, as of Linux.
const LIST_BYTES_MAX: usize = 64 << 10;
/// Who may read, write and execute.
const RIGHTS: u32 = 0o777;

/// Gives the `new` file, which is empty, the rights of the `old` one.
///
/// # Errors
/// `Denied` if it is not such a file (A1); else what the system reports.
pub fn make_alike(old: impl AsFd, new: impl AsFd) -> Result<()> {
    let given = || -> rustix::io::Result<bool> {
        let (like, found) = (fstat(&old)?, fstat(&new)?);
        let is_file = |mode| FileType::from_raw_mode(mode) == FileType::RegularFile;
        let is_own = is_file(like.st_mode)
            && is_file(found.st_mode)
            && (found.st_size, found.st_nlink) == (0, 1)
            && found.st_uid == geteuid().as_raw()
            && fcntl_getfl(&new)?.intersects(OFlags::WRONLY | OFlags::RDWR);
        if is_own {
            // Before the list, which has some of it, too.
            fchmod(&new, Mode::from_raw_mode(like.st_mode & RIGHTS))?;
            copy_list(&old, &new)?;
        }
        Ok(is_own)
    };
    match given() {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::new(ErrorKind::Denied, "it is not a new file of this user")),
        Err(error) => Err(Error::from_io("giving a new file its rights", error.into())),
    }
}

fn copy_list(old: impl AsFd, new: impl AsFd) -> rustix::io::Result<()> {
    let mut list = vec![0; LIST_BYTES_MAX];
    match fgetxattr(old, LIST, &mut list[..]) {
        Ok(len) => fsetxattr(new, LIST, &list[..len], XattrFlags::empty()),
        // It may have one from its folder.
        Err(Errno::NODATA | Errno::OPNOTSUPP) => match fremovexattr(new, LIST) {
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
            removed => removed,
        },
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File, OpenOptions, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    #[test]
    fn only_a_new_file_of_this_user_gets_the_rights_of_another_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode();
        for name in ["old", "full", "linked"] {
            fs::write(at(name), if name == "linked" { "" } else { "bytes" }).expect("written");
            fs::set_permissions(at(name), Permissions::from_mode(0o600)).expect("set");
        }
        fs::set_permissions(at("old"), Permissions::from_mode(0o4664)).expect("set");
        fs::hard_link(at("linked"), at("again")).expect("linked");
        let old = File::open(at("old")).expect("open");
        let writable = |name| OpenOptions::new().write(true).open(at(name)).expect("open");
        for name in ["full", "linked"] {
            let said = make_alike(&old, writable(name)).expect_err("it is no new file");
            assert_eq!(said.kind(), ErrorKind::Denied, "{name}: {said}");
            assert_eq!(mode(&at(name)) & 0o7777, 0o600, "{name}");
        }
        let new = File::create_new(at("new")).expect("made");
        let read_only = File::open(at("new")).expect("open");
        make_alike(&old, &read_only).expect_err("it cannot be written by who asks");
        make_alike(&old, &new).expect("it is one");
        assert_eq!(mode(&at("new")) & 0o7777, 0o664, "and no bit that gives it another user");
    }
}

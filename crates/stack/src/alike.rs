//! A new file that takes the name of another one gets its mode and its list of who may do what. A
//! process in a sandbox may not do that, and has another one do it.
//!
//! Invariants
//! - A1 Whoever asks, nothing changes that somebody has: the new file is an empty one of this
//!   process's user, has one name, and is open for writing. The old one is open for writing,
//!   too: so a process that asks for the rights of a file that everybody may read gets none.
//! - A2 It gets its group, and who may read, write and execute it, and nothing else.
//! - A3 At no step may anybody open it who may not open the old one. If its group cannot be kept,
//!   the group that it has gets what others have.

use mica_block::{Error, ErrorKind, Result};
use rustix::fd::AsFd;
use rustix::fs::{
    FileType, Gid, Mode, OFlags, Stat, XattrFlags, fchmod, fchown, fcntl_getfl, fgetxattr,
    fremovexattr, fsetxattr, fstat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

/// The attribute that has the list.
const LIST: &str = "system.posix_acl_access";
/// Longest value of an attribute, as of Linux.
const LIST_BYTES_MAX: usize = 64 << 10;
/// Who may read, write and execute.
const RIGHTS: u32 = 0o777;

/// Gives the `new` file, which is empty, and which its owner alone may open, the rights of the
/// `old` one.
///
/// # Errors
/// `Denied` if it is not such a file (A1), or if its list cannot be kept as its group cannot be;
/// else what the system reports.
pub fn make_alike(old: impl AsFd, new: impl AsFd) -> Result<()> {
    let given = || -> rustix::io::Result<Given> {
        let (like, found) = (fstat(&old)?, fstat(&new)?);
        let is_file = |mode| FileType::from_raw_mode(mode) == FileType::RegularFile;
        let access = |flags: OFlags| flags & OFlags::RWMODE;
        let is_own = is_file(like.st_mode)
            && is_file(found.st_mode)
            && (found.st_size, found.st_nlink) == (0, 1)
            && found.st_uid == geteuid().as_raw()
            && access(fcntl_getfl(&old)?) == OFlags::RDWR
            && access(fcntl_getfl(&new)?) != OFlags::RDONLY;
        if is_own { give(old, new, (&like, &found)) } else { Ok(Given::Nothing) }
    };
    let denied = |what: &str| Err(Error::new(ErrorKind::Denied, what));
    match given() {
        Ok(Given::Rights) => Ok(()),
        Ok(Given::RightsWithoutList) => {
            denied("its group cannot be kept, and so its access control list is not either")
        }
        Ok(Given::Nothing) => denied("it is not a new file of this user"),
        Err(error) => Err(Error::from_io("giving a new file its rights", error.into())),
    }
}

enum Given {
    Rights,
    RightsWithoutList,
    Nothing,
}

fn give(
    old: impl AsFd,
    new: impl AsFd,
    (like, found): (&Stat, &Stat),
) -> rustix::io::Result<Given> {
    let group = Gid::from_raw(like.st_gid);
    let keeps_group = like.st_gid == found.st_gid || fchown(&new, None, Some(group)).is_ok();
    let list = list_of(old)?;
    if let Some(list) = list.as_deref().filter(|_| keeps_group) {
        // It has the rights of the mode, too, and sets all of them at once (A3).
        fsetxattr(new, LIST, list, XattrFlags::empty())?;
        return Ok(Given::Rights);
    }
    match fremovexattr(&new, LIST) {
        // It may have one from its folder.
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
        Err(error) => return Err(error),
    }
    fchmod(new, Mode::from_raw_mode(rights(like.st_mode, keeps_group)))?;
    Ok(if list.is_some() { Given::RightsWithoutList } else { Given::Rights })
}

/// What `mode` allows to whom, where another group gets what others have.
fn rights(mode: u32, keeps_group: bool) -> u32 {
    match keeps_group {
        true => mode & RIGHTS,
        false => mode & 0o707 | (mode & 0o7) << 3,
    }
}

fn list_of(file: impl AsFd) -> rustix::io::Result<Option<Vec<u8>>> {
    let mut list = vec![0; LIST_BYTES_MAX];
    match fgetxattr(file, LIST, &mut list[..]) {
        Ok(len) => {
            list.truncate(len);
            Ok(Some(list))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
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
        let writable = |name| OpenOptions::new().read(true).write(true).open(at(name));
        let writable = |name| writable(name).expect("open");
        let old = writable("old");
        for name in ["full", "linked"] {
            let said = make_alike(&old, writable(name)).expect_err("it is no new file");
            assert_eq!(said.kind(), ErrorKind::Denied, "{name}: {said}");
            assert_eq!(mode(&at(name)) & 0o7777, 0o600, "{name}");
        }
        let new = File::create_new(at("new")).expect("made");
        let read_only = File::open(at("new")).expect("open");
        make_alike(&old, &read_only).expect_err("it cannot be written by who asks");
        let to_read = File::open(at("old")).expect("open");
        make_alike(&to_read, &new).expect_err("nor can the one whose rights it would get");
        make_alike(&old, &new).expect("it is one");
        assert_eq!(mode(&at("new")) & 0o7777, 0o664, "and no bit that gives it another user");
    }

    /// The story: the disk of one group could be written by all of another one after a backup.
    #[test]
    fn another_group_gets_what_others_have() {
        for (mode, kept, other) in
            [(0o660, 0o660, 0o600), (0o4664, 0o664, 0o644), (0o640, 0o640, 0o600)]
        {
            assert_eq!((rights(mode, true), rights(mode, false)), (kept, other));
        }
    }
}

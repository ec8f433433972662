//! Whether the system still has in memory what was written and not made durable.
//!
//! It has lost that if the file system was mounted anew since, or the device came anew, which may
//! happen without a new start of the machine. sysfs has a folder for each mounted file system of
//! most kinds, and for each device; it goes and comes with them, and the kernel gives no two of its
//! folders one inode number. Asking for a number opens nothing, so that it works in a sandbox.

use crate::kind::FileKind;
use rustix::fs::{Stat, major, minor, readlink, stat};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Where sysfs is.
const SYS: &str = "/sys";
/// File systems that have a folder of the name of their device.
const FILE_SYSTEMS: [&str; 4] = ["ext4", "xfs", "f2fs", "nilfs2"];
/// What comes anew with what a loop device or a network block device is connected to; of a
/// partition, that of its disk.
const CONNECTIONS: [&str; 4] = ["loop", "pid", "../loop", "../pid"];

/// A number for the time since the file system or device of the file of this `stat` came; `None`
/// where nothing tells.
pub(crate) fn of(kind: FileKind, stat: &Stat) -> Option<u64> {
    match kind {
        FileKind::Regular => of_file_system(Path::new(SYS), stat.st_dev),
        FileKind::BlockDevice => of_device(Path::new(SYS), stat.st_rdev),
    }
}

fn of_file_system(sys: &Path, device: u64) -> Option<u64> {
    let number = format!("{}:{}", major(device), minor(device));
    let Ok(link) = readlink(sys.join("dev/block").join(&number), Vec::new()) else {
        // Of one without a device, what writes its pages back.
        return inode(&sys.join("class/bdi").join(number));
    };
    let name = Path::new(OsStr::from_bytes(link.as_bytes())).file_name()?;
    FILE_SYSTEMS.iter().find_map(|kind| inode(&sys.join("fs").join(kind).join(name)))
}

fn of_device(sys: &Path, device: u64) -> Option<u64> {
    let folder = sys.join("dev/block").join(format!("{}:{}", major(device), minor(device)));
    // FNV-1a: the same in every version of this program.
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let mix = |sum: u64, part: u64| (sum ^ part).wrapping_mul(PRIME);
    let connections = CONNECTIONS.iter().map(|name| inode(&folder.join(name)).unwrap_or(0));
    Some(connections.fold(mix(BASIS, inode(&folder)?), mix))
}

fn inode(path: &Path) -> Option<u64> {
    stat(path).ok().map(|found| found.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir, create_dir_all};
    use std::os::unix::fs::symlink;

    /// A folder like sysfs, with a disk 8:0 of the name `sda`.
    fn sysfs() -> tempfile::TempDir {
        let sys = tempfile::tempdir().expect("a folder");
        for folder in ["dev/block", "block/sda", "fs/ext4/sda", "class/bdi/0:77"] {
            create_dir_all(sys.path().join(folder)).expect("made");
        }
        symlink("../../block/sda", sys.path().join("dev/block/8:0")).expect("a link");
        sys
    }

    /// Removes a folder and makes it again, as another inode.
    fn renew(folder: &Path) {
        let other = folder.with_file_name("other");
        create_dir(&other).expect("made");
        std::fs::remove_dir(folder).expect("it is empty");
        std::fs::rename(other, folder).expect("renamed");
    }

    #[test]
    fn file_system_that_was_mounted_anew_is_another() {
        let sys = sysfs();
        let (disk, none) = (rustix::fs::makedev(8, 0), rustix::fs::makedev(0, 77));
        for (device, folder) in [(disk, "fs/ext4/sda"), (none, "class/bdi/0:77")] {
            let before = of_file_system(sys.path(), device).expect("told");
            assert_eq!(of_file_system(sys.path(), device), Some(before));
            renew(&sys.path().join(folder));
            let after = of_file_system(sys.path(), device).expect("told");
            assert_ne!(after, before, "{folder}");
        }
        assert_eq!(of_file_system(sys.path(), rustix::fs::makedev(0, 78)), None);
    }

    #[test]
    fn device_that_came_anew_or_was_connected_anew_is_another() {
        let sys = sysfs();
        let life = || of_device(sys.path(), rustix::fs::makedev(8, 0));
        let mut seen = vec![life().expect("told")];
        assert_eq!(life(), Some(seen[0]));
        renew(&sys.path().join("block/sda"));
        seen.push(life().expect("told"));
        create_dir(sys.path().join("block/sda/loop")).expect("made");
        seen.push(life().expect("told"));
        renew(&sys.path().join("block/sda/loop"));
        seen.push(life().expect("told"));
        let mut distinct = seen.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), seen.len(), "{seen:?}");
        assert_eq!(of_device(sys.path(), rustix::fs::makedev(8, 1)), None);
    }
}

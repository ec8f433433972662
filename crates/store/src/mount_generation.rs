//! Whether the system still holds in memory what was written and not made durable.
//!
//! It has lost that if the file system was remounted since, or the device was reattached, which may
//! happen without a reboot. sysfs has a directory for each mounted file system of most kinds, and
//! for each device; it appears and disappears with them, and the kernel never reuses the inode
//! number of such a directory. Asking for a number opens nothing, so that it works in a sandbox.

use crate::kind::FileKind;
use rustix::fs::{Stat, major, minor, readlink, stat};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The mount point of sysfs.
const SYS: &str = "/sys";
/// File systems with a directory named after their device.
const FILE_SYSTEMS: [&str; 4] = ["ext4", "xfs", "f2fs", "nilfs2"];
/// Entries that are recreated when a loop device or a network block device is reconnected; for a
/// partition, those of its disk.
const CONNECTIONS: [&str; 4] = ["loop", "pid", "../loop", "../pid"];

/// A number that identifies the current mount of the file system, or attachment of the device, of
/// the file of this `stat`; `None` if nothing identifies it.
pub(crate) fn of(kind: FileKind, stat: &Stat) -> Option<u64> {
    match kind {
        FileKind::Regular => of_file_system(Path::new(SYS), stat.st_dev),
        FileKind::BlockDevice => of_device(Path::new(SYS), stat.st_rdev),
    }
}

fn of_file_system(sys: &Path, device: u64) -> Option<u64> {
    let number = format!("{}:{}", major(device), minor(device));
    let Ok(link) = readlink(sys.join("dev/block").join(&number), Vec::new()) else {
        // For one without a device, its writeback.
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

    /// A directory like sysfs, with a disk 8:0 named `sda`.
    fn sysfs() -> tempfile::TempDir {
        let sys = tempfile::tempdir().expect("a folder");
        for folder in ["dev/block", "block/sda", "fs/ext4/sda", "class/bdi/0:77"] {
            create_dir_all(sys.path().join(folder)).expect("made");
        }
        symlink("../../block/sda", sys.path().join("dev/block/8:0")).expect("a link");
        sys
    }

    /// Removes a directory and recreates it, as another inode.
    fn renew(folder: &Path) {
        let other = folder.with_file_name("other");
        create_dir(&other).expect("made");
        std::fs::remove_dir(folder).expect("it is empty");
        std::fs::rename(other, folder).expect("renamed");
    }

    #[test]
    fn remounted_file_system_is_a_different_one() {
        let sys = sysfs();
        let (disk, none) = (rustix::fs::makedev(8, 0), rustix::fs::makedev(0, 77));
        for (device, folder) in [(disk, "fs/ext4/sda"), (none, "class/bdi/0:77")] {
            let before = of_file_system(sys.path(), device).expect("a number");
            assert_eq!(of_file_system(sys.path(), device), Some(before));
            renew(&sys.path().join(folder));
            let after = of_file_system(sys.path(), device).expect("a number");
            assert_ne!(after, before, "{folder}");
        }
        assert_eq!(of_file_system(sys.path(), rustix::fs::makedev(0, 78)), None);
    }

    #[test]
    fn reattached_or_reconnected_device_is_a_different_one() {
        let sys = sysfs();
        let generation = || of_device(sys.path(), rustix::fs::makedev(8, 0));
        let mut seen = vec![generation().expect("a number")];
        assert_eq!(generation(), Some(seen[0]));
        renew(&sys.path().join("block/sda"));
        seen.push(generation().expect("a number"));
        create_dir(sys.path().join("block/sda/loop")).expect("made");
        seen.push(generation().expect("a number"));
        renew(&sys.path().join("block/sda/loop"));
        seen.push(generation().expect("a number"));
        let mut distinct = seen.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), seen.len(), "{seen:?}");
        assert_eq!(of_device(sys.path(), rustix::fs::makedev(8, 1)), None);
    }
}

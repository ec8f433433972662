//! What `stat` reports for the file, and which attributes may be changed: as in QEMU's FUSE export.

use fuser::{Errno, FileAttr, FileType, INodeNo};
use mica_units::SECTOR_BYTES;
use parking_lot::Mutex;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Whether users other than the one who started the server may use the file (FUSE's `allow_other`).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum AllowOther {
    /// They may, as far as the file's mode lets them.
    On,
    /// They may not.
    Off,
    /// They may if the system permits that.
    #[default]
    Auto,
}

/// Whether the file may be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    Read,
    ReadWrite,
}

/// Whether the mount lets others in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Others {
    Allowed,
    Denied,
}

/// Attributes of the file that are not the disk's.
pub(super) struct Attributes {
    access: Access,
    others: Others,
    owner: Mutex<Owner>,
    /// Time of the last change, in nanoseconds since 1970.
    changed: AtomicU64,
    /// The file whose allocation is reported as the disk's. It is held open because its name may
    /// lead to the disk itself by now, and that `stat` would never be answered.
    image: Option<File>,
}

#[derive(Clone, Copy)]
struct Owner {
    mode: u16,
    uid: u32,
    gid: u32,
}

const READ_BITS: u16 = 0o400;
const WRITE_BITS: u16 = 0o200;
const ANY_WRITE_BITS: u16 = 0o222;
const OTHERS_BITS: u16 = 0o077;
/// The I/O size suggested to programs.
const BLOCK_BYTES: u32 = 4096;

/// Requested changes of attributes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Change {
    pub(super) mode: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
}

impl Attributes {
    pub(super) fn new(access: Access, others: Others, image: Option<File>) -> Self {
        let write = if access == Access::ReadWrite { WRITE_BITS } else { 0 };
        let owner = Owner {
            mode: READ_BITS | write,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
        };
        let attributes =
            Self { access, others, owner: Mutex::new(owner), changed: AtomicU64::new(0), image };
        attributes.touch();
        attributes
    }

    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// Records that the disk was changed just now.
    pub(super) fn touch(&self) {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let nanoseconds = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        self.changed.store(nanoseconds, Ordering::Relaxed);
    }

    /// The answer to `stat`.
    pub(super) fn stat(&self, disk_len: u64) -> FileAttr {
        let owner = *self.owner.lock();
        let changed = Duration::from_nanos(self.changed.load(Ordering::Relaxed));
        let changed = SystemTime::UNIX_EPOCH + changed;
        FileAttr {
            ino: INodeNo::ROOT,
            size: disk_len,
            blocks: self.allocated_sectors().unwrap_or_else(|| disk_len.div_ceil(SECTOR_BYTES)),
            atime: changed,
            mtime: changed,
            ctime: changed,
            crtime: changed,
            kind: FileType::RegularFile,
            perm: owner.mode,
            nlink: 1,
            uid: owner.uid,
            gid: owner.gid,
            rdev: 0,
            blksize: BLOCK_BYTES,
            flags: 0,
        }
    }

    fn allocated_sectors(&self) -> Option<u64> {
        Some(self.image.as_ref()?.metadata().ok()?.blocks())
    }

    /// Applies all of `change`, or nothing.
    pub(super) fn set(&self, change: Change) -> Result<(), Errno> {
        let mode = change.mode.map(|mode| u16::try_from(mode & 0o7777).expect("12 bits"));
        if let Some(mode) = mode {
            // Bits that would have no effect are refused.
            if self.others == Others::Denied && mode & OTHERS_BITS != 0 {
                return Err(Errno::EPERM);
            }
            if self.access == Access::Read && mode & ANY_WRITE_BITS != 0 {
                return Err(Errno::EROFS);
            }
        }
        if self.others == Others::Denied && (change.uid.is_some() || change.gid.is_some()) {
            return Err(Errno::EOPNOTSUPP);
        }
        let mut owner = self.owner.lock();
        owner.mode = mode.unwrap_or(owner.mode);
        owner.uid = change.uid.unwrap_or(owner.uid);
        owner.gid = change.gid.unwrap_or(owner.gid);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(mode: u32) -> Change {
        Change { mode: Some(mode), ..Change::default() }
    }

    #[test]
    fn mode_follows_what_the_disk_takes_and_what_the_mount_allows() {
        let writable = Attributes::new(Access::ReadWrite, Others::Allowed, None);
        assert_eq!(writable.stat(512).perm, 0o600);
        assert_eq!(writable.set(mode(0o100_664)), Ok(()));
        assert_eq!(writable.stat(512).perm, 0o664);

        let readable = Attributes::new(Access::Read, Others::Denied, None);
        assert_eq!(readable.stat(512).perm, 0o400);
        assert_eq!(readable.set(mode(0o600)), Err(Errno::EROFS));
        assert_eq!(readable.set(mode(0o440)), Err(Errno::EPERM));
        let owner = Change { uid: Some(1), ..Change::default() };
        assert_eq!(readable.set(owner), Err(Errno::EOPNOTSUPP));
        assert_eq!(readable.stat(512).perm, 0o400);
    }

    #[test]
    fn change_that_is_refused_changes_nothing() {
        let attributes = Attributes::new(Access::Read, Others::Allowed, None);
        let before = attributes.stat(0);
        let both = Change { mode: Some(0o666), uid: Some(12), gid: Some(34) };
        assert_eq!(attributes.set(both), Err(Errno::EROFS));
        assert_eq!(attributes.stat(0), before);
    }

    #[test]
    fn blocks_are_those_of_the_named_file_or_the_whole_length() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("sparse");
        let image = Some(file.reopen().expect("opened"));
        assert_eq!(Attributes::new(Access::Read, Others::Denied, image).stat(1 << 20).blocks, 0);
        assert_eq!(Attributes::new(Access::Read, Others::Denied, None).stat(1 << 20).blocks, 2048);
    }
}

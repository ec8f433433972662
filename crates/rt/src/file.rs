//! Open files of the host.

use crate::file_system::FileSystem;
use rustix::fs::{FileType, FsWord};
use rustix::io::{ReadWriteFlags, preadv2};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What `fstatfs` calls ext2, ext3 and ext4.
const EXT_MAGIC: FsWord = 0xef53;
const FUSE_MAGIC: FsWord = 0x6573_5546;

/// An open regular file or block device. Operations hold it by `Arc`, so that its descriptor stays
/// open until the last of them completed.
#[derive(Debug)]
pub struct File {
    /// Dropped before the descriptor ([`FileSystem`] I1).
    _system: Option<Arc<FileSystem>>,
    fd: OwnedFd,
    access: Access,
    /// Whether it is a regular file, not a device.
    is_regular: bool,
    is_on_ext: bool,
    read_way: Way,
    write_way: Way,
    /// Whether locks were taken.
    pub(crate) has_locks: AtomicBool,
    /// See [`File::write_in_place`].
    in_place: Option<Arc<AtomicBool>>,
}

/// How the file was opened, which decides whether a read may be tried without a thread, and where a
/// short operation resumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Through the page cache.
    Buffered,
    /// With O_DIRECT: buffers, offsets and lengths must be aligned.
    Direct,
}

/// How an operation on a file is carried out, where there is a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// The ring.
    Ring,
    /// The ring, if that need not wait; otherwise, or if that fails, a thread.
    Try,
    /// A thread of ours.
    Thread,
}

impl File {
    /// Wraps an open descriptor.
    pub fn new(fd: OwnedFd, access: Access) -> Self {
        use rustix::fs::{fstat, fstatfs};
        let is_regular = fstat(&fd)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        let magic = fstatfs(&fd).map_or(0, |system| system.f_type);
        Self::of(fd, access, is_regular, (magic, None))
    }

    /// Wraps an open descriptor of a file of type `kind` on `system`: as [`Self::new`], without
    /// asking for what the caller knows.
    pub fn on(fd: OwnedFd, access: Access, kind: FileType, system: Arc<FileSystem>) -> Self {
        let magic = system.magic();
        Self::of(fd, access, kind == FileType::RegularFile, (magic, Some(system)))
    }

    fn of(
        fd: OwnedFd,
        access: Access,
        is_regular: bool,
        (magic, _system): (FsWord, Option<Arc<FileSystem>>),
    ) -> Self {
        // Of a device this is where its node is.
        let is_on_ext = is_regular && magic == EXT_MAGIC;
        let write_way = match magic {
            _ if !is_regular => Way::Ring,
            libc::XFS_SUPER_MAGIC | libc::BTRFS_SUPER_MAGIC => Way::Try,
            _ if is_on_ext && access == Access::Direct => Way::Try,
            _ => Way::Thread,
        };
        // It asks its server for attributes even if the caller must not wait.
        let read_way = if magic == FUSE_MAGIC { Way::Thread } else { Way::Ring };
        let has_locks = AtomicBool::new(false);
        let in_place = None;
        Self {
            _system,
            fd,
            access,
            is_regular,
            is_on_ext,
            read_way,
            write_way,
            has_locks,
            in_place,
        }
    }

    /// How it was opened.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether it is on ext2, ext3 or ext4.
    pub fn is_on_ext(&self) -> bool {
        self.is_on_ext
    }

    /// Reads the byte at `offset`, if that takes no waiting, and returns how many there are. If it
    /// is not in the page cache, the system begins to read it.
    pub(crate) fn probe(&self, offset: u64) -> rustix::io::Result<usize> {
        let mut byte = [0];
        preadv2(self, &mut [IoSliceMut::new(&mut byte)], offset, ReadWriteFlags::NOWAIT)
    }

    /// Lets the executor make small writes to the page cache by itself, whenever `is_allowed` says
    /// so, where each would otherwise be given to a thread, and syncs while it has nothing else to
    /// do. If one of them blocks, perhaps for as long as the file system is frozen, everything on
    /// the executor blocks with it. Of many at once that take long it leaves some to a thread.
    #[must_use]
    pub fn write_in_place(mut self, is_allowed: Arc<AtomicBool>) -> Self {
        self.in_place = Some(is_allowed);
        self
    }

    /// Whether the executor currently makes small writes by itself.
    #[inline]
    pub fn is_written_in_place(&self) -> bool {
        self.in_place.as_ref().is_some_and(|is_allowed| is_allowed.load(Ordering::Relaxed))
    }

    pub(crate) fn is_regular(&self) -> bool {
        self.is_regular
    }

    pub(crate) fn read_way(&self) -> Way {
        self.read_way
    }

    /// How writes are carried out: those that are tried first are to regular files of a file system
    /// that can tell beforehand whether the write would wait (`RWF_NOWAIT`).
    pub(crate) fn write_way(&self) -> Way {
        self.write_way
    }

    /// How the space of the file is changed.
    pub(crate) fn space_way(&self) -> Way {
        if self.is_regular { Way::Thread } else { Way::Ring }
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        self.unlock();
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

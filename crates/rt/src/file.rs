//! Files of the host that are open.

use rustix::fs::fstatfs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

/// What `fstatfs` calls ext2, ext3 and ext4.
const EXT_MAGIC: i64 = 0xef53;

/// An open regular file or block device. Operations hold it by `Arc`, so that its descriptor stays
/// open until the last of them completed.
#[derive(Debug)]
pub struct File {
    fd: OwnedFd,
    access: Access,
    /// Whether locks were taken.
    pub(crate) has_locks: AtomicBool,
    /// See [`File::lacks_nowait_writes`].
    lacks_nowait_writes: OnceLock<bool>,
}

/// How the file was opened, which decides whether a read may be tried without a thread, and where a
/// short operation goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Through the page cache.
    Buffered,
    /// With O_DIRECT: buffers, offsets and lengths must be aligned.
    Direct,
}

impl File {
    /// Wraps an open descriptor.
    pub fn new(fd: OwnedFd, access: Access) -> Self {
        Self { fd, access, has_locks: AtomicBool::new(false), lacks_nowait_writes: OnceLock::new() }
    }

    /// How it was opened.
    pub fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Whether its file system (ext2 to ext4) cannot tell beforehand that a write would wait, so
    /// that the ring hands each to a thread of the kernel.
    pub(crate) fn lacks_nowait_writes(&self) -> bool {
        let is_ext = || fstatfs(&self.fd).is_ok_and(|system| system.f_type == EXT_MAGIC);
        *self.lacks_nowait_writes.get_or_init(is_ext)
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

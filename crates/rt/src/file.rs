//! Files of the host, as operations of the runtime.

use crate::buf::Buf;
use crate::op::{Op, OpKind, RawOp};
use rustix::fs::{FallocateFlags, fstatfs};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

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

/// Reads at `offset` until `buf` is full or the file ends; the count is less than the buffer's
/// length only at the end of the file.
///
/// # Panics
/// Outside an executor.
pub fn read_at(file: &Arc<File>, buf: Buf, offset: u64) -> Op {
    Op::start(OpKind::Read { file: Arc::clone(file), buf, offset, done: 0 })
}

/// Writes `buf` at `offset` until all of it is written; the count is less than the buffer's length
/// only where the file took no more and gave no error.
///
/// The write goes on when its future is dropped, but one that the system cut short is then not
/// continued.
///
/// # Panics
/// Outside an executor.
pub fn write_at(file: &Arc<File>, buf: Buf, offset: u64) -> Op {
    Op::start(OpKind::Write { file: Arc::clone(file), buf, offset, done: 0 })
}

/// Makes durable what was written to `file` before, and what is needed to read it back, its length
/// among it (fdatasync).
///
/// # Panics
/// Outside an executor.
pub fn sync_data(file: &Arc<File>) -> impl Future<Output = io::Result<()>> + use<> {
    RawOp::start(OpKind::SyncData { file: Arc::clone(file) }).outcome()
}

/// Changes the space of `len` bytes at `offset`, as `mode` says.
///
/// # Panics
/// Outside an executor.
pub fn fallocate(
    file: &Arc<File>,
    mode: FallocateFlags,
    offset: u64,
    len: u64,
) -> impl Future<Output = io::Result<()>> + use<> {
    RawOp::start(OpKind::Fallocate { file: Arc::clone(file), mode, offset, len }).outcome()
}

/// Turns a negative errno, as io_uring gives it, into a result.
pub(crate) fn result_of(code: i32) -> io::Result<usize> {
    usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code))
}

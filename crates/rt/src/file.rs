//! Files of the host, as operations of the runtime.

use crate::buf::Buf;
use crate::op::{Op, OpKind};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

/// An open regular file or block device. Operations hold it by `Arc`, so that its descriptor stays
/// open until the last of them completed.
#[derive(Debug)]
pub struct File {
    fd: OwnedFd,
    access: Access,
}

/// How the file was opened, which decides whether a read may be tried without a thread.
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
        Self { fd, access }
    }

    /// How it was opened.
    pub fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
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

/// Turns a negative errno, as io_uring gives it, into a result.
pub(crate) fn result_of(code: i32) -> io::Result<usize> {
    usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code))
}

//! Sockets of the system.

use crate::send::{SEND_BUFS_MAX, SendParts};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// A connected or listening socket, non-blocking.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
}

impl Socket {
    /// Wraps a socket and makes it non-blocking.
    ///
    /// # Errors
    /// If the descriptor refuses that.
    pub fn new(fd: impl Into<OwnedFd>) -> io::Result<Self> {
        let fd = fd.into();
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self { fd })
    }

    /// Sends what the socket has room for now.
    pub(crate) fn try_send(&self, parts: &SendParts) -> Result<usize, Errno> {
        let slices: Vec<IoSlice<'_>> =
            parts.bufs.iter().take(SEND_BUFS_MAX).map(|buf| IoSlice::new(buf)).collect();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut control = SendAncillaryBuffer::default();
        rustix::net::sendmsg(&self.fd, &slices, &mut control, flags)
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

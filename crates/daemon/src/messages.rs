//! Messages with descriptors over unix sockets that preserve message boundaries.

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Maximum number of descriptors in one message.
pub(crate) const FDS_MAX: usize = 32;

/// A socket that preserves message boundaries.
pub(crate) fn socket() -> rustix::io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)
}

/// Sends one message with descriptors.
///
/// # Errors
/// Those of the system call.
pub(crate) fn send_with_fds(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    Ok(send(socket, bytes, fds, SendFlags::NOSIGNAL)?)
}

/// As [`send_with_fds`]; fails with `AGAIN` rather than wait until the other end takes messages.
///
/// # Errors
/// Those of the system call.
pub(crate) fn send_with_fds_at_once(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    send(socket, bytes, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

fn send(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let from = [IoSlice::new(bytes)];
    loop {
        match rustix::net::sendmsg(&socket, &from, &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Receives one message of at most `bytes_max`, with its descriptors. An empty one is end of file.
///
/// # Errors
/// Those of the system call.
pub(crate) fn receive_with_fds(
    socket: impl AsFd,
    bytes_max: usize,
) -> rustix::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; bytes_max];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut into = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(&socket, &mut into, &mut control, flags) {
            Err(Errno::INTR) => {}
            result => break result?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    bytes.truncate(received.bytes);
    Ok((bytes, fds))
}

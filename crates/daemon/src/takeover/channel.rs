//! Messages with descriptors between two processes of ours.

use mica_block::{Error, ErrorKind, Result};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Descriptors that go with one message.
pub(super) const FDS_MAX: usize = 32;
/// Bytes of a message.
const MESSAGE_BYTES_MAX: usize = 32 << 10;

/// What is said, in this order.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(super) enum Message {
    /// Old: these are my listening sockets, each with a descriptor.
    Sockets { sockets: Vec<Told>, more: bool },
    /// New: all that can be done before is done.
    Ready,
    /// Old: nothing is served any more, and every image is closed.
    Closed,
    /// Old: that cannot be, for this reason. I go on.
    Failed { why: String },
    /// New: all is served. You may end.
    Serving,
    /// Old: you took too long. I go on.
    GivenUp,
}

/// A socket that is handed over.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct Told {
    pub(super) name: String,
    /// Whether a unit of systemd keeps it, and its file.
    pub(super) is_of_unit: bool,
}

/// One end of it.
#[derive(Debug)]
pub(super) struct Channel(OwnedFd);

impl Channel {
    pub(super) fn new(fd: OwnedFd) -> Result<Self> {
        let channel = Self(fd);
        channel.check_peer()?;
        Ok(channel)
    }

    pub(super) fn connect(path: &Path) -> Result<Self> {
        let connected = || {
            let socket = socket()?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket)
        };
        let socket = connected().map_err(|error: rustix::io::Errno| {
            Error::from_io(format!("connecting to {}", path.display()), error.into())
        })?;
        Self::new(socket)
    }

    /// Sockets are given to nobody but those who could take them anyway.
    fn check_peer(&self) -> Result<()> {
        let peer = sockopt::socket_peercred(&self.0).map_err(broken)?;
        let me = rustix::process::geteuid();
        if peer.uid == me || peer.uid.is_root() {
            return Ok(());
        }
        let user = peer.uid.as_raw();
        Err(Error::new(ErrorKind::Denied, format!("the other process is of another user, {user}")))
    }

    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let bytes = serde_json::to_vec(message).map_err(|error| broken(io::Error::from(error)))?;
        if bytes.len() > MESSAGE_BYTES_MAX || fds.len() > FDS_MAX {
            return Err(Error::new(ErrorKind::Invalid, "a message of a takeover is too long"));
        }
        send_with_fds(&self.0, &bytes, fds).map_err(broken)
    }

    /// The next message, if it comes within `limit`.
    pub(super) fn receive(&self, limit: Duration) -> Result<(Message, Vec<OwnedFd>)> {
        sockopt::set_socket_timeout(&self.0, sockopt::Timeout::Recv, Some(limit))
            .map_err(broken)?;
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut into = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.0, &mut into, &mut control, flags) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    let context = format!("the other process said nothing for {limit:?}");
                    return Err(Error::new(ErrorKind::Io, context));
                }
                result => break result.map_err(broken)?,
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                fds.extend(came);
            }
        }
        if received.bytes == 0 {
            return Err(Error::new(ErrorKind::Io, "the other process is gone"));
        }
        let message = serde_json::from_slice(&bytes[..received.bytes]);
        let message = message.map_err(|error| broken(io::Error::from(error)))?;
        Ok((message, fds))
    }

    /// Lets nothing through any more. What the other end said before is still received.
    pub(super) fn close(&self) {
        // It may be gone already.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

/// A socket that keeps messages apart.
pub(super) fn socket() -> rustix::io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)
}

/// Sends one message with descriptors.
///
/// # Errors
/// What the system says.
pub(crate) fn send_with_fds(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let from = [IoSlice::new(bytes)];
    loop {
        match rustix::net::sendmsg(&socket, &from, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn broken(error: impl Into<io::Error>) -> Error {
    Error::from_io("talking to the other process of a takeover", error.into())
}

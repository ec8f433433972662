//! The back channel of a session: how the device notifies its front end of a changed configuration
//! (QEMU's specification, "Back-end message types").
//!
//! Invariants
//! - I1 Nobody waits here for a front end longer than [`REPLY_WAIT`], and the session's own thread
//!   not at all: a front end answers after it has asked that thread for the configuration.
//! - I2 One notice is under way at a time, so that an answer is the answer to it.

use mica_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an answer may take.
const REPLY_WAIT: Duration = Duration::from_millis(if cfg!(test) { 300 } else { 5000 });

/// VHOST_USER_SET_BACKEND_REQ_FD, of the front end.
const SET_BACKEND_REQ_FD: u32 = 21;
/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, of the back end.
const CONFIG_CHANGE: u32 = 2;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const HEADER_BYTES: usize = 12;
/// A header and a number.
const REPLY_BYTES: usize = HEADER_BYTES + 8;

/// The outcome of a notice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// No interested front end is connected: the next one asks by itself.
    Nobody,
    /// It was sent. This front end does not answer.
    Sent,
    /// The front end has taken it.
    Taken,
}

/// The channel, while there is one.
#[derive(Default)]
pub(super) struct BackChannel {
    /// One notice at a time (I2). Taken before `open`.
    notifying: Mutex<()>,
    open: Mutex<Option<Open>>,
}

#[derive(Clone)]
struct Open {
    socket: Arc<OwnedFd>,
    gives_replies: bool,
}

fn message(code: u32, flags: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&code.to_ne_bytes());
    bytes[4..8].copy_from_slice(&(VERSION | flags).to_ne_bytes());
    bytes
}

impl BackChannel {
    /// From now on there is one.
    pub(super) fn open(&self, socket: OwnedFd, gives_replies: bool) {
        let open = Open { socket: Arc::new(socket), gives_replies };
        *self.open.lock() = Some(open);
    }

    /// The session is over.
    pub(super) fn close(&self) {
        *self.open.lock() = None;
    }

    /// Notifies the front end that the configuration has changed.
    ///
    /// # Errors
    /// `Io` if it cannot be notified, refuses, or does not answer in time.
    pub(super) fn notify(&self) -> Result<Notice> {
        let _notifying = self.notifying.lock();
        let open = self.open.lock().clone();
        let Some(Open { socket, gives_replies }) = open else { return Ok(Notice::Nobody) };
        let failed = |error: Errno| Error::from_io("notifying the front end", error.into());
        if gives_replies {
            discard_late_replies(&socket);
        }
        let flags = if gives_replies { NEED_REPLY } else { 0 };
        let bytes = message(CONFIG_CHANGE, flags);
        // A channel that is full is one that nobody reads.
        let sent = rustix::net::send(&*socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        match sent.map_err(failed)? {
            HEADER_BYTES => {}
            _ => return Err(failed(Errno::MSGSIZE)),
        }
        match gives_replies {
            false => Ok(Notice::Sent),
            true => wait_reply(&socket).map(|()| Notice::Taken),
        }
    }
}

/// Discards answers that arrived after nobody waited for them any more.
fn discard_late_replies(socket: &OwnedFd) {
    let mut bytes = [0; 64 * REPLY_BYTES];
    // As many as the channel may hold, and no more: a front end may send without end.
    for _ in 0..64 {
        match rustix::net::recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((count, _)) if count == bytes.len() => {}
            _ => return,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the thread of a caller, which has no executor")]
fn now() -> Instant {
    Instant::now()
}

fn wait_reply(socket: &OwnedFd) -> Result<()> {
    let refuse = |what: &str| Err(Error::new(ErrorKind::Io, what));
    let start = now();
    let mut bytes = [0; REPLY_BYTES];
    let mut done = 0;
    while done < bytes.len() {
        let left = REPLY_WAIT.saturating_sub(start.elapsed());
        let timeout = Timespec::try_from(left).expect("a few seconds");
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => return refuse("the front end did not answer in time"),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                return Err(Error::from_io("waiting for the front end's answer", error.into()));
            }
        }
        match rustix::net::recv(socket, &mut bytes[done..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return refuse("the front end closed the back channel"),
            Ok((count, _)) => done += count,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                return Err(Error::from_io("reading the front end's answer", error.into()));
            }
        }
    }
    let expected = message(CONFIG_CHANGE, REPLY);
    let is_reply = bytes[..4] == expected[..4] && bytes[4] & 4 != 0 && bytes[8..12] == [8, 0, 0, 0];
    match is_reply {
        true if bytes[HEADER_BYTES..] == [0; 8] => Ok(()),
        true => refuse("the front end refused the notification"),
        false => refuse("the front end answered something else"),
    }
}

/// Waits for the next message on `stream`; the descriptor that comes with it, if it is the one that
/// opens the back channel. The message stays: `vhost` checks it, and keeps the descriptor that it
/// takes to itself.
pub(super) fn peek(stream: &UnixStream) -> Option<OwnedFd> {
    let mut header = [0; HEADER_BYTES];
    let (count, _) = rustix::net::recv(stream, &mut header, RecvFlags::PEEK).ok()?;
    if count < 4 || header[..4] != SET_BACKEND_REQ_FD.to_ne_bytes() {
        return None;
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut header)];
    let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    rustix::net::recvmsg(stream.as_fd(), &mut parts, &mut control, flags).ok()?;
    let mut fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.into_iter().next(),
        _ => None,
    });
    fds.next()
}

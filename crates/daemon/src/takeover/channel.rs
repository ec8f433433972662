//! Messages with descriptors between two processes of ours.

use crate::messages::{FDS_MAX, receive_with_fds, send_with_fds};
use mica_block::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, sockopt};
use rustix::process::{Pid, PidfdFlags, Uid, pidfd_open};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// Bytes of a message.
const MESSAGE_BYTES_MAX: usize = 32 << 10;

/// What is said, in this order.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(super) enum Message {
    /// Old: these are my listening sockets, each with a descriptor.
    Sockets {
        sockets: Vec<Passed>,
        more: bool,
        /// How often systemd wants to hear from the main process, if it does. Older ones do not
        /// say it.
        #[serde(default)]
        watchdog_us: Option<u64>,
    },
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
    /// Old: I am told to stop, and end. All of it is yours.
    Ending,
}

/// A socket that is handed over.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct Passed {
    pub(super) name: String,
    /// Whether a unit of systemd keeps it, and its file.
    pub(super) is_of_unit: bool,
}

/// Why nothing was heard.
#[derive(Debug)]
pub(super) enum Silence {
    /// The other end is closed.
    Gone,
    /// Nothing came in time.
    Late(Duration),
    /// This process does not want to wait any more.
    CalledOff,
    /// The channel, or what came, is broken.
    Broken(Error),
}

impl From<Silence> for Error {
    fn from(silence: Silence) -> Self {
        match silence {
            Silence::Gone => Self::new(ErrorKind::Io, "the other process is gone"),
            Silence::Late(limit) => {
                let context = format!("the other process said nothing for {limit:?}");
                Self::new(ErrorKind::Io, context)
            }
            Silence::CalledOff => Self::new(ErrorKind::Denied, "told to stop meanwhile"),
            Silence::Broken(error) => error,
        }
    }
}

type Heard = std::result::Result<(Message, Vec<OwnedFd>), Silence>;

/// How often who waits looks whether it still has to.
const WAIT_TURN: Duration = Duration::from_millis(50);
/// For a process that has closed all it had open to be over.
const DEATH_LIMIT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// One end of it.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    /// The process at the other end, where the system shows it.
    process: Option<(Pid, OwnedFd)>,
}

impl Channel {
    pub(super) fn new(socket: OwnedFd) -> Result<Self> {
        let peer = sockopt::socket_peercred(&socket).map_err(broken)?;
        check_user(peer.uid)?;
        let process = pidfd_open(peer.pid, PidfdFlags::empty()).ok();
        Ok(Self { socket, process: process.map(|process| (peer.pid, process)) })
    }

    /// The process at the other end.
    pub(super) fn process(&self) -> Option<Pid> {
        self.process.as_ref().map(|(pid, _)| *pid)
    }

    /// Whether the process at the other end, which is [`Silence::Gone`], is over. It may still
    /// live, and have only closed its end.
    pub(super) fn has_died(&self) -> bool {
        let Some((_, process)) = &self.process else { return false };
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        poll(&mut fds, Some(&DEATH_LIMIT)).is_ok_and(|count| count > 0)
    }

    pub(super) fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let bytes = serde_json::to_vec(message).map_err(|error| broken(io::Error::from(error)))?;
        if bytes.len() > MESSAGE_BYTES_MAX || fds.len() > FDS_MAX {
            return Err(Error::new(ErrorKind::Invalid, "a message of a takeover is too long"));
        }
        send_with_fds(&self.socket, &bytes, fds).map_err(broken)
    }

    /// The next message, if it comes within `limit` and before the wait `is_called_off`.
    pub(super) fn receive(
        &self,
        limit: Duration,
        is_called_off: &mut dyn FnMut() -> bool,
    ) -> Heard {
        let mut waited = Duration::ZERO;
        loop {
            let turn = Timespec::try_from(WAIT_TURN).ok();
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut fds, turn.as_ref()) {
                Ok(0) => waited += WAIT_TURN,
                Ok(_) => return self.take(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Silence::Broken(broken(error))),
            }
            if is_called_off() {
                return Err(Silence::CalledOff);
            }
            if waited >= limit {
                return Err(Silence::Late(limit));
            }
        }
    }

    /// Takes what has come.
    fn take(&self) -> Heard {
        let (bytes, fds) = match receive_with_fds(&self.socket, MESSAGE_BYTES_MAX) {
            // It was closed with something of ours in it.
            Err(rustix::io::Errno::CONNRESET) => return Err(Silence::Gone),
            received => received.map_err(|error| Silence::Broken(broken(error)))?,
        };
        if bytes.is_empty() {
            return Err(Silence::Gone);
        }
        let message = serde_json::from_slice(&bytes);
        let message = message.map_err(|error| Silence::Broken(broken(io::Error::from(error))))?;
        Ok((message, fds))
    }

    /// Lets nothing through any more. What the other end said before is still received.
    pub(super) fn close(&self) {
        // It may be gone already.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

/// Sockets are given to nobody but those who could take them anyway.
fn check_user(user: Uid) -> Result<()> {
    if user == rustix::process::geteuid() || user.is_root() {
        return Ok(());
    }
    let user = user.as_raw();
    Err(Error::new(ErrorKind::Denied, format!("the other process is of another user, {user}")))
}

fn broken(error: impl Into<io::Error>) -> Error {
    Error::from_io("talking to the other process of a takeover", error.into())
}

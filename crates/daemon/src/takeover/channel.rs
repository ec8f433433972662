//! The channel between the two processes of a takeover.

use super::ANSWER_LIMIT;
use crate::config::HandedOver;
use crate::messages::{FDS_MAX, receive_with_fds, send_with_fds_at_once};
use mica_block::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, sockopt};
use rustix::process::{Pid, PidfdFlags, Uid, pidfd_open};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// Bytes of a message: a disk's table may have 64 KiB, and becomes longer in JSON. The system
/// passes on a little more at once.
const MESSAGE_BYTES_MAX: usize = 160 << 10;

/// The messages, in order.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(super) enum Message {
    /// Old: my listening sockets, each with a descriptor.
    Sockets {
        sockets: Vec<Passed>,
        more: bool,
        /// How often systemd expects a watchdog message, if it does. Older processes do not send
        /// it.
        #[serde(default)]
        watchdog_us: Option<u64>,
        /// How many messages of disks follow the last one of sockets. Older processes do not send
        /// it.
        #[serde(default)]
        disks: usize,
    },
    /// Old: a disk that the configuration alone does not tell.
    Disk(HandedOver),
    /// New: everything that can be done beforehand is done.
    Ready,
    /// Old: nothing is served any longer, and every image is closed.
    Closed,
    /// Old: I cannot hand over, for this reason, and keep serving.
    Failed { why: String },
    /// New: everything is ready to be served, and is from now on. You may end.
    Serving,
    /// Old: you took too long. I keep serving.
    GivenUp,
    /// Old: I was told to stop, and end. Everything is yours.
    Ending,
}

/// A socket that is handed over.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct Passed {
    pub(super) name: String,
    /// Whether a systemd unit owns it and its file.
    pub(super) is_of_unit: bool,
}

/// Why no message was received.
#[derive(Debug)]
pub(super) enum Silence {
    /// The other end is closed.
    Gone,
    /// Nothing arrived in time.
    Late(Duration),
    /// The wait was cancelled.
    Cancelled,
    /// The channel or a message is broken.
    Broken(Error),
}

impl From<Silence> for Error {
    fn from(silence: Silence) -> Self {
        match silence {
            Silence::Gone => Self::new(ErrorKind::Io, "the other process is gone"),
            Silence::Late(limit) => {
                let context = format!("the other process sent nothing for {limit:?}");
                Self::new(ErrorKind::Io, context)
            }
            Silence::Cancelled => Self::new(ErrorKind::Denied, "this process was told to stop"),
            Silence::Broken(error) => error,
        }
    }
}

pub(super) type Received = std::result::Result<(Message, Vec<OwnedFd>), Silence>;

/// How often a waiting thread checks whether it was cancelled.
const WAIT_STEP: Duration = Duration::from_millis(50);
/// Limit for a process that has closed its end to exit.
const DEATH_LIMIT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// One end of it.
#[derive(Debug)]
pub(super) struct Channel {
    socket: OwnedFd,
    /// The process at the other end, if the system reveals it.
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

    /// Whether the process at the other end of a channel that is [`Silence::Gone`] has died. It may
    /// still be alive, having only closed its end.
    pub(super) fn has_died(&self) -> bool {
        let Some((_, process)) = &self.process else { return false };
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        poll(&mut fds, Some(&DEATH_LIMIT)).is_ok_and(|count| count > 0)
    }

    /// Sends a message. If the other process does not take those that are there, waits for it for
    /// as long as for an answer, or until `is_cancelled`.
    pub(super) fn send(
        &self,
        message: &Message,
        fds: &[BorrowedFd<'_>],
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let mut room = |step| {
            let mut room = [PollFd::new(&self.socket, PollFlags::OUT)];
            poll(&mut room, Timespec::try_from(step).ok().as_ref())
        };
        self.send_when(message, fds, is_cancelled, &mut room)
    }

    /// As [`Self::send`]. `room` waits for room, for as long as it is told, and returns 0 if there
    /// was none in all that time.
    fn send_when(
        &self,
        message: &Message,
        fds: &[BorrowedFd<'_>],
        is_cancelled: &mut dyn FnMut() -> bool,
        room: &mut dyn FnMut(Duration) -> rustix::io::Result<usize>,
    ) -> Result<()> {
        let bytes = serde_json::to_vec(message).map_err(|error| broken(io::Error::from(error)))?;
        if bytes.len() > MESSAGE_BYTES_MAX || fds.len() > FDS_MAX {
            return Err(Error::new(ErrorKind::Invalid, "a takeover message is too long"));
        }
        let mut waited = Duration::ZERO;
        loop {
            match send_with_fds_at_once(&self.socket, &bytes, fds) {
                Err(Errno::AGAIN) => {}
                sent => return sent.map_err(broken),
            }
            if is_cancelled() {
                return Err(Silence::Cancelled.into());
            }
            if waited >= ANSWER_LIMIT {
                let context = format!("the other process took nothing for {ANSWER_LIMIT:?}");
                return Err(Error::new(ErrorKind::Io, context));
            }
            match room(WAIT_STEP) {
                Ok(0) => waited += WAIT_STEP,
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(broken(error)),
            }
        }
    }

    /// Receives the next message, if it arrives within `limit` and before `is_cancelled`.
    pub(super) fn receive(
        &self,
        limit: Duration,
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> Received {
        let mut waited = Duration::ZERO;
        loop {
            let step = WAIT_STEP.min(limit.saturating_sub(waited));
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut fds, Timespec::try_from(step).ok().as_ref()) {
                Ok(0) => waited += step,
                Ok(_) => return self.take(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Silence::Broken(broken(error))),
            }
            if is_cancelled() {
                return Err(Silence::Cancelled);
            }
            if waited >= limit {
                return Err(Silence::Late(limit));
            }
        }
    }

    /// Receives the message that is there.
    fn take(&self) -> Received {
        let receive = || receive_with_fds(&self.socket, MESSAGE_BYTES_MAX);
        let received = match receive() {
            // It was closed with unread messages of ours. Its own come after this error.
            Err(Errno::CONNRESET) => receive(),
            received => received,
        };
        let (bytes, fds) = match received {
            Err(Errno::CONNRESET) => return Err(Silence::Gone),
            received => received.map_err(|error| Silence::Broken(broken(error)))?,
        };
        if bytes.is_empty() {
            return Err(Silence::Gone);
        }
        let message = serde_json::from_slice(&bytes);
        let message = message.map_err(|error| Silence::Broken(broken(io::Error::from(error))))?;
        Ok((message, fds))
    }

    /// Stops all further messages. Those already sent by the other end are still received.
    pub(super) fn close(&self) {
        // It may already be gone.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

/// Sockets are only handed to users who could take them anyway.
fn check_user(user: Uid) -> Result<()> {
    if user == rustix::process::geteuid() || user.is_root() {
        return Ok(());
    }
    let user = user.as_raw();
    Err(Error::new(ErrorKind::Denied, format!("the other process belongs to another user, {user}")))
}

fn broken(error: impl Into<io::Error>) -> Error {
    Error::from_io("communicating with the other process of a takeover", error.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::sync::mpsc;

    fn pair() -> (Channel, Channel) {
        let kind = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let pair = socketpair(AddressFamily::UNIX, kind.0, kind.1, None).expect("a pair");
        (Channel::new(pair.0).unwrap(), Channel::new(pair.1).unwrap())
    }

    #[test]
    fn longest_message_arrives_and_a_longer_one_is_refused() {
        let (here, there) = pair();
        let message = |len: usize| Message::Failed { why: "x".repeat(len) };
        let around = serde_json::to_vec(&message(0)).unwrap().len();
        here.send(&message(MESSAGE_BYTES_MAX - around), &[], &mut || false).expect("sent");
        let (received, _) = there.receive(Duration::from_secs(10), &mut || false).expect("there");
        let Message::Failed { why } = received else { panic!("{received:?}") };
        assert_eq!(why.len(), MESSAGE_BYTES_MAX - around);
        assert!(here.send(&message(MESSAGE_BYTES_MAX), &[], &mut || false).is_err());
    }

    /// Sends disks until it fails, and gives the reason, and for how long it waited, of which
    /// nothing passes here.
    fn fill(here: &Channel, mut is_cancelled: impl FnMut() -> bool) -> (Error, Duration) {
        let disk = Message::Disk(HandedOver { name: "x".repeat(4096), ..HandedOver::default() });
        let mut waited = Duration::ZERO;
        let mut room = |step| {
            waited += step;
            assert!(waited <= 2 * ANSWER_LIMIT, "it waits without end");
            Ok(0)
        };
        let failed = loop {
            if let Err(error) = here.send_when(&disk, &[], &mut is_cancelled, &mut room) {
                break error;
            }
        };
        (failed, waited)
    }

    #[test]
    fn process_that_takes_nothing_is_given_up_on() {
        let (here, _there) = pair();
        let (error, waited) = fill(&here, || false);
        assert!(error.to_string().contains("took nothing"), "{error}");
        assert_eq!(waited, ANSWER_LIMIT, "as long as for an answer, and no longer");
    }

    #[test]
    fn process_that_is_told_to_stop_waits_no_longer_for_one_that_takes_nothing() {
        let (here, _there) = pair();
        let (error, waited) = fill(&here, || true);
        assert!(error.to_string().contains("told to stop"), "{error}");
        assert_eq!(waited, Duration::ZERO);
    }

    #[test]
    fn messages_that_are_taken_late_all_arrive() {
        let (here, there) = pair();
        let (is_full, full) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            full.recv().expect("more is sent than there is room for");
            let mut count = 0;
            while there.receive(Duration::from_secs(10), &mut || false).is_ok() {
                count += 1;
            }
            count
        });
        let message = Message::Failed { why: "x".repeat(100_000) };
        let mut waits = || is_full.send(()).is_err();
        (0..20).for_each(|_| here.send(&message, &[], &mut waits).expect("sent"));
        drop(here);
        assert_eq!(reader.join().expect("no panic"), 20);
    }
}

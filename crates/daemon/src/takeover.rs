//! A new process takes over the sockets of the one that serves, and goes on. Guests only wait.
//!
//! ```text
//! new: is configured               ─ POST /v1/takeover, with a socket's path ─▶ old
//! old: serves on                   ─ its listening sockets ──────────────────▶ new
//! new: enters its sandbox          ─ ready ──────────────────────────────────▶ old
//! old: stops, closes its images    ─ closed ─────────────────────────────────▶ new
//! new: opens them, serves          ─ serving ────────────────────────────────▶ old
//! old: ends
//! ```
//!
//! Invariants
//! - I1 One of the two has the images open, never both: their locks say so too.
//! - I2 The listening sockets are open in one of them at any time, and their files stay: who
//!   connects meanwhile waits.
//! - I3 Until the old one hears that the new one serves, it opens the images again and goes on if
//!   the new one fails, ends, or takes longer than [`SERVE_LIMIT`].
//! - I4 Both know the same end of it: after that limit nothing that the new one says is heard, and
//!   it notices, because it cannot say it.
//! - I5 Whoever is told to stop ends soon. The old one closes its images, which ends the takeover;
//!   or it has closed them, and leaves all to the new one. The new one leaves all to the old one.
//! - I6 The old one may die at any time: the new one, which has its sockets, goes on as after any
//!   death of a server.
//!
//! What the new one does not serve any more at a socket, it closes, and removes its file.

mod channel;
mod meeting;

pub(crate) use meeting::{FOLDER as MEETING_FOLDER, SOCKET as MEETING_SOCKET};

use crate::disks::each_of;
use crate::held::{Held, Origin};
use crate::messages::FDS_MAX;
use crate::retry::{Patience, while_held};
use crate::served::Served;
use crate::shared::Shared;
use crate::systemd;
use channel::{Channel, Message, Passed, Silence};
use meeting::Meeting;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::Listener;
use sd_notify::NotifyState;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// For the old one to answer, while it serves.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// For the new one to be ready. The old one serves meanwhile.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// For the old one to answer what is in flight, and to flush.
const CLOSE_LIMIT: Duration = Duration::from_secs(120);
/// For the new one to open the images. Guests wait meanwhile.
const SERVE_LIMIT: Duration = Duration::from_secs(60);
/// For an image to be free again that the new one had open.
const REOPEN: Patience =
    Patience { limit: Duration::from_secs(600), pause: Duration::from_millis(200) };
/// For the system to let go of what a dead process had open: its rings end after it.
const DEAD_LIMIT: Duration = Duration::from_secs(10);
/// Sockets that are handed over.
const SOCKETS_MAX: usize = 4096;

/// The new process, as it takes over.
pub(crate) struct Taking {
    channel: Channel,
    /// How often the old process had to tell systemd that it lives.
    pub(crate) watch_period: Option<Duration>,
}

impl Taking {
    /// Asks the process behind the `control` socket for its sockets. It goes on serving.
    ///
    /// # Errors
    /// If there is none, or it refuses.
    pub(crate) fn begin(control: &Path) -> Result<(Self, Vec<Held>)> {
        let meeting = Meeting::arrange(control)?;
        let channel = meeting.invite(control)?;
        drop(meeting);
        let mut sockets = Vec::new();
        loop {
            let (message, fds) = channel.receive(ANSWER_LIMIT, &mut || false)?;
            let Message::Sockets { sockets: told, more, watchdog_us } = message else {
                return Err(unexpected(&message));
            };
            if told.len() != fds.len() || sockets.len() > SOCKETS_MAX {
                return Err(Error::new(ErrorKind::Invalid, "the other process's list is wrong"));
            }
            for (Passed { name, is_of_unit }, fd) in told.into_iter().zip(fds) {
                let origin = if is_of_unit { Origin::Unit } else { Origin::Takeover };
                sockets.push(Held::new(name, origin, Listener::inherited(fd)?));
            }
            if !more {
                let watch_period = watchdog_us.map(Duration::from_micros);
                return Ok((Self { channel, watch_period }, sockets));
            }
        }
    }

    /// Has the old process close its images. From now on guests wait. Gives for how long images may
    /// still be held by a process that is gone.
    ///
    /// # Errors
    /// If it cannot, or does not in time, or the wait `is_called_off`. It goes on then.
    pub(crate) fn wait_until_closed(
        &self,
        is_called_off: &mut dyn FnMut() -> bool,
    ) -> Result<Duration> {
        let told = self.channel.send(&Message::Ready, &[]);
        match self.channel.receive(CLOSE_LIMIT, is_called_off) {
            Ok((Message::Closed, _)) => Ok(Duration::ZERO),
            Ok((Message::Failed { why }, _)) => {
                let context = format!("the other process could not hand over: {why}");
                Err(Error::new(ErrorKind::Io, context))
            }
            Ok((message, _)) => Err(unexpected(&message)),
            // Its images are free, and nobody else is there for those who wait (I6).
            Err(Silence::Gone) if self.channel.has_died() => {
                tracing::warn!("the process that was to be taken over has died: this one goes on");
                Ok(DEAD_LIMIT)
            }
            Err(silence) => Err(told.err().unwrap_or(silence.into())),
        }
    }

    /// Lets the old process end.
    ///
    /// # Errors
    /// If it has given this one up: then it serves again as soon as the images are free.
    pub(crate) fn serving(&self) -> Result<()> {
        let Err(error) = self.channel.send(&Message::Serving, &[]) else { return Ok(()) };
        match self.channel.receive(ANSWER_LIMIT, &mut || false) {
            Ok((Message::GivenUp, _)) => Err(error.wrap("the other process has gone on by itself")),
            Ok((Message::Ending, _)) => Ok(()),
            // It has closed the images, and nobody but this process serves them.
            _ => {
                tracing::warn!("the process that was taken over has died meanwhile");
                Ok(())
            }
        }
    }
}

fn unexpected(message: &Message) -> Error {
    let context = format!("a takeover does not begin with {message:?} here");
    Error::new(ErrorKind::Invalid, context)
}

impl Shared {
    /// Hands over to the process that listens at `path`; returns when it was found to be one of
    /// ours, and does the rest on a thread of its own.
    ///
    /// # Errors
    /// `Denied` if it is another user's, or if another takeover is under way; else what keeps it
    /// from being reached.
    pub(crate) fn hand_over(self: &Arc<Self>, path: &Path) -> Result<()> {
        // The kernel's end of the mount would outlive this process with its descriptor, but it
        // greets (FUSE_INIT) once a mount, and the library begins no session without that.
        let disks = self.disks.all();
        if let Some(served) = disks.iter().find(|served| served.settings.fuse.is_some()) {
            let what = format!(
                "disk {:?} is served as a file: who has that open would lose it; end this server \
                 and start the other",
                served.name
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        let channel = Channel::new(self.outside.meet(path)?)?;
        let shared = Arc::clone(self);
        let (sender, begun) = mpsc::channel();
        let body = move || {
            let Ok(_one) = shared.handing_over.try_lock() else {
                let what = "another takeover is under way, or the server's end";
                return drop(sender.send(Err(Error::new(ErrorKind::Denied, what))));
            };
            if shared.is_stopping() {
                return drop(sender.send(Err(Silence::CalledOff.into())));
            }
            if sender.send(Ok(())).is_err() {
                return;
            }
            match shared.give(&channel) {
                Ok(()) => {
                    tracing::info!("another process has taken over");
                    shared.is_handed_over.store(true, Ordering::Release);
                    shared.ending.close();
                }
                Err(error) if shared.is_stopping() => {
                    tracing::warn!(%error, "not taken over: this process stops");
                }
                Err(error) => tracing::warn!(%error, "not taken over: this process serves on"),
            }
        };
        let thread = std::thread::Builder::new().name("mica-takeover".to_owned()).spawn(body);
        thread.map_err(|error| Error::from_io("starting a takeover", error))?;
        match begun.recv_timeout(ANSWER_LIMIT) {
            Ok(begun) => begun,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(Error::new(ErrorKind::Io, "a takeover does not begin"))
            }
        }
    }

    fn give(&self, channel: &Channel) -> Result<()> {
        self.send_sockets(channel)?;
        match channel.receive(READY_LIMIT, &mut || self.is_stopping()) {
            Ok((Message::Ready, _)) => {}
            Ok((message, _)) => return Err(unexpected(&message)),
            Err(silence) => {
                let error = Error::from(silence);
                // Nobody may be there to be told.
                let _ = channel.send(&Message::Failed { why: error.to_string() }, &[]);
                return Err(error);
            }
        }
        let mut suspended = Vec::new();
        let mut failure = None;
        let disks = self.disks.all();
        let outcomes = each_of(&disks, |served| served.suspend());
        for (served, outcome) in disks.into_iter().zip(outcomes) {
            match outcome {
                Ok(true) => suspended.push(served),
                // It was drained before.
                Ok(false) => {}
                // What could not be closed has lost writes that were acknowledged: to open it again
                // would hide that from who has it. It stays as it is.
                Err(error) => failure = Some(error),
            }
        }
        // Whoever stops it waits for this.
        let called_off = self.is_stopping().then(|| Silence::CalledOff.into());
        if let Some(error) = failure.or(called_off) {
            // Nobody is there to be told if this fails.
            let _ = channel.send(&Message::Failed { why: error.to_string() }, &[]);
            channel.close();
            self.resume(&suspended);
            return Err(error);
        }
        let told = channel.send(&Message::Closed, &[]);
        match told.and_then(|()| self.hear_serving(channel)) {
            Ok(()) => {
                self.leave_sockets();
                // Before this one ends.
                if let Some(heir) = channel.process() {
                    systemd::tell(&[NotifyState::MainPid(heir.as_raw_pid().unsigned_abs())]);
                }
                Ok(())
            }
            Err(error) => {
                self.resume(&suspended);
                Err(error)
            }
        }
    }

    /// Waits for the new process to serve (I4).
    fn hear_serving(&self, channel: &Channel) -> Result<()> {
        let message = match channel.receive(SERVE_LIMIT, &mut || self.is_stopping()) {
            // Its images are closed, and the other process is about to open them (I5). If that is
            // gone, so is the takeover.
            Err(Silence::CalledOff) => return channel.send(&Message::Ending, &[]),
            Err(silence) => {
                // Nobody may be there to hear it.
                let _ = channel.send(&Message::GivenUp, &[]);
                channel.close();
                // What was said before it was closed counts.
                channel.receive(ANSWER_LIMIT, &mut || false).map_err(|_| silence)
            }
            heard => heard,
        };
        match message?.0 {
            Message::Serving => Ok(()),
            message => Err(unexpected(&message)),
        }
    }

    fn send_sockets(&self, channel: &Channel) -> Result<()> {
        let mut all = Vec::new();
        let mut add = |held: &Held| {
            let told = Passed { name: held.name.clone(), is_of_unit: held.origin == Origin::Unit };
            all.push((told, held.listener.clone()));
        };
        self.places().iter().for_each(&mut add);
        self.disks.all().iter().for_each(|served| served.held().iter().for_each(&mut add));
        let watchdog_us = self.watch_period.and_then(|period| period.as_micros().try_into().ok());
        let mut rest = all.as_slice();
        loop {
            let (batch, after) = rest.split_at(rest.len().min(FDS_MAX));
            rest = after;
            let fds: Vec<_> = batch.iter().map(|(_, listener)| listener.as_fd()).collect();
            let told = |told: &Passed| Passed { name: told.name.clone(), ..*told };
            let sockets = batch.iter().map(|(socket, _)| told(socket)).collect();
            let more = !rest.is_empty();
            channel.send(&Message::Sockets { sockets, more, watchdog_us }, &fds)?;
            if !more {
                return Ok(());
            }
        }
    }

    /// Somebody else listens there now, and has systemd keep what is there to be kept.
    fn leave_sockets(&self) {
        let leave = |held: &mut Held| {
            held.listener.leave_file();
            held.is_stored = false;
        };
        self.places().iter_mut().for_each(leave);
        self.disks.all().iter().for_each(|served| served.held().iter_mut().for_each(leave));
    }

    /// Serves again what was closed for another process that failed, unless it is to stop.
    fn resume(&self, suspended: &[Arc<Served>]) {
        each_of(suspended, |served| self.resume_one(served));
    }

    fn resume_one(&self, served: &Served) {
        if self.is_stopping() {
            return;
        }
        let name = &served.name;
        // The other process may need a moment to let go of the image.
        match while_held(REOPEN, || self.is_stopping(), || served.resume()) {
            Ok(()) => tracing::warn!("disk {name:?} is served again by this process"),
            Err(error) if error.kind() == ErrorKind::Denied && self.is_stopping() => {}
            Err(error) => tracing::error!(%error, "disk {name:?} is served no more"),
        }
    }
}

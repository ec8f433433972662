//! A new process takes over the listening sockets of the one that serves, opens its images and
//! carries on. Guests only wait.
//!
//! ```text
//! new: reads its configuration     ─ POST /v1/takeover, with a socket's path ─▶ old
//! old: keeps serving               ─ its listening sockets ──────────────────▶ new
//! new: enters its sandbox          ─ ready ──────────────────────────────────▶ old
//! old: stops, closes its images    ─ closed ─────────────────────────────────▶ new
//! new: opens them                  ─ serving ────────────────────────────────▶ old
//! new: serves; old: ends
//! ```
//!
//! Invariants
//! - I1 At most one of the two has the images open; their locks ensure it as well.
//! - I2 The listening sockets are always open in at least one of the two, and their files stay:
//!   clients that connect meanwhile wait.
//! - I3 Until the old one learns that the new one serves, it reopens the images and keeps
//!   serving if the new one fails, ends, or takes longer than [`SERVE_LIMIT`].
//! - I4 Both agree on the outcome: after that limit the old one reads nothing more from the new
//!   one, which notices because it can no longer send.
//! - I5 A process that is told to stop ends soon. The old one closes its images, which ends the
//!   takeover; if it has closed them already, it leaves everything to the new one. The new one
//!   leaves everything to the old one.
//! - I6 The new one answers no client before it has told the old one: until then the old one may
//!   come back, and would not know what the new one had acknowledged and not flushed. This holds
//!   for images without a log of acknowledged writes as well.
//! - I7 The old one may die at any time: the new one, which has its sockets, carries on as after
//!   any death of a server.
//!
//! Sockets that the new process no longer serves are closed, and their files removed.

mod channel;
mod rendezvous;

pub(crate) use rendezvous::{FOLDER as RENDEZVOUS_FOLDER, SOCKET as RENDEZVOUS_SOCKET};

use crate::disks::each_of;
use crate::held::{Held, Origin};
use crate::messages::FDS_MAX;
use crate::retry::{Patience, is_passing, while_held};
use crate::served::Served;
use crate::shared::Shared;
use crate::systemd;
use channel::{Channel, Message, Passed, Received, Silence};
use mica_block::{Error, ErrorKind, Result};
use mica_serve::Listener;
use rendezvous::Rendezvous;
use sd_notify::NotifyState;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// For an answer from the old process, which still serves.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// For the new process to be ready. The old one still serves.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// For the old process to finish requests in flight, and to flush.
const CLOSE_LIMIT: Duration = Duration::from_secs(120);
/// For the new process to open the images. Guests wait meanwhile.
const SERVE_LIMIT: Duration = Duration::from_secs(60);
/// For the new process to release an image that it had opened.
const REOPEN: Patience =
    Patience { limit: Duration::from_secs(600), pause: Duration::from_millis(200) };
/// For the system to release what a dead process had open: its rings end after it does.
const DEAD_LIMIT: Duration = Duration::from_secs(10);
/// How often the new process looks at the old one while it opens images.
const OPENING_STEP: Duration = Duration::from_millis(50);
/// Most sockets that are handed over.
const SOCKETS_MAX: usize = 4096;

/// The new process's side of a takeover.
pub(crate) struct Takeover {
    channel: Channel,
    old: Old,
    /// The watchdog period that systemd gave the old process.
    pub(crate) watch_period: Option<Duration>,
}

/// What the new process knows of the old one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Old {
    /// It may come back.
    Waiting,
    /// It is ending, or dead, and leaves everything to the new one.
    Gone,
}

impl Takeover {
    /// Asks the process behind the `control` socket for its listening sockets. It keeps serving.
    ///
    /// # Errors
    /// If there is none, or it refuses.
    pub(crate) fn begin(control: &Path) -> Result<(Self, Vec<Held>)> {
        let rendezvous = Rendezvous::create(control)?;
        let channel = rendezvous.invite(control)?;
        drop(rendezvous);
        let mut sockets = Vec::new();
        loop {
            let (message, fds) = channel.receive(ANSWER_LIMIT, &mut || false)?;
            let Message::Sockets { sockets: passed, more, watchdog_us } = message else {
                return Err(unexpected(&message));
            };
            if passed.len() != fds.len() || sockets.len() > SOCKETS_MAX {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    "the other process sent a malformed list of sockets",
                ));
            }
            for (Passed { name, is_of_unit }, fd) in passed.into_iter().zip(fds) {
                let origin = if is_of_unit { Origin::Unit } else { Origin::Takeover };
                sockets.push(Held::new(name, origin, Listener::inherited(fd)?));
            }
            if !more {
                let watch_period = watchdog_us.map(Duration::from_micros);
                return Ok((Self { channel, old: Old::Waiting, watch_period }, sockets));
            }
        }
    }

    /// Tells the old process to close its images and waits for it. From now on guests wait. Returns
    /// how long images may still be held by a process that is gone.
    ///
    /// # Errors
    /// If it cannot, does not in time, or `is_cancelled`. The old process then keeps serving.
    pub(crate) fn wait_until_closed(
        &mut self,
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<Duration> {
        let sent = self.channel.send(&Message::Ready, &[]);
        match self.channel.receive(CLOSE_LIMIT, is_cancelled) {
            Ok((Message::Closed, _)) => Ok(Duration::ZERO),
            Ok((Message::Failed { why }, _)) => {
                let context = format!("the other process could not hand over: {why}");
                Err(Error::new(ErrorKind::Io, context))
            }
            Ok((message, _)) => Err(unexpected(&message)),
            // Its images are free, and no other process is left for those who wait (I7).
            Err(Silence::Gone) if self.channel.has_died() => {
                tracing::warn!("the process to take over has died: carrying on without it");
                self.old = Old::Gone;
                Ok(DEAD_LIMIT)
            }
            Err(silence) => Err(sent.err().unwrap_or(silence.into())),
        }
    }

    /// Whether the old process may come back.
    pub(crate) fn old(&self) -> Old {
        self.old
    }

    /// Opens the images, on another thread: one that hangs keeps no other from the old process for
    /// longer than that waits.
    ///
    /// # Errors
    /// As `open`; if the old process has given up on this one, or `is_cancelled`: then `open` may
    /// still run.
    pub(crate) fn while_opening<T: Send + 'static>(
        &mut self,
        open: impl FnOnce() -> Result<T> + Send + 'static,
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> Result<T> {
        let (sender, opened) = mpsc::channel();
        let opening = move || {
            // If nobody waits any more, this process ends.
            let _ = sender.send(open());
        };
        std::thread::Builder::new()
            .name("mica-open".to_owned())
            .spawn(opening)
            .map_err(|error| Error::from_io("opening images", error))?;
        loop {
            match opened.recv_timeout(OPENING_STEP) {
                Ok(opened) => return opened,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(ErrorKind::Io, "opening images failed"));
                }
                Err(RecvTimeoutError::Timeout) => self.check_old(is_cancelled)?,
            }
        }
    }

    /// Looks whether the old process has said something, while it waits.
    fn check_old(&mut self, is_cancelled: &mut dyn FnMut() -> bool) -> Result<()> {
        if is_cancelled() {
            return Err(Silence::Cancelled.into());
        }
        if self.old == Old::Gone {
            return Ok(());
        }
        match self.channel.receive(Duration::ZERO, &mut || false) {
            Err(Silence::Late(_)) => Ok(()),
            said => self.learn(said),
        }
    }

    /// Lets the old process end: this one serves from now on.
    ///
    /// # Errors
    /// If it has given up on this one: it serves again as soon as the images are free.
    pub(crate) fn serving(&mut self) -> Result<()> {
        if self.old == Old::Gone || self.channel.send(&Message::Serving, &[]).is_ok() {
            return Ok(());
        }
        let said = self.channel.receive(ANSWER_LIMIT, &mut || false);
        self.learn(said)
    }

    /// Learns from the last message of the old process, which has closed its images, whether it
    /// comes back.
    fn learn(&mut self, said: Received) -> Result<()> {
        match said {
            Ok((Message::Ending, _)) => {}
            Ok((Message::GivenUp, _)) => {
                let what = "this process took too long, and the other one has resumed serving";
                return Err(Error::new(ErrorKind::Io, what));
            }
            Ok((message, _)) => return Err(unexpected(&message)),
            // Only this process is left for those who wait (I7).
            Err(Silence::Gone) if self.channel.has_died() => {
                tracing::warn!("the process that is taken over has died");
            }
            Err(silence) => return Err(silence.into()),
        }
        self.old = Old::Gone;
        Ok(())
    }
}

fn unexpected(message: &Message) -> Error {
    let context = format!("unexpected message in a takeover: {message:?}");
    Error::new(ErrorKind::Invalid, context)
}

impl Shared {
    /// Hands over to the process that listens at `path`, which may take minutes. Calls `on_started`
    /// once that process is known to be one of ours, or with the reason why not: `Denied` if it is
    /// another user's or another takeover is in progress; otherwise whatever prevents connecting.
    pub(crate) fn hand_over(&self, path: &Path, on_started: impl FnOnce(Result<()>)) {
        // The other process takes a connection for consent, so that this comes last.
        let alone = self.check_hand_over().and_then(|()| self.hold_alone());
        let connected =
            alone.and_then(|alone| Ok((Channel::new(self.outside.connect(path)?)?, alone)));
        let (channel, _alone) = match connected {
            Ok(connected) => connected,
            Err(error) => return on_started(Err(error)),
        };
        on_started(Ok(()));
        match self.transfer(&channel) {
            Ok(()) => {
                tracing::info!("another process has taken over");
                self.is_handed_over.store(true, Ordering::Release);
                self.ending.close();
            }
            Err(error) if self.is_stopping() => {
                tracing::warn!(%error, "takeover failed: this process is stopping");
            }
            Err(error) => tracing::warn!(%error, "takeover failed: this process keeps serving"),
        }
    }

    fn check_hand_over(&self) -> Result<()> {
        // The kernel's end of the mount would survive this process along with its descriptor, but
        // the kernel sends FUSE_INIT once per mount, and the library starts no session without it.
        let disks = self.disks.all();
        if let Some(served) = disks.iter().find(|served| served.settings.fuse.is_some()) {
            let what = format!(
                "disk {:?} is served as a file, which its users would lose: stop this server and \
                 start the other",
                served.name
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        Ok(())
    }

    fn transfer(&self, channel: &Channel) -> Result<()> {
        self.send_sockets(channel)?;
        match channel.receive(READY_LIMIT, &mut || self.is_stopping()) {
            Ok((Message::Ready, _)) => {}
            Ok((message, _)) => return Err(unexpected(&message)),
            Err(silence) => {
                let error = Error::from(silence);
                // The other process may be gone.
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
                // It was drained earlier.
                Ok(false) => {}
                // A disk that could not be closed has lost acknowledged writes: reopening it would
                // hide that from its clients. It stays closed.
                Err(error) => failure = Some(error),
            }
        }
        // Somebody is waiting to stop this process.
        let cancelled = self.is_stopping().then(|| Silence::Cancelled.into());
        if let Some(error) = failure.or(cancelled) {
            // If this fails, the other process is gone.
            let _ = channel.send(&Message::Failed { why: error.to_string() }, &[]);
            channel.close();
            self.resume(&suspended);
            return Err(error);
        }
        let sent = channel.send(&Message::Closed, &[]);
        match sent.and_then(|()| self.wait_until_serving(channel)) {
            Ok(()) => {
                self.disown_sockets();
                // systemd must know before this process ends.
                if let Some(successor) = channel.process() {
                    systemd::notify(&[NotifyState::MainPid(successor.as_raw_pid().unsigned_abs())]);
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
    fn wait_until_serving(&self, channel: &Channel) -> Result<()> {
        let message = match channel.receive(SERVE_LIMIT, &mut || self.is_stopping()) {
            // The images are closed and the other process is about to open them (I5). If that one
            // is gone, the takeover has failed.
            Err(Silence::Cancelled) => return channel.send(&Message::Ending, &[]),
            Err(silence) => {
                // The other process may be gone.
                let _ = channel.send(&Message::GivenUp, &[]);
                channel.close();
                // A message that was sent before the close counts.
                channel.receive(ANSWER_LIMIT, &mut || false).map_err(|_| silence)
            }
            received => received,
        };
        match message?.0 {
            Message::Serving => Ok(()),
            message => Err(unexpected(&message)),
        }
    }

    fn send_sockets(&self, channel: &Channel) -> Result<()> {
        let mut all = Vec::new();
        let mut add = |held: &Held| {
            let passed =
                Passed { name: held.name.clone(), is_of_unit: held.origin == Origin::Unit };
            all.push((passed, held.listener.clone()));
        };
        self.control_sockets().iter().for_each(&mut add);
        self.disks.all().iter().for_each(|served| served.held().iter().for_each(&mut add));
        let watchdog_us = self.watch_period.and_then(|period| period.as_micros().try_into().ok());
        let mut rest = all.as_slice();
        loop {
            let (batch, after) = rest.split_at(rest.len().min(FDS_MAX));
            rest = after;
            let fds: Vec<_> = batch.iter().map(|(_, listener)| listener.as_fd()).collect();
            let copy = |passed: &Passed| Passed { name: passed.name.clone(), ..*passed };
            let sockets = batch.iter().map(|(socket, _)| copy(socket)).collect();
            let more = !rest.is_empty();
            channel.send(&Message::Sockets { sockets, more, watchdog_us }, &fds)?;
            if !more {
                return Ok(());
            }
        }
    }

    /// Another process listens on these sockets now, and stores them with systemd.
    fn disown_sockets(&self) {
        let disown = |held: &mut Held| {
            held.listener.leave_file();
            held.is_stored = false;
        };
        self.control_sockets().iter_mut().for_each(disown);
        self.disks.all().iter().for_each(|served| served.held().iter_mut().for_each(disown));
    }

    /// Resumes the disks that were suspended for another process that failed, unless this one is
    /// stopping.
    fn resume(&self, suspended: &[Arc<Served>]) {
        let mut waiting = suspended.to_vec();
        // A disk that has to wait keeps no thread meanwhile, which another may need.
        let all_once = || {
            let resume = |served: &Served| (!self.is_stopping()).then(|| served.resume());
            let outcomes = each_of(&waiting, resume);
            let (mut rest, mut last) = (Vec::new(), Ok(()));
            for (served, outcome) in waiting.iter().zip(outcomes) {
                match outcome {
                    None => {}
                    Some(Err(error)) if is_passing(&error) => {
                        rest.push(Arc::clone(served));
                        last = Err(error);
                    }
                    Some(outcome) => self.resumed(served, outcome),
                }
            }
            waiting = rest;
            last
        };
        // The other process may need a moment to release the images.
        if let Err(error) = while_held(REOPEN, || self.is_stopping(), all_once) {
            waiting.iter().for_each(|served| self.resumed(served, Err(error.clone())));
        }
    }

    fn resumed(&self, served: &Served, outcome: Result<()>) {
        let name = &served.name;
        match outcome {
            Ok(()) => tracing::warn!("disk {name:?} is served again by this process"),
            // Its image is closed, and its sockets are about to be.
            Err(error) if is_passing(&error) && self.is_stopping() => {}
            Err(error) => {
                served.give_up();
                tracing::error!(%error, "disk {name:?} is no longer served");
            }
        }
    }
}

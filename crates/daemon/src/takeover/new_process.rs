//! The new process's side: what it takes, and when it may serve.

use super::channel::{Channel, Message, Passed, Received, Silence};
use super::rendezvous::Rendezvous;
use super::{ANSWER_LIMIT, unexpected};
use crate::config::HandedOver;
use crate::held::{Held, Origin};
use mica_block::{Error, ErrorKind, Result};
use mica_serve::Listener;
use std::path::Path;
use std::time::Duration;

/// Limit for the old process to finish requests in flight, and to flush.
const CLOSE_LIMIT: Duration = Duration::from_secs(120);
/// Limit for the system to release what a dead process had open: its rings end after it does.
const DEAD_LIMIT: Duration = Duration::from_secs(10);
/// Most sockets that are handed over, and disks that are told of.
const SOCKETS_MAX: usize = 65536;
const DISKS_MAX: usize = 65536;

/// The new process's side of a takeover.
pub(crate) struct Takeover {
    channel: Channel,
    old: Old,
    /// The watchdog period that systemd gave the old process.
    pub(crate) watch_period: Option<Duration>,
}

/// What the old process has said when a takeover has begun.
pub(crate) struct Begun {
    pub(crate) takeover: Takeover,
    /// Its listening sockets.
    pub(crate) sockets: Vec<Held>,
    /// Its disks that are not served as the configuration says.
    pub(crate) disks: Vec<HandedOver>,
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
    pub(crate) fn begin(control: &Path) -> Result<Begun> {
        let malformed = |what: &str| {
            let what = format!("the other process sent a malformed list of {what}");
            Error::new(ErrorKind::Invalid, what)
        };
        let rendezvous = Rendezvous::create(control)?;
        let channel = rendezvous.invite(control)?;
        drop(rendezvous);
        let mut all = Vec::new();
        let (watch_period, count) = loop {
            let (message, fds) = channel.receive(ANSWER_LIMIT, &mut || false)?;
            let Message::Sockets { sockets, more, watchdog_us, disks } = message else {
                return Err(unexpected(&message));
            };
            if sockets.len() != fds.len() || all.len() > SOCKETS_MAX {
                return Err(malformed("sockets"));
            }
            for (Passed { name, is_of_unit }, fd) in sockets.into_iter().zip(fds) {
                let origin = if is_of_unit { Origin::Unit } else { Origin::Takeover };
                all.push(Held::new(name, origin, Listener::inherited(fd)?));
            }
            if !more {
                break (watchdog_us.map(Duration::from_micros), disks);
            }
        };
        if count > DISKS_MAX {
            return Err(malformed("disks"));
        }
        let mut disks = Vec::new();
        for _ in 0..count {
            match channel.receive(ANSWER_LIMIT, &mut || false)?.0 {
                Message::Disk(disk) => disks.push(disk),
                message => return Err(unexpected(&message)),
            }
        }
        let takeover = Self { channel, old: Old::Waiting, watch_period };
        Ok(Begun { takeover, sockets: all, disks })
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
        let sent = self.channel.send(&Message::Ready, &[], is_cancelled);
        match self.channel.receive(CLOSE_LIMIT, is_cancelled) {
            Ok((Message::Closed, _)) => Ok(Duration::ZERO),
            Ok((Message::Failed { why }, _)) => {
                let context = format!("the other process could not hand over: {why}");
                Err(Error::new(ErrorKind::Io, context))
            }
            Ok((message, _)) => Err(unexpected(&message)),
            // Its images are free, and no other process is left for those who wait (I7).
            Err(Silence::Gone) if self.channel.has_died() => {
                tracing::warn!("the process to take over from has died: continuing without it");
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

    /// Looks whether the old process has said something, while it waits for images to be opened.
    ///
    /// # Errors
    /// If it has given up on this one, or `is_cancelled`.
    pub(crate) fn check_old(&mut self, is_cancelled: &mut dyn FnMut() -> bool) -> Result<()> {
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
        let say = || self.channel.send(&Message::Serving, &[], &mut || false);
        if self.old == Old::Gone || say().is_ok() {
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

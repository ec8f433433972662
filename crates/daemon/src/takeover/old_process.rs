//! The old process's side: what it hands over, and how it comes back.

use super::channel::{Channel, Message, Passed, Silence};
use super::{ANSWER_LIMIT, unexpected};
use crate::config::{HandedOver, LeftClosed};
use crate::disks::each_of;
use crate::held::{Held, Origin};
use crate::messages::FDS_MAX;
use crate::overlay::Overlay;
use crate::retry::{Patience, is_passing, while_held};
use crate::served::{Served, Source};
use crate::shared::Shared;
use crate::systemd;
use mica_block::{Error, ErrorKind, Result};
use sd_notify::NotifyState;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Limit for the new process to be ready. The old one still serves.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// Limit for the new process to open the images. Guests wait meanwhile.
const SERVE_LIMIT: Duration = Duration::from_secs(60);
/// How long to retry while the new process releases an image that it had opened.
const REOPEN: Patience =
    Patience { limit: Duration::from_secs(600), pause: Duration::from_millis(200) };

impl Shared {
    /// Hands over to the process that listens at `path`, which may take minutes. Calls `on_started`
    /// once that process is known to be one of ours, or with the reason why not: `Denied` if it is
    /// another user's or another takeover is in progress; otherwise whatever prevents connecting.
    pub(crate) fn hand_over(&self, path: &Path, on_started: impl FnOnce(Result<()>)) {
        // Whether it may be handed over stays so only while nothing else can be done.
        let alone = self.hold_alone().and_then(|alone| self.check_hand_over().map(|()| alone));
        // The other process takes a connection for consent, so that this comes last.
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
        // Also one that is drained: the other process would get its settings only.
        let has_written =
            |served: &&Arc<Served>| served.settings.overlay.as_ref().is_some_and(Overlay::is_used);
        if let Some(served) = disks.iter().find(has_written) {
            let what = format!(
                "disk {:?} is ephemeral, and its clients would lose what they wrote: stop this \
                 server and start the other",
                served.name
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        if let Some((served, backup)) =
            disks.iter().find_map(|served| Some((served, served.backup()?)))
        {
            let what = format!(
                "disk {:?} has the backup {:?} under way: end it first",
                served.name, backup.state
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        let is_file = |served: &&Arc<Served>| served.settings.fuse.is_some() && served.is_open();
        if let Some(served) = disks.iter().find(is_file) {
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
                let _ = self.say(channel, &Message::Failed { why: error.to_string() }, &[]);
                return Err(error);
            }
        }
        // A client that is let in from now on would find some disks and miss others.
        self.resources.addresses.hold_back();
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
            let _ = self.say(channel, &Message::Failed { why: error.to_string() }, &[]);
            channel.close();
            self.resume(&suspended);
            return Err(error);
        }
        let sent = self.say(channel, &Message::Closed, &[]);
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
            Err(Silence::Cancelled) => return self.say(channel, &Message::Ending, &[]),
            Err(silence) => {
                // The other process may be gone.
                let _ = self.say(channel, &Message::GivenUp, &[]);
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
        self.disks
            .all()
            .iter()
            .for_each(|served| served.doors().device().iter().for_each(&mut add));
        // Once each, however many disks share it.
        self.resources.addresses.for_each(|held| add(held));
        let watchdog_us = self.watch_period.and_then(|period| period.as_micros().try_into().ok());
        let disks = self.disks_to_tell()?;
        let mut rest = all.as_slice();
        loop {
            let (batch, after) = rest.split_at(rest.len().min(FDS_MAX));
            rest = after;
            let fds: Vec<_> = batch.iter().map(|(_, listener)| listener.as_fd()).collect();
            let copy = |passed: &Passed| Passed { name: passed.name.clone(), ..*passed };
            let sockets = batch.iter().map(|(socket, _)| copy(socket)).collect();
            let more = !rest.is_empty();
            let disks = disks.len();
            self.say(channel, &Message::Sockets { sockets, more, watchdog_us, disks }, &fds)?;
            if !more {
                break;
            }
        }
        disks.into_iter().try_for_each(|disk| self.say(channel, &Message::Disk(disk), &[]))
    }

    /// Sends a message. A process that is told to stop waits for nobody to take it (I5).
    fn say(&self, channel: &Channel, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        channel.send(message, fds, &mut || self.is_stopping())
    }

    /// The disks that are not served as the configuration says, those that are served at an address
    /// that they share, and those beside a drained one of the same image, so that they are not
    /// taken for that one under another name.
    fn disks_to_tell(&self) -> Result<Vec<HandedOver>> {
        let mut all = Vec::new();
        let disks = self.disks.all();
        let image = |served: &Arc<Served>| served.config().image;
        let left: BTreeSet<_> =
            disks.iter().filter(|served| served.is_drained()).map(image).collect();
        for served in disks {
            let is_closed = served.is_drained();
            let is_added = served.source() == Source::Command;
            if is_closed || is_added {
                let table = is_added.then(|| served.config().to_table()).transpose()?;
                let (name, is_served) = (served.name.clone(), served.is_open());
                let LeftClosed { loss, shown } = served.left_closed();
                // If it is no text, the disk is known by its name only.
                let image = served.config().image.to_str().map(str::to_owned);
                let image = image.filter(|_| is_closed);
                all.push(HandedOver { name, table, is_closed, loss, is_served, image, shown });
                continue;
            }
            let (name, is_served) = (served.name.clone(), served.is_open());
            // The socket alone does not tell.
            if is_served && served.doors().are_shared() || left.contains(&image(&served)) {
                all.push(HandedOver { name, is_served, ..HandedOver::default() });
            }
        }
        let removed = self.removed();
        let gone = removed.iter().filter(|name| self.disks.named(name).is_none());
        let handed = |name: &String| HandedOver {
            name: name.clone(),
            is_closed: true,
            ..HandedOver::default()
        };
        all.extend(gone.map(handed));
        Ok(all)
    }

    /// Another process listens on these sockets now, and stores them with systemd.
    fn disown_sockets(&self) {
        let disown = |held: &mut Held| {
            held.listener.leave_file();
            held.is_stored = false;
        };
        self.control_sockets().iter_mut().for_each(disown);
        self.disks
            .all()
            .iter()
            .for_each(|served| served.doors().device().iter_mut().for_each(disown));
        self.resources.addresses.for_each(disown);
    }

    /// Resumes the disks that were suspended for another process that failed, unless this one is
    /// stopping.
    fn resume(&self, suspended: &[Arc<Served>]) {
        // Those who ask for a disk that is not back yet wait for it.
        self.resources.addresses.let_in();
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
                served.give_up(error.clone());
                tracing::error!(%error, "disk {name:?} is no longer served");
            }
        }
    }
}

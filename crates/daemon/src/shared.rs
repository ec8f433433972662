//! State that the parts of the process share: its disks, its control sockets, and whether it is
//! stopping or handed over.

use crate::addresses::Listening;
use crate::config::Config;
use crate::disks::{Disks, each_of, open_each};
use crate::held::{Held, Origin};
use crate::helper::Outside;
use crate::listed::Listed;
use crate::own_process::OwnProcess;
use crate::sandbox::Granted;
use crate::served::{Served, Source};
use crate::servers::Resources;
use crate::settings::ProcessSettings;
use crate::sockets::{ControlSockets, Sockets};
use crate::systemd;
use mica_block::{Error, ErrorKind, Haste, Result};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use sd_notify::NotifyState;
use signal_hook::iterator::Handle;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// How long a question waits for a takeover that has closed what it is about.
const TAKEOVER_PATIENCE: Duration = Duration::from_secs(10);

/// When disks are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begin {
    /// Each as soon as it is open.
    AtOnce,
    /// All of them at [`Shared::start`].
    Later,
}

/// What the process kept for itself when it entered the sandbox.
pub(crate) struct Surroundings {
    pub(crate) outside: Outside,
    pub(crate) granted: Option<Granted>,
    pub(crate) own_process: OwnProcess,
}

/// A disk that is about to be opened.
struct Opening {
    served: Arc<Served>,
    /// How messages name it.
    place: String,
    /// Whether the process ends if it cannot be served.
    is_required: bool,
}

/// What the parts of the process see of it.
pub(crate) struct Shared {
    pub(crate) disks: Disks,
    pub(crate) resources: Resources,
    /// Closing it ends the process, as a signal does.
    pub(crate) ending: Handle,
    /// Whether it ends with its last client.
    pub(crate) exits_after_last: bool,
    /// Does what the sandbox forbids.
    pub(crate) outside: Outside,
    /// What the sandbox allows, if there is one.
    pub(crate) granted: Option<Granted>,
    /// Held alone while everything is handed over to another process. What is done with single
    /// disks shares it, and so does the end of all.
    life: RwLock<()>,
    /// Whether it has been asked to stop.
    is_stopping: AtomicBool,
    /// The configuration file, and what else it said.
    pub(crate) config_file: Option<PathBuf>,
    pub(crate) process: ProcessSettings,
    /// Disks of the configuration that were removed by command.
    pub(crate) removed: Mutex<BTreeSet<String>>,
    /// The disks that the configuration file lists by now.
    pub(crate) listed: Mutex<Listed>,
    /// Held while the configuration is read again.
    pub(crate) reloading: Mutex<()>,
    /// Held by the one signal that has it read again, and whether another one came since it began.
    pub(crate) hang_ups: Mutex<()>,
    pub(crate) is_hung_up: AtomicBool,
    /// The first disk that was removed without all that was written to it.
    pub(crate) lost: Mutex<Option<Error>>,
    /// Disks that went since memory was last given back.
    pub(crate) gone: AtomicUsize,
    pub(crate) own_process: OwnProcess,
    /// Whether another process now serves all of it.
    pub(crate) is_handed_over: AtomicBool,
    /// How often systemd expects a watchdog message, if it does.
    pub(crate) watch_period: Option<Duration>,
    /// The sockets of the control thread.
    control_sockets: Mutex<ControlSockets>,
}

impl Shared {
    pub(crate) fn new(
        config: &Config,
        ending: Handle,
        watch_period: Option<Duration>,
        surroundings: Surroundings,
        resources: Resources,
    ) -> Self {
        let Surroundings { outside, granted, own_process } = surroundings;
        Self {
            disks: Disks::default(),
            resources,
            ending,
            exits_after_last: config.process.exit_after_last,
            outside,
            granted,
            own_process,
            life: RwLock::default(),
            is_stopping: AtomicBool::new(false),
            config_file: config.file.clone(),
            process: config.process_in_file.clone(),
            removed: Mutex::default(),
            listed: Mutex::default(),
            reloading: Mutex::default(),
            hang_ups: Mutex::default(),
            is_hung_up: AtomicBool::new(false),
            lost: Mutex::default(),
            gone: AtomicUsize::new(0),
            is_handed_over: AtomicBool::new(false),
            watch_period,
            control_sockets: Mutex::default(),
        }
    }

    /// Opens the disks of `config`, to be served at `inherited` sockets and at new ones; returns
    /// the inherited sockets that are left over. Waits up to `patience` for an image that another
    /// process holds.
    ///
    /// # Errors
    /// If a disk that has to be served cannot be, or none can.
    pub(crate) fn open(
        &self,
        mut config: Config,
        mut inherited: Sockets,
        patience: Duration,
        begin: Begin,
    ) -> Result<Sockets> {
        let is_alone = config.disks.len() == 1;
        let mut disks = Vec::new();
        let is_from_file = config.named.is_some();
        let places: Vec<_> = (0..config.disks.len()).map(|index| config.place(index)).collect();
        for (disk, place) in std::mem::take(&mut config.disks).into_iter().zip(places) {
            let name = disk.name.clone();
            let served = Served::new(disk, &mut inherited, &self.resources);
            let served = Arc::new(served.map_err(|error| error.wrap(place.clone()))?);
            if config.added.contains(&name) {
                served.set_source(Source::Command);
            }
            self.disks.add(Arc::clone(&served))?;
            match config.drained.remove(&name) {
                Some(left) => {
                    tracing::warn!("disk {name:?} stays closed, as the other process left it");
                    served.leave_closed(left);
                }
                None => disks.push(Opening { served, place, is_required: false }),
            }
        }
        let tells_served = !config.served.is_empty();
        for Opening { served, is_required, .. } in &mut disks {
            // The other process served it, and can go on.
            let was_served =
                config.served.contains(&served.name) || served.doors().has_inherited(tells_served);
            let is_handed_over = begin == Begin::Later && was_served;
            *is_required = is_alone || config.process.strict || is_handed_over;
        }
        // Who has connected to a disk may turn to the control socket next. It listens from here on,
        // and answers when the disks are open.
        let ProcessSettings { control, metrics, metrics_public, .. } = &config.process;
        *self.control_sockets() =
            ControlSockets::take(control.as_deref(), *metrics, *metrics_public, &mut inherited)?;
        let mut failures = Vec::new();
        for (Opening { served, place, is_required }, opened) in
            disks.iter().zip(self.open_all(&disks, patience, begin))
        {
            // What was not tried is no reason: that is the end of the process, or another disk.
            let Some(Err(error)) = opened else { continue };
            let error = self.explained(served, error);
            match is_required {
                true if is_alone && !is_from_file => return Err(error),
                true => return Err(error.wrap(place.clone())),
                false => {
                    failures.push(error.wrap(place.clone()));
                    served.give_up_sockets();
                }
            }
        }
        if self.is_stopping() {
            return Err(denied("the server is stopping"));
        }
        self.report(failures)?;
        self.resources.addresses.close_unused();
        Ok(inherited)
    }

    /// Opens `disks`, several at a time. Opening may take long: once the process is asked to stop,
    /// or a disk that is required has failed, the rest is not opened, for which there is `None`.
    fn open_all(
        &self,
        disks: &[Opening],
        patience: Duration,
        begin: Begin,
    ) -> Vec<Option<Result<()>>> {
        let is_given_up = AtomicBool::new(false);
        open_each(disks, |Opening { served, is_required, .. }| {
            if self.is_stopping() || is_given_up.load(Ordering::Relaxed) {
                return None;
            }
            let prepared = served.prepare(patience).inspect_err(|_| {
                is_given_up.fetch_or(*is_required, Ordering::Relaxed);
            });
            if prepared.is_ok() && begin == Begin::AtOnce {
                served.start();
            }
            Some(prepared)
        })
    }

    /// Says which disks cannot be served.
    ///
    /// # Errors
    /// If none can be.
    fn report(&self, failures: Vec<Error>) -> Result<()> {
        let count = failures.len();
        let is_any_open = self.disks.all().iter().any(|served| served.is_open());
        for error in failures {
            if !is_any_open {
                let what = format!("none of {count} disks can be served (see --check-config)");
                return Err(error.wrap(what));
            }
            tracing::error!("not served: {}", error.in_one_line());
        }
        Ok(())
    }

    /// Serves all disks that are not served yet.
    pub(crate) fn start(&self) {
        self.disks.all().iter().for_each(|served| served.start());
    }

    /// The sockets of the control thread.
    pub(crate) fn control_sockets(&self) -> MutexGuard<'_, ControlSockets> {
        self.control_sockets.lock()
    }

    /// Takes ownership of all socket files that no systemd unit owns, stores those sockets with
    /// systemd and reports readiness. Called once everything is served.
    pub(crate) fn notify_ready(&self) {
        self.control_sockets().iter_mut().for_each(own_socket);
        let disks = self.disks.all();
        disks.iter().for_each(|served| {
            Self::own_sockets(served);
            served.announce();
        });
        let open = disks.iter().filter(|served| served.is_open()).count();
        let status = match (open, disks.len()) {
            (1, 1) => "serving a disk".to_owned(),
            (open, all) if open == all => format!("serving {all} disks"),
            (open, all) => format!("serving {open} of {all} disks"),
        };
        if disks.iter().any(|served| served.could_not_be_served()) {
            // Where there are many, the reasons are far above.
            tracing::warn!("{status}");
        }
        let process = NotifyState::MainPid(std::process::id());
        systemd::notify(&[process, NotifyState::Status(&status), NotifyState::Ready]);
    }

    /// Takes ownership of the socket files of a disk that no systemd unit owns, and stores these
    /// sockets with systemd.
    pub(crate) fn own_sockets(served: &Served) {
        served.doors().device().iter_mut().for_each(own_socket);
        served.doors().listening().iter().for_each(Listening::own);
    }

    /// Whether it has been asked to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// While this is held, nothing is handed over to another process.
    ///
    /// # Errors
    /// `Denied` if everything is being handed over, or was, or is being stopped.
    pub(crate) fn hold(&self) -> Result<RwLockReadGuard<'_, ()>> {
        self.hold_for(Duration::ZERO)
    }

    /// As [`Self::hold`], after waiting for a handover that may fail, for so long at most.
    fn hold_for(&self, patience: Duration) -> Result<RwLockReadGuard<'_, ()>> {
        let held = self.while_ours(self.life.try_read_for(patience))?;
        held.ok_or_else(|| match self.is_stopping() {
            true => denied("the server is stopping, which drains every disk"),
            false => denied("another process is taking over: try again, and it will answer"),
        })
    }

    /// What `ask` answers. It does not keep everything from being handed over, so that it may find
    /// a disk closed: then it is asked again once a takeover that was under way has failed.
    ///
    /// # Errors
    /// Those of `ask`; `Denied` as [`Self::hold`] if a takeover goes on, or is done.
    pub(crate) fn ask<T>(&self, ask: impl Fn() -> Result<T>) -> Result<T> {
        match ask() {
            Err(error) if error.kind() == ErrorKind::Denied => {}
            answer => return answer,
        }
        let _held = self.hold_for(TAKEOVER_PATIENCE)?;
        ask()
    }

    /// As [`Self::hold`], for a takeover. Nobody else holds it then.
    ///
    /// # Errors
    /// `Denied` with what is going on instead.
    pub(crate) fn hold_alone(&self) -> Result<RwLockWriteGuard<'_, ()>> {
        if self.is_stopping() {
            return Err(denied("the server is stopping"));
        }
        let Some(held) = self.while_ours(self.life.try_write())? else {
            // Whoever is there shares it, or else says what it is.
            let _shared = self.hold()?;
            return Err(denied(
                "disks are being changed (added, removed, drained or reloaded): take over when \
                 that is done",
            ));
        };
        Ok(held)
    }

    /// What was `held`, or was not, as long as nothing is another process's already.
    fn while_ours<Held>(&self, held: Held) -> Result<Held> {
        // Only now: whoever hands over lets go of it when that is done.
        match self.is_handed_over.load(Ordering::Acquire) {
            true => Err(denied("another process has taken over: try again, and it will answer")),
            false => Ok(held),
        }
    }

    /// From now on waits for stores that do not answer no longer than `haste` allows. Returns
    /// whether there are any.
    pub(crate) fn hasten(&self, haste: Haste) -> bool {
        let disks = self.disks.all();
        disks.iter().filter(|served| served.hasten(haste)).count() > 0
    }

    /// Stops every disk. One that is being drained, which may hang, delays no other.
    pub(crate) fn stop(&self) -> Result<()> {
        self.is_stopping.store(true, Ordering::Relaxed);
        // Also those that are just being closed, which others may wait for.
        self.hasten(Haste::Soon);
        let _held = self.life.read();
        // Every disk is closed; the first failure is reported.
        let stopped = each_of(&self.disks.all(), |served| served.stop())
            .into_iter()
            .fold(Ok(()), Result::and);
        let lost = self.lost.lock().clone();
        lost.map_or(Ok(()), Err).and(stopped)
    }
}

fn own_socket(held: &mut Held) {
    if held.origin != Origin::Unit {
        held.listener.own_file();
    }
    systemd::store(held);
}

fn denied(what: &str) -> Error {
    Error::new(ErrorKind::Denied, what)
}

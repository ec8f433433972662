//! State that the parts of the process share: its disks, its control sockets, and whether it is
//! stopping or handed over.

use crate::config::{Config, DiskConfig};
use crate::disks::{Disks, each_of};
use crate::held::{Held, Origin};
use crate::helper::Outside;
use crate::served::Served;
use crate::servers::Resources;
use crate::settings::ProcessSettings;
use crate::sockets::{ControlSockets, Sockets};
use crate::systemd;
use mica_block::{Error, ErrorKind, Result};
use sd_notify::NotifyState;
use signal_hook::iterator::Handle;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
};
use std::time::Duration;

/// When disks are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Begin {
    /// Each as soon as it is open.
    AtOnce,
    /// All of them at [`Shared::start`].
    Later,
}

/// What the parts of the process see of it.
pub(crate) struct Shared {
    pub(crate) disks: Disks,
    resources: Resources,
    /// Closing it ends the process, as a signal does.
    pub(crate) ending: Handle,
    /// Does what the sandbox forbids.
    pub(crate) outside: Outside,
    /// Held alone while everything is handed over to another process, and while everything is
    /// stopped: one at a time. Drains of single disks share it.
    life: RwLock<()>,
    /// Whether it has been asked to stop.
    is_stopping: AtomicBool,
    /// Whether another process now serves all of it.
    pub(crate) is_handed_over: AtomicBool,
    /// How often systemd expects a watchdog message, if it does.
    pub(crate) watch_period: Option<Duration>,
    /// The sockets of the control thread.
    control_sockets: Mutex<ControlSockets>,
}

impl Shared {
    pub(crate) fn new(
        ending: Handle,
        watch_period: Option<Duration>,
        outside: Outside,
        resources: Resources,
    ) -> Self {
        Self {
            disks: Disks::default(),
            resources,
            ending,
            outside,
            life: RwLock::default(),
            is_stopping: AtomicBool::new(false),
            is_handed_over: AtomicBool::new(false),
            watch_period,
            control_sockets: Mutex::default(),
        }
    }

    /// Opens the disks of `config`, to be served at `inherited` sockets and at new ones; returns
    /// the inherited sockets that are left over. Waits up to `patience` for an image that another
    /// process holds.
    pub(crate) fn open(
        &self,
        config: Config,
        mut inherited: Sockets,
        patience: Duration,
        begin: Begin,
    ) -> Result<Sockets> {
        let is_alone = config.disks.len() == 1;
        for disk in config.disks {
            let name = disk.name.clone();
            let named = |error: Error| error.wrap(format!("disk {name:?}"));
            let added = self.add(disk, &mut inherited, patience);
            let served = added.map_err(|error| if is_alone { error } else { named(error) })?;
            if begin == Begin::AtOnce {
                served.start();
            }
            // Opening may have taken long, and the signal came meanwhile: the rest is not opened.
            if self.is_stopping() {
                return Err(denied("the server is stopping"));
            }
        }
        let ProcessSettings { control, metrics, metrics_public, .. } = config.process;
        *self.control_sockets() =
            ControlSockets::take(control.as_deref(), metrics, metrics_public, &mut inherited)?;
        Ok(inherited)
    }

    /// Opens one more disk.
    fn add(
        &self,
        disk: DiskConfig,
        inherited: &mut Sockets,
        patience: Duration,
    ) -> Result<Arc<Served>> {
        let served = Arc::new(Served::prepare(disk, &self.resources, inherited, patience)?);
        self.disks.add(Arc::clone(&served)).inspect_err(|_| {
            // The first failure is the one to report.
            let _ = served.stop();
        })?;
        Ok(served)
    }

    /// Serves all disks that are not served yet.
    pub(crate) fn start(&self) {
        self.disks.all().iter().for_each(|served| served.start());
    }

    /// The sockets of the control thread.
    pub(crate) fn control_sockets(&self) -> MutexGuard<'_, ControlSockets> {
        self.control_sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes ownership of all socket files that no systemd unit owns, stores those sockets with
    /// systemd and reports readiness. Called once everything is served.
    pub(crate) fn notify_ready(&self) {
        let each_socket = |held: &mut Held| {
            if held.origin != Origin::Unit {
                held.listener.own_file();
            }
            systemd::store(held);
        };
        self.control_sockets().iter_mut().for_each(each_socket);
        let disks = self.disks.all();
        disks.iter().for_each(|served| served.held().iter_mut().for_each(each_socket));
        disks.iter().for_each(|served| served.announce());
        let status = match disks.len() {
            1 => "serving a disk".to_owned(),
            count => format!("serving {count} disks"),
        };
        let process = NotifyState::MainPid(std::process::id());
        systemd::notify(&[process, NotifyState::Status(&status), NotifyState::Ready]);
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
        let held = match self.life.try_read() {
            Ok(held) => Some(held),
            // A takeover that panicked is over.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if self.is_handed_over.load(Ordering::Acquire) {
            return Err(denied("another process has taken over: try again, and it will answer"));
        }
        held.ok_or_else(|| match self.is_stopping() {
            true => denied("the server is stopping, which drains every disk"),
            false => denied("another process is taking over: try again, and it will answer"),
        })
    }

    /// The same, for a takeover. Nobody else holds it then.
    ///
    /// # Errors
    /// `Denied` with what is going on instead.
    pub(crate) fn hold_alone(&self) -> Result<RwLockWriteGuard<'_, ()>> {
        if self.is_stopping() {
            return Err(denied("the server is stopping"));
        }
        let held = match self.life.try_write() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                // Whoever is there shares it, or else says what it is.
                let _shared = self.hold()?;
                return Err(denied("a disk is being drained: take over when that is done"));
            }
        };
        if self.is_handed_over.load(Ordering::Acquire) {
            return Err(denied("another process has taken over: try again, and it will answer"));
        }
        Ok(held)
    }

    /// Stops every disk. One that is being drained, which may hang, delays no other.
    pub(crate) fn stop(&self) -> Result<()> {
        self.is_stopping.store(true, Ordering::Relaxed);
        let _held = self.life.read().unwrap_or_else(PoisonError::into_inner);
        // Every disk is closed; the first failure is reported.
        each_of(&self.disks.all(), |served| served.stop()).into_iter().fold(Ok(()), Result::and)
    }
}

fn denied(what: &str) -> Error {
    Error::new(ErrorKind::Denied, what)
}

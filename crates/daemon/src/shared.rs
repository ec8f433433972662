//! What the parts of the process share: its disks, where it is told what to do, and how far it is.

use crate::config::{Config, DiskConfig};
use crate::disks::{Disks, each_of};
use crate::held::{Held, Origin};
use crate::helper::Outside;
use crate::served::Served;
use crate::servers::Common;
use crate::settings::ProcessSettings;
use crate::sockets::{Places, Sockets};
use crate::systemd;
use mica_block::{Error, Result};
use sd_notify::NotifyState;
use signal_hook::iterator::Handle;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What its parts see of it.
pub(crate) struct Shared {
    pub(crate) disks: Disks,
    common: Common,
    /// Closing it ends the process, as a signal does.
    pub(crate) ending: Handle,
    /// Who does what it may not do.
    pub(crate) outside: Outside,
    /// Held by who hands all of it over to another process, and by who stops it: one at a time.
    pub(crate) handing_over: Mutex<()>,
    /// Whether somebody wants it stopped.
    is_stopping: AtomicBool,
    /// Whether another process serves all of it now.
    pub(crate) is_handed_over: AtomicBool,
    /// How often systemd wants to hear from this process, if it does.
    pub(crate) watch_period: Option<Duration>,
    /// Where it is told what to do.
    places: Mutex<Places>,
}

impl Shared {
    pub(crate) fn new(
        ending: Handle,
        watch_period: Option<Duration>,
        outside: Outside,
        common: Common,
    ) -> Self {
        Self {
            disks: Disks::default(),
            common,
            ending,
            outside,
            handing_over: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            is_handed_over: AtomicBool::new(false),
            watch_period,
            places: Mutex::default(),
        }
    }

    /// Serves the disks of `config` at the sockets that `came` along, and at new ones; gives what
    /// is left of those. An image that is held is waited for with `patience`.
    pub(crate) fn serve(
        &self,
        config: Config,
        mut came: Sockets,
        patience: Duration,
    ) -> Result<Sockets> {
        let is_alone = config.disks.len() == 1;
        for disk in config.disks {
            let name = disk.name.clone();
            let named = |error: Error| error.wrap(format!("disk {name:?}"));
            let added = self.add(disk, &mut came, patience);
            added.map_err(|error| if is_alone { error } else { named(error) })?;
        }
        let ProcessSettings { control, metrics, metrics_public, .. } = config.process;
        *self.places() = Places::take(control.as_deref(), metrics, metrics_public, &mut came)?;
        Ok(came)
    }

    /// Serves one more disk.
    fn add(&self, disk: DiskConfig, came: &mut Sockets, patience: Duration) -> Result<()> {
        let served = Arc::new(Served::start(disk, &self.common, came, patience)?);
        self.disks.add(Arc::clone(&served)).inspect_err(|_| {
            // What failed first is told.
            let _ = served.stop();
        })
    }

    /// Where it is asked and told.
    pub(crate) fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Now all is served, and the sockets that are not of a unit are this process's.
    pub(crate) fn tell_systemd(&self) {
        let each_socket = |held: &mut Held| {
            if held.origin != Origin::Unit {
                held.listener.own_file();
            }
            systemd::store(held);
        };
        self.places().iter_mut().for_each(each_socket);
        let disks = self.disks.all();
        disks.iter().for_each(|served| served.held().iter_mut().for_each(each_socket));
        let status = match disks.len() {
            1 => "serving a disk".to_owned(),
            count => format!("serving {count} disks"),
        };
        let process = NotifyState::MainPid(std::process::id());
        systemd::tell(&[process, NotifyState::Status(&status), NotifyState::Ready]);
    }

    /// Whether somebody wants it stopped.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Stops all that is served.
    pub(crate) fn stop(&self) -> Result<()> {
        self.is_stopping.store(true, Ordering::Relaxed);
        let _alone = self.handing_over.lock().unwrap_or_else(PoisonError::into_inner);
        // Every disk is closed, and the first failure is told.
        each_of(&self.disks.all(), |served| served.stop()).into_iter().fold(Ok(()), Result::and)
    }
}

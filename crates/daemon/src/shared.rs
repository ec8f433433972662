//! What the parts of the process share: its disks, where it is told what to do, and how far it is.

use crate::config::Config;
use crate::held::{Held, Origin};
use crate::helper::Outside;
use crate::served::{Common, Served};
use crate::sockets::{Places, Sockets};
use crate::systemd;
use mica_block::{Error, Result};
use sd_notify::NotifyState;
use signal_hook::iterator::Handle;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Disks that something is done with at one time.
const ACTS_MAX: usize = 64;

/// What its parts see of it.
pub(crate) struct Shared {
    pub(crate) served: Vec<Served>,
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
    pub(crate) fn new(ending: Handle, watch_period: Option<Duration>, outside: Outside) -> Self {
        Self {
            served: Vec::new(),
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
        &mut self,
        config: Config,
        common: &Common,
        mut came: Sockets,
        patience: Duration,
    ) -> Result<Sockets> {
        let is_alone = config.disks.len() == 1;
        for disk in config.disks {
            let name = disk.name.clone();
            let named = |error: Error| error.wrap(format!("disk {name:?}"));
            let served = Served::start(disk, common, &mut came, patience);
            self.served.push(served.map_err(|error| if is_alone { error } else { named(error) })?);
        }
        let Config { control, metrics, metrics_public, .. } = config;
        *self.places() = Places::take(control.as_deref(), metrics, metrics_public, &mut came)?;
        Ok(came)
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
        self.served.iter().for_each(|served| served.held().iter_mut().for_each(each_socket));
        let status = match self.served.len() {
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
        self.each(Served::stop).into_iter().fold(Ok(()), Result::and)
    }

    /// Does something with every disk, with many at one time: one that takes long holds up few.
    pub(crate) fn each<T: Send>(&self, act: impl Fn(&Served) -> T + Sync) -> Vec<T> {
        each_of(&self.served.iter().collect::<Vec<_>>(), act)
    }
}

/// Does something with each of `disks`, as [`Shared::each`] has it.
pub(crate) fn each_of<T: Send>(disks: &[&Served], act: impl Fn(&Served) -> T + Sync) -> Vec<T> {
    let act = &act;
    let mut all = Vec::new();
    for some in disks.chunks(ACTS_MAX) {
        std::thread::scope(|scope| {
            let begin = |served| {
                let thread = std::thread::Builder::new().name("mica-act".to_owned());
                thread.spawn_scoped(scope, move || act(served)).map_err(|_| served)
            };
            let begun: Vec<_> = some.iter().copied().map(begin).collect();
            all.extend(begun.into_iter().map(|begun| match begun {
                Ok(thread) => match thread.join() {
                    Ok(done) => done,
                    Err(panic) => std::panic::resume_unwind(panic),
                },
                // Without a thread it is done here.
                Err(served) => act(served),
            }));
        });
    }
    all
}

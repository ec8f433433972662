//! The process from start to end.
//!
//! Order: what is not to be done in the sandbox, the sandbox, and then threads that serve, images
//! and sockets. Images are opened, then sockets appear; so whoever can connect is served. At the
//! end the sockets go first, requests in flight are answered, the servers end, and every disk is
//! closed, once, whatever went wrong before.

use crate::config::Config;
use crate::control::{Control, LogSwitch, Places};
use crate::held::{Held, Origin};
use crate::helper::{Helper, Outside};
use crate::images::ImageConfig;
use crate::sandbox::{Needs, Sandbox, SandboxMode};
use crate::served::{Common, Served};
use crate::sockets::Sockets;
use crate::systemd::{self, Watchdog};
use crate::takeover::Taking;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::Workers;
use mica_store::{Holder, search_holders_with};
use sd_notify::NotifyState;
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::fmt;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most threads that are started without being asked for.
const THREADS_DEFAULT_MAX: usize = 8;

/// Disks that something is done with at one time.
const ACTS_MAX: usize = 64;

/// A process that serves disks.
pub struct Daemon {
    pub(crate) shared: Arc<Shared>,
    pub(crate) control: Option<Control>,
    _watchdog: Option<Watchdog>,
    signals: Signals,
    stats_file: Option<StatsFile>,
}

/// Where the figures of the run go.
struct StatsFile {
    path: PathBuf,
    file: File,
}

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

impl Daemon {
    /// Serves all of `config`, or nothing. `log` is what the control socket tells of the log.
    ///
    /// # Errors
    /// What keeps a disk from being served.
    pub fn start(config: Config, log: Arc<dyn LogSwitch>) -> Result<Self> {
        config.check()?;
        let mut signals = Signals::new([SIGTERM, SIGINT])
            .map_err(|error| Error::from_io("waiting for signals", error))?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = config.queues.unwrap_or(processors.min(THREADS_DEFAULT_MAX));
        let handles = ImageConfig::handles();
        let stats_file = config.stats_file.as_deref().map(StatsFile::open).transpose()?;
        systemd::connect()?;
        let (taking, came) = match (config.takeover, &config.control) {
            (false, _) => (None, systemd::sockets()?),
            (true, Some(control)) => {
                let (taking, came) = Taking::begin(control)?;
                (Some(taking), came)
            }
            (true, None) => {
                let what = "--takeover needs --control: the socket of the server to take over";
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        };
        let came = Sockets::assign(came, &config)?;
        came.clear_places(&config)?;
        let outside = outside(&config)?;
        let sandbox = Sandbox::enter(config.sandbox, &Needs::of(&config, &came)?)?;
        let workers = Workers::start(threads, config.aio.backend())?;
        if config.sandbox != SandboxMode::Off {
            mica_rt::prepare_doorbells(config.doorbells());
        }
        sandbox.close()?;
        if config.disks.len() == 1 {
            // No other disk would wait with this one.
            for worker in workers.handles() {
                worker.allow_writes_in_place();
            }
        }
        let watch_period = taking.as_ref().and_then(|taking| taking.watch_period);
        let watch_period = systemd::watch_period(watch_period);
        let watchdog = Watchdog::start(workers.handles(), watch_period)?;
        let mut is_called_off = || signals.pending().next().is_some();
        let closed = taking.as_ref().map(|taking| taking.wait_until_closed(&mut is_called_off));
        let patience = closed.transpose()?.unwrap_or_default();
        let mounts = outside.mounts();
        let mut shared = Shared::new(signals.handle(), watch_period, outside);
        let common = Common { handles, workers, mounts };
        let served = shared.serve(config, &common, came, patience);
        let shared = Arc::new(shared);
        let begun = served.and_then(|came| {
            let control = Control::start(&shared.places(), &shared, log)?;
            if taking.is_some() && signals.pending().next().is_some() {
                let what = "a signal came before this process could take over";
                return Err(Error::new(ErrorKind::Denied, what));
            }
            // From here on the other process is gone, or this one fails.
            taking.map_or(Ok(()), |taking| taking.serving())?;
            came.remove_spare();
            Ok(control)
        });
        match begun {
            Ok(control) => {
                shared.tell_systemd();
                Ok(Self { shared, control, _watchdog: watchdog, signals, stats_file })
            }
            Err(error) => {
                // What failed first is told.
                let _ = shared.stop();
                Err(error)
            }
        }
    }

    /// Serves until SIGTERM or SIGINT, and ends.
    ///
    /// # Errors
    /// If not all that was written is in the images; else if the figures cannot be written.
    pub fn run(mut self) -> Result<()> {
        let signal = self.signals.forever().next();
        tracing::info!(?signal, "stopping");
        systemd::tell(&[NotifyState::Stopping]);
        let stopped = self.shared.stop();
        let told = self.write_stats();
        self.shared.places().close();
        // Whoever asked for the end hears of it.
        if let Some(control) = self.control.take() {
            control.stop();
        }
        // Of two failures the one that may have cost data is told.
        stopped.and(told)
    }

    fn write_stats(&mut self) -> Result<()> {
        let (Some(file), Some(served)) = (&mut self.stats_file, self.shared.served.first()) else {
            return Ok(());
        };
        file.write(&format!("{}\n", Value::Object(served.figures())))
    }
}

/// Who does what this process may not do once it is in its sandbox.
fn outside(config: &Config) -> Result<Outside> {
    let (SandboxMode::On | SandboxMode::Require, Some(program)) = (config.sandbox, &config.helper)
    else {
        return Ok(Outside::Here(Arc::default()));
    };
    let files = config.disks.iter().filter_map(|disk| disk.fuse.clone());
    let helper = Helper::start(program, files.collect())?;
    let asked = Arc::downgrade(&helper);
    search_holders_with(move |question| {
        asked.upgrade().map_or(Holder::Unknown, |helper| helper.holder(question))
    });
    Ok(Outside::Helper(helper))
}

impl StatsFile {
    /// Finds out that it cannot be written before there is anything to write.
    fn open(path: &Path) -> Result<Self> {
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|error| writing(path, error))?;
        Ok(Self { path: path.to_owned(), file })
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let Self { path, file } = self;
        let written = file.set_len(0).and_then(|()| file.rewind());
        let written = written.and_then(|()| file.write_all(text.as_bytes()));
        written.map_err(|error| writing(path, error))
    }
}

fn writing(path: &Path, error: std::io::Error) -> Error {
    Error::from_io(format!("writing {}", path.display()), error)
}

impl Shared {
    fn new(ending: Handle, watch_period: Option<Duration>, outside: Outside) -> Self {
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
    fn serve(
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
    fn tell_systemd(&self) {
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

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Daemon({} disks)", self.shared.served.len())
    }
}

//! The process from start to end.
//!
//! Order: what is not to be done in the sandbox, the sandbox, and then threads that serve, images
//! and sockets. Images are opened, then sockets appear; so whoever can connect is served. At the
//! end the sockets go first, requests in flight are answered, the servers end, and every disk is
//! closed, once, whatever went wrong before.

use crate::config::Config;
use crate::control::{Control, LogSwitch};
use crate::helper::{Helper, Outside};
use crate::sandbox::{Needs, Sandbox};
use crate::servers::Common;
use crate::settings::{ImageSettings, SandboxMode};
use crate::shared::Shared;
use crate::sockets::Sockets;
use crate::systemd::{self, Watchdog};
use crate::takeover::Taking;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::Workers;
use mica_store::{Holder, search_holders_with};
use sd_notify::NotifyState;
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most threads that are started without being asked for.
const THREADS_DEFAULT_MAX: usize = 8;

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
        let threads = config.process.queues.unwrap_or(processors.min(THREADS_DEFAULT_MAX));
        let handles = ImageSettings::handles();
        let stats_file = config.stats.stats_file.as_deref().map(StatsFile::open).transpose()?;
        systemd::connect()?;
        let (taking, came) = match (config.takeover, &config.process.control) {
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
        let sandbox = Sandbox::enter(config.process.sandbox(), &Needs::of(&config, &came)?)?;
        let workers = Workers::start(threads, config.io.backend())?;
        if config.process.sandbox() != SandboxMode::Off {
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
        let common = Common { handles, workers, mounts };
        let shared = Arc::new(Shared::new(signals.handle(), watch_period, outside, common));
        let served = shared.serve(config, came, patience);
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
        let disks = self.shared.disks.all();
        let (Some(file), Some(served)) = (&mut self.stats_file, disks.first()) else {
            return Ok(());
        };
        file.write(&format!("{}\n", Value::Object(served.figures())))
    }
}

/// Who does what this process may not do once it is in its sandbox.
fn outside(config: &Config) -> Result<Outside> {
    let (SandboxMode::On | SandboxMode::Require, Some(program)) =
        (config.process.sandbox(), &config.helper)
    else {
        return Ok(Outside::Here(Arc::default()));
    };
    let files = config.disks.iter().filter_map(|disk| disk.settings.fuse.clone());
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

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Daemon({} disks)", self.shared.disks.all().len())
    }
}

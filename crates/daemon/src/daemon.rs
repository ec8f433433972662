//! The process from start to end.
//!
//! Order: images are opened, then sockets appear; so whoever can connect is served. At the end the
//! sockets go first, requests in flight are answered, the servers end, and every disk is closed,
//! once, whatever went wrong before.

use crate::config::Config;
use crate::control::{Control, LogSwitch, Places};
use crate::images::ImageConfig;
use crate::served::Served;
use mica_block::{Error, Result};
use mica_serve::Workers;
use mica_serve::fuse::Unmounter;
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Most threads that are started without being asked for.
const THREADS_DEFAULT_MAX: usize = 8;

/// A process that serves disks.
pub struct Daemon {
    shared: Arc<Shared>,
    pub(crate) control: Option<Control>,
    signals: Signals,
    stats_file: Option<PathBuf>,
}

/// What its parts see of it.
pub(crate) struct Shared {
    pub(crate) served: Vec<Served>,
    pub(crate) workers: Arc<Workers>,
    /// Closing it ends the process, as a signal does.
    pub(crate) ending: Handle,
}

impl Daemon {
    /// Serves all of `config`, or nothing. `log` is what the control socket tells of the log.
    ///
    /// # Errors
    /// What keeps a disk from being served.
    pub fn start(config: Config, log: Arc<dyn LogSwitch>) -> Result<Self> {
        config.check()?;
        let signals = Signals::new([SIGTERM, SIGINT])
            .map_err(|error| Error::from_io("waiting for signals", error))?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = config.queues.unwrap_or(processors.min(THREADS_DEFAULT_MAX));
        let unmounter = Unmounter::start()?;
        let workers = Workers::start(threads, config.aio.backend())?;
        let handles = ImageConfig::handles();
        let is_alone = config.disks.len() == 1;
        let places = Places::of(&config);
        let mut shared = Shared { served: Vec::new(), workers, ending: signals.handle() };
        for disk in config.disks {
            let name = disk.name.clone();
            match Served::start(disk, &handles, &shared.workers, &unmounter) {
                Ok(served) => shared.served.push(served),
                Err(error) => {
                    // What failed first is told.
                    let _ = shared.stop();
                    let named = |error: Error| error.wrap(format!("disk {name:?}"));
                    return Err(if is_alone { error } else { named(error) });
                }
            }
        }
        let shared = Arc::new(shared);
        match Control::start(&places, None, &shared, log) {
            Ok(control) => Ok(Self { shared, control, signals, stats_file: config.stats_file }),
            Err(error) => {
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
        let stopped = self.shared.stop();
        let told = self.write_stats();
        // Whoever asked for the end hears of it.
        if let Some(control) = self.control.take() {
            control.stop();
        }
        // Of two failures the one that may have cost data is told.
        stopped.and(told)
    }

    fn write_stats(&self) -> Result<()> {
        let (Some(file), Some(served)) = (&self.stats_file, self.shared.served.first()) else {
            return Ok(());
        };
        std::fs::write(file, format!("{}\n", Value::Object(served.figures())))
            .map_err(|error| Error::from_io(format!("writing {}", file.display()), error))
    }
}

impl Shared {
    /// Stops all that is served.
    pub(crate) fn stop(&self) -> Result<()> {
        let mut outcome = Ok(());
        for served in &self.served {
            // Every disk is closed, and the first failure is told.
            outcome = outcome.and(served.stop());
        }
        outcome
    }
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Daemon({} disks)", self.shared.served.len())
    }
}

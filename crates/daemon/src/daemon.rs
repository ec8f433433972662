//! The process from start to end.
//!
//! Order: everything the sandbox would forbid, the sandbox itself, then worker threads, images and
//! sockets. Images are opened before their sockets appear, so a client that can connect is served;
//! the control socket appears before all of them, and answers when they are open. In a
//! takeover no client is answered before the other process can no longer come back: it would not
//! know what was acknowledged meanwhile.
//! Shutdown runs the other way: sockets go first, requests in flight are answered, servers stop,
//! and every disk is closed exactly once, whatever failed before.

use crate::addresses::Addresses;
use crate::config::Config;
use crate::control::{Control, LogSwitch};
use crate::descriptors;
use crate::ephemeral;
use crate::held::Held;
use crate::helper::{Errands, Helper, Outside};
use crate::new_logs::NewLogs;
use crate::own_process::OwnProcess;
use crate::retry::stopwatch;
use crate::sandbox::{Granted, Needs, Sandbox};
use crate::servers::Resources;
use crate::settings::{ImageSettings, MapBudgets, SandboxMode};
use crate::shared::{Begin, Shared, Surroundings};
use crate::signals::{Doing, Heard, Opener, until_late};
use crate::sockets::Sockets;
use crate::systemd::{self, Watchdog};
use crate::takeover::{Begun, Old, Takeover};
use mica_block::{Error, ErrorKind, Haste, Result};
use mica_qcow2::MapCache;
use mica_serve::{Workers, find_dead_sockets_with};
use mica_stack::{NewLog, Patience, Stores};
use mica_store::{Handles, Holder, SetAside, WritesInPlace, open_files_limit, search_holders_with};
use sd_notify::NotifyState;
use serde_json::Value;
use signal_hook::consts::SIGHUP;
use signal_hook::low_level::signal_name;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long the end may take once no store is waited for.
const AT_ONCE_LIMIT: Duration = Duration::from_secs(5);
/// A signal that comes sooner after the first says nothing more than that one.
const SAME_WISH: Duration = Duration::from_secs(2);
/// How often to look whether there are clients, where the server ends with the last.
const LAST_CLIENT_PAUSE: Duration = Duration::from_millis(50);
/// Upper bound on the default number of worker threads.
const THREADS_DEFAULT_MAX: usize = 8;

/// A process that serves disks.
pub struct Daemon {
    pub(crate) shared: Arc<Shared>,
    pub(crate) control: Option<Control>,
    _watchdog: Option<Watchdog>,
    /// Until its end has begun.
    heard: Option<Heard>,
    log: Arc<dyn LogSwitch>,
    stats_file: Option<StatsFile>,
    /// For the rings of devices.
    _descriptors: SetAside,
}

/// The file for the figures of the run.
struct StatsFile {
    path: PathBuf,
    file: File,
}

impl Daemon {
    /// Serves all of `config`, or nothing. `log` is what the control socket reads and sets.
    ///
    /// # Errors
    /// Whatever prevents a disk from being served.
    pub fn start(mut config: Config, log: Arc<dyn LogSwitch>) -> Result<Self> {
        config.check()?;
        let mut heard = Heard::start()?;
        let handles = ImageSettings::handles();
        let stats_file = config.stats.stats_file.as_deref().map(StatsFile::open).transpose()?;
        systemd::connect()?;
        // What was read here says what may be opened, not what the other process tells.
        let own_disks = config.disks.len();
        let (mut takeover, inherited) = inherit(&mut config)?;
        descriptors::check(&config, open_files_limit())?;
        let inherited = assigned(inherited, &config)?;
        ephemeral::prepare(&mut config)?;
        let mut new_logs = NewLogs::make(&config.disks[..own_disks], &handles);
        let (outside, own_process) = (outside(&config, new_logs.logs())?, OwnProcess::open());
        new_logs.leave_to(outside.clone());
        let budgets = config.disks.iter().map(|disk| disk.images.index_cache);
        let budgets = MapBudgets::largest(budgets);
        let (sandbox, granted) = confine(&config, own_disks, &inherited)?;
        outside.watch()?;
        let rings = descriptors::rings(&config, open_files_limit());
        let workers = start_workers(&config, rings)?;
        let rings = handles.set_aside(rings);
        sandbox.close()?;
        if config.disks.len() == 1 {
            // No other disk would wait with this one.
            handles.set_writes_in_place(WritesInPlace::Allowed);
        }
        let watch_period = takeover.as_ref().and_then(|takeover| takeover.watch_period);
        let watch_period = systemd::watch_period(watch_period);
        let watchdog = Watchdog::start(workers.handles(), watch_period)?;
        let closed = takeover
            .as_mut()
            .map(|takeover| takeover.wait_until_closed(&mut || heard.end().is_some()));
        let patience = closed.transpose()?.unwrap_or_default();
        let resources = resources(&config, budgets, (handles, workers), &outside);
        let surroundings = Surroundings { outside, granted, own_process };
        let shared = Shared::new(&config, heard.handle(), watch_period, surroundings, resources);
        let shared = Arc::new(shared);
        let opening = Arc::clone(&shared);
        let open = move |begin| opening.open(config, inherited, patience, begin);
        let own_log = Arc::clone(&log);
        let started = match takeover {
            Some(takeover) => take_over(takeover, &shared, open, own_log, &mut heard),
            None => begin(&shared, open, own_log, &mut heard),
        };
        match started {
            Ok(control) => {
                new_logs.keep();
                let (_watchdog, _descriptors) = (watchdog, rings);
                Ok(Self {
                    shared,
                    control,
                    _watchdog,
                    heard: Some(heard),
                    log,
                    stats_file,
                    _descriptors,
                })
            }
            Err(error) => {
                stop_what_started(heard, &shared);
                shared.control_sockets().close();
                Err(error)
            }
        }
    }

    /// Serves until SIGTERM or SIGINT, and ends. On SIGHUP it reads its configuration again, but
    /// ends if it has a terminal, which is gone then. At a second signal, some
    /// seconds later, no store is waited for.
    ///
    /// # Errors
    /// If some acknowledged writes are not in the images; otherwise if the figures cannot be
    /// written.
    pub fn run(mut self) -> Result<()> {
        let mut heard = self.heard.take().expect("it runs once");
        if self.shared.exits_after_last {
            end_after_last(&self.shared)?;
        }
        let ending = heard.wait_for_end(|| hang_up(&self.shared, &self.log));
        match ending.and_then(signal_name) {
            Some(signal) => tracing::info!("stopping on {signal}"),
            None => tracing::info!("stopping"),
        }
        hear_again(heard, Arc::clone(&self.shared));
        self.stop()
    }

    /// Ends it.
    ///
    /// # Errors
    /// As [`Daemon::run`].
    pub fn stop(mut self) -> Result<()> {
        // After a takeover the service goes on: systemd 252 would leave it stopping (systemd.rs,
        // I2).
        if !self.shared.is_handed_over.load(Ordering::Acquire) {
            systemd::notify(&[NotifyState::Stopping]);
        }
        let stopped = self.shared.stop();
        let written = self.write_stats();
        self.shared.control_sockets().close();
        // The client that requested the shutdown gets its answer.
        if let Some(control) = self.control.take() {
            control.stop();
        }
        // Of two failures, report the one that may have cost data.
        stopped.and(written)
    }

    fn write_stats(&mut self) -> Result<()> {
        let disks = self.shared.disks.all();
        let (Some(file), Some(served)) = (&mut self.stats_file, disks.first()) else {
            return Ok(());
        };
        file.write(&format!("{}\n", Value::Object(served.figures())))
    }
}

/// Ends the process once there were clients and the last of them has left.
fn end_after_last(shared: &Arc<Shared>) -> Result<()> {
    let shared = Arc::clone(shared);
    let mut had_any = false;
    let body = move || {
        loop {
            std::thread::park_timeout(LAST_CLIENT_PAUSE);
            if shared.ending.is_closed() {
                return;
            }
            let disks = shared.disks.all();
            // A client may come and go between two looks. One that comes after this is still there.
            had_any |= disks.iter().any(|disk| disk.had_clients());
            let has_any = disks.iter().any(|disk| disk.clients() > 0);
            if had_any && !has_any {
                tracing::info!("the last client has disconnected");
                shared.ending.close();
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("mica-last".to_owned()).spawn(body);
    thread.map(drop).map_err(|error| Error::from_io("waiting for the last client", error))
}

/// Closes the disks of a start that failed: some may have been open, and served. Storage that hangs
/// does not keep a server that was told to end from ending.
fn stop_what_started(mut heard: Heard, shared: &Arc<Shared>) {
    let stopping = Arc::clone(shared);
    let stop = move || stopping.stop();
    let stopped = match Opener::start() {
        Ok(thread) => thread.open(stop, &mut until_late(&mut heard, Doing::Closing)),
        Err(_) => stop(),
    };
    if let Err(error) = stopped {
        // The one to report is why it did not start.
        tracing::debug!(%error, "closing what was open");
    }
}

/// Hears a second signal while the process ends. The first one that ends it was heard. One that
/// follows it closely is the same wish, sent twice: timeout(1) signals its child and then its whole
/// group, and a service manager may signal all processes of a group, one of which passes it on.
fn hear_again(mut heard: Heard, shared: Arc<Shared>) {
    let since_first = stopwatch();
    let is_impatience = move |signal| signal != SIGHUP && since_first() >= SAME_WISH;
    let body = move || {
        if !heard.wait_for(is_impatience) {
            return;
        }
        if !shared.hasten(Haste::AtOnce) {
            return;
        }
        tracing::warn!("stopping at once, without waiting for stores");
        let elapsed = stopwatch();
        while elapsed() < AT_ONCE_LIMIT {
            std::thread::park_timeout(AT_ONCE_LIMIT);
        }
        tracing::error!("not all disks could be closed");
        std::process::exit(1);
    };
    let thread = std::thread::Builder::new().name("mica-ending".to_owned()).spawn(body);
    if let Err(error) = thread {
        tracing::warn!(%error, "a second signal will have no effect");
    }
}

/// Begins a new log file if the old one was renamed, and reads the configuration and certificates
/// again, if there are any, on a thread of its own: a signal that ends the process is heard
/// meanwhile.
fn hang_up(shared: &Arc<Shared>, log: &Arc<dyn LogSwitch>) {
    if let Err(error) = log.reopen() {
        tracing::error!("{}", error.in_one_line());
    }
    let shared = Arc::clone(shared);
    let body = move || shared.hang_up();
    let thread = std::thread::Builder::new().name("mica-reload".to_owned()).spawn(body);
    if let Err(error) = thread {
        tracing::error!(%error, "not reloaded: the system has no thread to spare");
    }
}

/// What all disks share.
fn resources(
    config: &Config,
    budgets: MapBudgets,
    (handles, workers): (Arc<Handles>, Arc<Workers>),
    outside: &Outside,
) -> Resources {
    let stores = Stores::new(Arc::clone(&handles), budgets.volumes, Patience::Guest);
    Resources {
        handles,
        workers,
        outside: outside.clone(),
        mounts: outside.mounts(),
        cache: MapCache::new(budgets.images),
        stores: Arc::new(stores),
        indexers: Arc::default(),
        one_by_one: Arc::default(),
        tending: Arc::default(),
        gc: config.process.gc(),
        addresses: Arc::new(Addresses::new(outside.clone())),
    }
}

/// Starts the threads that serve, and makes what they need and could not make in the sandbox: these
/// `rings` for doorbells.
fn start_workers(config: &Config, rings: usize) -> Result<Arc<Workers>> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = config.process.queues.unwrap_or(processors.min(THREADS_DEFAULT_MAX));
    let workers = Workers::start(threads, config.io.backend())?;
    if config.process.sandbox() != SandboxMode::Off {
        mica_rt::prepare_doorbells(rings);
    }
    Ok(workers)
}

/// Matches each of the `inherited` sockets with its use in `config`, and makes room for the others.
fn assigned(inherited: Vec<Held>, config: &Config) -> Result<Sockets> {
    let sockets = Sockets::assign(inherited, config)?;
    sockets.clear_places(config)?;
    Ok(sockets)
}

/// Takes what a process that is taken over, or systemd, passes.
fn inherit(config: &mut Config) -> Result<(Option<Takeover>, Vec<Held>)> {
    match (config.takeover, &config.process.control) {
        (false, _) => Ok((None, systemd::sockets()?)),
        (true, Some(control)) => {
            let Begun { takeover, sockets, disks } = Takeover::begin(control)?;
            config.take_over(disks)?;
            // The other process still serves: what is wrong is said before it stops.
            config.check()?;
            Ok((Some(takeover), sockets))
        }
        (true, None) => {
            let what = "--takeover needs --control: the socket of the server to take over";
            Err(Error::new(ErrorKind::Invalid, what))
        }
    }
}

/// Reads the secrets that are out of reach in the sandbox, and enters that: the one of the
/// process and its first disks. Returns what it allows, too; the others
/// have to do with that.
fn confine(
    config: &Config,
    first_disks: usize,
    inherited: &Sockets,
) -> Result<(Sandbox, Option<Granted>)> {
    let (first, others) = config.disks.split_at(first_disks);
    let needs = Needs::of(&config.process, first, inherited)?;
    config.disks.iter().try_for_each(|disk| disk.images.secrets()?.load())?;
    let sandbox = Sandbox::enter(config.process.sandbox(), &needs)?;
    let granted = (config.process.sandbox() != SandboxMode::Off).then(|| needs.granted());
    if let Some(granted) = &granted {
        others.iter().try_for_each(|disk| granted.check(disk))?;
    }
    Ok((sandbox, granted))
}

/// Opens everything, and serves it once the other process cannot come back any more.
fn take_over(
    mut takeover: Takeover,
    shared: &Arc<Shared>,
    open: impl FnOnce(Begin) -> Result<Sockets> + Send + 'static,
    log: Arc<dyn LogSwitch>,
    heard: &mut Heard,
) -> Result<Option<Control>> {
    let begin = match takeover.old() {
        Old::Waiting => Begin::Later,
        Old::Gone => Begin::AtOnce,
    };
    // An image that hangs keeps no other from the old process for longer than that waits.
    let mut look = || takeover.check_old(&mut || heard.end().is_some());
    let inherited = Opener::start()?.open(move || open(begin), &mut look)?;
    // A third process may take over from this one when it is done here.
    let _alone = shared.hold_alone()?;
    let control = Control::start(&shared.control_sockets(), shared, log)?;
    if heard.end().is_some() {
        let what = "a signal arrived before this process could take over";
        return Err(Error::new(ErrorKind::Denied, what));
    }
    // From here on either the other process is gone or this one fails.
    takeover.serving()?;
    shared.start();
    ready(shared, inherited);
    Ok(control)
}

/// Opens everything, and serves it.
fn begin(
    shared: &Arc<Shared>,
    open: impl FnOnce(Begin) -> Result<Sockets> + Send + 'static,
    log: Arc<dyn LogSwitch>,
    heard: &mut Heard,
) -> Result<Option<Control>> {
    let open = move || open(Begin::AtOnce);
    let inherited = match Opener::start() {
        Ok(opener) => opener.open(open, &mut until_late(heard, Doing::Opening))?,
        Err(error) => {
            tracing::warn!(%error, "signals have no effect until the disks are open");
            open()?
        }
    };
    let control = Control::start(&shared.control_sockets(), shared, log)?;
    ready(shared, inherited);
    Ok(control)
}

/// Everything is served: what is left over is closed, and systemd is told.
fn ready(shared: &Shared, inherited: Sockets) {
    inherited.remove_spare();
    shared.notify_ready();
}

/// The way to do what this process may not do inside its sandbox.
fn outside(config: &Config, new_logs: &[NewLog]) -> Result<Outside> {
    let (SandboxMode::On | SandboxMode::Require, Some(program)) =
        (config.process.sandbox(), &config.helper)
    else {
        return Ok(Outside::Here(Arc::default()));
    };
    let settings = || config.disks.iter().map(|disk| &disk.settings);
    let certificates: BTreeSet<_> =
        settings().filter_map(|settings| settings.tls_certificates.clone()).collect();
    let errands = Errands {
        files: settings().filter_map(|settings| settings.fuse.clone()).collect(),
        config: config.file.clone(),
        certificates: certificates.into_iter().collect(),
        new_logs: new_logs.to_vec(),
    };
    let helper = Helper::start(program, errands)?;
    let weak = Arc::downgrade(&helper);
    search_holders_with(move |question| {
        weak.upgrade().map_or(Holder::Unknown, |helper| helper.holder(question))
    });
    let weak = Arc::downgrade(&helper);
    find_dead_sockets_with(move |path| weak.upgrade().is_some_and(|helper| helper.is_dead(path)));
    Ok(Outside::Helper(helper))
}

impl StatsFile {
    /// Fails early if the file cannot be written, before there is anything to write.
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

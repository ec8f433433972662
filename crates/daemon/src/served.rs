//! One disk: its image and its servers, from opening to the end, and perhaps another beginning.
//! Where its clients come in is a matter of its [`Doors`].
//!
//! Invariants
//! - I1 A socket appears only once the image is open: a client that can connect is served, as soon
//!   as [`Served::start`] lets it.
//! - I2 The disk is closed exactly once for each time that it was opened, after all its servers
//!   have ended.
//! - I3 When `stop` or `suspend` returns, the image is closed: a second caller waits for the
//!   first and gets the same outcome. But nobody waits for an image that is being opened: whoever
//!   opens it closes it then.
//! - I4 A disk that was told to stop is not served again unless somebody asks for that
//!   ([`Served::undrain`]).

mod backup;
mod doors;
mod extents;
mod handover;
mod layers;
mod merges;
mod report;
mod resize;
mod snapshots;
mod stored;

pub(crate) use backup::{BackupInfo, Wanted};
pub(crate) use doors::Doors;
pub(crate) use extents::{Asked, Refused};
pub(crate) use layers::Layered;
pub(crate) use merges::{LayersCalled, StatesInTheWay};
pub(crate) use resize::NewLength;
pub(crate) use stored::Stored;

use crate::config::{DiskConfig, LeftClosed};
use crate::contexts;
use crate::jobs::{Job, JobReport};
use crate::one_by_one::TURN_LIMIT;
use crate::opened::{Figures, Opened};
use crate::opening::{Opening, open};
use crate::retry::{Patience, is_address_in_use, retry_while, while_held};
use crate::servers::{Prepared, Resources, Servers, Subject};
use crate::settings::{DiskSettings, GcMode, ImageSettings, VolumeSettings};
use crate::sockets::Sockets;
use crate::stats::Counts;
use backup::Backups;
use mica_block::{Error, ErrorKind, Haste, Manage, Result};
use mica_rt::timeout;
use mica_stack::Format;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The target of the lines that say what is served where.
pub const SERVING: &str = "mica::serving";
/// How often to check whether a closed disk is still referenced.
const RELEASE_CHECKS: u32 = 1000;
const RELEASE_CHECK_PAUSE: Duration = Duration::from_millis(1);
/// How long requests without a waiting client may take to end before a disk is closed.
const IDLE_DEADLINE: Duration = Duration::from_secs(10);
/// Pause between attempts to open an image that another process holds.
const HELD_IMAGE_PAUSE: Duration = Duration::from_millis(20);

/// Limit for a TCP address that another disk of this process has just left to become free.
const FREE_ADDRESS_LIMIT: Duration = Duration::from_millis(500);
const FREE_ADDRESS_PAUSE: Duration = Duration::from_millis(5);

/// Why a disk is not served, for NBD clients that ask for it at a shared address.
const DRAINED: &str = "it is drained";
const FAILED: &str = "it could not be opened, and the server's log says why";

/// A disk and what serves it.
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) settings: DiskSettings,
    /// How its images are opened.
    pub(crate) images: ImageSettings,
    /// Without force, which counts once.
    volume: VolumeSettings,
    /// Whether another writer of the volume is fenced when it is opened for the first time.
    is_forced: AtomicBool,
    /// The image of its configuration.
    first_image: PathBuf,
    source: Mutex<Source>,
    resources: Resources,
    /// Serializes changes of the disk's life: stop, suspend, resume, resize (I3). Taken before
    /// `state`, which is never held for long.
    changes: Mutex<()>,
    /// The image that is open, or was last: for a chain, its active layer. The configuration only
    /// names the first, and what is above that is found from there.
    image: Mutex<Arc<Path>>,
    opened: Mutex<Opened>,
    /// The merge of its layers that is under way, or the last one.
    job: Mutex<Option<Arc<Job>>>,
    /// Reports of earlier jobs, oldest first.
    past_jobs: Mutex<VecDeque<JobReport>>,
    /// Where its clients come in.
    doors: Doors,
    backups: Backups,
    state: Mutex<State>,
    /// Whether somebody is opening the image, wanted or no longer.
    has_opener: AtomicBool,
}

enum State {
    /// Its image is being opened, which may take as long as its storage likes.
    Opening,
    /// It is open, and its servers, as far as there are any, answer nobody yet.
    Prepared(Box<Prepared>),
    /// It is being served.
    Serving(Box<Servers>),
    /// It is closing or closed, and nothing serves it.
    Ended(Box<Counts>, End),
}

impl State {
    /// The state of a disk that ended so, and has served no client since.
    fn ended(end: End) -> Self {
        Self::Ended(Box::new(Servers::default().counts()), end)
    }
}

/// Where the request to serve a disk comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// The command line or the configuration file.
    Configuration,
    /// Somebody at the control socket.
    Command,
}

/// How far the end of a disk is.
#[derive(Clone)]
enum End {
    /// It is about to be opened for the first time.
    New,
    /// Its servers end and it is being closed.
    Closing,
    /// It is closed. A failure means that some acknowledged writes are not in the image.
    Closed(Result<()>),
    /// It could not be opened or served. Everything acknowledged is in the image.
    NotServed(Error),
    /// It is closed and no longer among the disks of this process. A failure as above.
    Removed(Result<()>),
}

impl Served {
    /// A disk that is not open yet, to be served at `inherited` sockets where there are some, and
    /// at new ones.
    ///
    /// # Errors
    /// As [`Addresses::join`](crate::addresses::Addresses::join).
    pub(crate) fn new(
        config: DiskConfig,
        inherited: &mut Sockets,
        resources: &Resources,
    ) -> Result<Self> {
        let doors = Doors::new(&config, inherited, resources)?;
        let is_forced = AtomicBool::new(config.volume.force);
        let DiskConfig { name, image, settings, images, volume } = config.kept();
        let state = State::ended(End::New);
        Ok(Self {
            name,
            settings,
            images,
            volume,
            is_forced,
            first_image: image.clone(),
            source: Mutex::new(Source::Configuration),
            resources: resources.clone(),
            changes: Mutex::default(),
            image: Mutex::new(image.into()),
            opened: Mutex::new(Opened::Closed(Figures::default())),
            job: Mutex::default(),
            past_jobs: Mutex::default(),
            doors,
            backups: Backups::default(),
            state: Mutex::new(state),
            has_opener: AtomicBool::new(false),
        })
    }

    /// Opens a new disk, waiting up to `patience` while another process holds its image, and
    /// prepares to serve it. Clients wait until [`Self::start`].
    ///
    /// # Errors
    /// Whatever prevents it from being opened or served; [`Self::failure`] is that from now on.
    /// `Denied` if it was told to stop before it could be opened.
    pub(crate) fn prepare(&self, patience: Duration) -> Result<()> {
        let _changes = self.lock_changes();
        match &*self.lock() {
            State::Ended(_, End::New) => {}
            _ => return Err(self.denied("was told to stop")),
        }
        let patience = Patience { limit: patience, pause: HELD_IMAGE_PAUSE };
        let is_cancelled = || !matches!(*self.lock(), State::Opening);
        self.open(|open| {
            let mut opened = open();
            // Of two that open one image at the same time each may have seen the other's locks.
            if opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::Denied) {
                let _alone = self.resources.one_by_one.turn(TURN_LIMIT);
                opened = open();
            }
            let mut first = Some(opened);
            let opened = while_held(patience, is_cancelled, || first.take().unwrap_or_else(open));
            self.is_forced.store(false, Ordering::Relaxed);
            opened
        })
    }

    /// Opens and serves it again, if it was drained or could not be served, unless `is_stopping`. A
    /// drained disk for which that fails stays drained: somebody else may have its image by now,
    /// and whoever takes over must not want it back.
    ///
    /// # Errors
    /// Whatever prevents that; `Denied` if it is open, or was closed without all that was written.
    pub(crate) fn undrain(&self, is_stopping: &dyn Fn() -> bool) -> Result<()> {
        let _changes = self.lock_changes();
        let was_drained = match &*self.lock() {
            State::Ended(_, End::Closed(Ok(()))) => true,
            State::Ended(_, End::NotServed(_)) => false,
            State::Ended(_, End::Closed(Err(_))) => {
                return Err(self.denied(
                    "was closed before all writes were in its image: check the image, remove the \
                     disk, and add it again",
                ));
            }
            State::Ended(_, End::Removed(_)) => return Err(self.denied("was removed")),
            State::Opening | State::Ended(_, End::New | End::Closing) => {
                return Err(self.denied("is not ready"));
            }
            State::Prepared(_) | State::Serving(_) => return Err(self.denied("is served")),
        };
        self.open(|open| open()).inspect_err(|_| {
            self.doors.close(if was_drained { DRAINED } else { FAILED });
            if was_drained && let State::Ended(_, end @ End::NotServed(_)) = &mut *self.lock() {
                *end = End::Closed(Ok(()));
            }
        })?;
        // Whoever stops all disks may have seen this one closed.
        if is_stopping() {
            self.doors.close(DRAINED);
            // Nobody has used it.
            let _ = self.end();
            return Err(self.denied("stays closed: the server is stopping"));
        }
        self.start();
        Ok(())
    }

    /// Leaves a new disk closed, as another process or a disk of another name left its image, which
    /// may have lost something.
    pub(crate) fn leave_closed(&self, left: LeftClosed) {
        let LeftClosed { loss, shown } = left;
        self.is_forced.store(false, Ordering::Relaxed);
        self.doors.close(DRAINED);
        *self.opened() = Opened::Closed(shown.into());
        let outcome = loss.map_or(Ok(()), |loss| Err(Error::new(ErrorKind::Io, loss)));
        *self.lock() = State::ended(End::Closed(outcome));
    }

    /// Leaves a new disk closed, because it cannot be served for this reason.
    pub(crate) fn fail(&self, error: Error) {
        self.doors.close(FAILED);
        *self.lock() = State::ended(End::NotServed(error));
    }

    /// Says better why it could not be served, if that is how it ended.
    pub(crate) fn set_failure(&self, better: &Error) {
        if let State::Ended(_, End::NotServed(error)) = &mut *self.lock() {
            *error = better.clone();
        }
    }

    /// Stops it for good: it cannot be opened again.
    ///
    /// # Errors
    /// As [`Self::stop`]. It is closed in any case.
    pub(crate) fn remove(&self) -> Result<()> {
        if self.cancel_opening(End::Removed(Ok(()))) {
            return Ok(());
        }
        let _changes = self.lock_changes();
        self.doors.close(DRAINED);
        self.doors.remove_device();
        let outcome = self.end();
        self.doors.mark_absent(DRAINED);
        if let State::Ended(_, end) = &mut *self.lock() {
            *end = End::Removed(outcome.clone());
        }
        outcome
    }

    /// Where its clients come in.
    pub(crate) fn doors(&self) -> &Doors {
        &self.doors
    }

    /// Its configuration.
    pub(crate) fn config(&self) -> DiskConfig {
        let (name, image) = (self.name.clone(), self.first_image.clone());
        let (settings, images) = (self.settings.clone(), self.images.clone());
        DiskConfig { name, image, settings, images, volume: self.volume.clone() }
    }

    /// Opens its image.
    fn open_image(&self) -> Result<Arc<dyn Manage>> {
        let Self { settings, volume, resources, .. } = self;
        let force = self.is_forced.load(Ordering::Relaxed);
        let image = &*self.known_image();
        // The configuration says what its own image is.
        let format = self.format_of(image);
        let images = &ImageSettings { format, ..self.images.clone() };
        let (opened, image) = open(&Opening { image, settings, images, volume, force }, resources)?;
        self.set_image(image.into());
        Ok(opened)
    }

    pub(crate) fn source(&self) -> Source {
        *self.source.lock()
    }

    pub(crate) fn set_source(&self, source: Source) {
        *self.source.lock() = source;
    }

    fn denied(&self, what: &str) -> Error {
        Error::new(ErrorKind::Denied, format!("the disk {:?} {what}", self.name))
    }

    /// Opens the image by `by`, listens, and prepares the servers. The caller holds `changes`.
    fn open(
        &self,
        by: impl FnOnce(&dyn Fn() -> Result<Arc<dyn Manage>>) -> Result<Arc<dyn Manage>>,
    ) -> Result<()> {
        *self.lock() = State::Opening;
        self.doors.mark_opening();
        self.has_opener.store(true, Ordering::Release);
        let opened = by(&|| self.open_image());
        let is_wanted = {
            let mut state = self.lock();
            let is_wanted = matches!(*state, State::Opening);
            if is_wanted {
                *state = match &opened {
                    Ok(_) => State::Prepared(Box::default()),
                    Err(error) => State::ended(End::NotServed(error.clone())),
                };
                self.has_opener.store(false, Ordering::Release);
            }
            is_wanted
        };
        let opened = opened.inspect(|disk| self.tend(disk)).inspect_err(|_| {
            if is_wanted {
                self.doors.mark_absent(FAILED);
            }
            self.has_opener.store(false, Ordering::Release);
        })?;
        *self.opened() = Opened::Open(opened);
        if !is_wanted {
            let discarded = self.discard();
            self.has_opener.store(false, Ordering::Release);
            return discarded.and_then(|()| Err(self.denied("was told to stop")));
        }
        let free = Patience { limit: FREE_ADDRESS_LIMIT, pause: FREE_ADDRESS_PAUSE };
        let listening = retry_while(is_address_in_use, free, || self.doors.listen(&self.resources));
        listening.and_then(|()| self.prepare_servers()).inspect_err(|error| {
            // The first failure is the one to report.
            let _ = self.end();
            *self.lock() = State::ended(End::NotServed(error.clone()));
        })
    }

    /// Closes the image, which nobody has used.
    fn discard(&self) -> Result<()> {
        let disk = self.opened().disk()?;
        let closed = self.resources.workers.run(move || async move { disk.close().await })?;
        self.release();
        closed
    }

    /// Cancels an opening that is under way; returns false if there is none.
    fn cancel_opening(&self, end: End) -> bool {
        let mut state = self.lock();
        match *state {
            State::Opening => {
                *state = State::ended(end);
                true
            }
            // Somebody else has told the opener already.
            State::Ended(..) => self.has_opener.load(Ordering::Acquire),
            State::Prepared(_) | State::Serving(_) => false,
        }
    }

    /// Serves it from now on. Without effect if it is served or has ended. Does not wait for
    /// changes under way: only the state decides.
    pub(crate) fn start(&self) {
        let mut state = self.lock();
        if let State::Prepared(prepared) = &mut *state {
            let prepared = std::mem::take(prepared);
            *state = State::Serving(Box::new(prepared.start()));
        }
    }

    /// The caller has just opened it.
    fn prepare_servers(&self) -> Result<()> {
        let (disk, settings) = (self.opened().disk()?, self.settings.clone());
        let asked = self.resources.workers.run(move || async move {
            let part = contexts::part_of(&*disk, &settings).await?;
            let all = contexts::of_settings(&disk, &settings).await?;
            Ok::<_, Error>((part, contexts::moved(all, part)))
        })?;
        let (part, contexts) = asked?;
        let subject = Subject {
            name: &self.name,
            settings: &self.settings,
            image: self.is_file().then(|| self.image().to_path_buf()),
            disk: self.opened().disk()?,
            part,
            device: self.doors.device().as_ref().map(|held| held.listener.clone()),
            seats: self.doors.seats(),
            contexts,
        };
        let prepared = Prepared::new(subject, &self.resources)?;
        *self.lock() = State::Prepared(Box::new(prepared));
        Ok(())
    }

    /// Ends its servers and closes the disk. A second call only returns the outcome.
    ///
    /// # Errors
    /// If some acknowledged writes are not in the image.
    pub(crate) fn stop(&self) -> Result<()> {
        if self.cancel_opening(End::Closed(Ok(()))) {
            return Ok(());
        }
        let _changes = self.lock_changes();
        // The socket files go first.
        self.doors.close(DRAINED);
        let outcome = self.end();
        // It may have been started just before it ended.
        self.doors.mark_absent(DRAINED);
        outcome
    }

    /// Like [`Self::stop`], but clients that connect wait. False if it had ended before.
    ///
    /// # Errors
    /// As [`Self::stop`]; then clients do not wait: serving again would hide the loss from them.
    pub(crate) fn suspend(&self) -> Result<bool> {
        let _changes = self.lock_changes();
        if matches!(*self.lock(), State::Ended(..)) {
            return Ok(false);
        }
        self.end().map(|()| true).inspect_err(|_| self.doors.close(FAILED))
    }

    /// Closes its sockets after [`Self::prepare`] has failed: nobody is to wait there.
    pub(crate) fn give_up_sockets(&self) {
        self.doors.discard(FAILED);
    }

    /// Serves it again, after [`Self::suspend`]. Clients that connect wait until it does, or until
    /// [`Self::give_up`].
    ///
    /// # Errors
    /// Whatever prevents it from being opened or served.
    pub(crate) fn resume(&self) -> Result<()> {
        let _changes = self.lock_changes();
        let opened = self.open_image()?;
        self.tend(&opened);
        *self.opened() = Opened::Open(opened);
        *self.lock() = State::Prepared(Box::default());
        self.prepare_servers().inspect_err(|_| {
            // The first failure is the one to report.
            let _ = self.end();
        })?;
        self.start();
        Ok(())
    }

    /// Gives up on [`Self::resume`], which failed for this reason: clients do not wait for it any
    /// longer.
    pub(crate) fn give_up(&self, error: Error) {
        let _changes = self.lock_changes();
        if let State::Ended(_, end @ End::Closed(Ok(()))) = &mut *self.lock() {
            *end = End::NotServed(error);
        }
        self.doors.close(FAILED);
    }

    /// Ends its servers and closes the disk. The caller holds `changes`.
    fn end(&self) -> Result<()> {
        // A merge that was stopped resumes when it is requested again.
        self.stop_job();
        let mut never_started = None;
        let servers = {
            let mut state = self.lock();
            let servers = match &mut *state {
                // Only whoever opens it changes that.
                State::Opening => return Ok(()),
                State::Prepared(prepared) => {
                    never_started = Some(std::mem::take(prepared));
                    Box::default()
                }
                State::Serving(servers) => std::mem::take(servers),
                State::Ended(_, End::Closed(outcome) | End::Removed(outcome)) => {
                    return outcome.clone();
                }
                State::Ended(_, end @ (End::New | End::NotServed(_))) => {
                    *end = End::Closed(Ok(()));
                    return Ok(());
                }
                State::Ended(_, End::Closing) => return Ok(()),
            };
            // Meanwhile callers see what was counted so far.
            *state = State::Ended(Box::new(servers.counts()), End::Closing);
            servers
        };
        drop(never_started);
        // It reads the files of the disk.
        self.backups.interrupt();
        let counts = servers.shutdown();
        *self.lock() = State::Ended(Box::new(counts), End::Closing);
        let disk = self.opened().disk();
        let closed = disk.and_then(|disk| {
            self.resources.workers.run(move || async move {
                // Requests whose clients are gone still have to end.
                let _ = timeout(IDLE_DEADLINE, disk.idle()).await;
                disk.close().await
            })?
        });
        let outcome = closed.map_err(|error| {
            let image = self.image();
            error.wrap(format!("closing {}: not all writes are in it", image.display()))
        });
        self.release();
        *self.lock() = State::Ended(Box::new(counts), End::Closed(outcome.clone()));
        outcome
    }

    /// Drops the closed disk and keeps only its figures, so that its files and their locks are free
    /// for the next process to open them.
    fn release(&self) {
        let Some(disk) = self.opened().close() else { return };
        // Tasks of its servers, which have ended, drop it on their next turn.
        for _ in 0..RELEASE_CHECKS {
            if Arc::strong_count(&disk) <= 1 {
                return;
            }
            let turn =
                self.resources.workers.run(|| async { mica_rt::sleep(RELEASE_CHECK_PAUSE).await });
            if turn.is_err() {
                break;
            }
        }
        let image = self.image();
        let image = image.display();
        tracing::warn!(
            "{image} is closed, but still referenced: its files stay open a little longer"
        );
    }

    /// A volume has work of its own.
    fn tend(&self, disk: &Arc<dyn Manage>) {
        if self.volume.volume.is_some() && disk.is_writable() {
            self.resources.tending.tend(Arc::clone(disk));
            if self.resources.gc == GcMode::Auto {
                self.resources.tending.collect(&self.resources.stores);
            }
        }
    }

    /// The process is about to end: a store that does not answer holds up the end of a volume no
    /// longer than `haste` allows. Returns whether it is an open volume. Waits for nothing.
    pub(crate) fn hasten(&self, haste: Haste) -> bool {
        let disk = self.opened().disk().ok().filter(|_| self.volume.volume.is_some());
        let Some(disk) = disk else { return false };
        let begun = self.resources.tending.run(move || async move { disk.hasten(haste).await });
        if let Err(error) = begun {
            tracing::warn!(%error, "closing {:?} may wait for its store", self.name);
        }
        true
    }

    fn is_file(&self) -> bool {
        self.config().is_file()
    }

    /// The format of `image`, which is the configured one or was put on top of it.
    fn format_of(&self, image: &Path) -> Format {
        match self.images.format {
            Format::Raw if *image != *self.first_image => Format::Qcow2,
            format => format,
        }
    }

    /// The format of the image, or what it is instead.
    pub(crate) fn format(&self) -> &'static str {
        match self.volume.volume {
            Some(_) => "volume",
            None => self.format_of(&self.image()).name(),
        }
    }

    fn opened(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock()
    }

    /// The image: for a chain, its active layer.
    pub(crate) fn image(&self) -> Arc<Path> {
        Arc::clone(&self.image.lock())
    }

    /// The image by which its chain is found: the last that was active, if it may name the same
    /// files as the configured one; else that, from which marks lead there.
    fn known_image(&self) -> Arc<Path> {
        let image = self.image();
        let folder = |path: &Path| {
            std::path::absolute(path).ok().and_then(|path| path.parent().map(Path::to_owned))
        };
        match folder(&image) == folder(&self.first_image) {
            true => image,
            false => self.first_image.as_path().into(),
        }
    }

    fn set_image(&self, image: Arc<Path>) {
        *self.image.lock() = image;
    }

    /// While this is held, nobody else changes the disk's life.
    pub(crate) fn lock_changes(&self) -> MutexGuard<'_, ()> {
        self.changes.lock()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

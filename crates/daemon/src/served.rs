//! One disk that is served: its image and its servers, from opening to the end.
//!
//! Invariants
//! - I1 A socket appears only once the image is open: a client that can connect is served, as soon
//!   as [`Served::start`] lets it.
//! - I2 The disk is closed exactly once, after all its servers have ended.
//! - I3 When `stop` or `suspend` returns, the image is closed: a second caller waits for the
//!   first and gets the same outcome.

use crate::config::DiskConfig;
use crate::ephemeral;
use crate::held::Held;
use crate::opened::{Figures, Opened};
use crate::retry::{Patience, while_held};
use crate::servers::{Prepared, Resources, Servers, Subject};
use crate::settings::{DiskSettings, ImageSettings, IndexMode};
use crate::sockets::{Sockets, device_name};
use crate::stats::{self, Counts};
use crate::systemd;
use crate::tls::Security;
use mica_block::{Error, ErrorKind, Manage, Result};
use mica_qcow2::IndexUse;
use mica_rt::timeout;
use mica_serve::{SocketUsers, vhost_user};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// A disk and what serves it.
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) settings: DiskSettings,
    /// How its images are opened.
    pub(crate) images: ImageSettings,
    resources: Resources,
    /// Serializes changes of the disk's life: stop, suspend, resume, resize (I3). Taken before
    /// `state`, which is never held for long.
    changes: Mutex<()>,
    /// The image that is open, or the next to be opened: for a chain, its active layer. The
    /// configuration only names the first.
    image: Mutex<Arc<Path>>,
    opened: Mutex<Opened>,
    /// Where clients connect, until the disk ends for good.
    held: Mutex<Vec<Held>>,
    state: Mutex<State>,
}

enum State {
    /// It is open, and its servers, as far as there are any, answer nobody yet.
    Prepared(Box<Prepared>),
    /// It is being served.
    Serving(Box<Servers>),
    /// It is closing or closed, and nothing serves it.
    Ended(Box<Counts>, End),
}

/// How far the end of a disk is.
#[derive(Clone)]
enum End {
    /// Its servers end and it is being closed.
    Closing,
    /// It is closed. A failure means that some acknowledged writes are not in the image.
    Closed(Result<()>),
    /// It was closed for another process, which failed, and cannot be opened again. Everything
    /// acknowledged is in the image.
    NotResumed,
}

/// The length to grow a disk to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NewLength {
    Exactly(u64),
    /// Longer by this many bytes.
    Longer(u64),
}

/// The outcome of growing a disk.
pub(crate) struct Resized {
    pub(crate) old: u64,
    pub(crate) new: u64,
    /// Whether its virtual machine was told, if it can have one.
    pub(crate) notice: Option<Result<vhost_user::Notice>>,
}

impl Served {
    /// Opens the image, waiting up to `patience` while another process holds it, and prepares to
    /// serve it at inherited sockets and at new ones. Clients wait until [`Self::start`].
    pub(crate) fn prepare(
        config: DiskConfig,
        resources: &Resources,
        inherited: &mut Sockets,
        patience: Duration,
    ) -> Result<Self> {
        let DiskConfig { name, image, settings, images } = config;
        let patience = Patience { limit: patience, pause: HELD_IMAGE_PAUSE };
        let open = || open(&image, &settings, &images, resources);
        let opened = while_held(patience, || false, open)?;
        let served = Self {
            name,
            settings,
            images,
            resources: resources.clone(),
            changes: Mutex::default(),
            image: Mutex::new(image.into()),
            opened: Mutex::new(Opened::Open(opened)),
            held: Mutex::default(),
            state: Mutex::new(State::Prepared(Box::default())),
        };
        match served.listen(inherited).and_then(|()| served.prepare_servers()) {
            Ok(()) => Ok(served),
            Err(error) => {
                // The first failure is the one to report.
                let _ = served.stop();
                Err(error)
            }
        }
    }

    fn listen(&self, inherited: &mut Sockets) -> Result<()> {
        let Self { name, settings, .. } = self;
        let mut held = self.held();
        let device = device_name(name);
        match &settings.vhost_user {
            Some(path) => held.push(inherited.unix(device, path, SocketUsers::AsUmask)?),
            None => held.extend(inherited.named(&device).pop()),
        }
        held.extend(Security::of(settings).listen(name, &settings.nbd, inherited)?);
        Ok(())
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

    /// Says where it is served.
    pub(crate) fn announce(&self) {
        let device = device_name(&self.name);
        let place = |held: &Held| {
            let server = if held.name == device { "vhost-user" } else { "nbd" };
            format!("{server} {}", held.place())
        };
        let mut places: Vec<_> = self.held().iter().map(place).collect();
        places.extend(self.settings.fuse.iter().map(|file| format!("fuse {}", file.display())));
        let (image, places) = (self.image(), places.join(", "));
        let how = if self.image_figures().is_writable { "" } else { ", read-only" };
        let (name, image) = (&self.name, image.display());
        tracing::info!(target: SERVING, "serving {name:?} ({image}{how}) at {places}");
    }

    /// The caller has just opened it.
    fn prepare_servers(&self) -> Result<()> {
        let subject = Subject {
            name: &self.name,
            settings: &self.settings,
            image: self.images.is_file().then(|| self.image().to_path_buf()),
            disk: self.opened().disk()?,
        };
        let prepared = Prepared::new(&subject, &self.held(), &self.resources)?;
        *self.lock() = State::Prepared(Box::new(prepared));
        Ok(())
    }

    /// Ends its servers and closes the disk. A second call only returns the outcome.
    ///
    /// # Errors
    /// If some acknowledged writes are not in the image.
    pub(crate) fn stop(&self) -> Result<()> {
        let _changes = self.lock_changes();
        // The socket files go first.
        self.close_sockets();
        self.end()
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
        self.end().map(|()| true).inspect_err(|_| self.close_sockets())
    }

    fn close_sockets(&self) {
        systemd::close(std::mem::take(&mut *self.held()));
    }

    /// Serves it again, after [`Self::suspend`]. Clients that connect wait until it does, or until
    /// [`Self::give_up`].
    ///
    /// # Errors
    /// Whatever prevents it from being opened or served.
    pub(crate) fn resume(&self) -> Result<()> {
        let _changes = self.lock_changes();
        let opened = open(&self.image(), &self.settings, &self.images, &self.resources)?;
        *self.opened() = Opened::Open(opened);
        *self.lock() = State::Prepared(Box::default());
        self.prepare_servers().inspect_err(|_| {
            // The first failure is the one to report.
            let _ = self.end();
        })?;
        self.start();
        Ok(())
    }

    /// Gives up on [`Self::resume`]: clients do not wait for it any longer.
    pub(crate) fn give_up(&self) {
        let _changes = self.lock_changes();
        if let State::Ended(_, end @ End::Closed(Ok(()))) = &mut *self.lock() {
            *end = End::NotResumed;
        }
        self.close_sockets();
    }

    /// Ends its servers and closes the disk. The caller holds `changes`.
    fn end(&self) -> Result<()> {
        let mut never_started = None;
        let servers = {
            let mut state = self.lock();
            let servers = match &mut *state {
                State::Prepared(prepared) => {
                    never_started = Some(std::mem::take(prepared));
                    Box::default()
                }
                State::Serving(servers) => std::mem::take(servers),
                State::Ended(_, End::Closed(outcome)) => return outcome.clone(),
                State::Ended(_, End::Closing | End::NotResumed) => return Ok(()),
            };
            // Meanwhile callers see what was counted so far.
            *state = State::Ended(Box::new(servers.counts()), End::Closing);
            servers
        };
        drop(never_started);
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
            error.wrap(format!(
                "closing {}: not everything that was written is in it",
                image.display()
            ))
        });
        self.release();
        *self.lock() = State::Ended(Box::new(counts), End::Closed(outcome.clone()));
        outcome
    }

    /// Grows the disk and tells its virtual machine. NBD has no message for that: its clients see
    /// the new length when they reconnect.
    ///
    /// # Errors
    /// As [`Manage::resize`]; `Denied` if it is not served, yet or any longer.
    pub(crate) fn resize(&self, to: NewLength) -> Result<Resized> {
        let changes = self.lock_changes();
        let notifier = match &*self.lock() {
            State::Serving(servers) => servers.resize_notifier(),
            state @ (State::Prepared(_) | State::Ended(..)) => {
                let is_ended = matches!(state, State::Ended(..));
                let when = if is_ended { "no longer" } else { "not yet" };
                let context = format!("the disk {:?} is {when} served", self.name);
                return Err(Error::new(ErrorKind::Denied, context));
            }
        };
        let disk = self.opened().disk()?;
        let old = disk.geometry().len;
        let new = match to {
            NewLength::Exactly(len) => Some(len),
            NewLength::Longer(by) => old.checked_add(by),
        };
        let too_long = || Error::new(ErrorKind::Invalid, "a disk must be shorter than 8 EiB");
        let new = new.filter(|len| i64::try_from(*len).is_ok()).ok_or_else(too_long)?;
        self.resources.workers.run(move || async move { disk.resize(new).await })??;
        // A front end may take its time: hold nothing meanwhile.
        drop(changes);
        let notice = notifier.map(|notify| notify());
        if let Some(Err(error)) = &notice {
            let name = &self.name;
            tracing::warn!(%error, "cannot notify the virtual machine of {name} of its disk's new length");
        }
        Ok(Resized { old, new: self.image_figures().len, notice })
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

    /// Its state, as the control socket reports it.
    pub(crate) fn condition(&self) -> &'static str {
        match &*self.lock() {
            State::Prepared(_) => "starting",
            State::Serving(_) => "serving",
            State::Ended(_, End::Closing) => "draining",
            State::Ended(_, End::Closed(Ok(()))) => "drained",
            State::Ended(_, End::Closed(Err(_)) | End::NotResumed) => "failed",
        }
    }

    /// Why its device does not serve, if it does not.
    pub(crate) fn device_error(&self) -> Option<&'static str> {
        let State::Serving(servers) = &*self.lock() else { return None };
        servers.is_device_broken().then_some(
            "its front end took away memory that it had shared: reconnect it to be served again",
        )
    }

    /// Counters so far.
    pub(crate) fn counts(&self) -> Counts {
        match &*self.lock() {
            State::Prepared(_) => Servers::default().counts(),
            State::Serving(servers) => servers.counts(),
            State::Ended(counts, _) => **counts,
        }
    }

    /// Current clients: NBD connections and the front end of a virtual machine.
    pub(crate) fn clients(&self) -> usize {
        match &*self.lock() {
            State::Serving(servers) => servers.clients(),
            State::Prepared(_) | State::Ended(..) => 0,
        }
    }

    /// Its figures, as JSON.
    pub(crate) fn figures(&self) -> Map<String, Value> {
        stats::document(&self.image_figures(), &self.counts())
    }

    /// What the disk shows of itself, or showed when it was closed.
    pub(crate) fn image_figures(&self) -> Figures {
        self.opened().figures()
    }

    fn opened(&self) -> MutexGuard<'_, Opened> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image: for a chain, its active layer.
    pub(crate) fn image(&self) -> Arc<Path> {
        Arc::clone(&self.image.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Where clients connect.
    pub(crate) fn held(&self) -> MutexGuard<'_, Vec<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// While this is held, nobody else changes the disk's life.
    pub(crate) fn lock_changes(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open(
    image: &Path,
    settings: &DiskSettings,
    images: &ImageSettings,
    resources: &Resources,
) -> Result<Arc<dyn Manage>> {
    let Resources { handles, workers, .. } = resources;
    let index = match settings.index {
        IndexMode::Auto | IndexMode::Read => IndexUse::Read,
        IndexMode::Off => IndexUse::Ignore,
    };
    let (image, images) = match &settings.overlay_folder {
        Some(folder) => ephemeral::overlay(folder, image, images, resources)?,
        None => (image.to_owned(), images.clone()),
    };
    let mut chain = images.chain_options(index)?;
    chain.snapshot.clone_from(&settings.load_snapshot);
    let (options, format) = (images.image_options(Arc::clone(handles))?, images.format()?);
    let (path, writes) = (image.clone(), settings.writes());
    let opened = workers.run(move || async move {
        match writes {
            true => mica_stack::open_writable(&path, format, options, &chain).await,
            false => mica_stack::open(&path, format, options, &chain).await,
        }
    })??;
    if writes && !opened.is_writable() {
        tracing::warn!("{} is served read-only", image.display());
    }
    Ok(opened)
}

//! One disk that is served: its image, its servers, its index.
//!
//! Invariants
//! - I1 A socket appears only when the image is open: who can connect is served.
//! - I2 The disk is closed once, after every server of it has ended.
//! - I3 Whoever is told that it has ended knows that its image is closed: who comes second waits
//!   for who came first, and hears the same.

use crate::config::DiskConfig;
use crate::held::Held;
use crate::opened::{Figures, Opened};
use crate::retry::{Patience, while_held};
use crate::servers::{Common, Servers, Subject};
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

/// How often a closed disk is looked at until nobody holds it any more.
const LET_GO_TURNS: u32 = 1000;
const LET_GO_TURN: Duration = Duration::from_millis(1);
/// How long requests that no client waits for may take to end before a disk is closed.
const IDLE_DEADLINE: Duration = Duration::from_secs(10);
/// How often an image is tried that another process holds.
const HELD_TURN: Duration = Duration::from_millis(20);

/// A disk, and what serves it.
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) settings: DiskSettings,
    /// How its images are opened.
    pub(crate) images: ImageSettings,
    common: Common,
    /// Held by who changes what the disk is: one at a time (I3). Taken before `state`, which nobody
    /// holds for long.
    acts: Mutex<()>,
    /// The image that is open, or is opened next: for a chain, its active layer. What the
    /// configuration named is only the first.
    image: Mutex<Arc<Path>>,
    opened: Mutex<Opened>,
    /// Where clients connect, until it ends for good.
    held: Mutex<Vec<Held>>,
    state: Mutex<State>,
}

enum State {
    /// It is served.
    Serving(Box<Servers>),
    /// It is being closed, or was: nothing serves it. The outcome is there once it is closed.
    Ended(Box<Counts>, Option<Result<()>>),
}

/// How long a disk shall be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NewLength {
    Exactly(u64),
    /// By so many bytes.
    Longer(u64),
}

/// A disk that has become longer.
pub(crate) struct Resized {
    pub(crate) old: u64,
    pub(crate) new: u64,
    /// Whether its machine knows, if it can have one.
    pub(crate) notice: Option<Result<vhost_user::Notice>>,
}

impl Served {
    /// Opens the image, for which it waits with `patience` if another process holds it, and serves
    /// it: at the sockets that came along, and at new ones.
    pub(crate) fn start(
        config: DiskConfig,
        common: &Common,
        came: &mut Sockets,
        patience: Duration,
    ) -> Result<Self> {
        let DiskConfig { name, image, settings, images } = config;
        let patience = Patience { limit: patience, pause: HELD_TURN };
        let open = || open(&image, &settings, &images, common);
        let opened = while_held(patience, || false, open)?;
        let served = Self {
            name,
            settings,
            images,
            common: common.clone(),
            acts: Mutex::default(),
            image: Mutex::new(image.into()),
            opened: Mutex::new(Opened::Open(opened)),
            held: Mutex::default(),
            state: Mutex::new(State::Serving(Box::default())),
        };
        match served.listen(came).and_then(|()| served.serve()) {
            Ok(()) => Ok(served),
            Err(error) => {
                // What failed first is told.
                let _ = served.stop();
                Err(error)
            }
        }
    }

    fn listen(&self, came: &mut Sockets) -> Result<()> {
        let Self { name, settings, .. } = self;
        let mut held = self.held();
        let device = device_name(name);
        match &settings.vhost_user {
            Some(path) => held.push(came.unix(device, path, SocketUsers::AsUmask)?),
            None => held.extend(came.named(&device).pop()),
        }
        held.extend(Security::of(settings).listen(name, &settings.nbd, came)?);
        if held.is_empty() && settings.fuse.is_none() {
            let what = "nothing says where it is served, and no socket came along for it";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(())
    }

    fn serve(&self) -> Result<()> {
        let subject = Subject {
            name: &self.name,
            settings: &self.settings,
            image: self.images.is_file().then(|| self.image().to_path_buf()),
            disk: self.opened().disk()?,
        };
        match &mut *self.lock() {
            State::Serving(servers) => servers.start(&subject, &self.held(), &self.common),
            State::Ended(..) => Ok(()),
        }
    }

    /// Ends its servers, as their own words have it, and then closes the disk. The second time it
    /// only gives the outcome.
    ///
    /// # Errors
    /// If not all that was written is in the image.
    pub(crate) fn stop(&self) -> Result<()> {
        let _act = self.act();
        // Their files go with its servers.
        self.close_sockets();
        self.end()
    }

    /// The same, but where clients connect they wait. False if it has ended before.
    ///
    /// # Errors
    /// As [`Self::stop`]; then nobody waits: what is lost must not be hidden by serving again.
    pub(crate) fn suspend(&self) -> Result<bool> {
        let _act = self.act();
        if !matches!(*self.lock(), State::Serving(_)) {
            return Ok(false);
        }
        self.end().map(|()| true).inspect_err(|_| self.close_sockets())
    }

    fn close_sockets(&self) {
        systemd::close(std::mem::take(&mut *self.held()));
    }

    /// Serves it again, after [`Self::suspend`].
    ///
    /// # Errors
    /// What keeps it from being opened or served.
    pub(crate) fn resume(&self) -> Result<()> {
        let _act = self.act();
        let opened = open(&self.image(), &self.settings, &self.images, &self.common)?;
        *self.opened() = Opened::Open(opened);
        *self.lock() = State::Serving(Box::default());
        self.serve().inspect_err(|_| {
            // What failed first is told.
            let _ = self.end();
        })
    }

    /// Ends what serves it. The caller is the only one that acts.
    fn end(&self) -> Result<()> {
        let servers = {
            let mut state = self.lock();
            let servers = match &mut *state {
                State::Serving(servers) => std::mem::take(servers),
                State::Ended(_, outcome) => return outcome.clone().unwrap_or(Ok(())),
            };
            // Whoever asks meanwhile sees what was counted so far.
            *state = State::Ended(Box::new(servers.counts()), None);
            servers
        };
        let counts = servers.shutdown();
        *self.lock() = State::Ended(Box::new(counts), None);
        let disk = self.opened().disk();
        let closed = disk.and_then(|disk| {
            self.common.workers.run(move || async move {
                // Requests whose clients are gone still have to end.
                let _ = timeout(IDLE_DEADLINE, disk.idle()).await;
                disk.close().await
            })?
        });
        let outcome = closed.map_err(|error| {
            let image = self.image();
            error.wrap(format!("closing {}: not all that was written is in it", image.display()))
        });
        self.let_go();
        *self.lock() = State::Ended(Box::new(counts), Some(outcome.clone()));
        outcome
    }

    /// Makes the disk longer, and tells the machine that has it. NBD has no word for that: its
    /// clients see it when they connect anew.
    ///
    /// # Errors
    /// As [`Manage::resize`]; `Denied` if it is not served any more.
    pub(crate) fn resize(&self, to: NewLength) -> Result<Resized> {
        let act = self.act();
        let notifier = match &*self.lock() {
            State::Serving(servers) => servers.resize_notifier(),
            State::Ended(..) => {
                let context = format!("the disk {:?} is not served any more", self.name);
                return Err(Error::new(ErrorKind::Denied, context));
            }
        };
        let disk = self.opened().disk()?;
        let old = disk.geometry().len;
        let new = match to {
            NewLength::Exactly(len) => Some(len),
            NewLength::Longer(by) => old.checked_add(by),
        };
        let too_long = || Error::new(ErrorKind::Invalid, "a disk is shorter than 8 EiB");
        let new = new.filter(|len| i64::try_from(*len).is_ok()).ok_or_else(too_long)?;
        self.common.workers.run(move || async move { disk.resize(new).await })??;
        // A front end may take its time, and is told by somebody who holds nothing.
        drop(act);
        let notice = notifier.map(|notify| notify());
        if let Some(Err(error)) = &notice {
            let name = &self.name;
            tracing::warn!(%error, "the machine of {name} does not know its disk's new length");
        }
        Ok(Resized { old, new: self.image_figures().len, notice })
    }

    /// Leaves nothing of a closed disk but what was counted: its files and their locks are free for
    /// whoever comes next.
    fn let_go(&self) {
        let Some(disk) = self.opened().close() else { return };
        // Tasks of its servers, which have ended, drop it with their next turn.
        for _ in 0..LET_GO_TURNS {
            if Arc::strong_count(&disk) <= 1 {
                return;
            }
            let turn = self.common.workers.run(|| async { mica_rt::sleep(LET_GO_TURN).await });
            if turn.is_err() {
                break;
            }
        }
        let image = self.image();
        let image = image.display();
        tracing::warn!("{image} is closed, and its files are free only later: it is still held");
    }

    /// What is being done with it.
    pub(crate) fn condition(&self) -> &'static str {
        match &*self.lock() {
            State::Serving(_) => "serving",
            State::Ended(_, None) => "draining",
            State::Ended(_, Some(Ok(()))) => "drained",
            State::Ended(_, Some(Err(_))) => "failed",
        }
    }

    /// What keeps its device from serving, if anything does.
    pub(crate) fn device_error(&self) -> Option<&'static str> {
        let State::Serving(servers) = &*self.lock() else { return None };
        servers.is_device_broken().then_some(
            "its front end took away memory that it had shared: it is served when it connects anew",
        )
    }

    /// What was done so far.
    pub(crate) fn counts(&self) -> Counts {
        match &*self.lock() {
            State::Serving(servers) => servers.counts(),
            State::Ended(counts, _) => **counts,
        }
    }

    /// Who has it now: NBD connections, and the front end of a machine.
    pub(crate) fn clients(&self) -> usize {
        match &*self.lock() {
            State::Serving(servers) => servers.clients(),
            State::Ended(..) => 0,
        }
    }

    /// Its figures, as JSON.
    pub(crate) fn figures(&self) -> Map<String, Value> {
        stats::document(&self.image_figures(), &self.counts())
    }

    /// What its disk shows of itself, or showed when it was closed.
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

    /// Who has this is the only one that acts.
    pub(crate) fn act(&self) -> MutexGuard<'_, ()> {
        self.acts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open(
    image: &Path,
    settings: &DiskSettings,
    images: &ImageSettings,
    common: &Common,
) -> Result<Arc<dyn Manage>> {
    let Common { handles, workers, .. } = common;
    let index = match settings.index {
        IndexMode::Auto | IndexMode::Read => IndexUse::Read,
        IndexMode::Off => IndexUse::Ignore,
    };
    let mut chain = images.chain_options(index)?;
    chain.snapshot.clone_from(&settings.load_snapshot);
    let (options, format) = (images.image_options(Arc::clone(handles))?, images.format()?);
    let (path, writes) = (image.to_owned(), settings.writes());
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

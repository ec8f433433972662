//! One disk that is served: its image, its servers, its index.
//!
//! Invariants
//! - I1 A socket appears only when the image is open: who can connect is served.
//! - I2 The disk is closed once, after every server of it has ended.

use crate::config::{DiskConfig, IndexMode};
use crate::indexer::Indexer;
use crate::stats;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2::IndexUse;
use mica_serve::nbd::{Export, Limits};
use mica_serve::{Listener, Workers, fuse, nbd, vhost_user};
use mica_stack::{Format, OpenDisk};
use mica_store::Handles;
use serde_json::Value;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A disk, and what serves it.
pub(crate) struct Served {
    pub(crate) config: DiskConfig,
    pub(crate) opened: OpenDisk,
    workers: Arc<Workers>,
    unmounter: Arc<fuse::Unmounter>,
    state: Mutex<State>,
}

enum State {
    /// It is served.
    Serving(Servers),
    /// It is being closed, or was: nothing serves it, and its image is free once it is closed.
    Ended(Counts),
}

/// What serves a disk.
#[derive(Default)]
struct Servers {
    nbd: Option<nbd::Running>,
    device: Option<vhost_user::Running>,
    file: Option<fuse::Running>,
    indexer: Option<Indexer>,
}

/// What the servers of a disk did.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) nbd: nbd::Counters,
    pub(crate) device: Option<vhost_user::Counters>,
    pub(crate) file: Option<fuse::Counters>,
}

impl Served {
    /// Opens the image, and serves it.
    pub(crate) fn start(
        config: DiskConfig,
        handles: &Arc<Handles>,
        workers: &Arc<Workers>,
        unmounter: &Arc<fuse::Unmounter>,
    ) -> Result<Self> {
        let opened = open(&config, handles, workers)?;
        let (workers, unmounter) = (Arc::clone(workers), Arc::clone(unmounter));
        let state = Mutex::new(State::Serving(Servers::default()));
        let served = Self { config, opened, workers, unmounter, state };
        match served.serve() {
            Ok(()) => Ok(served),
            Err(error) => {
                // What failed first is told.
                let _ = served.stop();
                Err(error)
            }
        }
    }

    fn serve(&self) -> Result<()> {
        let config = &self.config;
        let mut state = self.lock();
        let State::Serving(servers) = &mut *state else { return Ok(()) };
        if let Some(path) = &config.vhost_user {
            let serial = config.serial.as_ref().unwrap_or(&config.name);
            servers.device = Some(vhost_user::Server::start(vhost_user::ServerConfig {
                listener: Listener::unix(path)?,
                disk: Arc::clone(&self.opened.disk),
                queues: config.num_queues,
                serial: serial.clone(),
                discard: config.discard.into(),
                rates: config.rates(),
                workers: Arc::clone(&self.workers),
            })?);
        }
        if !config.nbd.is_empty() {
            servers.nbd = Some(nbd::Server::start(nbd::ServerConfig {
                listeners: config.security().listen(&config.nbd)?,
                exports: vec![Export {
                    disk: Arc::clone(&self.opened.disk),
                    name: config.export_name.clone(),
                    description: config.description.clone(),
                    discard: config.discard.into(),
                }],
                workers: Arc::clone(&self.workers),
                limits: Limits { connections_max: config.shared, ..Limits::default() },
            })?);
        }
        if let Some(file) = &config.fuse {
            let is_file = !matches!(config.images().format()?, Format::Null);
            servers.file = Some(fuse::Server::start(fuse::ServerConfig {
                file: file.clone(),
                disk: Arc::clone(&self.opened.disk),
                image: is_file.then(|| config.image.clone()),
                discard: config.discard.into(),
                allow_other: config.allow_other.into(),
                workers: Arc::clone(&self.workers),
                unmounter: Arc::clone(&self.unmounter),
            })?);
        }
        if let (Some(chain), IndexMode::Auto) = (&self.opened.chain, config.index) {
            servers.indexer = Some(Indexer::start(Arc::clone(chain))?);
        }
        Ok(())
    }

    /// Ends its servers, as their own words have it, and then closes the disk. Does nothing the
    /// second time.
    ///
    /// # Errors
    /// If not all that was written is in the image.
    pub(crate) fn stop(&self) -> Result<()> {
        let servers = {
            let mut state = self.lock();
            let State::Serving(servers) = &mut *state else { return Ok(()) };
            let servers = std::mem::take(servers);
            // Whoever asks meanwhile sees what was counted so far.
            *state = State::Ended(servers.counts());
            servers
        };
        let counts = servers.shutdown();
        *self.lock() = State::Ended(counts);
        let disk = Arc::clone(&self.opened.disk);
        self.workers.run(move || async move { disk.close().await })?.map_err(|error| {
            let image = self.config.image.display();
            error.wrap(format!("closing {image}: not all that was written is in it"))
        })
    }

    /// Whether it is served.
    pub(crate) fn is_served(&self) -> bool {
        matches!(*self.lock(), State::Serving(_))
    }

    /// What was done so far.
    pub(crate) fn counts(&self) -> Counts {
        match &*self.lock() {
            State::Serving(servers) => servers.counts(),
            State::Ended(counts) => *counts,
        }
    }

    /// NBD connections that are open now.
    pub(crate) fn connections(&self) -> usize {
        match &*self.lock() {
            State::Serving(Servers { nbd: Some(nbd), .. }) => nbd.connections_open(),
            _ => 0,
        }
    }

    /// Its figures, as JSON.
    pub(crate) fn figures(&self) -> Value {
        stats::document(&*self.opened.disk, &self.counts())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Servers {
    fn counts(&self) -> Counts {
        Counts {
            nbd: self.nbd.as_ref().map(nbd::Running::counters).unwrap_or_default(),
            device: self.device.as_ref().map(vhost_user::Running::counters),
            file: self.file.as_ref().map(fuse::Running::counters),
        }
    }

    fn shutdown(self) -> Counts {
        if let Some(indexer) = self.indexer {
            indexer.stop();
        }
        Counts {
            file: self.file.map(fuse::Running::shutdown),
            device: self.device.map(vhost_user::Running::shutdown),
            nbd: self.nbd.map(nbd::Running::shutdown).unwrap_or_default(),
        }
    }
}

fn open(config: &DiskConfig, handles: &Arc<Handles>, workers: &Workers) -> Result<OpenDisk> {
    let index = match config.index {
        IndexMode::Auto | IndexMode::Read => IndexUse::Read,
        IndexMode::Off => IndexUse::Ignore,
    };
    let settings = config.images();
    let mut chain = settings.chain_options(index)?;
    chain.snapshot.clone_from(&config.load_snapshot);
    let images = settings.image_options(Arc::clone(handles))?;
    let format = settings.format()?;
    let writes = !config.read_only && config.load_snapshot.is_none();
    let image = config.image.clone();
    let opened = workers.run(move || async move {
        match writes {
            true => mica_stack::open_writable(&image, format, images, &chain).await,
            false => mica_stack::open(&image, format, images, &chain).await,
        }
    })??;
    if config.load_snapshot.is_some() && opened.chain.is_none() {
        let context = "--load-snapshot: only a qcow2 image has snapshots";
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    if writes && !opened.disk.is_writable() {
        tracing::warn!("{} is served read-only", config.image.display());
    }
    Ok(opened)
}

//! What serves a disk: NBD, vhost-user and FUSE, and what keeps its index.

use crate::addresses::Addresses;
use crate::descriptors::Need;
use crate::helper::Outside;
use crate::indexer::{Indexed, Indexers};
use crate::one_by_one::OneByOne;
use crate::settings::{Discards, DiskSettings, GcMode, IndexMode, ZeroDetection};
use crate::stats::Counts;
use crate::tending::Tending;
use mica_block::{Disk, Manage, Result};
use mica_qcow2::MapCache;
use mica_rt::sync::SharedLock;
use mica_serve::fuse::Mapping;
use mica_serve::nbd::{Context, Export, Limits, Seat};
use mica_serve::{Limiter, Listener, Throttled, Workers, fuse, nbd, vhost_user};
use mica_stack::{DetectZeroes, Stores, Window, WindowPlace, ZeroSpace};
use mica_store::{Handles, SetAside};
use std::path::PathBuf;
use std::sync::Arc;

/// What all disks of a process share.
#[derive(Clone)]
pub(crate) struct Resources {
    pub(crate) handles: Arc<Handles>,
    pub(crate) workers: Arc<Workers>,
    /// Does what the sandbox forbids.
    pub(crate) outside: Outside,
    /// Mounts the files that disks are served as.
    pub(crate) mounts: Arc<dyn fuse::Mounts>,
    /// Memory for the maps of all disks.
    pub(crate) cache: MapCache,
    /// Where volumes are.
    pub(crate) stores: Arc<Stores>,
    /// Write the indexes of chains.
    pub(crate) indexers: Arc<Indexers>,
    /// Held while an image is opened that could not be while others were ([`Served::prepare`]).
    ///
    /// [`Served::prepare`]: crate::served::Served::prepare
    pub(crate) one_by_one: Arc<OneByOne>,
    /// Lets volumes do their own work.
    pub(crate) tending: Arc<Tending>,
    /// Whether their stores are collected in the background.
    pub(crate) gc: GcMode,
    /// Where NBD clients connect.
    pub(crate) addresses: Arc<Addresses>,
}

/// What is about to serve a disk, and answers nobody yet. Dropping it ends it.
#[derive(Default)]
pub(crate) struct Prepared {
    nbd: Option<nbd::Prepared>,
    device: Option<vhost_user::Prepared>,
    file: Option<mica_serve::Prepared<fuse::Running>>,
    limiter: Option<Arc<Limiter>>,
    /// The disk whose index is kept, and with what.
    indexed: Option<(Arc<dyn Manage>, Resources)>,
    descriptors: Option<SetAside>,
}

/// What serves a disk.
#[derive(Default)]
pub(crate) struct Servers {
    nbd: Option<nbd::Running>,
    device: Option<vhost_user::Running>,
    file: Option<fuse::Running>,
    limiter: Option<Arc<Limiter>>,
    indexed: Option<Indexed>,
    /// For its sockets and clients.
    descriptors: Option<SetAside>,
}

/// The disk to serve, and how.
pub(crate) struct Subject<'a> {
    pub(crate) name: &'a str,
    pub(crate) settings: &'a DiskSettings,
    /// The file of its image, if it has one.
    pub(crate) image: Option<PathBuf>,
    pub(crate) disk: Arc<dyn Manage>,
    /// The part of it that clients see, if not all.
    pub(crate) part: Option<WindowPlace>,
    /// The socket of its device, if it has one.
    pub(crate) device: Option<Listener>,
    /// Its seats where NBD clients connect.
    pub(crate) seats: Vec<Arc<Seat>>,
    /// What they can ask about its parts.
    pub(crate) contexts: Vec<Arc<dyn Context>>,
}

impl Prepared {
    /// Prepares what the settings ask for, at the sockets of the subject and as a file. All that
    /// can fail is done.
    pub(crate) fn new(subject: Subject<'_>, resources: &Resources) -> Result<Self> {
        let aside = resources.handles.set_aside(Need::of(subject.settings).total());
        let mut all = Self { descriptors: Some(aside), ..Self::default() };
        let Subject { name, settings, image, disk: managed, part, device, seats, contexts } =
            subject;
        let disk = shown(&managed, part, settings)?;
        let limiter = Limiter::shared(settings.rates());
        all.limiter.clone_from(&limiter);
        // A device asks the limiter itself, before it takes a request.
        let limited: Arc<dyn Disk> = match &limiter {
            Some(limiter) => Arc::new(Throttled::new(Arc::clone(&disk), Arc::clone(limiter))),
            None => Arc::clone(&disk),
        };
        let Resources { workers, mounts, .. } = resources;
        let (has_nbd, has_file) = (!seats.is_empty(), settings.fuse.is_some());
        let has_device = device.is_some();
        let edges = Arc::<SharedLock>::default();
        if let Some(listener) = device {
            all.device = Some(vhost_user::Server::prepare(vhost_user::ServerConfig {
                listener,
                disk: Arc::clone(&disk),
                queues: settings.num_queues(),
                serial: settings.serial.as_deref().unwrap_or(name).to_owned(),
                discard: settings.discard.into(),
                // A guest writes whole sectors.
                edges: (has_nbd || has_file).then(|| Arc::clone(&edges)),
                limiter,
                workers: Arc::clone(workers),
            })?);
        }
        if let Some(seat) = seats.first() {
            all.nbd = Some(nbd::Server::prepare(nbd::ServerConfig {
                export: Export {
                    disk: Arc::clone(&limited),
                    name: seat.name().to_owned(),
                    description: settings.description.clone().unwrap_or_default(),
                    discard: settings.discard.into(),
                    edges: Arc::clone(&edges),
                    contexts,
                },
                seats,
                workers: Arc::clone(workers),
                limits: Limits { connections_max: settings.clients_max(), ..Limits::default() },
            })?);
        }
        if let Some(file) = &settings.fuse {
            all.file = Some(fuse::Server::prepare(fuse::ServerConfig {
                file: file.clone(),
                disk: limited,
                image,
                discard: settings.discard.into(),
                mapping: if has_nbd || has_device { Mapping::Refused } else { Mapping::Allowed },
                edges,
                allow_other: settings.allow_other.unwrap_or_default().into(),
                workers: Arc::clone(workers),
                mounts: Arc::clone(mounts),
            })?);
        }
        if settings.index == IndexMode::Auto {
            all.indexed = Some((managed, resources.clone()));
        }
        Ok(all)
    }

    /// Answers clients from now on.
    pub(crate) fn start(self) -> Servers {
        let Self { nbd, device, file, limiter, indexed, descriptors } = self;
        let keep_index = |(disk, resources): (Arc<dyn Manage>, Resources)| {
            Indexed::start(disk, &resources.indexers, &resources.workers.handles()[0])
        };
        Servers {
            nbd: nbd.map(nbd::Prepared::start),
            device: device.map(vhost_user::Prepared::start),
            file: file.map(mica_serve::Prepared::start),
            limiter,
            indexed: indexed.and_then(keep_index),
            descriptors,
        }
    }
}

/// The disk as its clients see it.
fn shown(
    managed: &Arc<dyn Manage>,
    part: Option<WindowPlace>,
    settings: &DiskSettings,
) -> Result<Arc<dyn Disk>> {
    let mut disk: Arc<dyn Disk> = Arc::clone(managed) as _;
    if let Some(place) = part {
        disk = Arc::new(Window::new(disk, place)?);
    }
    let space = match (settings.detect_zeroes, settings.discard) {
        (ZeroDetection::Off, _) => return Ok(disk),
        (ZeroDetection::Unmap, Discards::Unmap) => ZeroSpace::Freed,
        (ZeroDetection::On | ZeroDetection::Unmap, _) => ZeroSpace::Kept,
    };
    Ok(Arc::new(DetectZeroes::new(disk, space)))
}

impl Servers {
    /// Counters so far.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            nbd: self.nbd.as_ref().map(nbd::Running::counters).unwrap_or_default(),
            device: self.device.as_ref().map(vhost_user::Running::counters),
            file: self.file.as_ref().map(fuse::Running::counters),
            delayed: self.limiter.as_ref().map_or(0, |limiter| limiter.delayed()),
        }
    }

    /// Whether an NBD client was ever served.
    pub(crate) fn had_clients(&self) -> bool {
        self.nbd.as_ref().is_some_and(|nbd| nbd.counters().sessions > 0)
    }

    /// Current clients: NBD connections and the front end of a virtual machine.
    pub(crate) fn clients(&self) -> usize {
        let nbd = self.nbd.as_ref().map_or(0, nbd::Running::connections_open);
        let device = self.device.as_ref().is_some_and(vhost_user::Running::is_connected);
        nbd + usize::from(device)
    }

    /// Whether the device's front end took away memory that it had shared.
    pub(crate) fn is_device_broken(&self) -> bool {
        self.device.as_ref().is_some_and(vhost_user::Running::is_broken)
    }

    /// Call it to tell the virtual machine that its disk has grown.
    pub(crate) fn resize_notifier(
        &self,
    ) -> Option<impl FnOnce() -> Result<vhost_user::Notice> + use<>> {
        self.device.as_ref().map(vhost_user::Running::resize_notifier)
    }

    /// Ends all of them and returns their final counters.
    pub(crate) fn shutdown(self) -> Counts {
        let Self { nbd, device, file, limiter, indexed, descriptors } = self;
        if let Some(indexed) = indexed {
            indexed.stop();
        }
        let counts = Counts {
            file: file.map(fuse::Running::shutdown),
            device: device.map(vhost_user::Running::shutdown),
            nbd: nbd.map(nbd::Running::shutdown).unwrap_or_default(),
            delayed: limiter.map_or(0, |limiter| limiter.delayed()),
        };
        drop(descriptors);
        counts
    }
}

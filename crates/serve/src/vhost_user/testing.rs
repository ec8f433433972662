//! A guest with its memory, its rings and its monitor, scripted by a test.

mod disk;
mod front_end;
mod ring;

pub(super) use disk::TestDisk;
pub(super) use front_end::{FrontEnd, code, event, inflight_message, region};
pub(super) use ring::{Ring, Seg, Way};

use super::memory::{Memory, Region};
use super::server::{Running, Server, ServerConfig};
use crate::discard::Discard;
use crate::limit::{Limiter, Rates};
use crate::listener::Listener;
use crate::workers::Workers;
use mica_rt::Backend;
use mica_rt::sync::SharedLock;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{Bytes, GuestAddress};

pub(super) const MIB: u64 = 1 << 20;
/// Where the front end has guest address 0.
pub(super) const USER: u64 = 0x7f00_0000_0000;

/// A guest's memory: regions one behind the other, from address 0 on.
pub(super) struct Guest {
    pub(super) files: Vec<(VhostUserMemoryRegion, File)>,
    pub(super) memory: Memory,
}

impl Guest {
    pub(super) fn new(lens: &[u64]) -> Arc<Self> {
        Self::of(lens, memfd)
    }

    /// Whose memory its front end may truncate.
    pub(super) fn unsealed(lens: &[u64]) -> Arc<Self> {
        Self::of(lens, |len| {
            let file = tempfile::tempfile().expect("a file");
            file.set_len(len).expect("a length");
            file
        })
    }

    fn of(lens: &[u64], file: impl Fn(u64) -> File) -> Arc<Self> {
        let mut start = 0;
        let mut files = Vec::new();
        for len in lens {
            let layout = VhostUserMemoryRegion::new(start, *len, USER + start, 0);
            files.push((layout, file(*len)));
            start += len;
        }
        let lost = Arc::default();
        let map = |(layout, file): &(VhostUserMemoryRegion, File)| {
            Region::map(*layout, file.try_clone().expect("a file"), &lost).expect("maps")
        };
        let memory = Memory::new(files.iter().map(map).collect(), &lost).expect("in order");
        Arc::new(Self { files, memory })
    }

    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.guest.write_slice(bytes, GuestAddress(at)).expect("guest memory");
    }

    pub(super) fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.guest.read_slice(&mut bytes, GuestAddress(at)).expect("guest memory");
        bytes
    }
}

/// Memory that can be sealed.
pub(super) fn memfd(len: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("guest", flags).expect("a memfd");
    ftruncate(&file, len).expect("a length");
    file.into()
}

/// A server with its disk.
pub(super) struct World {
    directory: tempfile::TempDir,
    pub(super) workers: Arc<Workers>,
    pub(super) disk: Arc<TestDisk>,
    pub(super) server: Option<Running>,
    pub(super) discard: Discard,
    pub(super) rates: Rates,
    pub(super) edges: Option<Arc<SharedLock>>,
    pub(super) queues: u16,
}

impl World {
    pub(super) fn new(disk: TestDisk) -> Self {
        Self::with(disk, Rates::default(), 2)
    }

    pub(super) fn with(disk: TestDisk, rates: Rates, queues: u16) -> Self {
        let mut world = Self {
            directory: tempfile::tempdir().expect("a directory"),
            workers: Workers::start(2, Backend::Auto).expect("workers"),
            disk: Arc::new(disk),
            server: None,
            discard: Discard::default(),
            rates,
            edges: None,
            queues,
        };
        world.serve();
        world
    }

    /// Starts a server where there is none.
    pub(super) fn serve(&mut self) {
        let config = ServerConfig {
            listener: Listener::unix(&self.path()).expect("listens"),
            disk: Arc::clone(&self.disk) as _,
            queues: self.queues,
            serial: "a serial number".to_owned(),
            discard: self.discard,
            edges: self.edges.clone(),
            limiter: Limiter::shared(self.rates),
            workers: Arc::clone(&self.workers),
        };
        self.server = Some(Server::start(config).expect("starts"));
    }

    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub(super) fn connect(&self) -> FrontEnd {
        FrontEnd::connect(&self.path())
    }

    /// A front end with its guest's memory shared, and its rings running.
    pub(super) fn guest(&self, way: Way) -> (FrontEnd, Vec<Ring>) {
        let guest = Guest::new(&[2 * MIB, 2 * MIB]);
        let front_end = self.connect();
        front_end.negotiate(way);
        front_end.share(&guest);
        let rings: Vec<Ring> =
            (0..self.queues).map(|index| Ring::new(&guest, index, 64, way)).collect();
        rings.iter().for_each(|ring| front_end.start(ring));
        (front_end, rings)
    }

    /// Shows that a front end that does nothing wrong is served.
    pub(super) fn assert_serves(&self) {
        let (_front_end, mut rings) = self.guest(Way::default());
        assert_eq!(rings[0].write(8, &[7; 512]), 0);
        assert_eq!(rings[0].read(8, 512), (0, vec![7; 512]));
    }

    pub(super) fn counters(&self) -> super::Counters {
        self.server.as_ref().expect("it runs").counters()
    }
}

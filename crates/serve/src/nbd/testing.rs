//! A server without sockets, its disks, and a client that is scripted by a test.

mod client;
mod disks;

#[cfg(test)]
pub(super) use crate::testing::memory::{Event, MemoryDisk};
pub(super) use client::{
    Client, EINVAL, EIO, ENOSPC, ENOTSUP, EOVERFLOW, EPERM, Reply, assemble, decode_error,
    info_data, meta_data, option_header, request,
};
pub(super) use disks::{PatternDisk, RUN_BYTES};

use super::connection::{Door, Secured, serve};
use super::contexts::Context;
use super::entry::Entry;
use super::export::Export;
use super::exports::{Exports, Seat};
use super::handshake::Handshakes;
use super::limits::Limits;
use super::stats::Counters;
use crate::budget::{POOL_BYTES, Pool};
#[cfg(test)]
use crate::budget::{Party, Share};
use crate::discard::Discard;
use crate::testing::gauge::Gauge;
use disks::BrokenDisk;
use mica_block::Disk;
use mica_rt::sync::Signal;
use mica_rt::{Backend, Executor, Stream, sleep, spawn};
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

pub(super) const MIB: u64 = 1 << 20;

/// A server without sockets: connections are streams in memory.
pub(super) struct World {
    /// What its clients have together.
    pub(super) pool: Arc<Pool>,
    pub(super) exports: Arc<Exports>,
    entry: Arc<Entry>,
    /// Where the disk is.
    pub(super) seat: Seat,
    handshakes: Arc<Handshakes>,
    /// Raised when the world ends.
    closed: Arc<Signal>,
    open: Rc<Cell<usize>>,
    /// What the connections have that come now.
    pub(super) secured: Secured,
    /// See [`PatternDisk::reading`].
    pub(super) reading: Arc<Gauge>,
}

/// Runs `test` in the simulator, in several orders of events.
pub(super) fn simulated(disk: impl Fn() -> PatternDisk, test: impl AsyncFn(World)) {
    simulated_seeds(0..5, disk, test);
}

/// As [`simulated`], in as many orders as there are `seeds`.
pub(super) fn simulated_seeds(
    seeds: Range<u64>,
    disk: impl Fn() -> PatternDisk,
    test: impl AsyncFn(World),
) {
    for seed in seeds {
        let disk = disk();
        let reading = Arc::clone(&disk.reading);
        simulated_once(seed, World::new(Arc::new(disk), Discard::default(), reading), &test);
    }
}

/// As [`simulated`], once, with contexts besides `base:allocation`.
#[cfg(test)]
pub(super) fn simulated_with_contexts(
    disk: PatternDisk,
    contexts: Vec<Arc<dyn Context>>,
    test: impl AsyncFn(World),
) {
    let reading = Arc::clone(&disk.reading);
    simulated_once(0, World::with(contexts, Arc::new(disk), Discard::default(), reading), &test);
}

/// As [`simulated`], with a disk that is written.
#[cfg(test)]
pub(super) fn simulated_memory(
    disk: impl Fn() -> MemoryDisk,
    discard: Discard,
    test: impl AsyncFn(World, Arc<MemoryDisk>),
) {
    for seed in 0..5 {
        let disk = Arc::new(disk());
        let world = World::new(Arc::clone(&disk) as _, discard, Arc::default());
        simulated_once(seed, world, &async |world| test(world, Arc::clone(&disk)).await);
    }
}

/// As [`simulated`], with a disk that cannot plan.
pub(super) fn simulated_with_broken_disk(test: impl AsyncFn(World)) {
    simulated_once(0, World::new(Arc::new(BrokenDisk), Discard::default(), Arc::default()), &test);
}

fn simulated_once(seed: u64, world: World, test: &impl AsyncFn(World)) {
    let executor = Executor::new(Backend::Sim { seed }).expect("the simulator");
    executor.block_on(test(world));
}

impl World {
    /// Others that leave nothing of the budget that is worth taking.
    #[cfg(test)]
    pub(super) fn others(&self) -> Vec<Share> {
        let all = usize::MAX / 2;
        let share = |_| {
            let share = Share::new(&Party::new(&self.pool), 0, all);
            share.up_to(all);
            share
        };
        (0..200).map(share).collect()
    }

    fn new(disk: Arc<dyn Disk>, discard: Discard, reading: Arc<Gauge>) -> Self {
        Self::with(Vec::new(), disk, discard, reading)
    }

    fn with(
        contexts: Vec<Arc<dyn Context>>,
        disk: Arc<dyn Disk>,
        discard: Discard,
        reading: Arc<Gauge>,
    ) -> Self {
        let export = Export {
            disk,
            name: "disk".to_owned(),
            description: "a pattern".to_owned(),
            discard,
            edges: Arc::default(),
            contexts,
        };
        let pool = Pool::new(POOL_BYTES);
        let entry = Arc::new(Entry::new(export, Limits::default(), 1, &pool));
        let exports = Arc::<Exports>::default();
        let seat = exports.join("disk").expect("the first");
        seat.serves(&entry);
        Self {
            pool,
            exports,
            entry,
            seat,
            handshakes: Arc::default(),
            closed: Arc::default(),
            open: Rc::default(),
            secured: None,
            reading,
        }
    }

    /// A client that has said nothing yet.
    pub(super) fn connect(&self) -> Client {
        let (near, far) = Stream::memory_pair(PIPE_BYTES);
        let secured = self.secured.clone();
        let door = Arc::new(Door::new(Arc::clone(&self.exports), secured, Limits::default()));
        let dismissed = [Arc::default(), Arc::clone(&self.closed)];
        let handshake = self.handshakes.enter().expect("somebody says nothing");
        let open = Rc::clone(&self.open);
        open.set(open.get() + 1);
        spawn(async move {
            serve(far, door, dismissed, 0, handshake).await;
            open.set(open.get() - 1);
        });
        Client::new(near)
    }

    /// A client in the transmission phase, with structured replies and block status.
    pub(super) async fn session(&self) -> Client {
        self.session_with(b"base:allocation").await
    }

    /// As [`Self::session`], with the metadata `context`.
    pub(super) async fn session_with(&self, context: &[u8]) -> Client {
        let mut client = self.connect();
        client.greet(3).await;
        client.option(8, &[]).await;
        client.expect_ack(8).await;
        client.option(10, &meta_data(b"disk", &[context])).await;
        assert_eq!(client.option_replies(10).await.len(), 2);
        client.option(7, &info_data(b"disk", &[])).await;
        assert_eq!(client.option_replies(7).await.len(), 2);
        client
    }

    /// A client in the transmission phase, with simple replies.
    pub(super) async fn simple_session(&self) -> Client {
        let mut client = self.connect();
        client.greet(3).await;
        client.option(7, &info_data(b"", &[])).await;
        assert_eq!(client.option_replies(7).await.len(), 2);
        client
    }

    /// Begins a shutdown.
    pub(super) fn stop(&self) {
        self.closed.raise();
        self.entry.stop.raise();
    }

    pub(super) fn counters(&self) -> Counters {
        self.entry.counters()
    }

    /// Connections that the server has not ended.
    pub(super) fn open(&self) -> usize {
        self.open.get()
    }

    /// Waits, in virtual time, until the server has ended all but `count` connections.
    pub(super) async fn until_open(&self, count: usize) {
        for _ in 0..10_000 {
            if self.open() == count {
                return;
            }
            sleep(Duration::from_millis(1)).await;
        }
        panic!("{} connections are open, not {count}", self.open());
    }

    /// Shows that a client that does nothing wrong is served.
    pub(super) async fn assert_serves(&self) {
        let mut client = self.session().await;
        client.request(0, 0, 77, 0, 512).await;
        assert_eq!(client.reply_data(77).await.len(), 512);
        client.request(0, 2, 78, 0, 0).await;
        assert!(client.is_closed().await);
    }
}

/// Bytes that a direction of a connection holds, as a socket buffer does.
const PIPE_BYTES: usize = 64 << 10;

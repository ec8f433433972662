use super::*;
use mica_block::{
    Disk, Error, Extent, Geometry, IndexProgress, IoFuture, LocalFuture, MapStats, Planned, Result,
    SealState, WriteStats,
};
use mica_rt::Buf;
use mica_rt::sync::Notify;
use mica_serve::Workers;
use mica_stack::NullDisk;
use mica_units::{GuestRange, LayerNumber};
use std::borrow::Cow;
use std::path::PathBuf;
use std::time::Duration;

/// Chains whose builds hang until they are let go.
#[derive(Default)]
struct Storage {
    state: Mutex<Builds>,
    changed: Condvar,
}

#[derive(Default)]
struct Builds {
    begun: Vec<u64>,
    running: usize,
    is_let_go: bool,
}

struct FakeChain {
    disk: NullDisk,
    base: u64,
    storage: Arc<Storage>,
    called: Notify,
}

impl Storage {
    fn chain(self: &Arc<Self>, base: u64) -> Arc<dyn Manage> {
        let disk = NullDisk::new(1 << 20).expect("a disk");
        let (storage, called) = (Arc::clone(self), Notify::default());
        Arc::new(FakeChain { disk, base, storage, called })
    }

    fn wait_until(&self, is_so: impl Fn(&Builds) -> bool) -> Vec<u64> {
        const LIMIT: Duration = Duration::from_secs(60);
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |state| !is_so(state), LIMIT);
        assert!(is_so(&state), "{:?}, {} running", state.begun, state.running);
        state.begun.clone()
    }

    fn let_go(&self, is_let_go: bool) {
        self.state.lock().is_let_go = is_let_go;
        self.changed.notify_all();
    }

    fn build(&self, base: u64) {
        let mut state = self.state.lock();
        state.begun.push(base);
        state.running += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| !state.is_let_go);
        state.running -= 1;
        self.changed.notify_all();
    }
}

impl Disk for FakeChain {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        self.disk.plan(range, extents)
    }

    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        self.disk.read(extent, buf)
    }
}

impl Manage for FakeChain {
    fn resize(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.disk.resize(len)
    }

    fn idle(&self) -> LocalFuture<'_, ()> {
        self.disk.idle()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.disk.close()
    }

    fn weakness(&self) -> Option<Cow<'static, str>> {
        None
    }

    fn hasten(&self, _haste: mica_block::Haste) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn latch(&self) -> Option<Error> {
        None
    }

    fn write_stats(&self) -> WriteStats {
        WriteStats::default()
    }

    fn map_stats(&self) -> MapStats {
        MapStats::default()
    }

    fn layer_count(&self) -> usize {
        2
    }

    fn layer_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn data_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn is_encrypted(&self, _position: usize) -> bool {
        false
    }

    fn layer_position(&self, _layer: LayerNumber) -> usize {
        0
    }

    fn index(&self) -> Option<&dyn ManageIndex> {
        Some(self)
    }

    fn chain(&self) -> Option<&dyn mica_block::ManageChain> {
        None
    }

    fn bitmaps(&self) -> Option<&dyn mica_block::ManageBitmaps> {
        None
    }

    fn snapshots(&self) -> Option<&dyn mica_block::ManageSnapshots> {
        None
    }

    fn volume(&self) -> Option<&dyn mica_block::ManageVolume> {
        None
    }

    fn tend(&self) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

impl ManageIndex for FakeChain {
    fn covered_layers(&self) -> usize {
        0
    }

    fn base(&self) -> StoreIdentity {
        StoreIdentity::Own(self.base)
    }

    fn called(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.called.wait())
    }

    fn call(&self) {
        self.called.set();
    }

    fn build<'a>(
        &'a self,
        _progress: &'a mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
    ) -> LocalFuture<'a, Result<usize>> {
        Box::pin(async {
            self.storage.build(self.base);
            Ok(1)
        })
    }

    fn seal_states(&self) -> LocalFuture<'_, Vec<(SealState, u64)>> {
        Box::pin(std::future::ready(Vec::new()))
    }

    fn remove(&self) -> Result<()> {
        Ok(())
    }
}

struct World {
    storage: Arc<Storage>,
    indexers: Arc<Indexers>,
    workers: Arc<Workers>,
}

impl World {
    fn new() -> Self {
        let workers = Workers::start(1, Backend::Pool).expect("a worker");
        Self { storage: Arc::default(), indexers: Arc::default(), workers }
    }

    fn start(&self, disk: Arc<dyn Manage>) -> Indexed {
        let worker = &self.workers.handles()[0];
        Indexed::start(disk, &self.indexers, worker).expect("it has an index")
    }

    fn has_no_threads(&self) {
        while self.indexers.lock().threads > 0 {
            std::thread::yield_now();
        }
    }
}

/// The story: with one thread for all chains, one on storage that hangs kept all others from being
/// closed.
#[test]
fn chain_that_waits_while_all_threads_hang_is_stopped_at_once() {
    let world = World::new();
    let hung: Vec<_> =
        (0..THREADS_MAX as u64).map(|base| world.start(world.storage.chain(base))).collect();
    world.storage.wait_until(|builds| builds.running == THREADS_MAX);
    let waits = world.start(world.storage.chain(100));
    waits.stop();
    world.storage.let_go(true);
    hung.into_iter().for_each(Indexed::stop);
    world.has_no_threads();
    let begun = world.storage.wait_until(|builds| builds.running == 0);
    assert_eq!(begun.len(), THREADS_MAX, "what was stopped is not touched: {begun:?}");
}

#[test]
fn chains_with_one_base_are_built_one_after_the_other() {
    let world = World::new();
    let mut chains: Vec<_> = (0..3).map(|_| world.start(world.storage.chain(1))).collect();
    chains.push(world.start(world.storage.chain(2)));
    let begun = world.storage.wait_until(|builds| builds.running == 2);
    assert!(begun == [1, 2] || begun == [2, 1], "{begun:?}");
    world.storage.let_go(true);
    let begun = world.storage.wait_until(|builds| builds.begun.len() == 4 && builds.running == 0);
    assert_eq!(begun.iter().filter(|base| **base == 1).count(), 3);
    world.has_no_threads();
    chains.into_iter().for_each(Indexed::stop);
}

#[test]
fn chain_that_is_called_for_while_it_is_built_is_built_again() {
    let world = World::new();
    let disk = world.storage.chain(1);
    let chain = world.start(Arc::clone(&disk));
    world.storage.wait_until(|builds| builds.running == 1);
    disk.index().expect("it has one").call();
    while !world.indexers.lock().building.iter().any(|building| building.is_called) {
        std::thread::yield_now();
    }
    world.storage.let_go(true);
    world.storage.wait_until(|builds| builds.begun.len() == 2 && builds.running == 0);
    disk.index().expect("it has one").call();
    world.storage.wait_until(|builds| builds.begun.len() == 3 && builds.running == 0);
    chain.stop();
    world.has_no_threads();
}

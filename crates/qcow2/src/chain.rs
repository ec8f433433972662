//! A chain of images as one disk.
//!
//! Opening follows the backing names from the active layer down, reads each header, and keeps only
//! what reading needs of a layer. No step recurses by layer, and nothing of a layer but its header
//! is read before a guest asks for it.

mod dirty;
mod first;
mod manage;
mod merge;
mod push;
mod view;

pub use push::{flush_ahead, flush_while_long};

use crate::gate::Gate;
use crate::header_io::read_header;
use crate::index::cache::{MapCache, Sharing};
use crate::layer::Layer;
use crate::map::{Map, Rest};
use crate::open::{OpenAs, open_layers};
use crate::snapshots::SnapshotSelector;
use crate::write::Writer;
use crate::write::bitmaps::settle_bitmaps;
use crate::write::pages::Metadata;
use arc_swap::ArcSwapOption;
use mica_block::{
    Disk, Error, ErrorKind, Extent, Geometry, Images, IndexProgress, IoFuture, LocalFuture, Plan,
    Planned, Result, Store, Writing, Zeroes,
};
use mica_qcow2_format::Header;
use mica_rt::Buf;
use mica_rt::sync;
use mica_units::{GuestOffset, GuestRange};
use std::future::ready;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A unit of fewer bits than this is not reported as the preferred one.
const PREFERRED_BITS_MIN: u32 = 12;

/// Whether the sidecars are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexUse {
    /// Read if they fit; see [`Chain::build_index`] for how they are written.
    Read,
    /// Not at all: every slice is resolved by a walk.
    Ignore,
}

/// Repairs the refcounts of an image with this header; returns the header that it then has.
pub type Repair = fn(Arc<dyn Store>, Header) -> LocalFuture<'static, Result<Header>>;

/// How a chain is opened.
#[derive(Clone, Debug)]
pub struct ChainOptions {
    /// Memory for its map, which it shares with all chains that are opened with clones of this.
    pub cache: MapCache,
    /// Whether it shares with them what it knows of layers that they have in common.
    pub sharing: Sharing,
    /// Whether the sidecars are used.
    pub index: IndexUse,
    /// An internal snapshot of the active layer, to read instead of its present.
    pub snapshot: Option<SnapshotSelector>,
    /// Whether the active layer is to be written.
    pub writable: bool,
    /// Repairs an image that its last writer has not closed, before it is written. Without it such
    /// an image is refused.
    pub repair: Option<Repair>,
}

impl Default for ChainOptions {
    fn default() -> Self {
        Self {
            cache: MapCache::default(),
            sharing: Sharing::WithClones,
            index: IndexUse::Read,
            snapshot: None,
            writable: false,
            repair: None,
        }
    }
}

/// A chain of images, base to active. Clones are the same chain.
#[derive(Clone)]
pub struct Chain {
    map: Arc<Map>,
    gate: Arc<Gate>,
    /// The writer of the active layer. It is loaded only inside the gate, so that it is replaced
    /// only while the gate is held.
    writer: Arc<ArcSwapOption<Writer>>,
    /// Serializes putting layers on top.
    pushing: Arc<sync::Mutex>,
    merging: Arc<merge::Merging>,
    stored_bitmaps: Arc<dirty::StoredBitmaps>,
    repair: Option<Repair>,
    index: IndexUse,
}

impl Chain {
    /// Opens the chain whose active layer is the qcow2 image at `path`.
    ///
    /// # Errors
    /// Anything that makes an image unusable, with its path; the policy's refusal of a name; a
    /// loop; for writing also an image that is marked as corrupt, and a snapshot.
    pub async fn open(
        images: Arc<dyn Images>,
        path: &Path,
        options: &ChainOptions,
    ) -> Result<Self> {
        if options.writable && options.snapshot.is_some() {
            let context = "an internal snapshot can only be opened for reading";
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let opening_ns = images.now_ns();
        let wanted = OpenAs { snapshot: options.snapshot.as_ref(), writable: options.writable };
        let (layers, metadata) = open_layers(&*images, path, wanted).await?;
        let map = Map::new(images, layers, options.cache.clone(), (opening_ns, options.sharing));
        let gate = Arc::<Gate>::default();
        let writer = match metadata {
            Some(metadata) => {
                let active = Arc::clone(map.layers().active());
                let active = (&active, &*active.path);
                Some(Arc::new(open_writer(&map, active, metadata, &gate, options.repair).await?))
            }
            None => None,
        };
        if options.index == IndexUse::Read {
            map.adopt_sidecars().await;
        }
        map.images.sidecars().chain_is_open();
        let opened = Self::of(map, writer, (options.repair, options.index));
        Ok(Self { gate, ..opened })
    }

    /// The chain of a map and the writer of its uppermost layer.
    fn of(
        map: Arc<Map>,
        writer: Option<Arc<Writer>>,
        (repair, index): (Option<Repair>, IndexUse),
    ) -> Self {
        let writer = Arc::new(ArcSwapOption::new(writer));
        let (gate, pushing, merging) = (Arc::default(), Arc::default(), Arc::default());
        let stored_bitmaps = Arc::default();
        Self { map, gate, writer, pushing, merging, stored_bitmaps, repair, index }
    }

    /// The writer of the active layer.
    #[cfg(test)]
    pub(crate) fn present_writer(&self) -> Arc<Writer> {
        self.writer.load_full().expect("a disk that is written")
    }

    /// How many layers, from the base, the index covers.
    pub fn indexed_layers(&self) -> usize {
        self.map.index.tree().covered()
    }

    /// Brings the sidecars of all frozen layers up to date; returns how many it wrote. Stops
    /// between two layers when `progress` breaks.
    ///
    /// # Errors
    /// If a layer cannot be read or a sidecar cannot be written. What was written before stays
    /// valid.
    pub async fn build_index(
        &self,
        progress: &mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
    ) -> Result<usize> {
        self.map.build_index(progress).await
    }

    /// Length of the layer beneath the active one, in bytes; zero if there is none.
    pub fn backing_len(&self) -> u64 {
        self.map.layers().frozen().last().map_or(0, |layer| layer.len())
    }

    /// Runs a change of the disk in a task of its own: a client that disconnects does not leave it
    /// half-done.
    fn change<T: 'static>(
        &self,
        work: impl AsyncFnOnce(Arc<Writer>) -> T + 'static,
    ) -> LocalFuture<'static, T> {
        self.change_after(Duration::ZERO, work)
    }

    /// As [`Self::change`], after waiting for this time, unless it is zero.
    fn change_after<T: 'static>(
        &self,
        wait: Duration,
        work: impl AsyncFnOnce(Arc<Writer>) -> T + 'static,
    ) -> LocalFuture<'static, T> {
        let (gate, writer) = (Arc::clone(&self.gate), Arc::clone(&self.writer));
        let entering = match wait.is_zero() {
            true => gate.begin_change(),
            false => gate.begin_waiting(),
        };
        Box::pin(mica_rt::spawn(async move {
            if !wait.is_zero() {
                mica_rt::sleep(wait).await;
            }
            let change = gate.enter_change(entering).await;
            let writer = writer.load_full().expect("a disk that is written stays so");
            let output = Arc::clone(&writer).complete(work).await;
            writer.prepare(change);
            output
        }))
    }

    /// As [`Self::change_after`], braked by a merge, for a disk that may be open for reading only.
    fn change_if_writable(
        &self,
        work: impl AsyncFnOnce(Arc<Writer>) -> Result<()> + 'static,
    ) -> LocalFuture<'static, Result<()>> {
        match self.is_writable() {
            true => self.change_after(self.merging.brake.wait(), work),
            false => Box::pin(ready(Err(not_writable()))),
        }
    }
}

fn not_writable() -> Error {
    Error::new(ErrorKind::Denied, "the disk was opened for reading only")
}

impl Disk for Chain {
    fn geometry(&self) -> Geometry {
        let preferred_bytes = 1 << self.map.preferred_bits().max(PREFERRED_BITS_MIN);
        Geometry { len: self.map.published_len(), preferred_bytes }
    }

    #[inline]
    fn plan(&self, range: GuestRange, mut extents: Vec<Extent>) -> Planned<'_> {
        let in_flight = self.gate.enter();
        match self.map.plan_now(range, &mut extents) {
            Ok(()) => Planned::Ready(Ok(Plan::new(extents, in_flight))),
            Err(Rest::Impossible(error)) => Planned::Ready(Err(error)),
            Err(Rest::From(done)) => Planned::Pending(Box::pin(async move {
                self.map.plan_rest(range, done, &mut extents).await?;
                Ok(Plan::new(extents, in_flight))
            })),
        }
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        let in_flight = self.gate.enter();
        Box::pin(async move {
            let surveyed = self.map.survey(range).await;
            drop(in_flight);
            surveyed
        })
    }

    #[inline]
    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        let layers = self.map.layers_now();
        if let Some(window) = self.map.follow(&layers, extent) {
            self.map.begin_ahead(window, self.gate.enter_owned());
        }
        self.map.read(&layers, extent, buf)
    }

    fn is_writable(&self) -> bool {
        self.writer.load().is_some()
    }

    #[inline]
    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        let wait = self.merging.brake.wait();
        let entered = if wait.is_zero() { self.gate.enter_in_place() } else { None };
        let buf = match entered {
            None => buf,
            Some(under_way) => match &*self.writer.load() {
                None => return Writing::Direct(mica_block::ready(Err(not_writable()), buf)),
                Some(writer) => {
                    self.merging.touches.note(at, buf.len() as u64);
                    match writer.write_in_place(at, buf, under_way) {
                        Ok(writing) => return Writing::Direct(writing),
                        Err(buf) => buf,
                    }
                }
            },
        };
        let merging = Arc::clone(&self.merging);
        let write = async move |writer: Arc<Writer>| {
            merging.touches.note(at, buf.len() as u64);
            writer.write_allocating(at, buf).await
        };
        Writing::Boxed(self.change_after(wait, write))
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        let merging = Arc::clone(&self.merging);
        self.change_if_writable(async move |writer| {
            merging.touches.note(range.start(), range.len());
            writer.zero_range(range, how).await
        })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        let merging = Arc::clone(&self.merging);
        self.change_if_writable(async move |writer| {
            merging.touches.note(range.start(), range.len());
            writer.discard_range(range).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        match self.is_writable() {
            true => self.change(async |writer| writer.flush().await),
            false => Box::pin(ready(Ok(()))),
        }
    }
}

/// The writer of `layer`, whose file is at `path` now, and whose metadata is `metadata`.
async fn open_writer(
    map: &Arc<Map>,
    (layer, path): (&Arc<Layer>, &Path),
    metadata: Arc<Metadata>,
    gate: &Arc<Gate>,
    repair: Option<Repair>,
) -> Result<Writer> {
    let opened = async {
        let header = read_header(&*metadata.store).await?;
        let header = writable_header(&metadata.store.raw_file(), header, repair).await?;
        let redo_memory = (map.images.redo_logs().log(path)?, map.images.now_ns());
        let (map, layer) = (Arc::clone(map), Arc::clone(layer));
        Writer::open(map, layer, &header, metadata, Arc::clone(gate), redo_memory).await
    };
    opened.await.map_err(|error| layer.explain(error))
}

/// The `header` of the image in `store` if that can be written, repaired if it has to be.
async fn writable_header(
    store: &Arc<dyn Store>,
    header: Header,
    repair: Option<Repair>,
) -> Result<Header> {
    if header.incompatible.corrupt {
        let context = "the image is marked as corrupt: run `mica check -r all` first";
        return Err(Error::new(ErrorKind::Corrupt, context));
    }
    let header = settle_bitmaps(&**store, header).await?;
    match (header.incompatible.dirty, repair) {
        (false, _) => Ok(header),
        (true, Some(repair)) => repair(Arc::clone(store), header).await,
        (true, None) => {
            let context = "the image was not closed: `mica check -r all` repairs it";
            Err(Error::new(ErrorKind::Corrupt, context))
        }
    }
}

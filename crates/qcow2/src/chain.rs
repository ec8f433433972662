//! A chain of images as one disk.
//!
//! Opening walks the backing names from the active layer down, reads each header, and keeps of a
//! layer only what reading needs. No step recurses by layer, and nothing of a layer but its header
//! is read before a guest asks for it.

use crate::decoded::DecodedClusters;
use crate::header_io::read_header;
use crate::index::{Index, count};
use crate::layer::Layer;
use crate::notify::Notify;
use crate::open::open_layers;
use crate::write::Writer;
use mica_block::{
    Detail, Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, Images, InFlight, IoFuture,
    LocalFuture, MapStats, Planned, Result, WriteStats, Writing, Zeroes,
};
use mica_rt::{Buf, Pace};
use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber};
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Least budget of a chain's cache: below it the cache holds no slice of a usual disk.
pub const CACHE_BYTES_MIN: u64 = 64 << 10;
/// Budget of a chain's cache unless the user says otherwise.
pub const CACHE_BYTES_DEFAULT: u64 = 32 << 20;

/// Extents of a plan after which others have their turn.
pub(crate) const EXTENTS_PER_TURN: u64 = 1024;

/// How often who waits for an idle disk looks again.
const IDLE_PAUSE: Duration = Duration::from_millis(1);

/// Whether the sidecars are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexUse {
    /// Read where they fit; see [`Chain::build_index`] for how they are written.
    Read,
    /// Not at all: every slice is resolved by a walk.
    Ignore,
}

/// How a chain is opened.
#[derive(Clone, Debug)]
pub struct ChainOptions {
    /// Most bytes that the chain's cache holds; at least [`CACHE_BYTES_MIN`] are taken.
    pub cache_bytes: u64,
    /// Whether the sidecars are used.
    pub index: IndexUse,
    /// An internal snapshot of the active layer, by id or name, to read instead of its present.
    pub snapshot: Option<String>,
    /// Whether the active layer is written.
    pub writable: bool,
}

impl Default for ChainOptions {
    fn default() -> Self {
        Self {
            cache_bytes: CACHE_BYTES_DEFAULT,
            index: IndexUse::Read,
            snapshot: None,
            writable: false,
        }
    }
}

/// How far the building of an index has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexProgress {
    /// Layers done.
    pub layer: usize,
    /// Layers in all.
    pub layers: usize,
}

/// A chain of images, base to active. Clones are the same chain.
#[derive(Clone)]
pub struct Chain {
    state: Arc<ChainState>,
}

/// What a chain is. Behind an `Arc`, so that work that has begun can end though nobody waits for it
/// any more.
pub struct ChainState {
    pub(crate) images: Arc<dyn Images>,
    /// From the base.
    pub(crate) layers: Vec<Arc<Layer>>,
    /// Bytes of the disk, and as many as are told: while it is being made longer, the new part is
    /// there for this process before it is for anybody else.
    len: AtomicU64,
    published_len: AtomicU64,
    pub(crate) index: Index,
    pub(crate) index_call: Notify,
    pub(crate) decoded: Arc<DecodedClusters>,
    pub(crate) writer: Option<Writer>,
}

impl Deref for Chain {
    type Target = ChainState;

    #[inline]
    fn deref(&self) -> &ChainState {
        &self.state
    }
}

impl ChainState {
    /// Bytes of the disk. Whoever asks twice may get two answers.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Has reads and writes reach up to `len`. Slices that end at the old or the new end are loaded
    /// anew.
    pub(crate) fn set_len(&self, len: u64) {
        let before = self.len();
        self.active().set_len(len);
        self.len.store(len, Ordering::Release);
        for end in [before, len] {
            self.index.cache.change(slice_of(GuestOffset::new(end)).0, |_| None);
        }
    }

    /// Tells everybody the length.
    pub(crate) fn publish_len(&self, len: u64) {
        self.published_len.store(len, Ordering::Release);
    }

    fn active(&self) -> &Layer {
        self.layers.last().expect("a chain has a layer")
    }
}

impl Chain {
    /// Opens the chain whose active layer is the qcow2 image at `path`.
    ///
    /// # Errors
    /// What makes an image unusable, with its path; the policy's refusal of a name; a loop; for
    /// writing also an image that is marked as corrupt, and a snapshot.
    pub async fn open(
        images: Arc<dyn Images>,
        path: &Path,
        options: &ChainOptions,
    ) -> Result<Self> {
        if options.writable && options.snapshot.is_some() {
            let context = "an internal snapshot is opened for reading only";
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let wanted = (options.snapshot.as_deref(), options.writable);
        let layers = open_layers(&*images, path, wanted).await?;
        let writer = open_writer(&*images, &layers).await?;
        let len = layers.last().map_or(0, |layer| layer.len());
        let state = ChainState {
            images,
            layers,
            len: AtomicU64::new(len),
            published_len: AtomicU64::new(len),
            index: Index::new(options.cache_bytes.max(CACHE_BYTES_MIN)),
            index_call: Notify::default(),
            decoded: Arc::default(),
            writer,
        };
        let chain = Self { state: Arc::new(state) };
        if options.index == IndexUse::Read {
            chain.adopt_sidecars().await;
        }
        Ok(chain)
    }

    /// Number of layers.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// How many layers, from the base, the index speaks for.
    pub fn indexed_layers(&self) -> usize {
        self.index.tree().covered()
    }

    /// The paths of the layers, from the base.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.layers.iter().map(|layer| &*layer.path)
    }

    /// Waits until someone calls for the index: a reader to whom a sidecar turned out to be
    /// damaged, so that [`Self::build_index`] has work, or [`Self::call_for_index`].
    pub async fn index_called_for(&self) {
        self.index_call.wait().await;
    }

    /// Ends the wait of [`Self::index_called_for`].
    pub fn call_for_index(&self) {
        self.index_call.set();
    }

    /// Removes the sidecars of all frozen layers.
    ///
    /// # Errors
    /// What the system says; the others are removed all the same.
    pub fn drop_index(&self) -> Result<()> {
        self.index.publish(crate::index::Tree::default());
        let mut outcome = Ok(());
        for layer in self.frozen() {
            let removed = self.images.remove_sidecar(&layer.path);
            outcome = outcome.and(removed);
        }
        outcome
    }

    pub(crate) fn frozen(&self) -> &[Arc<Layer>] {
        &self.layers[..self.layers.len() - 1]
    }

    pub(crate) fn check_range(&self, range: GuestRange) -> Result<()> {
        if range.end().bytes() <= self.len() {
            return Ok(());
        }
        Err(beyond_end(self.len(), range.end()))
    }

    /// Plans from cached slices; how much of `range` was planned before one was missing.
    #[inline]
    fn plan_cached(&self, range: GuestRange, extents: &mut Vec<Extent>) -> u64 {
        let mut done = 0;
        while done < range.len() {
            let at = GuestOffset::new(range.start().bytes() + done);
            let (number, base) = slice_of(at);
            let Some(slice) = self.index.cache.get(number) else { break };
            let len = left_in_slice(base, at).min(range.len() - done);
            slice.append_extents(base, at, len, extents);
            done += len;
            count(&self.index.counters.hits, 1);
        }
        done
    }

    async fn plan_rest(
        &self,
        range: GuestRange,
        detail: Detail,
        mut done: u64,
        (extents, from): (&mut Vec<Extent>, usize),
    ) -> Result<()> {
        let mut pace = Pace::new(EXTENTS_PER_TURN);
        while done < range.len() {
            let at = GuestOffset::new(range.start().bytes() + done);
            let (number, base) = slice_of(at);
            let before = extents.len();
            let in_slice = left_in_slice(base, at).min(range.len() - done);
            let cached = GuestRange::new(at, in_slice).expect("a part of the range");
            if self.plan_cached(cached, extents) == in_slice {
                done += in_slice;
                pace.steps((extents.len() - before) as u64 + 1).await;
                continue;
            }
            count(&self.index.counters.misses, 1);
            if let Some(len) = self.skip_unowned(at, range.end()).await? {
                let (start, kind, layer) = (at, ExtentKind::Hole, LayerNumber::BASE);
                let host = HostOffset::ZERO;
                Extent::push_joined(extents, Extent { start, len, kind, layer, host });
                done += len;
                continue;
            }
            let slice = self.slice(number).await?;
            slice.append_extents(base, at, in_slice, extents);
            done += in_slice;
        }
        self.add_detail(detail, extents, from).await
    }
}

impl Disk for Chain {
    fn geometry(&self) -> Geometry {
        let preferred = self.active().tables.as_ref().map(|tables| tables.l2.subcluster_bits());
        let preferred_bytes = 1 << preferred.unwrap_or(12).max(12);
        Geometry { len: self.published_len.load(Ordering::Acquire), preferred_bytes }
    }

    #[inline]
    fn plan<'a>(
        &'a self,
        range: GuestRange,
        detail: Detail,
        extents: &'a mut Vec<Extent>,
    ) -> Planned<'a> {
        if let Err(error) = self.check_range(range) {
            return Planned::Ready(Err(error));
        }
        let from = extents.len();
        // Who wants detail may ask for very much at once, and waits for it.
        let done = if detail == Detail::Read { self.plan_cached(range, extents) } else { 0 };
        if done == range.len() && detail == Detail::Read {
            return Planned::Ready(Ok(()));
        }
        Planned::Pending(Box::pin(self.plan_rest(range, detail, done, (extents, from))))
    }

    #[inline]
    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        assert_eq!(extent.len, buf.len() as u64, "a buffer as long as the extent");
        match extent.kind {
            ExtentKind::Data => self.layers[extent.layer.index()].data.read_at(buf, extent.host),
            ExtentKind::Encoded => {
                let layer = Arc::clone(&self.layers[extent.layer.index()]);
                let decoded = Arc::clone(&self.decoded);
                let (start, chain) = (extent.start, self.clone());
                IoFuture::boxed(async move {
                    let (result, buf) = layer.read_deferred(start, buf, &decoded).await;
                    match result {
                        Err(_) if layer.metadata.is_some() => {
                            Box::pin(chain.read_again(&layer, start, buf)).await
                        }
                        result => (result, buf),
                    }
                })
            }
            zero => {
                debug_assert!(zero.reads_as_zero());
                buf.fill(0);
                mica_block::ready(Ok(()), buf)
            }
        }
    }

    fn is_writable(&self) -> bool {
        self.writer.is_some()
    }

    #[inline]
    fn enter(&self) -> InFlight<'_> {
        match &self.writer {
            Some(writer) => writer.requests().enter(),
            None => InFlight::untracked(),
        }
    }

    #[inline]
    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        match self.write_in_place(at, buf) {
            Ok(writing) => Writing::Direct(writing),
            Err(buf) => Writing::Boxed(
                self.run_to_completion(async move |chain| chain.write_allocating(at, buf).await),
            ),
        }
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.run_to_completion(async move |chain| chain.zero_range(range, how).await)
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        self.run_to_completion(async move |chain| chain.discard_range(range).await)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.run_to_completion(async move |chain| match &chain.writer {
            Some(writer) => writer.flush().await,
            None => Ok(()),
        })
    }

    fn resize(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.run_to_completion(async move |chain| chain.grow(len).await)
    }

    fn idle(&self) -> LocalFuture<'_, ()> {
        Box::pin(async {
            if let Some(writer) = &self.writer {
                while !writer.is_idle() {
                    mica_rt::sleep(IDLE_PAUSE).await;
                }
            }
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            match &self.writer {
                Some(writer) => writer.close().await,
                None => Ok(()),
            }
        })
    }

    fn weakness(&self) -> Option<&'static str> {
        self.writer.as_ref()?.weakness()
    }

    fn write_stats(&self) -> WriteStats {
        self.writer.as_ref().map(Writer::stats).unwrap_or_default()
    }

    fn map_stats(&self) -> MapStats {
        let counters = &self.index.counters;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        MapStats {
            hits: get(&counters.hits),
            misses: get(&counters.misses),
            index_loads: get(&counters.index_loads),
            walks: get(&counters.walks),
            layers_walked: get(&counters.layers_walked),
            cached_bytes: self.index.cache.held_bytes(),
            budget_bytes: self.index.cache.budget_bytes(),
        }
    }
}

/// The state of writing, if the active layer was opened for it.
async fn open_writer(images: &dyn Images, layers: &[Arc<Layer>]) -> Result<Option<Writer>> {
    let Some(active) = layers.last() else { return Ok(None) };
    let Some(metadata) = &active.metadata else { return Ok(None) };
    let opened = async {
        let header = read_header(&*metadata.store).await?;
        if header.incompatible.corrupt {
            let context = "the image is marked as corrupt: run `mica check -r all` first";
            return Err(Error::new(ErrorKind::Corrupt, context));
        }
        let header = match header.incompatible.dirty {
            true => {
                crate::recover::repair_dirty(metadata.store.before_any_write(), &header).await?
            }
            false => header,
        };
        let redo_memory = (images.redo_log(&active.path)?, images.now_ns());
        Writer::open(active, &header, Arc::clone(metadata), redo_memory).await
    };
    opened.await.map(Some).map_err(|error| active.explain(error))
}

pub(crate) fn beyond_end(len: u64, end: GuestOffset) -> Error {
    let context = format!("the disk ends at {len:#x}, before {end}");
    Error::new(ErrorKind::Invalid, context)
}

pub(crate) fn slice_of(at: GuestOffset) -> (u64, GuestOffset) {
    use crate::index::slice::SLICE_BITS;
    let number = at.bytes() >> SLICE_BITS;
    (number, GuestOffset::new(number << SLICE_BITS))
}

fn left_in_slice(base: GuestOffset, at: GuestOffset) -> u64 {
    crate::index::slice::SLICE_BYTES - (at.bytes() - base.bytes())
}

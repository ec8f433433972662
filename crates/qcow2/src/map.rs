//! The map of a chain: which layer owns which bytes of the disk, and where they are.
//!
//! It plans and reads, and knows no writer: a layer's writer reports its changes through the index.

pub(crate) mod ahead;
mod read;

use crate::decoded::DecodedClusters;
use crate::index::cache::{MapCache, Sharing};
use crate::index::slice::Slice;
use crate::index::{Index, count};
use crate::layer::Layer;
use crate::layers::Layers;
use arc_swap::{ArcSwap, Guard};
use mica_block::{Error, ErrorKind, Extent, ExtentKind, Images, IoFuture, MapStats, Result};
use mica_rt::sync::{self, Notify};
use mica_rt::{Buf, Pace};
use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Extents of a plan after which other tasks get a turn.
pub(crate) const EXTENTS_PER_TURN: u64 = 1024;

/// The layers of a chain as one.
pub(crate) struct Map {
    pub(crate) images: Arc<dyn Images>,
    /// The present layers. A caller that needs a stable set takes [`Self::layers`].
    layers: ArcSwap<Layers>,
    /// Bytes of the disk, and the published length: while the disk is growing, this process can use
    /// the new part before anybody else.
    len: AtomicU64,
    published_len: AtomicU64,
    pub(crate) index: Index,
    pub(crate) index_call: Notify,
    /// The right to write sidecars, and whether that is out of the question at present.
    pub(crate) indexing: sync::Mutex,
    pub(crate) is_index_held: AtomicBool,
    pub(crate) decoded: Arc<DecodedClusters>,
    /// The map of a longer chain that reads the uppermost of these layers while it is written.
    above: OnceLock<Weak<Map>>,
    /// How often the uppermost layer became empty.
    emptied: AtomicU64,
}

/// What is left to do after planning from memory.
pub(crate) enum Rest {
    /// Nothing: the range cannot be planned.
    Impossible(Error),
    /// Everything from this byte of the range on.
    From(u64),
}

impl Map {
    /// The map of `layers`, from the base, which were about to be opened at `opening_ns`, with its
    /// slices in `cache`; `sharing` says whether clones share them.
    pub(crate) fn new(
        images: Arc<dyn Images>,
        layers: Vec<Arc<Layer>>,
        cache: MapCache,
        (opening_ns, sharing): (i128, Sharing),
    ) -> Arc<Self> {
        let layers = Layers::new(layers);
        let len = layers.active().len();
        let frozen = cache.frozen(layers.frozen(), opening_ns, sharing);
        Arc::new(Self {
            images,
            layers: ArcSwap::from_pointee(layers),
            len: AtomicU64::new(len),
            published_len: AtomicU64::new(len),
            index: Index::new(cache, frozen),
            index_call: Notify::default(),
            indexing: sync::Mutex::default(),
            is_index_held: AtomicBool::new(false),
            decoded: Arc::default(),
            above: OnceLock::new(),
            emptied: AtomicU64::new(0),
        })
    }

    /// The chain of `above`, which has more layers on top, reads what is written here, too.
    pub(crate) fn set_above(&self, above: &Arc<Self>) {
        let _ = self.above.set(Arc::downgrade(above));
    }

    /// Owners in slice `number` have changed: replaces it by the result of `change`, as
    /// [`SliceCache::change`](crate::index::cache::SliceCache::change) does.
    pub(crate) fn change_slice(&self, number: u64, change: impl FnOnce(&Slice) -> Option<Slice>) {
        self.index.cache.change(number, change);
        if let Some(above) = self.above.get().and_then(Weak::upgrade) {
            above.index.cache.change(number, |_| None);
        }
    }

    /// Bytes of the disk. Two calls may return different values.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Enables reads and writes up to `len`. Slices that end at the old or the new end are loaded
    /// again.
    pub(crate) fn set_len(&self, len: u64) {
        let before = self.len();
        self.layers().active().set_len(len);
        self.len.store(len, Ordering::Release);
        for end in [before, len] {
            self.index.cache.change(slice_of(GuestOffset::new(end)).0, |_| None);
        }
    }

    /// The published length of the disk, in bytes.
    pub(crate) fn published_len(&self) -> u64 {
        self.published_len.load(Ordering::Acquire)
    }

    /// Publishes the length.
    pub(crate) fn publish_len(&self, len: u64) {
        self.published_len.store(len, Ordering::Release);
    }

    /// The present layers.
    pub(crate) fn layers(&self) -> Arc<Layers> {
        self.layers.load_full()
    }

    /// As [`Self::layers`], for a moment, which is cheaper.
    #[inline]
    pub(crate) fn layers_now(&self) -> Guard<Arc<Layers>> {
        self.layers.load()
    }

    /// The unit in which requests are cheapest, in bits of a byte count. Asked with each request.
    pub(crate) fn preferred_bits(&self) -> u32 {
        let layers = self.layers_now();
        layers.active().tables.as_ref().map_or(0, |tables| tables.l2.subcluster_bits())
    }

    pub(crate) fn check_range(&self, range: GuestRange) -> Result<()> {
        if range.end().bytes() <= self.len() {
            return Ok(());
        }
        Err(beyond_end(self.len(), range.end()))
    }

    /// Replaces the chain's layers. The slices in memory must be true of the new ones too.
    pub(crate) fn replace_layers(&self, layers: Layers) {
        // Before anybody can see the new ones.
        self.index.cache.leave_frozen();
        self.layers.store(Arc::new(layers));
        self.index.cache.outdate_loading();
        #[cfg(test)]
        crate::testing::pass("other layers");
    }

    /// The uppermost layer owns nothing from the next moment on, and those beneath it that others
    /// must not see then have left. Whoever took the layers before that looks once more.
    pub(crate) fn note_emptied(&self) {
        self.emptied.fetch_add(1, Ordering::SeqCst);
    }

    /// How often that was noted.
    pub(crate) fn emptied(&self) -> u64 {
        self.emptied.load(Ordering::SeqCst)
    }

    /// As [`Self::replace_layers`] if slices in memory may name layers that are not among the new
    /// ones, or are not true of them: those that name only layers which `keeps` allows are kept.
    /// Nothing changes owners meanwhile.
    pub(crate) fn exchange_layers(&self, layers: Layers, keeps: impl Fn(LayerNumber) -> bool) {
        self.replace_layers(layers);
        // Whoever loads a slice from now on asks the new layers.
        self.index.cache.retain(|slice| slice.names_only(&keeps));
    }

    /// Keeps sidecars from being written until the returned value is dropped, and waits until none
    /// is.
    pub(crate) async fn hold_index(self: &Arc<Self>) -> HeldIndex {
        self.is_index_held.store(true, Ordering::SeqCst);
        let held = HeldIndex(Arc::clone(self));
        drop(self.indexing.lock().await);
        held
    }

    /// Plans `range` from memory, if that is enough; returns what is left to do if it is not.
    /// `extents` is empty.
    #[inline]
    pub(crate) fn plan_now(
        &self,
        range: GuestRange,
        extents: &mut Vec<Extent>,
    ) -> std::result::Result<(), Rest> {
        self.check_range(range).map_err(Rest::Impossible)?;
        let done = self.plan_cached(range, extents);
        if done == range.len() { Ok(()) } else { Err(Rest::From(done)) }
    }

    /// The extents of `range`, to be read.
    pub(crate) async fn plan(&self, range: GuestRange) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        match self.plan_now(range, &mut extents) {
            Ok(()) => {}
            Err(Rest::Impossible(error)) => return Err(error),
            Err(Rest::From(done)) => {
                Box::pin(self.plan_rest(range, done, &mut extents)).await?;
            }
        }
        Ok(extents)
    }

    /// Plans from cached slices; returns how much of `range` was planned before one was missing.
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

    /// Plans `range` from byte `done` on.
    pub(crate) async fn plan_rest(
        &self,
        range: GuestRange,
        mut done: u64,
        extents: &mut Vec<Extent>,
    ) -> Result<()> {
        let mut pace = Pace::new(EXTENTS_PER_TURN);
        while done < range.len() {
            let rest = range.after(done);
            done += self.plan_step(rest, extents, &mut pace).await?;
        }
        Ok(())
    }

    /// Plans the first slice of `range`, or as much as nobody owns; returns how many bytes.
    pub(crate) async fn plan_step(
        &self,
        range: GuestRange,
        extents: &mut Vec<Extent>,
        pace: &mut Pace,
    ) -> Result<u64> {
        let at = range.start();
        let (number, base) = slice_of(at);
        let before = extents.len();
        let in_slice = left_in_slice(base, at).min(range.len());
        let cached = GuestRange::new(at, in_slice).expect("a part of the range");
        if self.plan_cached(cached, extents) == in_slice {
            pace.steps((extents.len() - before) as u64 + 1).await;
            return Ok(in_slice);
        }
        count(&self.index.counters.misses, 1);
        if let Some(len) = self.skip_unowned(at, range.end()).await? {
            let (start, kind, layer) = (at, ExtentKind::Hole, self.layers().base().number);
            let host = HostOffset::ZERO;
            Extent::push_joined(extents, Extent { start, len, kind, layer, host });
            return Ok(len);
        }
        let slice = self.slice(number).await?;
        slice.append_extents(base, at, in_slice, extents);
        Ok(in_slice)
    }

    /// As [`Disk::read`](mica_block::Disk::read), of the present `layers`.
    #[inline]
    pub(crate) fn read(
        self: &Arc<Self>,
        layers: &Layers,
        extent: &Extent,
        mut buf: Buf,
    ) -> IoFuture {
        assert_eq!(extent.len, buf.len() as u64, "a buffer as long as the extent");
        match extent.kind {
            ExtentKind::Data => layers.data_of(extent.layer).read_at(buf, extent.host),
            ExtentKind::Encoded => {
                let layer = Arc::clone(layers.get(extent.layer));
                let decoded = Arc::clone(&self.decoded);
                let (start, map) = (extent.start, Arc::clone(self));
                IoFuture::boxed(async move {
                    let (result, buf) = layer.read_deferred(start, buf, &decoded).await;
                    match result {
                        Ok(()) => (result, buf),
                        // The layer may have been written since the range was planned.
                        Err(_) => Box::pin(map.read_again(&layer, start, buf)).await,
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

    pub(crate) fn stats(&self) -> MapStats {
        let counters = &self.index.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
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

/// While this lives no sidecar is written.
#[must_use = "sidecars are written again when this is dropped"]
pub(crate) struct HeldIndex(Arc<Map>);

impl Drop for HeldIndex {
    fn drop(&mut self) {
        self.0.is_index_held.store(false, Ordering::SeqCst);
        self.0.index_call.set();
    }
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

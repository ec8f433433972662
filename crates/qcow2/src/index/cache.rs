//! The slices in memory: one cache for all chains that share a [`MapCache`], with a budget in
//! bytes.
//!
//! What several chains have in common is kept once ([`Frozen`]): a slice of the layers beneath the
//! active one is found by these layers, and a chain whose active layer owns nothing there only
//! marks that its slice is the same.
//!
//! ```text
//! (chain, number) ─▶ the slice
//!                 └▶ a mark ─▶ (frozen layers, number) ─▶ the slice
//! ```
//!
//! Invariants
//! - I1 The slices held never weigh more than the budget, including the cache's own overhead for
//!   each. A mark holds no slice: if that was evicted, it has to be loaded again.
//! - I2 A slice is loaded by one task of a chain at a time; the others wait for it.
//! - I3 What a loader read before a writer changed owners never replaces the writer's version of
//!   the slice: each change is counted, and a loader with an outdated count does not publish its
//!   slice.
//! - I4 A slice of frozen layers depends on nothing but them: neither on the active layer above nor
//!   on its length.

mod frozen;

pub(crate) use frozen::Frozen;

use crate::index::Directory;
use crate::index::node_ref::NodeRef;
use crate::index::slice::Slice;
use frozen::KnownFrozen;
use mica_rt::sync::{Claim, Claims};
use parking_lot::{Mutex, MutexGuard};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Least budget of a cache: a smaller one could not hold a slice of a usual disk.
pub const CACHE_BYTES_MIN: u64 = 64 << 10;
/// Budget of a cache unless the user says otherwise.
pub const CACHE_BYTES_DEFAULT: u64 = 32 << 20;

/// The cache's overhead for one slice: its table entry and the shared counters.
const ENTRY_BYTES: usize = 80;
/// The weight from which the first tables are sized.
const TYPICAL_SLICE_BYTES: u64 = 512;
/// Share of the budget that directories of the tree may take: one part in this many.
const DIRECTORY_SHARE: u64 = 8;
/// Bytes of a directory in memory, including the cache's overhead.
const DIRECTORY_MEMORY_BYTES: u64 = 384;

/// Counters of changes: enough that loaders and writers of other slices rarely share one.
const VERSIONS: usize = 64;

/// Whether a chain shares what it knows of its frozen layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// With chains of the same cache that have the same ones.
    WithClones,
    /// With none: others trust sidecars that it does not, or it does not keep others from writing
    /// these layers.
    Alone,
}

/// Memory for the maps of chains, under one budget: of all chains that are opened with clones of
/// it.
#[derive(Clone)]
pub struct MapCache(Arc<Common>);

struct Common {
    /// By their owner, a chain or its frozen layers, and their number; `None` is a mark.
    slices: Cache<Key, Option<Arc<HeldSlice>>, MemoryWeight>,
    /// By the generation of the tree that read them: a node's place identifies nothing once a
    /// sidecar was rewritten.
    directories: Cache<(u64, NodeRef), Arc<Directory>>,
    budget_bytes: AtomicU64,
    /// What the dirty bitmaps of all its chains take in memory, which have a budget of their own.
    bitmap_bytes: Arc<AtomicU64>,
    /// Numbers of owners and generations that were given out.
    numbers: AtomicU64,
    frozen: KnownFrozen,
}

/// No number is used again.
type OwnerNumber = u64;
type Key = (OwnerNumber, u64);

#[derive(Clone)]
struct MemoryWeight;

impl Weighter<Key, Option<Arc<HeldSlice>>> for MemoryWeight {
    fn weight(&self, _key: &Key, slice: &Option<Arc<HeldSlice>>) -> u64 {
        slice.as_ref().map_or(ENTRY_BYTES as u64, |slice| slice.weight())
    }
}

/// Who has slices in the cache.
struct Owner {
    number: OwnerNumber,
    /// What its slices weigh that are in memory.
    held_bytes: Arc<AtomicU64>,
    /// The slices that it ever had have numbers below this one.
    end: AtomicU64,
}

/// A slice that is counted for its owner for as long as it is in memory.
pub(crate) struct HeldSlice {
    slice: Slice,
    held_bytes: Arc<AtomicU64>,
}

/// A slice that was loaded.
pub(crate) enum Loaded {
    /// The chain's own.
    Own(Slice),
    /// That of the frozen layers with which the chain was opened: nothing above has any of it.
    OfFrozen(Arc<HeldSlice>),
}

impl Owner {
    fn new(shared: &MapCache) -> Self {
        let end = AtomicU64::new(0);
        Self { number: shared.next_number(), held_bytes: Arc::default(), end }
    }

    fn hold(&self, slice: Slice) -> Arc<HeldSlice> {
        let held = Arc::new(HeldSlice { slice, held_bytes: Arc::clone(&self.held_bytes) });
        self.held_bytes.fetch_add(held.weight(), Ordering::Relaxed);
        held
    }

    fn key(&self, slice: u64) -> Key {
        (self.number, slice)
    }
}

impl HeldSlice {
    fn weight(&self) -> u64 {
        (self.slice.memory_bytes() + ENTRY_BYTES) as u64
    }
}

impl Deref for HeldSlice {
    type Target = Slice;

    fn deref(&self) -> &Slice {
        &self.slice
    }
}

impl Drop for HeldSlice {
    fn drop(&mut self) {
        self.held_bytes.fetch_sub(self.weight(), Ordering::Relaxed);
    }
}

impl MapCache {
    /// A cache of `budget_bytes`; less than [`CACHE_BYTES_MIN`] is raised to that.
    pub fn new(budget_bytes: u64) -> Self {
        let budget_bytes = budget_bytes.max(CACHE_BYTES_MIN);
        let (slice_bytes, directories) = shares(budget_bytes);
        let typical = usize::try_from(slice_bytes / TYPICAL_SLICE_BYTES).unwrap_or(usize::MAX);
        Self(Arc::new(Common {
            slices: Cache::with_weighter(typical.clamp(16, 4096), slice_bytes, MemoryWeight),
            directories: Cache::new(usize::try_from(directories).unwrap_or(usize::MAX)),
            budget_bytes: AtomicU64::new(budget_bytes),
            bitmap_bytes: Arc::default(),
            numbers: AtomicU64::new(1),
            frozen: KnownFrozen::default(),
        }))
    }

    /// Gives it a budget of at least `budget_bytes`.
    pub fn grow_to(&self, budget_bytes: u64) {
        if self.0.budget_bytes.fetch_max(budget_bytes, Ordering::Relaxed) < budget_bytes {
            let (slice_bytes, directories) = shares(budget_bytes);
            self.0.slices.set_capacity(slice_bytes);
            self.0.directories.set_capacity(directories);
        }
    }

    /// Its budget.
    pub fn budget_bytes(&self) -> u64 {
        self.0.budget_bytes.load(Ordering::Relaxed)
    }

    /// Counts what dirty bitmaps take in memory.
    pub(crate) fn bitmap_bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.0.bitmap_bytes)
    }

    /// A number that it has not given out before.
    pub(crate) fn next_number(&self) -> u64 {
        self.0.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Directories of trees, by generation and place.
    pub(crate) fn directories(&self) -> &Cache<(u64, NodeRef), Arc<Directory>> {
        &self.0.directories
    }
}

impl Common {
    /// Inserts `slice` of `owner`, or a mark.
    fn insert(&self, owner: &Owner, number: u64, slice: Option<Arc<HeldSlice>>) {
        owner.end.fetch_max(number.saturating_add(1), Ordering::Relaxed);
        self.slices.insert(owner.key(number), slice);
    }

    /// Drops what it has of `owner`, whose end this is.
    fn forget(&self, owner: &Owner) {
        let (cache, end) = (&self.slices, owner.end.load(Ordering::Relaxed));
        // Whichever looks at fewer.
        if end <= cache.len() as u64 {
            (0..end).for_each(|number| drop(cache.remove(&owner.key(number))));
        } else {
            cache.retain(|(other, _), _| *other != owner.number);
        }
    }
}

/// Bytes for slices, and the number of directories.
fn shares(budget_bytes: u64) -> (u64, u64) {
    let directory_bytes = budget_bytes / DIRECTORY_SHARE;
    (budget_bytes - directory_bytes, (directory_bytes / DIRECTORY_MEMORY_BYTES).max(16))
}

impl Default for MapCache {
    fn default() -> Self {
        Self::new(CACHE_BYTES_DEFAULT)
    }
}

impl fmt::Debug for MapCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MapCache({} bytes)", self.budget_bytes())
    }
}

/// The slices of one chain, by number.
pub(crate) struct SliceCache {
    shared: MapCache,
    chain: Owner,
    /// The frozen layers that the chain was opened with.
    frozen: Arc<Frozen>,
    /// Whether it has other frozen layers now.
    has_left_frozen: AtomicBool,
    loading: Claims,
    /// How many times owners were changed, by the slice's number.
    versions: [Mutex<u64>; VERSIONS],
}

impl SliceCache {
    /// The cache of a chain that was opened with `frozen` layers.
    pub(crate) fn new(shared: MapCache, frozen: Arc<Frozen>) -> Self {
        let versions = std::array::from_fn(|_| Mutex::default());
        let (chain, loading) = (Owner::new(&shared), Claims::default());
        let has_left_frozen = AtomicBool::new(false);
        Self { shared, chain, frozen, has_left_frozen, loading, versions }
    }

    pub(crate) fn shared(&self) -> &MapCache {
        &self.shared
    }

    #[inline]
    pub(crate) fn get(&self, number: u64) -> Option<Arc<HeldSlice>> {
        match self.shared.0.slices.get(&self.chain.key(number))? {
            Some(slice) => Some(slice),
            None => self.get_frozen(number),
        }
    }

    /// The slice of the frozen layers that the chain was opened with.
    pub(crate) fn get_frozen(&self, number: u64) -> Option<Arc<HeldSlice>> {
        self.shared.0.slices.get(&self.frozen.owner.key(number)).flatten()
    }

    /// Whether the chain still has the frozen layers that it was opened with, and another one has
    /// them, too, so that it is worth keeping their slices apart. A caller that compares layers
    /// takes them before it asks.
    pub(crate) fn shares_frozen(&self) -> bool {
        Arc::strong_count(&self.frozen) > 1 && !self.has_left_frozen.load(Ordering::SeqCst)
    }

    /// The chain is about to have other frozen layers. What it has in memory stays right.
    pub(crate) fn leave_frozen(&self) {
        self.has_left_frozen.store(true, Ordering::SeqCst);
    }

    /// What the chain has in memory and shares with none.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.chain.held_bytes.load(Ordering::Relaxed)
    }

    /// The budget of all chains together.
    pub(crate) fn budget_bytes(&self) -> u64 {
        self.shared.budget_bytes()
    }

    /// The right to load `key`. Waits while another task has it; then `None`, as the slice may be
    /// there now.
    pub(crate) async fn claim(&self, key: u64) -> Option<Claim<'_>> {
        self.loading.claim_or_wait(key).await
    }

    /// How many times owners in slice `number`, or one that shares its counter, were changed.
    pub(crate) fn version(&self, number: u64) -> u64 {
        *self.version_of(number)
    }

    /// Inserts a slice that was loaded since `version` was read, unless owners changed since: then
    /// it may be out of date. Returns it in any case.
    pub(crate) fn insert_loaded(
        &self,
        number: u64,
        loaded: Loaded,
        version: u64,
    ) -> Arc<HeldSlice> {
        let (slice, entry) = match loaded {
            Loaded::Own(slice) => {
                let slice = self.chain.hold(slice);
                (Arc::clone(&slice), Some(slice))
            }
            Loaded::OfFrozen(slice) => (slice, None),
        };
        let current = self.version_of(number);
        if *current == version {
            self.shared.0.insert(&self.chain, number, entry);
        }
        slice
    }

    /// Inserts a slice of the frozen layers that the chain was opened with (I4).
    pub(crate) fn insert_frozen(&self, number: u64, slice: Slice) -> Arc<HeldSlice> {
        let slice = self.frozen.owner.hold(slice);
        self.shared.0.insert(&self.frozen.owner, number, Some(Arc::clone(&slice)));
        slice
    }

    /// Replaces the slice by the result of `change`, if it is in the cache. If `change` returns
    /// `None`, it will be loaded again.
    pub(crate) fn change(&self, number: u64, change: impl FnOnce(&Slice) -> Option<Slice>) {
        let mut version = self.version_of(number);
        *version += 1;
        let slices = &self.shared.0.slices;
        let Some(entry) = slices.peek(&self.chain.key(number)) else { return };
        let slice = entry.or_else(|| self.get_frozen(number));
        match slice.and_then(|slice| change(&slice)) {
            Some(changed) => {
                self.shared.0.insert(&self.chain, number, Some(self.chain.hold(changed)));
            }
            None => drop(slices.remove(&self.chain.key(number))),
        }
    }

    /// Drops the chain's slices for which `keeps` is false, and everything that it has in common
    /// with others. Slices that are being loaded now are not cached.
    pub(crate) fn retain(&self, keeps: impl Fn(&Slice) -> bool) {
        self.outdate_loading();
        let keeps = |entry: &Option<Arc<HeldSlice>>| entry.as_ref().is_some_and(|held| keeps(held));
        let own = self.chain.number;
        self.shared.0.slices.retain(|(owner, _), entry| *owner != own || keeps(entry));
    }

    /// Slices that are being loaded now are not cached.
    pub(crate) fn outdate_loading(&self) {
        for version in &self.versions {
            *version.lock() += 1;
        }
    }

    fn version_of(&self, number: u64) -> MutexGuard<'_, u64> {
        let index = usize::try_from(number % VERSIONS as u64).expect("small");
        self.versions[index].lock()
    }
}

impl Drop for SliceCache {
    fn drop(&mut self) {
        self.shared.0.forget(&self.chain);
    }
}

#[cfg(test)]
mod tests;

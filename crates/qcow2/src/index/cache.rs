//! The slices in memory: one cache for the whole chain, with a budget in bytes.
//!
//! Invariants
//! - I1 The slices held never weigh more than the budget, including the cache's own overhead for
//!   each.
//! - I2 A slice is loaded by one task at a time; the others wait for it.
//! - I3 What a loader read before a writer changed owners never replaces the writer's version of
//!   the slice: each change is counted, and a loader with an outdated count does not publish its
//!   slice.

use crate::index::slice::Slice;
use mica_rt::sync::{Claim, Claims};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The cache's overhead for one slice: its table entry and the shared counters.
const ENTRY_BYTES: usize = 64;
/// The weight from which the first tables are sized.
const TYPICAL_SLICE_BYTES: u64 = 512;

/// Counters of changes: enough that loaders and writers of other slices rarely share one.
const VERSIONS: usize = 64;

#[derive(Clone)]
struct MemoryWeight;

impl Weighter<u64, Arc<Slice>> for MemoryWeight {
    fn weight(&self, _key: &u64, slice: &Arc<Slice>) -> u64 {
        (slice.memory_bytes() + ENTRY_BYTES) as u64
    }
}

/// Slices by number.
pub(crate) struct SliceCache {
    slices: Cache<u64, Arc<Slice>, MemoryWeight>,
    budget_bytes: u64,
    loading: Claims,
    /// How many times owners were changed, by the slice's number.
    versions: [Mutex<u64>; VERSIONS],
}

impl SliceCache {
    pub(crate) fn new(budget_bytes: u64) -> Self {
        let typical = usize::try_from(budget_bytes / TYPICAL_SLICE_BYTES).unwrap_or(usize::MAX);
        let slices = Cache::with_weighter(typical.clamp(16, 4096), budget_bytes, MemoryWeight);
        let versions = std::array::from_fn(|_| Mutex::default());
        Self { slices, budget_bytes, loading: Claims::default(), versions }
    }

    #[inline]
    pub(crate) fn get(&self, number: u64) -> Option<Arc<Slice>> {
        self.slices.get(&number)
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.slices.weight()
    }

    pub(crate) fn budget_bytes(&self) -> u64 {
        self.budget_bytes
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
    /// it may be out of date.
    pub(crate) fn insert_loaded(&self, number: u64, slice: Arc<Slice>, version: u64) {
        let current = self.version_of(number);
        if *current == version {
            self.slices.insert(number, slice);
        }
    }

    /// Replaces the slice by the result of `change`, if it is in the cache. If `change` returns
    /// `None`, it will be loaded again.
    pub(crate) fn change(&self, number: u64, change: impl FnOnce(&Slice) -> Option<Slice>) {
        let mut version = self.version_of(number);
        *version += 1;
        let Some(slice) = self.slices.peek(&number) else { return };
        match change(&slice) {
            Some(changed) => self.slices.insert(number, Arc::new(changed)),
            None => drop(self.slices.remove(&number)),
        }
    }

    /// Slices that are being loaded now are not cached.
    pub(crate) fn outdate_loading(&self) {
        for version in &self.versions {
            *version.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        }
    }

    fn version_of(&self, number: u64) -> MutexGuard<'_, u64> {
        let index = usize::try_from(number % VERSIONS as u64).expect("small");
        self.versions[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

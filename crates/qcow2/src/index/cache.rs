//! The slices in memory: one cache for the whole chain, with a budget in bytes.
//!
//! Invariants
//! - I1 The slices held never weigh more than the budget, what the cache itself needs for each
//!   included.
//! - I2 A slice is loaded by one task at a time; the others wait for it.

use crate::index::slice::Slice;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// What the cache needs for one slice besides the slice: its table entry and the shared counters.
const ENTRY_BYTES: usize = 64;
/// The weight by which the first tables are sized.
const TYPICAL_SLICE_BYTES: u64 = 512;

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
    loading: Mutex<HashMap<u64, Vec<Waker>>>,
}

impl SliceCache {
    pub(crate) fn new(budget_bytes: u64) -> Self {
        let typical = usize::try_from(budget_bytes / TYPICAL_SLICE_BYTES).unwrap_or(usize::MAX);
        let slices = Cache::with_weighter(typical.clamp(16, 4096), budget_bytes, MemoryWeight);
        Self { slices, budget_bytes, loading: Mutex::default() }
    }

    #[inline]
    pub(crate) fn get(&self, number: u64) -> Option<Arc<Slice>> {
        self.slices.get(&number)
    }

    pub(crate) fn insert(&self, number: u64, slice: Arc<Slice>) {
        self.slices.insert(number, slice);
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.slices.weight()
    }

    pub(crate) fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// The right to load `key`. Waits while another task has it; `None` then, as the slice may be
    /// there now.
    pub(crate) async fn claim(&self, key: u64) -> Option<LoadClaim<'_>> {
        if let Some(claim) = self.try_claim(key) {
            return Some(claim);
        }
        self.wait_for_loader(key).await;
        None
    }

    fn try_claim(&self, key: u64) -> Option<LoadClaim<'_>> {
        let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if loading.contains_key(&key) {
            return None;
        }
        loading.insert(key, Vec::new());
        Some(LoadClaim { cache: self, key })
    }

    fn wait_for_loader(&self, key: u64) -> impl Future<Output = ()> + use<'_> {
        let mut waited = false;
        std::future::poll_fn(move |context| {
            let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
            match loading.get_mut(&key) {
                Some(waiters) if !waited => {
                    waited = true;
                    waiters.push(context.waker().clone());
                    Poll::Pending
                }
                // Woken: the loader is done, or gave up. Whoever still misses the slice tries.
                _ => Poll::Ready(()),
            }
        })
    }
}

/// The right to load; given back on drop, also when the loader's future is dropped.
pub(crate) struct LoadClaim<'a> {
    cache: &'a SliceCache,
    key: u64,
}

impl Drop for LoadClaim<'_> {
    fn drop(&mut self) {
        let mut loading = self.cache.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let waiters = loading.remove(&self.key).unwrap_or_default();
        drop(loading);
        waiters.into_iter().for_each(Waker::wake);
    }
}

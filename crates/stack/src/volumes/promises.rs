//! Whether stores keep their promises, which is found out once in the life of a process: by a
//! probe, which waits for eight answers in sequence.

use super::faults::StoreFaults;
use super::url::StoreUrl;
use mica_block::{Objects, Result};
use mica_rt::sync::SharedLock;
use mica_store::object::{RetryObjects, RetryOptions, probe};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Attempts of a request of a probe: some seconds.
const PROBE_TRIES_MAX: u32 = 7;
/// Stores that were probed and that nobody uses any more, at most: then each is probed again.
const UNUSED_MAX: usize = 1024;

/// What is known of the promises of one store.
#[derive(Default)]
pub(super) struct Promises {
    /// Held by whoever probes it.
    probing: SharedLock,
    are_kept: AtomicBool,
}

/// By where a store is, and how it misbehaves.
type Named = (StoreUrl, StoreFaults);

/// Those of the stores of a process, also of such as are closed and opened again.
#[derive(Default)]
pub(super) struct AllPromises(Mutex<BTreeMap<Named, Arc<Promises>>>);

impl Promises {
    /// Whether a probe was passed.
    pub(super) fn are_kept(&self) -> bool {
        self.are_kept.load(Ordering::Acquire)
    }

    /// A probe was passed.
    pub(super) fn note_kept(&self) {
        self.are_kept.store(true, Ordering::Release);
    }

    /// Probes `objects`, unless that was done.
    ///
    /// # Errors
    /// `Unsupported` if a promise is broken; otherwise what the store reports.
    pub(super) async fn check(
        &self,
        objects: &Arc<dyn Objects>,
        numbers: impl FnOnce() -> Result<[u64; 2]>,
    ) -> Result<()> {
        let _alone = self.probing.alone().await;
        if !self.are_kept() {
            probe_once(objects, numbers()?).await?;
            self.note_kept();
        }
        Ok(())
    }
}

impl AllPromises {
    pub(super) fn of(&self, named: &Named) -> Arc<Promises> {
        let mut all = self.0.lock();
        if let Some(known) = all.get(named) {
            return Arc::clone(known);
        }
        if all.len() >= UNUSED_MAX {
            all.retain(|_, promises| Arc::strong_count(promises) > 1);
        }
        Arc::clone(all.entry(named.clone()).or_default())
    }
}

/// Finds out whether `objects` keep their promises, with a number that no other probe has, and one
/// for its pauses.
///
/// # Errors
/// As [`Promises::check`].
pub(super) async fn probe_once(objects: &Arc<dyn Objects>, [nonce, seed]: [u64; 2]) -> Result<()> {
    let tries_max = Some(PROBE_TRIES_MAX);
    let options = RetryOptions { tries_max, ..RetryOptions::new(seed) };
    probe(&RetryObjects::new(Arc::clone(objects), options), nonce).await
}

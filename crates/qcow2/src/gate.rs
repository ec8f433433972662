//! Tracks who is inside a chain, so that space is reused only when nobody may touch it, and so that
//! the active layer can be replaced between two writes.
//!
//! Invariants
//! - I1 A place that a request found in the map is not reused before the request is done.
//! - I2 While the gate is held no change of the disk is under way, and none begins.

use mica_rt::sync::{EndedPhase, InFlight, OwnedInFlight, Requests, Waiters};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Everything under way on a chain.
#[derive(Default)]
pub(crate) struct Gate {
    /// Everything that may touch a place that the map names or named.
    requests: Arc<Requests>,
    /// Writes straight to their place, even if the requests behind them were dropped.
    in_place: Arc<Requests>,
    /// All other changes of the disk, including those that wait to be admitted.
    changes: Arc<Requests>,
    asked: Arc<Requests>,
    is_held: AtomicBool,
    waiting: Waiters,
}

/// A change of the disk that is under way.
pub(crate) struct Changing {
    _change: OwnedInFlight,
    _request: OwnedInFlight,
}

/// A moment, which is over when everything that was under way then has ended.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    requests: EndedPhase,
    in_place: EndedPhase,
}

impl Gate {
    /// Counts a request until the returned value is dropped.
    #[inline]
    pub(crate) fn enter(&self) -> InFlight<'_> {
        self.requests.enter()
    }

    /// Counts a change that is requested: the chain is not idle from here on.
    pub(crate) fn ask(&self) -> OwnedInFlight {
        self.asked.enter_owned()
    }

    /// Counts a write straight to its place; `None` while the gate is held.
    #[inline]
    pub(crate) fn enter_in_place(&self) -> Option<OwnedInFlight> {
        let entered = self.in_place.enter_owned();
        // After it is counted: either the holder of the gate waits for it, or it sees the gate
        // (I2).
        (!self.is_held.load(Ordering::SeqCst)).then_some(entered)
    }

    /// Counts a change that was requested; waits while the gate is held.
    pub(crate) async fn enter_change(&self) -> Changing {
        let enter = || {
            let change = self.changes.enter_owned();
            let is_open = !self.is_held.load(Ordering::SeqCst);
            is_open.then(|| Changing { _change: change, _request: self.requests.enter_owned() })
        };
        self.waiting.until(enter).await
    }

    /// Waits until every write straight to its place that began before is done.
    pub(crate) async fn in_place_grace(&self) {
        self.in_place.grace().await;
    }

    /// Waits until every request that is under way is done.
    pub(crate) async fn grace(&self) {
        self.requests.grace().await;
        self.in_place.grace().await;
    }

    /// Waits until nothing is under way, and nothing waits to be admitted.
    pub(crate) async fn idle(&self) {
        while !(self.asked.is_idle() && self.requests.is_idle() && self.in_place.is_idle()) {
            self.asked.grace().await;
            self.grace().await;
        }
    }

    /// A moment for [`Self::is_over`]; `None` until everything from the last one is done.
    pub(crate) fn moment(&self) -> Option<Moment> {
        // In place first: if that is impossible, the other was not ended in vain.
        let in_place = self.in_place.end_phase()?;
        let requests = self.requests.end_phase()?;
        Some(Moment { requests, in_place })
    }

    /// Whether everything that was under way at `moment` is done (I1).
    pub(crate) fn is_over(&self, moment: Moment) -> bool {
        self.requests.is_drained(moment.requests) && self.in_place.is_drained(moment.in_place)
    }

    /// Holds the gate: once this is ready no change is under way, and none begins until the
    /// returned value is dropped. Only one task at a time may hold it.
    pub(crate) async fn hold(&self) -> HeldGate<'_> {
        let was_held = self.is_held.swap(true, Ordering::SeqCst);
        assert!(!was_held, "one task at a time holds the gate");
        let held = HeldGate(self);
        self.in_place.grace().await;
        self.changes.grace().await;
        held
    }
}

/// The gate is held until this is dropped.
#[must_use = "changes wait as long as this lives"]
pub(crate) struct HeldGate<'a>(&'a Gate);

impl Drop for HeldGate<'_> {
    fn drop(&mut self) {
        self.0.is_held.store(false, Ordering::SeqCst);
        self.0.waiting.wake_all();
    }
}

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
    /// Reads, from their plan on.
    reads: Arc<Requests>,
    /// Writes straight to their place, even if the requests behind them were dropped.
    in_place: Arc<Requests>,
    /// All other changes of the disk.
    changes: Arc<Requests>,
    /// Changes that wait while the gate is held.
    waiting: Arc<Requests>,
    is_held: AtomicBool,
    opened: Waiters,
}

/// A change of the disk that has begun; see [`Gate::enter_change`].
#[must_use = "a change that has begun is to enter"]
pub(crate) enum Entering {
    /// The gate was open.
    Entered(OwnedInFlight),
    /// It was held: the change counts as one that waits.
    Waiting(OwnedInFlight),
}

/// A moment, which is over when everything that was under way then has ended.
#[derive(Clone, Copy)]
pub(crate) struct Moment([EndedPhase; 3]);

impl Gate {
    /// Counts a read until the returned value is dropped.
    #[inline]
    pub(crate) fn enter(&self) -> InFlight<'_> {
        self.reads.enter()
    }

    /// As [`Self::enter`], for one that outlives its borrow of the disk.
    pub(crate) fn enter_owned(&self) -> OwnedInFlight {
        self.reads.enter_owned()
    }

    /// Counts a change: from here on the chain is not idle.
    pub(crate) fn begin_change(&self) -> Entering {
        match self.try_enter_change() {
            Some(entered) => Entering::Entered(entered),
            None => Entering::Waiting(self.waiting.enter_owned()),
        }
    }

    /// Counts a change that waits before it enters: from here on the chain is not idle, and whoever
    /// holds the gate does not wait for it.
    pub(crate) fn begin_waiting(&self) -> Entering {
        Entering::Waiting(self.waiting.enter_owned())
    }

    /// Waits while the gate is held; returns what is kept until the change is done.
    pub(crate) async fn enter_change(&self, entering: Entering) -> OwnedInFlight {
        match entering {
            Entering::Entered(entered) => entered,
            Entering::Waiting(_waiting) => self.opened.until(|| self.try_enter_change()).await,
        }
    }

    fn try_enter_change(&self) -> Option<OwnedInFlight> {
        let entered = self.changes.enter_owned();
        self.is_open().then_some(entered)
    }

    /// Asked after the change is counted: either the holder of the gate waits for it, or it sees
    /// that the gate is held (I2).
    #[inline]
    fn is_open(&self) -> bool {
        !self.is_held.load(Ordering::SeqCst)
    }

    /// Counts a write straight to its place; `None` while the gate is held.
    #[inline]
    pub(crate) fn enter_in_place(&self) -> Option<OwnedInFlight> {
        let entered = self.in_place.enter_owned();
        self.is_open().then_some(entered)
    }

    /// Whether nothing is under way just now.
    pub(crate) fn is_quiet(&self) -> bool {
        self.under_way().iter().all(|some| some.is_idle())
    }

    /// Waits until every write straight to its place that began before is done.
    pub(crate) async fn in_place_grace(&self) {
        self.in_place.grace().await;
    }

    /// Waits until every change that began before is done.
    pub(crate) async fn changes_grace(&self) {
        self.changes.grace().await;
    }

    /// Waits until everything that is under way is done, apart from changes that wait.
    pub(crate) async fn grace(&self) {
        for requests in self.under_way() {
            requests.grace().await;
        }
    }

    /// Waits until nothing is under way, and no change waits.
    pub(crate) async fn idle(&self) {
        while !(self.waiting.is_idle() && self.under_way().iter().all(|some| some.is_idle())) {
            self.waiting.grace().await;
            self.grace().await;
        }
    }

    /// A moment for [`Self::is_over`]; `None` until everything from the last one is done.
    pub(crate) fn moment(&self) -> Option<Moment> {
        let [reads, in_place, changes] = self.under_way();
        // A phase that was ended for nothing, as the next one could not be, is drained sooner.
        Some(Moment([reads.end_phase()?, in_place.end_phase()?, changes.end_phase()?]))
    }

    /// Whether everything that was under way at `moment` is done (I1).
    pub(crate) fn is_over(&self, Moment(ended): Moment) -> bool {
        self.under_way().iter().zip(ended).all(|(some, ended)| some.is_drained(ended))
    }

    /// Everything that may touch a place that the map names or named.
    fn under_way(&self) -> [&Requests; 3] {
        [&self.reads, &self.in_place, &self.changes]
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
        self.0.opened.wake_all();
    }
}

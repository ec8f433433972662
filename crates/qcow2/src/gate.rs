//! Tracks who is inside a chain, so that space is reused only when nobody may touch it, and so that
//! the active layer can be replaced between two writes.
//!
//! Invariants
//! - I1 A place that a request found in the map is not reused before the request is done.
//! - I2 While the gate is held no change of the disk is under way, and none begins.
//! - I3 A change may have taken a place away, and readers still find it until it has shown that: a
//!   moment is over only when what began before its changes ended is done, too.

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

/// A moment, which is over when everything that was under way then has ended, and what found places
/// in the map before the last change of them ended (I3).
pub(crate) struct Moment {
    changes: EndedPhase,
    /// Reads, and writes in place, once those changes have ended.
    others: Option<[EndedPhase; 2]>,
}

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

    /// A moment for [`Self::is_over`]; `None` until the changes of the last one are done.
    pub(crate) fn moment(&self) -> Option<Moment> {
        Some(Moment { changes: self.changes.end_phase()?, others: None })
    }

    /// Whether everything that was under way at `moment` is done (I1, I3). It is asked until it is.
    pub(crate) fn is_over(&self, moment: &mut Moment) -> bool {
        if !self.changes.is_drained(moment.changes) {
            return false;
        }
        if moment.others.is_none() {
            moment.others = self.end_others();
        }
        moment.others.is_some_and(|[reads, in_place]| {
            self.reads.is_drained(reads) && self.in_place.is_drained(in_place)
        })
    }

    /// `None` until everything from the last time is done. A phase that was ended for nothing, as
    /// the next one could not be, is drained sooner.
    fn end_others(&self) -> Option<[EndedPhase; 2]> {
        Some([self.reads.end_phase()?, self.in_place.end_phase()?])
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: a change had taken a cluster away, and not shown that, when the moment was taken.
    /// A read that began then found the cluster where it had been, and nobody waited for it.
    #[test]
    fn moment_is_not_over_before_what_began_while_its_changes_were_under_way() {
        let gate = Gate::default();
        let change = gate.try_enter_change().expect("the gate is open");
        let mut moment = gate.moment().expect("nothing was under way before");
        let read = gate.enter();
        let in_place = gate.enter_in_place().expect("the gate is open");
        assert!(!gate.is_over(&mut moment));
        drop(change);
        assert!(!gate.is_over(&mut moment), "the read may have the place");
        drop(read);
        assert!(!gate.is_over(&mut moment), "the write may have the place");
        let late = [gate.enter(), gate.enter()];
        drop(in_place);
        assert!(gate.is_over(&mut moment), "what begins afterwards finds another place");
        drop(late);
    }

    #[test]
    fn moment_of_a_quiet_disk_is_over_at_once() {
        let gate = Gate::default();
        let mut moment = gate.moment().expect("nothing is under way");
        assert!(gate.is_over(&mut moment));
    }
}

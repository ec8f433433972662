//! Neighbouring writes that are in flight together become one transaction: one allocation, one copy
//! of the bytes around them, one change of the map.
//!
//! A write to a single cluster whose entry is being changed offers itself. The holder of the claim
//! takes the pending offers before it looks at the entry; later offers are retried when the claim
//! ends.
//!
//! Invariants
//! - I1 An offer that was taken is done when it reports so, with the result of the transaction that
//!   took it.
//! - I2 When the claim of a cluster ends, everyone whose offer was not taken is woken.
//! - I3 Writes that are taken together do not overlap: each sector has one writer.

use mica_block::Result;
use mica_rt::Buf;
use mica_rt::sync::{Claim, Claims, Mode};
use mica_units::{GuestCluster, GuestRange};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// Writes that one transaction takes at most.
const TAKEN_MAX: usize = 64;

/// The writes on offer, by cluster.
#[derive(Default)]
pub(super) struct Gather {
    offers: Mutex<HashMap<GuestCluster, Vec<Arc<Offer>>>>,
}

/// A write that waits to be taken.
pub(super) struct Offer {
    range: GuestRange,
    state: Mutex<(State, Option<Waker>)>,
}

enum State {
    Offered(Buf),
    Taken,
    Done(Result<()>),
    Again(Buf),
    Over,
}

/// The outcome of an offer.
pub(super) enum Outcome {
    Done(Result<()>),
    /// Nobody took it.
    Again(Buf),
}

/// Whether a write leads its transaction, or has offered itself to the one that does.
pub(super) enum Role<'a> {
    Leads(Claimed<'a>, Buf),
    Offered(Arc<Offer>),
}

impl Gather {
    /// Returns the claim of `cluster`, or offers the write to `range` to its present holder.
    pub(super) fn join<'a>(
        &'a self,
        claims: &'a Claims,
        cluster: GuestCluster,
        range: GuestRange,
        buf: Buf,
    ) -> Role<'a> {
        // Under the lock of the offers, so that a claim that is just ending sees this one (I2).
        let mut offers = self.offers.lock();
        if let Some(claim) = claims.try_claim(cluster.number()) {
            let claimed =
                Claimed { gather: self, clusters: (cluster, cluster), claim: Some(claim) };
            return Role::Leads(claimed, buf);
        }
        let offer = Arc::new(Offer { range, state: Mutex::new((State::Offered(buf), None)) });
        offers.entry(cluster).or_default().push(Arc::clone(&offer));
        Role::Offered(offer)
    }

    /// The right to change the entries of guest clusters `first..=last`.
    pub(super) async fn claim<'a>(
        &'a self,
        claims: &'a Claims,
        first: GuestCluster,
        last: GuestCluster,
    ) -> Claimed<'a> {
        // Before the wait: others offer themselves during it, and have to be woken even if it is
        // abandoned (I2).
        let mut claimed = Claimed { gather: self, clusters: (first, last), claim: None };
        let range = first.number()..=last.number();
        claimed.claim = Some(claims.claim_range(range, Mode::Exclusive).await);
        claimed
    }

    /// The offers for `cluster` that overlap neither `led` nor each other.
    pub(super) fn take(
        &self,
        cluster: GuestCluster,
        led: GuestRange,
    ) -> Vec<(GuestRange, Buf, Arc<Offer>)> {
        let mut offers = self.offers.lock();
        let Some(waiting) = offers.get_mut(&cluster) else { return Vec::new() };
        let mut taken: Vec<(GuestRange, Buf, Arc<Offer>)> = Vec::new();
        waiting.retain(|offer| {
            let overlaps = |range: GuestRange| range.intersect(offer.range).is_some();
            let mut state = offer.state.lock();
            let free = taken.len() < TAKEN_MAX
                && !overlaps(led)
                && !taken.iter().any(|(range, ..)| overlaps(*range));
            if !free {
                return !matches!(state.0, State::Over);
            }
            match std::mem::replace(&mut state.0, State::Taken) {
                State::Offered(buf) => taken.push((offer.range, buf, Arc::clone(offer))),
                other => state.0 = other,
            }
            false
        });
        if waiting.is_empty() {
            offers.remove(&cluster);
        }
        taken
    }

    /// The claim of `cluster` has ended.
    fn wake(&self, cluster: GuestCluster) {
        let waiting = self.offers.lock().remove(&cluster);
        for offer in waiting.into_iter().flatten() {
            offer.change(|state| match state {
                State::Offered(buf) => State::Again(buf),
                other => other,
            });
        }
    }
}

impl Offer {
    /// The transaction that took it has ended.
    pub(super) fn finish(&self, result: Result<()>) {
        self.change(|_| State::Done(result));
    }

    fn change(&self, change: impl FnOnce(State) -> State) {
        let mut state = self.state.lock();
        let old = std::mem::replace(&mut state.0, State::Over);
        state.0 = change(old);
        let waker = state.1.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits until it is done, or until the claim ended without taking it.
    pub(super) async fn outcome(self: Arc<Self>) -> Outcome {
        let withdraw = Withdraw(self);
        std::future::poll_fn(|context| {
            let mut state = withdraw.0.state.lock();
            match std::mem::replace(&mut state.0, State::Over) {
                State::Done(result) => Poll::Ready(Outcome::Done(result)),
                State::Again(buf) => Poll::Ready(Outcome::Again(buf)),
                other => {
                    state.0 = other;
                    state.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// Withdraws an offer whose future is dropped; one that was taken continues without it.
struct Withdraw(Arc<Offer>);

impl Drop for Withdraw {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        if matches!(state.0, State::Offered(_) | State::Again(_)) {
            state.0 = State::Over;
        }
    }
}

/// The right to change the entries of some guest clusters.
pub(super) struct Claimed<'a> {
    gather: &'a Gather,
    /// The first and the last.
    clusters: (GuestCluster, GuestCluster),
    claim: Option<Claim<'a>>,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        drop(self.claim.take());
        let (first, last) = self.clusters;
        for cluster in first.through(last) {
            self.gather.wake(cluster);
        }
    }
}

/// What the guest writes in one transaction: ranges in rising order, with their bytes.
pub(super) struct Guest {
    /// The next one at the end.
    pieces: Pieces,
}

/// Ranges and their bytes: one mostly, and then without memory of its own.
pub(super) type Pieces = SmallVec<[(GuestRange, Buf); 1]>;

impl Guest {
    pub(super) fn new(pieces: impl Into<Pieces>) -> Self {
        let mut pieces = pieces.into();
        pieces.sort_by_key(|(range, _)| Reverse(range.start()));
        Self { pieces }
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = GuestRange> + '_ {
        self.pieces.iter().rev().map(|(range, _)| *range)
    }

    /// The next `len` bytes, in the order of the ranges. They are copied only if they span several
    /// buffers.
    pub(super) fn take(&mut self, len: usize) -> Buf {
        if let Some((_, front)) = self.pieces.last_mut()
            && len <= front.len()
        {
            return front.split_to(len);
        }
        let mut bytes = Buf::new(len);
        self.copy_to(bytes.own_bytes());
        bytes
    }

    /// Fills `to` with the next bytes.
    pub(super) fn copy_to(&mut self, to: &mut [u8]) {
        let mut at = 0;
        while at < to.len() {
            let (_, front) = self.pieces.last_mut().expect("as many bytes as the ranges have");
            let len = front.len().min(to.len() - at);
            to[at..at + len].copy_from_slice(&front[..len]);
            front.advance(len);
            at += len;
            if front.is_empty() {
                self.pieces.pop();
            }
        }
    }
}

#[cfg(test)]
mod tests;

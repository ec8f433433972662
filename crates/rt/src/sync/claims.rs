//! Claims: the right to work on a range of something that is numbered (clusters, windows, the bytes
//! of a file), or on one number of it.
//!
//! Invariants
//! - I1 A claim stands from the request until it is dropped, even if that is before it was granted.
//! - I2 Of two granted claims that overlap both are [`Mode::Shared`].
//! - I3 A claim waits for earlier ones only: so none waits forever, and no two for each other.
//! - I4 A task that waits listens to a conflicting claim before it releases the lock; the end of
//!   that claim wakes it, and it looks for the next.

use event_listener::{Event, IntoNotification};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Which claims may overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// It may overlap others that are shared.
    Shared,
    /// It overlaps none.
    Exclusive,
}

/// The claims that stand.
#[derive(Default)]
pub struct Claims {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the first number of their range, then in the order of the requests.
    entries: BTreeMap<(u64, u64), Entry>,
    next_order: u64,
    /// No entry reaches further beyond its first number.
    reach: u64,
}

struct Entry {
    last: u64,
    mode: Mode,
    /// Notified when the claim ends.
    end: Event,
}

impl Claims {
    /// The right to work on `key` alone, as soon as nobody else has it.
    pub async fn claim(&self, key: u64) -> Claim<'_> {
        self.claim_range(key..=key, Mode::Exclusive).await
    }

    /// The right to work on all of `range`, as soon as every earlier claim that conflicts has
    /// ended.
    pub async fn claim_range(&self, range: RangeInclusive<u64>, mode: Mode) -> Claim<'_> {
        let (claim, mut in_the_way) = {
            let mut state = self.lock();
            let in_the_way = state.latest(u64::MAX, &range, mode).map(|entry| entry.end.listen());
            (self.add(&mut state, &range, mode), in_the_way)
        };
        while let Some(end) = in_the_way {
            end.await;
            let state = self.lock();
            in_the_way = state.latest(claim.order, &range, mode).map(|entry| entry.end.listen());
        }
        claim
    }

    /// The right to work on `key` alone. Waits while another task has it; `None` then, as there may
    /// be nothing left to do.
    pub async fn claim_or_wait(&self, key: u64) -> Option<Claim<'_>> {
        let end = {
            let mut state = self.lock();
            match state.latest(u64::MAX, &(key..=key), Mode::Exclusive) {
                Some(entry) => entry.end.listen(),
                None => return Some(self.add(&mut state, &(key..=key), Mode::Exclusive)),
            }
        };
        end.await;
        None
    }

    /// The right to work on `key` alone, if nobody has it or waits for it.
    pub fn try_claim(&self, key: u64) -> Option<Claim<'_>> {
        let mut state = self.lock();
        if state.latest(u64::MAX, &(key..=key), Mode::Exclusive).is_some() {
            return None;
        }
        Some(self.add(&mut state, &(key..=key), Mode::Exclusive))
    }

    fn add<'a>(&'a self, state: &mut State, range: &RangeInclusive<u64>, mode: Mode) -> Claim<'a> {
        let (first, last) = (*range.start(), *range.end());
        assert!(first <= last, "a claim of nothing");
        let order = state.next_order;
        state.next_order += 1;
        let others = if state.entries.is_empty() { 0 } else { state.reach };
        state.reach = others.max(last - first);
        state.entries.insert((first, order), Entry { last, mode, end: Event::new() });
        Claim { claims: self, first, order }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that may panic runs while the state is half changed.
        self.state.lock()
    }
}

impl State {
    /// The latest entry before `order` that conflicts with a claim of `range`: the others probably
    /// end before it.
    fn latest(&self, order: u64, range: &RangeInclusive<u64>, mode: Mode) -> Option<&Entry> {
        let (first, last) = (*range.start(), *range.end());
        let lowest = (first.saturating_sub(self.reach), 0);
        let near = self.entries.range(lowest..=(last, u64::MAX));
        let in_the_way = near.filter(|((_, of_other), other)| {
            let excludes = mode == Mode::Exclusive || other.mode == Mode::Exclusive;
            excludes && *of_other < order && other.last >= first
        });
        in_the_way.max_by_key(|((_, of_other), _)| *of_other).map(|(_, entry)| entry)
    }
}

/// A granted right, released on drop.
#[must_use = "the right is released when this is dropped"]
pub struct Claim<'a> {
    claims: &'a Claims,
    first: u64,
    order: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let entry = self.claims.lock().entries.remove(&(self.first, self.order));
        let entry = entry.expect("a claim stands until it is dropped");
        // Listeners register under the lock, so no fence is needed.
        entry.end.notify(usize::MAX.relaxed());
    }
}

#[cfg(test)]
mod tests;

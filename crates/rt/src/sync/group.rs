//! Flushes that share one sync: a call that arrives while a run is under way waits for it to end,
//! and then one of the waiting calls leads one more run for all of them.
//!
//! ```text
//! A ──┬─ run 1 (A leads) ─┬─────────────────────────
//! B   └── waits ──────────┼─ run 2 (B leads) ─┬─────
//! C       └── waits ──────┴── waits ──────────┴─────  B and C have the result of run 2
//! ```
//!
//! Words: a **run** is one call of a leader's closure until its future is ready; runs are numbered
//! from 1. A call **needs** run n if no run with a lower number will do: it began before the call.
//!
//! Invariants
//! - I1 At most one run is under way.
//! - I2 A call returns only the result of a run that began after the call; so it covers everything
//!   done before the call, provided the closure collects its work only when it is called.
//! - I3 A run that was abandoned (its future was dropped, or panicked) has no result; the calls
//!   that waited for it need the next one.
//! - I4 If no run is under way and calls wait, one of them has been woken and was not polled since.
//!   If that one is dropped, it wakes another.
//! - I5 No waker is woken under the lock.
//!
//! Callers may be on any thread; the run is on the executor of the call that leads it.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Runs that are shared by all waiting calls, each with an outcome of type `T`.
pub struct GroupSync<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    is_running: bool,
    /// Runs begun so far, which is the number of the last one.
    begun: u64,
    waiting: BTreeMap<u64, Waiter<T>>,
    next_key: u64,
}

/// A call that waits.
struct Waiter<T> {
    /// The run that it needs.
    needs: u64,
    waker: Waker,
    outcome: Option<T>,
}

impl<T> State<T> {
    /// The waker of a call that may lead the next run.
    fn successor(&self) -> Option<Waker> {
        let unserved = |waiter: &&Waiter<T>| waiter.outcome.is_none();
        if self.is_running {
            return None;
        }
        self.waiting.values().find(unserved).map(|waiter| waiter.waker.clone())
    }
}

impl<T> Default for GroupSync<T> {
    fn default() -> Self {
        let (waiting, is_running) = (BTreeMap::new(), false);
        Self { state: Mutex::new(State { is_running, begun: 0, waiting, next_key: 0 }) }
    }
}

impl<T: Clone> GroupSync<T> {
    /// Nothing waits, nothing runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the result of a run that began after this call: of `lead`, or of another caller's.
    /// `lead` is called at most once, and must collect what it makes durable when it is called, not
    /// before. All calls that waited for a run get the same result.
    pub async fn run(&self, lead: impl AsyncFnOnce() -> T) -> T {
        match (Turn { group: self, key: None }).await {
            Role::Served(outcome) => outcome,
            Role::Leads(run) => {
                let outcome = lead().await;
                run.end(&outcome);
                outcome
            }
        }
    }
}

impl<T> GroupSync<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No code that may panic runs while the state is half changed.
        self.state.lock()
    }
}

/// The role of a call.
enum Role<'a, T> {
    Leads(RunUnderWay<'a, T>),
    Served(T),
}

/// A call that waits for its role.
struct Turn<'a, T> {
    group: &'a GroupSync<T>,
    /// Its key in `waiting`, once it has one.
    key: Option<u64>,
}

impl<'a, T> Future for Turn<'a, T> {
    type Output = Role<'a, T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Role<'a, T>> {
        let group = self.group;
        let mut state = group.lock();
        if let Some(key) = self.key
            && let Some(waiter) = state.waiting.get_mut(&key)
            && let Some(outcome) = waiter.outcome.take()
        {
            state.waiting.remove(&key);
            self.key = None;
            return Poll::Ready(Role::Served(outcome));
        }
        if !state.is_running {
            if let Some(key) = self.key.take() {
                state.waiting.remove(&key);
            }
            state.is_running = true;
            state.begun += 1;
            let number = state.begun;
            return Poll::Ready(Role::Leads(RunUnderWay { group, number }));
        }
        let waker = context.waker();
        match self.key.and_then(|key| state.waiting.get_mut(&key)) {
            Some(waiter) => waiter.waker.clone_from(waker),
            None => {
                let (key, needs) = (state.next_key, state.begun + 1);
                state.next_key += 1;
                let waiter = Waiter { needs, waker: waker.clone(), outcome: None };
                state.waiting.insert(key, waiter);
                self.key = Some(key);
            }
        }
        Poll::Pending
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut state = self.group.lock();
        let waiter = state.waiting.remove(&key);
        // It may have been the one that was woken to lead (I4).
        let successor = state.successor();
        drop(state);
        drop(waiter);
        if let Some(successor) = successor {
            successor.wake();
        }
    }
}

/// The run that is under way. Dropped without [`RunUnderWay::end`], it is abandoned (I3).
struct RunUnderWay<'a, T> {
    group: &'a GroupSync<T>,
    number: u64,
}

impl<T: Clone> RunUnderWay<'_, T> {
    /// Delivers `outcome` to all calls that needed this run; dropping `self` finds the next leader.
    fn end(self, outcome: &T) {
        let mut served = Vec::new();
        let mut state = self.group.lock();
        assert!(state.is_running && state.begun == self.number, "two runs at once");
        for waiter in state.waiting.values_mut() {
            if waiter.outcome.is_none() && waiter.needs <= self.number {
                waiter.outcome = Some(outcome.clone());
                served.push(waiter.waker.clone());
            }
        }
        drop(state);
        served.into_iter().for_each(Waker::wake);
    }
}

impl<T> Drop for RunUnderWay<'_, T> {
    fn drop(&mut self) {
        let mut state = self.group.lock();
        state.is_running = false;
        let successor = state.successor();
        drop(state);
        if let Some(successor) = successor {
            successor.wake();
        }
    }
}

#[cfg(test)]
mod tests;

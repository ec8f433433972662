//! Which requests are under way, so that space is put to another use only when nobody may touch it.
//!
//! Two phases, as in read-copy-update: requests count themselves in the phase that is current when
//! they enter. Who wants to reuse space turns the phase ([`Requests::turn`]) and waits until the
//! phase before is empty ([`Requests::is_drained`]): then every request that entered before the
//! turn is done.
//!
//! Invariants
//! - I1 A request counts in exactly one phase from enter to drop.
//! - I2 [`Requests::turn`] is called again only after the phase that it ended is drained: else a
//!   phase would hold requests from before and after. So whoever has the requests of a disk either
//!   turns by himself, or waits by [`Requests::grace`], which many may do at once.
//! - I3 Who waits for a phase is woken by the last request of it that counted as owned.

use super::GroupSync;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// Counters are spread over this many cache lines, so that queues do not share one.
const SHARDS: usize = 16;

#[repr(align(128))]
#[derive(Default)]
struct Shard {
    /// Requests under way, by phase.
    under_way: [AtomicU64; 2],
}

/// The requests under way on one disk.
#[derive(Default)]
pub struct Requests {
    shards: [Shard; SHARDS],
    phase: AtomicUsize,
    graces: GroupSync<()>,
    /// Whether somebody waits for a phase to be drained, and who.
    is_awaited: AtomicBool,
    waiter: Mutex<Option<Waker>>,
}

impl Requests {
    /// Counts a request until what it gives is dropped.
    #[inline]
    pub fn enter(&self) -> InFlight<'_> {
        let (shard, phase) = self.count();
        InFlight { counter: Some(&self.shards[shard].under_way[phase]) }
    }

    /// Counts one more; gives where, for who counts it down.
    #[inline]
    fn count(&self) -> (usize, usize) {
        let shard = shard_of_thread();
        loop {
            let phase = self.phase.load(Ordering::SeqCst) & 1;
            let counter = &self.shards[shard].under_way[phase];
            counter.fetch_add(1, Ordering::SeqCst);
            // Whoever turned in between may have seen this phase empty already.
            if self.phase.load(Ordering::SeqCst) & 1 == phase {
                return (shard, phase);
            }
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The same for work that outlives the request's borrow of the disk.
    pub fn enter_owned(self: &Arc<Self>) -> OwnedInFlight {
        let (shard, phase) = self.count();
        OwnedInFlight { requests: Arc::clone(self), shard, phase }
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.is_drained(0) && self.is_drained(1)
    }

    /// Ends the current phase; gives its number for [`Self::is_drained`].
    pub fn turn(&self) -> usize {
        let ended = self.phase.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        ended
    }

    /// Whether every request that entered in phase `ended`, or before it, is done.
    pub fn is_drained(&self, ended: usize) -> bool {
        let count = |shard: &Shard| shard.under_way[ended & 1].load(Ordering::SeqCst);
        self.shards.iter().map(count).sum::<u64>() == 0
    }

    /// Waits until every owned request that entered before the call is done. Those that enter
    /// meanwhile are not waited for. Only for requests all of which are owned.
    pub async fn grace(&self) {
        if self.is_idle() {
            return;
        }
        let drain = async || {
            // A grace that was given up half-way has turned, and nobody has waited (I2).
            self.drained(self.phase.load(Ordering::SeqCst) + 1).await;
            let ended = self.turn();
            self.drained(ended).await;
        };
        self.graces.run(drain).await;
    }

    async fn drained(&self, ended: usize) {
        self.is_awaited.store(true, Ordering::SeqCst);
        std::future::poll_fn(|context| {
            // The waker first: who is done after the look finds it (I3).
            *self.lock_waiter() = Some(context.waker().clone());
            if !self.is_drained(ended) {
                return Poll::Pending;
            }
            self.lock_waiter().take();
            Poll::Ready(())
        })
        .await;
        self.is_awaited.store(false, Ordering::SeqCst);
    }

    fn lock_waiter(&self) -> std::sync::MutexGuard<'_, Option<Waker>> {
        self.waiter.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that is under way; see [`Requests::enter`].
#[must_use = "the request counts as done when this is dropped"]
pub struct InFlight<'a> {
    counter: Option<&'a AtomicU64>,
}

/// Work that is under way, however long; see [`Requests::enter_owned`].
#[must_use = "the work counts as done when this is dropped"]
pub struct OwnedInFlight {
    requests: Arc<Requests>,
    shard: usize,
    phase: usize,
}

impl Drop for OwnedInFlight {
    fn drop(&mut self) {
        self.requests.shards[self.shard].under_way[self.phase].fetch_sub(1, Ordering::SeqCst);
        if self.requests.is_awaited.load(Ordering::SeqCst) {
            let waiter = self.requests.lock_waiter().clone();
            waiter.into_iter().for_each(Waker::wake);
        }
    }
}

impl InFlight<'_> {
    /// For disks on which space has one use only.
    pub fn untracked() -> Self {
        Self { counter: None }
    }
}

impl Drop for InFlight<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(counter) = self.counter {
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn shard_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    SHARD.try_with(|shard| *shard).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_work_counts_until_it_is_dropped_on_whatever_thread() {
        let requests = Arc::new(Requests::default());
        let owned = requests.enter_owned();
        assert!(!requests.is_idle());
        std::thread::spawn(move || drop(owned)).join().expect("no panic");
        assert!(requests.is_idle());
    }

    #[test]
    fn grace_ends_when_those_who_entered_before_are_done() {
        let executor = crate::Executor::new(crate::Backend::Sim { seed: 1 }).expect("starts");
        executor.block_on(async {
            let requests = Arc::new(Requests::default());
            let early = [requests.enter_owned(), requests.enter_owned()];
            let ended = Arc::new(AtomicUsize::new(0));
            let waiting: Vec<_> = (0..3)
                .map(|_| {
                    let (requests, ended) = (Arc::clone(&requests), Arc::clone(&ended));
                    crate::spawn_joined(async move {
                        requests.grace().await;
                        ended.fetch_add(1, Ordering::SeqCst);
                    })
                })
                .collect();
            crate::yield_now().await;
            let late = requests.enter_owned();
            for early in early {
                assert_eq!(ended.load(Ordering::SeqCst), 0, "somebody is under way still");
                crate::yield_now().await;
                drop(early);
            }
            // Who joined late is led in a grace of his own, which waits for nobody that is late.
            drop(late);
            for waiting in waiting {
                waiting.await;
            }
            assert_eq!(ended.load(Ordering::SeqCst), 3);
            requests.grace().await;
        });
    }

    #[test]
    fn grace_waits_for_what_one_that_was_given_up_waited_for() {
        let executor = crate::Executor::new(crate::Backend::Sim { seed: 1 }).expect("starts");
        executor.block_on(async {
            let pause = std::time::Duration::from_millis(1);
            let requests = Arc::new(Requests::default());
            let early = requests.enter_owned();
            assert!(crate::timeout(pause, requests.grace()).await.is_err(), "it is given up");
            let late = requests.enter_owned();
            drop(late);
            assert!(crate::timeout(pause, requests.grace()).await.is_err(), "one is under way");
            drop(early);
            requests.grace().await;
        });
    }

    #[test]
    fn a_phase_is_drained_when_its_requests_are_done() {
        let requests = Requests::default();
        let early = requests.enter();
        let ended = requests.turn();
        let late = requests.enter();
        assert!(!requests.is_drained(ended));
        drop(early);
        assert!(requests.is_drained(ended), "a later request does not count");
        let ended = requests.turn();
        assert!(!requests.is_drained(ended));
        drop(late);
        assert!(requests.is_drained(ended));
    }
}

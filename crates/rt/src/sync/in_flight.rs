//! Which requests are under way, so that space is put to another use only when nobody may touch it.
//!
//! Two phases, as in read-copy-update: requests count themselves in the phase that is current when
//! they enter. To put space to another use, end the phase ([`Requests::end_phase`]) and wait until
//! it is drained ([`Requests::is_drained`]): then every request that entered before the end is
//! done. [`Requests::grace`] does both.
//!
//! Invariants
//! - I1 A request counts in exactly one phase from enter to drop.
//! - I2 A phase ends only when the one before it is drained: else it would hold requests from
//!   before and after. So any number of tasks may end phases and wait for them.
//! - I3 A task that waits for a phase is woken by the last request of it.

use super::{GroupSync, Waiters};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

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
    /// Tasks that wait for a phase to be drained.
    awaiting: AtomicUsize,
    waiters: Waiters,
    /// Held while a phase is ended.
    ending: Mutex<()>,
    graces: GroupSync<()>,
}

/// A phase that was ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EndedPhase(usize);

impl Requests {
    /// Counts a request until what it gives is dropped.
    #[inline]
    pub fn enter(&self) -> InFlight<'_> {
        let (shard, phase) = self.count();
        InFlight { counted: Some((self, shard, phase)) }
    }

    /// Counts one more; gives where, to count it down there.
    #[inline]
    fn count(&self) -> (u8, u8) {
        let shard = shard_of_thread();
        loop {
            let phase = self.phase.load(Ordering::SeqCst) & 1;
            let counter = &self.shards[usize::from(shard)].under_way[phase];
            counter.fetch_add(1, Ordering::SeqCst);
            let counted = u8::from(phase == 1);
            // The phase may have ended in between, and been seen empty already.
            if self.phase.load(Ordering::SeqCst) & 1 == phase {
                return (shard, counted);
            }
            // Or not empty, because of this one: who waits for that is woken (I3).
            self.count_down(shard, counted);
        }
    }

    #[inline]
    fn count_down(&self, shard: u8, phase: u8) {
        let counter = &self.shards[usize::from(shard)].under_way[usize::from(phase)];
        counter.fetch_sub(1, Ordering::SeqCst);
        // They count before they look (I3).
        if self.awaiting.load(Ordering::SeqCst) > 0 {
            self.waiters.wake_all();
        }
    }

    /// The same for work that outlives the request's borrow of the disk.
    pub fn enter_owned(self: &Arc<Self>) -> OwnedInFlight {
        let (shard, phase) = self.count();
        OwnedInFlight { requests: Arc::clone(self), shard, phase }
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.is_empty(0) && self.is_empty(1)
    }

    /// Ends the current phase; `None` while requests of the one before are under way (I2).
    pub fn end_phase(&self) -> Option<EndedPhase> {
        let _alone = self.ending.lock();
        let phase = self.phase.load(Ordering::SeqCst);
        if !self.is_empty(phase + 1) {
            return None;
        }
        self.phase.store(phase + 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Some(EndedPhase(phase))
    }

    /// Whether every request that entered before `ended` was ended is done.
    pub fn is_drained(&self, ended: EndedPhase) -> bool {
        // The next phase has ended, too, if two have begun since.
        self.phase.load(Ordering::SeqCst) > ended.0 + 1 || self.is_empty(ended.0)
    }

    fn is_empty(&self, phase: usize) -> bool {
        let count = |shard: &Shard| shard.under_way[phase & 1].load(Ordering::SeqCst);
        self.shards.iter().map(count).sum::<u64>() == 0
    }

    /// Waits until every request that entered before the call is done. Those that enter meanwhile
    /// are not waited for.
    pub async fn grace(&self) {
        if self.is_idle() {
            return;
        }
        let drained = self.graces.run(async || {
            let _awaiting = Awaiting::new(&self.awaiting);
            let ended = self.waiters.until(|| self.end_phase()).await;
            self.waiters.until(|| self.is_drained(ended).then_some(())).await;
        });
        drained.await;
    }
}

/// Counts a task that waits, until this is dropped.
struct Awaiting<'a>(&'a AtomicUsize);

impl<'a> Awaiting<'a> {
    fn new(awaiting: &'a AtomicUsize) -> Self {
        awaiting.fetch_add(1, Ordering::SeqCst);
        Self(awaiting)
    }
}

impl Drop for Awaiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A request that is under way.
#[must_use = "the request counts as done when this is dropped"]
pub struct InFlight<'a> {
    counted: Option<(&'a Requests, u8, u8)>,
}

/// Work that is under way, however long; see [`Requests::enter_owned`].
#[must_use = "the work counts as done when this is dropped"]
pub struct OwnedInFlight {
    requests: Arc<Requests>,
    shard: u8,
    phase: u8,
}

impl Drop for OwnedInFlight {
    fn drop(&mut self) {
        self.requests.count_down(self.shard, self.phase);
    }
}

impl InFlight<'_> {
    /// For disks on which space has one use only.
    pub fn untracked() -> Self {
        Self { counted: None }
    }
}

impl Drop for InFlight<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some((requests, shard, phase)) = self.counted {
            requests.count_down(shard, phase);
        }
    }
}

fn shard_of_thread() -> u8 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: u8 = {
            let next = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
            u8::try_from(next).expect("there are few shards")
        };
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
    fn grace_ends_when_earlier_requests_are_done() {
        let executor = crate::Executor::new(crate::Backend::Sim { seed: 1 }).expect("starts");
        executor.block_on(async {
            let requests = Arc::new(Requests::default());
            let early = [requests.enter_owned(), requests.enter_owned()];
            let ended = Arc::new(AtomicUsize::new(0));
            let waiting: Vec<_> = (0..3)
                .map(|_| {
                    let (requests, ended) = (Arc::clone(&requests), Arc::clone(&ended));
                    crate::spawn(async move {
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
            // A late joiner is led in a grace of its own, which does not wait for late requests.
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
        let ended = requests.end_phase().expect("nothing was ended before");
        let late = requests.enter();
        assert!(!requests.is_drained(ended));
        assert_eq!(requests.end_phase(), None, "the phase before is not drained");
        drop(early);
        assert!(requests.is_drained(ended), "a later request does not count");
        let next = requests.end_phase().expect("the phase before is drained");
        assert!(!requests.is_drained(next));
        let _later = requests.enter();
        assert!(requests.is_drained(ended), "it stays drained while its counter is used again");
        drop(late);
        assert!(requests.is_drained(next));
    }

    #[test]
    fn grace_waits_for_borrowed_requests_and_beside_phases_that_others_end() {
        let executor = crate::Executor::new(crate::Backend::Sim { seed: 1 }).expect("starts");
        executor.block_on(async {
            let requests = Arc::new(Requests::default());
            let early = requests.enter();
            let ended = requests.end_phase().expect("nothing was ended before");
            let middle = requests.enter();
            let waiting = crate::spawn({
                let requests = Arc::clone(&requests);
                async move { requests.grace().await }
            });
            crate::yield_now().await;
            assert!(!requests.is_drained(ended));
            drop(early);
            assert!(requests.is_drained(ended));
            crate::yield_now().await;
            let _late = requests.enter();
            drop(middle);
            waiting.await;
        });
    }
}

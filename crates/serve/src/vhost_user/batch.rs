//! How many of the requests that are there a queue begins before it gives answers.
//!
//! A queue that works off all of them first leaves the driver without anything to do until then,
//! and has nothing to do itself while the driver takes the answers and makes new requests: each
//! waits for the other. Answers after every few requests let both work at the same time, but waking
//! the driver costs as much as two or three requests. So batches shrink while the queue loses more
//! time because it ran dry and the driver had been waiting than it spends on calls, and grow while
//! it loses less than half of that. One dry moment proves nothing: the driver may have had to wait
//! for its processor. While other queues of the device are busy, too, the driver always has
//! something to do, and a batch is all that is there.

use mica_rt::Instant;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const REQUESTS_MIN: usize = 2;
const REQUESTS_MAX: usize = 64;
/// Batches after which they may be larger.
const GROWS_AFTER: u32 = 64;
/// What a call costs that wakes a driver.
const CALL: Duration = Duration::from_micros(5);
/// How many calls' worth of time a queue may lose beyond what it spent on calls.
const PATIENCE: u32 = 8;
/// Looks at an empty ring after which the queue was idle: a few may be due to other queues of the
/// executor, which are served in between.
const IDLE_LOOKS: u32 = 4;
/// A driver that has had nothing to ask for longer than this was not waiting for answers.
const DRY_MAX: Duration = Duration::from_micros(500);

/// How many queues of a device have requests in flight.
#[derive(Default)]
pub(super) struct BusyQueues(AtomicUsize);

/// Whether one queue is among them.
pub(super) struct Busy<'a> {
    queues: &'a BusyQueues,
    is_busy: bool,
}

impl<'a> Busy<'a> {
    /// A queue that is not.
    pub(super) fn new(queues: &'a BusyQueues) -> Self {
        Self { queues, is_busy: false }
    }

    /// Sets whether the queue is busy.
    pub(super) fn set(&mut self, is_busy: bool) {
        if std::mem::replace(&mut self.is_busy, is_busy) == is_busy {
            return;
        }
        match is_busy {
            true => self.queues.0.fetch_add(1, Ordering::Relaxed),
            false => self.queues.0.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// Whether others are.
    pub(super) fn are_others(&self) -> bool {
        self.queues.0.load(Ordering::Relaxed) > usize::from(self.is_busy)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// The size of a queue's batches.
pub(super) struct Batch {
    requests: usize,
    /// Looks at the ring since something was there, and when the first was.
    looks: u32,
    dry_at: Option<Instant>,
    /// Whether the driver had to be called when it got the last answers: it waited for them.
    called: bool,
    /// Since the size was last considered: batches, those for which the driver was called, and the
    /// time that was lost.
    batches: u32,
    calls: u32,
    lost: Duration,
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            requests: 16,
            looks: 0,
            dry_at: None,
            called: false,
            batches: 0,
            calls: 0,
            lost: Duration::ZERO,
        }
    }
}

impl Batch {
    /// How many of `waiting` requests begin now: what is left is worth a batch of its own.
    pub(super) fn of(&self, waiting: usize) -> usize {
        if waiting <= self.requests + self.requests / 2 { waiting } else { self.requests }
    }

    /// The driver got answers, and was called or not.
    pub(super) fn note_answers(&mut self, called: bool) {
        self.called = called;
        self.batches += 1;
        self.calls += u32::from(called);
    }

    /// There was always something to do, for this queue or for others.
    pub(super) fn note_busy(&mut self) {
        (self.looks, self.dry_at) = (0, None);
    }

    /// The ring was empty at `now`, and is looked at again.
    pub(super) fn note_look(&mut self, now: Instant) {
        self.looks += 1;
        self.dry_at.get_or_insert(now);
    }

    /// The ring was empty at `now`, and the queue goes to sleep.
    pub(super) fn note_sleep(&mut self, now: Instant) {
        self.looks = IDLE_LOOKS;
        self.dry_at.get_or_insert(now);
    }

    /// Something was there at `now`.
    pub(super) fn note_found(&mut self, now: Instant) {
        let was_idle = std::mem::take(&mut self.looks) >= IDLE_LOOKS;
        let dry = self.dry_at.take().map(|dry_at| now.saturating_since(dry_at));
        if was_idle && self.called {
            self.lost += dry.filter(|dry| *dry <= DRY_MAX).unwrap_or_default();
        }
        if self.lost > CALL * (self.calls + PATIENCE) {
            self.resize((self.requests * 3 / 4).max(REQUESTS_MIN));
        } else if self.batches >= GROWS_AFTER {
            let is_cheap = self.lost <= CALL * self.calls / 2;
            let step = if is_cheap { 1 + self.requests / 8 } else { 0 };
            self.resize((self.requests + step).min(REQUESTS_MAX));
        }
    }

    fn resize(&mut self, requests: usize) {
        (self.requests, self.batches, self.calls) = (requests, 0, 0);
        self.lost = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_rt::{Backend, Executor, now, sleep};

    /// After rounds in each of which the ring was empty that often, and for so long, before
    /// something was there.
    fn after_rounds(batch: Batch, rounds: u32, looks: u32, dry: Duration) -> Batch {
        rounds_of(batch, rounds, (looks, dry), true)
    }

    fn rounds_of(
        mut batch: Batch,
        rounds: u32,
        (looks, dry): (u32, Duration),
        called: bool,
    ) -> Batch {
        Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(async {
            for _ in 0..rounds {
                batch.note_answers(called);
                (0..looks).for_each(|_| batch.note_look(now()));
                sleep(dry).await;
                batch.note_found(now());
            }
        });
        batch
    }

    const SHORT: Duration = Duration::from_micros(20);

    #[test]
    fn batches_shrink_while_the_queue_runs_dry_and_grow_while_it_does_not() {
        let batch = after_rounds(Batch::default(), 3, IDLE_LOOKS, SHORT);
        assert_eq!(batch.of(1000), 12);
        let batch = after_rounds(batch, 100, IDLE_LOOKS, SHORT);
        assert_eq!(batch.of(1000), REQUESTS_MIN);
        let batch = after_rounds(batch, GROWS_AFTER * 3, IDLE_LOOKS - 1, SHORT);
        assert_eq!(batch.of(1000), REQUESTS_MIN + 3);
        let batch = after_rounds(batch, GROWS_AFTER * 100, 0, SHORT);
        assert_eq!(batch.of(1000), REQUESTS_MAX);
    }

    #[test]
    fn calls_that_cost_more_than_dry_moments_make_batches_larger() {
        let mut batch = Batch::default();
        for _ in 0..GROWS_AFTER / 16 {
            batch = after_rounds(batch, 1, IDLE_LOOKS, SHORT);
            batch = after_rounds(batch, 15, 0, Duration::ZERO);
        }
        assert_eq!(batch.of(1000), 16 + 1 + 16 / 8);
    }

    #[test]
    fn calls_that_cost_about_as_much_as_dry_moments_leave_batches_as_they_are() {
        let mut batch = Batch::default();
        for _ in 0..GROWS_AFTER / 5 + 1 {
            batch = after_rounds(batch, 1, IDLE_LOOKS, SHORT);
            batch = after_rounds(batch, 4, 0, Duration::ZERO);
        }
        assert_eq!(batch.of(1000), 16);
    }

    #[test]
    fn few_requests_more_than_a_batch_begin_with_it() {
        let batch = Batch::default();
        assert_eq!((batch.of(0), batch.of(16), batch.of(24), batch.of(25)), (0, 16, 24, 16));
    }

    #[test]
    fn driver_that_had_nothing_to_ask_makes_no_batch_smaller() {
        let batch = after_rounds(Batch::default(), GROWS_AFTER - 1, IDLE_LOOKS, DRY_MAX * 3);
        assert_eq!(batch.of(1000), 16);
    }

    #[test]
    fn driver_that_is_busy_makes_no_batch_smaller() {
        let batch = rounds_of(Batch::default(), GROWS_AFTER - 1, (IDLE_LOOKS, SHORT), false);
        assert_eq!(batch.of(1000), 16);
    }

    #[test]
    fn queue_that_ends_is_no_longer_busy() {
        let queues = BusyQueues::default();
        let (mut one, mut other) = (Busy::new(&queues), Busy::new(&queues));
        one.set(true);
        assert!(!one.are_others() && other.are_others());
        other.set(true);
        other.set(true);
        assert!(one.are_others());
        drop(other);
        assert!(!one.are_others());
    }

    #[test]
    fn queue_that_slept_for_a_short_time_had_run_dry() {
        Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(async {
            let mut batch = Batch::default();
            for _ in 0..3 {
                batch.note_answers(true);
                batch.note_sleep(now());
                sleep(SHORT).await;
                batch.note_found(now());
            }
            assert_eq!(batch.of(1000), 12);
        });
    }
}

//! Who may poll instead of sleeping.
//!
//! Polling saves a trip through the scheduler, as long as nobody else needs the processor. Who
//! brings the next request does, so at most half of the processors are taken by executors that
//! poll; the others sleep.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// How many parts of this executor poll.
    static PARTS: Cell<usize> = const { Cell::new(0) };
    /// Whether a part of this executor ran dry since that was last asked.
    static RAN_DRY: Cell<bool> = const { Cell::new(false) };
}

/// How many executors poll.
static EXECUTORS: AtomicUsize = AtomicUsize::new(0);

/// The right of an executor's part to poll. It ends when this is dropped.
#[must_use = "it ends when this is dropped"]
pub struct Looking {
    /// Whether it counts: a simulated executor takes no processor.
    counts: bool,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl Looking {
    /// The right of a simulated executor.
    pub(crate) fn uncounted() -> Self {
        Self { counts: false, _thread: PhantomData }
    }

    /// Begins, unless enough executors poll already.
    pub(crate) fn begin() -> Option<Self> {
        let parts = PARTS.get();
        if parts == 0 && !take(&EXECUTORS, executors_max()) {
            return None;
        }
        PARTS.set(parts + 1);
        Some(Self { counts: true, _thread: PhantomData })
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        if !self.counts {
            return;
        }
        PARTS.set(PARTS.get() - 1);
        if PARTS.get() == 0 {
            EXECUTORS.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A part of this executor has nothing to do, and polls instead of sleeping.
pub(crate) fn note_ran_dry() {
    RAN_DRY.set(true);
}

/// Whether a part of this executor ran dry since this was last asked.
pub(crate) fn ran_dry() -> bool {
    RAN_DRY.take()
}

/// Counts one more, unless there are `max` already.
pub(crate) fn take(count: &AtomicUsize, max: usize) -> bool {
    let more = |count: usize| (count < max).then_some(count + 1);
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

/// Half of the processors, at least one: the others are for who makes the requests.
pub(crate) fn executors_max() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| {
        std::thread::available_parallelism().map_or(1, |processors| (processors.get() / 2).max(1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Executor, look};

    #[test]
    fn no_more_are_counted_than_may_be() {
        let count = AtomicUsize::new(0);
        assert_eq!([take(&count, 2), take(&count, 2), take(&count, 2)], [true, true, false]);
        assert_eq!(count.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn parts_of_one_executor_poll_together_and_all_is_given_back() {
        // Executors of other tests may poll at the moment.
        let first = loop {
            match Looking::begin() {
                Some(first) => break first,
                None => std::thread::yield_now(),
            }
        };
        let second = Looking::begin().expect("its executor polls already");
        drop(first);
        assert_eq!(PARTS.get(), 1);
        drop(second);
        assert_eq!(PARTS.get(), 0);
    }

    #[test]
    fn simulated_executors_always_may() {
        Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(async {
            let all: Vec<_> = (0..100).map(|_| look()).collect();
            assert!(all.iter().all(Option::is_some));
            assert_eq!(PARTS.get(), 0);
        });
    }

    #[test]
    fn part_that_looks_has_run_dry_once() {
        let executor = Executor::new(Backend::Pool).expect("an executor");
        executor.block_on(async {
            assert!(!ran_dry());
            drop(look());
            assert!(ran_dry());
            assert!(!ran_dry());
        });
    }
}

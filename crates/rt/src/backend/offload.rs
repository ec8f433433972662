//! Whether an executor leaves writes that it could do by itself to a thread.
//!
//! While it writes ([`in_place`](super::in_place)), an executor does nothing else. If the file
//! system has to find places for what is written, that is a large part of its time; a thread that
//! writes meanwhile costs little in comparison, once it is awake and has several writes to do. So
//! from the fifth write of a turn on they go to a thread, if writes have lately taken long; and
//! those that are long in bytes do from the third on that the executor does without a rest, as
//! there are clients then whose requests wait for it.
//!
//! Invariants
//! - I1 While a thread has writes that an executor left to it, this one does none in place: it
//!   would wait for the thread, which holds the lock of the file. Writes that could not be done in
//!   place do not count: if one in place waits for them, it is the last for a while
//!   ([`in_place`](super::in_place), I2).
//! - I2 Executors that began to leave writes to a thread are at most half as many as processors:
//!   where all processors are busy, a thread more gains nothing.

use crate::looking::{executors_max, take};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Writes of a turn that are done in place in any case: for fewer it does not pay to wake a thread.
const WRITES_MIN: u32 = 4;
/// The mean time of a write from which on it is left to a thread: about twice what that costs.
const COSTLY: Duration = Duration::from_nanos(2000);
/// No write counts as more: one that was blocked, or lost its processor, says nothing about others.
const COUNTED_MAX: Duration = Duration::from_micros(4);
/// A write of this many bytes takes longer than to wake a thread.
const LONG: usize = 32 << 10;
/// Long writes since the executor last rested that are done in place in any case.
const LONG_MIN: u32 = 2;
/// The part of the mean that the last write is.
const WEIGHT: u32 = 8;

/// How many executors have left writes to a thread that are not done.
static EXECUTORS: AtomicUsize = AtomicUsize::new(0);

/// The right to do so. It ends when this is dropped.
#[derive(Debug)]
struct Right;

impl Right {
    fn take() -> Option<Self> {
        // One that is made only to be dropped would count.
        take(&EXECUTORS, executors_max()).then(|| Self)
    }
}

impl Drop for Right {
    fn drop(&mut self) {
        EXECUTORS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What an executor knows of its writes.
#[derive(Default)]
pub(super) struct Offload {
    /// Writes of this turn.
    writes: u32,
    /// Long writes since the executor last waited for something to do.
    long_writes: u32,
    /// Of the last writes, wherever they were done.
    mean: Duration,
    right: Option<Right>,
}

impl Offload {
    /// A turn of the executor begins, in which so many writes are with threads.
    pub(super) fn begin_turn(&mut self, with_threads: usize) {
        self.writes = 0;
        if with_threads == 0 {
            self.right = None;
        }
    }

    /// The executor had nothing to do.
    pub(super) fn note_rest(&mut self) {
        self.long_writes = 0;
    }

    /// Whether the next write, of `len` bytes, which could be done in place, is left to a thread;
    /// so many are with threads.
    pub(super) fn takes(&mut self, len: usize, with_threads: usize) -> bool {
        let is_long = len >= LONG;
        self.writes = self.writes.saturating_add(1);
        self.long_writes = self.long_writes.saturating_add(u32::from(is_long));
        if with_threads > 0 {
            return true;
        }
        let is_worth_it = (is_long && self.long_writes > LONG_MIN) || self.writes > WRITES_MIN;
        if !is_worth_it || self.mean < COSTLY {
            return false;
        }
        self.right = self.right.take().or_else(Right::take);
        self.right.is_some()
    }

    /// A write took so long.
    pub(super) fn note(&mut self, took: Duration) {
        self.mean = self.mean - self.mean / WEIGHT + took.min(COUNTED_MAX) / WEIGHT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHEAP: Duration = Duration::from_nanos(900);
    const DEAR: Duration = Duration::from_nanos(2900);

    /// Which of the `count` writes of a turn are left to a thread, which does none meanwhile.
    fn turn(offload: &mut Offload, count: usize) -> Vec<bool> {
        offload.begin_turn(0);
        let mut with_threads = 0;
        let mut take = || {
            let takes = offload.takes(4096, with_threads);
            with_threads += usize::from(takes);
            takes
        };
        (0..count).map(|_| take()).collect()
    }

    /// As [`turn`], while tests of whole executors may have taken the right.
    fn turn_with_right(offload: &mut Offload, count: usize) -> Vec<bool> {
        loop {
            let left = turn(offload, count);
            if left.last() == Some(&true) {
                return left;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn many_that_take_long_are_left_and_those_that_do_not_are_done() {
        let mut offload = Offload::default();
        assert_eq!(turn(&mut offload, 40), [false; 40], "nothing is known");
        (0..50).for_each(|_| offload.note(CHEAP));
        assert_eq!(turn(&mut offload, 40), [false; 40]);
        (0..50).for_each(|_| offload.note(DEAR));
        assert_eq!(turn(&mut offload, 4), [false; 4], "few");
        let left = turn_with_right(&mut offload, 40);
        assert_eq!(left, [&[false; 4][..], &[true; 36]].concat());
        (0..50).for_each(|_| offload.note(CHEAP));
        assert_eq!(turn(&mut offload, 40), [false; 40], "they no longer take long");
    }

    #[test]
    fn long_ones_are_left_by_an_executor_that_does_not_rest() {
        let mut offload = Offload::default();
        (0..50).for_each(|_| offload.note(DEAR));
        // One in each turn.
        let mut takes = |rests: bool| {
            offload.begin_turn(0);
            if rests {
                offload.note_rest();
            }
            offload.takes(LONG, 0)
        };
        assert_eq!([true; 9].map(&mut takes), [false; 9], "nobody waits");
        assert!(!takes(false));
        while !takes(false) {
            // Tests of whole executors may have taken the right.
            std::thread::yield_now();
        }
        assert!(!takes(true), "it had nothing to do");
    }

    #[test]
    fn none_is_done_in_place_beside_a_thread() {
        let mut offload = Offload::default();
        offload.begin_turn(1);
        assert!(offload.takes(4096, 1));
        offload.begin_turn(0);
        assert!(!offload.takes(4096, 0));
    }

    #[test]
    fn one_that_was_blocked_says_nothing_about_others() {
        let mut offload = Offload::default();
        (0..50).for_each(|_| offload.note(CHEAP));
        offload.note(Duration::from_secs(3));
        assert_eq!(turn(&mut offload, 40), [false; 40]);
    }

    #[test]
    fn right_is_given_to_few_and_goes_back() {
        let rights: Vec<_> = std::iter::from_fn(Right::take).collect();
        for _ in 0..1000 {
            assert!(Right::take().is_none(), "asking for it takes nothing");
        }
        drop(rights);
        let mut offload = Offload::default();
        (0..50).for_each(|_| offload.note(DEAR));
        turn_with_right(&mut offload, 5);
        assert!(offload.right.is_some());
        offload.begin_turn(1);
        assert!(offload.right.is_some(), "not done yet");
        offload.begin_turn(0);
        assert!(offload.right.is_none());
    }
}

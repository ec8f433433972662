//! Which part of a task was woken.
//!
//! A session or a queue is one task with many parts that wait: a receive, a send, a timer, and
//! every request in flight. Each part has a waker of its own, made once per task, that sets a bit
//! and wakes the task; so a task that wakes up polls only what has something to say, and no request
//! allocates for being waited for.
//!
//! Invariants
//! - I1 A bit that is set will be seen: setting the first bit of a word wakes the task, and the
//!   task takes whole words.
//! - I2 The task's waker is in place before a bit is taken, so that a wake-up between two polls
//!   reaches the task that polls now.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Wake, Waker};

const WORD_BITS: usize = 64;

/// The bits of one session.
pub(crate) struct WakeSet {
    words: Box<[AtomicU64]>,
    task: Mutex<Option<Waker>>,
}

impl WakeSet {
    /// Bits for `parts` parts.
    pub(crate) fn new(parts: usize) -> Arc<Self> {
        let words = (0..parts.div_ceil(WORD_BITS)).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { words, task: Mutex::new(None) })
    }

    /// The waker of part `index`.
    pub(crate) fn waker(self: &Arc<Self>, index: usize) -> Waker {
        assert!(index / WORD_BITS < self.words.len(), "a part beyond the set");
        Waker::from(Arc::new(Part { set: Arc::clone(self), index }))
    }

    /// Puts the task's waker in place (I2).
    pub(crate) fn set_task(&self, waker: &Waker) {
        let mut task = self.task.lock();
        match &mut *task {
            Some(known) if known.will_wake(waker) => {}
            task => *task = Some(waker.clone()),
        }
    }

    /// Takes the bits of word `word`.
    #[inline]
    pub(crate) fn take(&self, word: usize) -> u64 {
        let bits = &self.words[word];
        if bits.load(Ordering::Relaxed) == 0 { 0 } else { bits.swap(0, Ordering::AcqRel) }
    }
}

/// The numbers of the bits that are set in `bits`.
pub(crate) fn ones(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let next = bits.trailing_zeros();
        bits &= bits.checked_sub(1)?;
        Some(next as usize)
    })
}

struct Part {
    set: Arc<WakeSet>,
    index: usize,
}

impl Wake for Part {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let bit = 1_u64 << (self.index % WORD_BITS);
        let before = self.set.words[self.index / WORD_BITS].fetch_or(bit, Ordering::AcqRel);
        if before == 0 {
            let task = self.set.task.lock();
            if let Some(task) = &*task {
                task.wake_by_ref();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn parts_that_wake_together_wake_the_task_once() {
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let set = WakeSet::new(70);
        set.set_task(&Waker::from(Arc::clone(&count)));

        set.waker(3).wake_by_ref();
        set.waker(5).wake_by_ref();
        set.waker(5).wake_by_ref();

        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(ones(set.take(0)).collect::<Vec<_>>(), [3, 5]);
        assert_eq!(set.take(0), 0);
    }

    #[test]
    fn part_woken_after_its_bit_was_taken_wakes_the_task_again() {
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let set = WakeSet::new(70);
        set.set_task(&Waker::from(Arc::clone(&count)));
        let part = set.waker(69);

        part.wake_by_ref();
        assert_eq!(ones(set.take(1)).collect::<Vec<_>>(), [5]);
        part.wake_by_ref();

        assert_eq!(count.0.load(Ordering::Relaxed), 2);
        assert_eq!(ones(set.take(1)).collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn ones_names_the_highest_bit_too() {
        assert_eq!(ones(1 << 63 | 1).collect::<Vec<_>>(), [0, 63]);
        assert_eq!(ones(0).count(), 0);
    }
}

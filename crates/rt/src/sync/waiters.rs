//! Tasks that wait for a condition: each checks it, and checks again whenever it is woken.
//!
//! Invariants
//! - I1 A task is registered before its last check; a change of the state comes first, the wake-up
//!   afterwards. So no wake-up is lost.
//! - I2 A task is registered at most once, and only while its future waits.

use event_listener::{Event, listener};

/// Tasks that wait for others to change a state.
#[derive(Default)]
pub struct Waiters {
    event: Event,
}

impl Waiters {
    /// Waits until `check` returns something. It is called at once, and again after each
    /// [`Self::wake_all`]; a check that fails must not wake the waiting tasks.
    pub async fn until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(found) = check() {
                return found;
            }
            listener!(self.event => woken);
            if let Some(found) = check() {
                return found;
            }
            woken.await;
        }
    }

    /// Makes every waiting task check again. Costs a fence and a load as long as none ever waited.
    #[inline]
    pub fn wake_all(&self) {
        self.event.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Woken;
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Waker};

    #[test]
    fn task_that_is_polled_often_is_woken_once() {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        let (waiters, is_so) = (Waiters::default(), AtomicUsize::new(0));
        let mut waiting =
            pin!(waiters.until(|| (is_so.load(Ordering::SeqCst) == 1).then_some("found")));
        for _ in 0..100 {
            assert!(waiting.as_mut().poll(&mut context).is_pending());
        }
        assert!(Arc::strong_count(&woken) < 5, "it is registered once");
        is_so.store(1, Ordering::SeqCst);
        waiters.wake_all();
        assert_eq!(woken.count(), 1);
        assert!(waiting.as_mut().poll(&mut context).is_ready());
    }

    #[test]
    fn change_between_the_two_checks_is_seen() {
        let (waiters, looks) = (Waiters::default(), AtomicUsize::new(0));
        let second = || (looks.fetch_add(1, Ordering::SeqCst) == 1).then_some(());
        let mut waiting = pin!(waiters.until(second));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_ready());
    }
}

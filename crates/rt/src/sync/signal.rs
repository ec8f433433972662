//! A flag that is raised once, for tasks on any thread to wait for.

use event_listener::{Event, EventListener};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// The flag.
#[derive(Default)]
pub struct Signal {
    is_raised: AtomicBool,
    event: Event,
}

impl Signal {
    /// Raises the flag and wakes everything that waits for it.
    pub fn raise(&self) {
        self.is_raised.store(true, Ordering::SeqCst);
        self.event.notify(usize::MAX);
    }

    /// Whether the flag is raised.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.is_raised.load(Ordering::SeqCst)
    }

    /// Wakes `waker` when the flag is raised, at once if it is, until what it gives is dropped.
    pub fn subscribe(&self, waker: &Waker) -> Subscription {
        let mut listener = self.event.listen();
        // Registered before the check, so that a flag raised in between is noticed by one of the
        // two.
        let registered = Pin::new(&mut listener).poll(&mut Context::from_waker(waker));
        if registered.is_ready() || self.is_raised() {
            waker.wake_by_ref();
        }
        Subscription { _listener: listener }
    }

    /// Waits for the flag.
    pub async fn raised(&self) {
        while !self.is_raised() {
            let listener = self.event.listen();
            if !self.is_raised() {
                listener.await;
            }
        }
    }

    /// Runs `future`, or drops it when the flag is raised.
    pub async fn unless_raised<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        let mut raised = pin!(self.raised());
        poll_fn(|context| match raised.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => future.as_mut().poll(context).map(Some),
        })
        .await
    }
}

/// A waker that waits for a [`Signal`]. Ends when dropped.
#[must_use]
pub struct Subscription {
    _listener: EventListener,
}

#[cfg(test)]
mod tests {
    use super::super::testing::Woken;
    use super::*;
    use std::sync::Arc;

    #[test]
    fn subscriber_is_woken_when_the_flag_is_raised_or_at_once() {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let signal = Signal::default();
        let early = signal.subscribe(&waker);
        drop(signal.subscribe(&waker));
        assert_eq!(woken.count(), 0);
        signal.raise();
        assert_eq!(woken.count(), 1, "one has ended, one was woken");
        let _late = signal.subscribe(&waker);
        assert_eq!(woken.count(), 2);
        drop(early);
    }

    #[test]
    fn all_waiters_continue() {
        let signal = Signal::default();
        let mut context = Context::from_waker(Waker::noop());
        let (mut first, mut second) = (pin!(signal.raised()), pin!(signal.raised()));
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        signal.raise();
        assert!(first.as_mut().poll(&mut context).is_ready());
        assert!(second.as_mut().poll(&mut context).is_ready());
    }
}

//! Room for connections, in which clients that ask for nothing do not keep out others.
//!
//! Invariants
//! - I1 There are at most so many connections as there is room for.
//! - I2 If there is none, the one that has been there longest without a request leaves. Whoever has
//!   sent one stays until it is answered.

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError};

pub(super) struct Room {
    free: Arc<Semaphore>,
    max: u32,
    places: Arc<Places>,
}

/// In the order in which they came.
#[derive(Default)]
struct Places(Mutex<VecDeque<Weak<Place>>>);

/// The place of a connection, freed when this is dropped.
pub(super) struct Place {
    /// Whether the head of a request has arrived.
    is_heard: AtomicBool,
    /// The answer is there.
    answered: Notify,
    dismissed: Notify,
    others: Arc<Places>,
    _permit: OwnedSemaphorePermit,
}

impl Room {
    pub(super) fn new(max: u32) -> Self {
        let free = Arc::new(Semaphore::new(max as usize));
        Self { free, max, places: Arc::default() }
    }

    /// A place for a connection, as soon as there is one; `None` if there will be none.
    pub(super) async fn place(&self) -> Option<Arc<Place>> {
        let permit = match Arc::clone(&self.free).try_acquire_owned() {
            Ok(permit) => permit,
            Err(TryAcquireError::Closed) => return None,
            Err(TryAcquireError::NoPermits) => {
                self.places.dismiss_one();
                Arc::clone(&self.free).acquire_owned().await.ok()?
            }
        };
        let place = Arc::new(Place {
            is_heard: AtomicBool::new(false),
            answered: Notify::new(),
            dismissed: Notify::new(),
            others: Arc::clone(&self.places),
            _permit: permit,
        });
        let mut places = self.places.lock();
        places.retain(|place| place.strong_count() > 0);
        places.push_back(Arc::downgrade(&place));
        Some(place)
    }

    /// Waits until all have left.
    pub(super) async fn empty(&self) {
        // It is never closed.
        let _ = self.free.acquire_many(self.max).await;
    }
}

impl Places {
    fn dismiss_one(&self) {
        let places = self.lock();
        let silent = |place: &Arc<Place>| !place.is_heard.load(Ordering::Relaxed);
        if let Some(place) = places.iter().filter_map(Weak::upgrade).find(silent) {
            place.dismissed.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Weak<Place>>> {
        self.0.lock()
    }
}

impl Place {
    /// A request has arrived.
    pub(super) fn hear(&self) {
        self.is_heard.store(true, Ordering::Relaxed);
    }

    /// The answer to its request is there.
    pub(super) fn answer(&self) {
        self.answered.notify_one();
    }

    /// Waits until the answer is there, unless no request has arrived. One task may.
    pub(super) async fn answered(&self) {
        if self.is_heard.load(Ordering::Relaxed) {
            self.answered.notified().await;
        }
    }

    /// Waits until the connection has to leave.
    pub(super) async fn dismissed(&self) {
        loop {
            self.dismissed.notified().await;
            // A request that has arrived but was not read yet is still heard: the runtime looks for
            // arrivals before this continues, and the caller reads before it asks again.
            tokio::task::yield_now().await;
            if !self.is_heard.load(Ordering::Relaxed) {
                return;
            }
            // It was heard just after it was chosen: another has to leave in its place.
            self.others.dismiss_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn now<F: Future>(future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        // Whoever is dismissed lets others have a turn first.
        (0..2).find_map(|_| match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    }

    /// The story: a hundred clients that connected and said nothing kept `mica ctl` waiting for
    /// fifteen seconds, until the deadline of each had passed.
    #[test]
    fn connection_that_says_nothing_leaves_if_another_comes() {
        let room = Room::new(2);
        let [first, second] = [0, 1].map(|_| now(room.place()).flatten().expect("there is room"));
        first.hear();
        let mut third = pin!(room.place());
        let mut context = Context::from_waker(Waker::noop());
        assert!(third.as_mut().poll(&mut context).is_pending(), "the second is still there");
        assert!(now(first.dismissed()).is_none(), "its request is answered");
        assert!(now(second.dismissed()).is_some());
        drop(second);
        let Poll::Ready(Some(third)) = third.as_mut().poll(&mut context) else {
            panic!("there is room")
        };
        third.hear();
        let mut fourth = pin!(room.place());
        assert!(fourth.as_mut().poll(&mut context).is_pending());
        assert!(now(first.dismissed()).is_none() && now(third.dismissed()).is_none());
    }

    /// The story: the connection that was chosen to leave spoke at that moment and stayed, no other
    /// left, and the newcomer waited for the deadline of one that said nothing.
    #[test]
    fn connection_that_speaks_when_it_is_to_leave_stays_and_another_leaves() {
        let room = Room::new(2);
        let [first, second] = [0, 1].map(|_| now(room.place()).flatten().expect("there is room"));
        let mut third = pin!(room.place());
        let mut context = Context::from_waker(Waker::noop());
        assert!(third.as_mut().poll(&mut context).is_pending());
        first.hear();
        assert!(now(first.dismissed()).is_none(), "its request is answered");
        assert!(now(second.dismissed()).is_some());
        drop(second);
        assert!(third.as_mut().poll(&mut context).is_ready());
    }
}

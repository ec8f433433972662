//! A flag that is raised once, for tasks on any thread to wait for.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// The flag.
#[derive(Default)]
pub struct Signal {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    raised: bool,
    wakers: BTreeMap<u64, Waker>,
    next_key: u64,
}

impl Signal {
    /// Raises the flag and wakes everybody who subscribed.
    pub fn raise(&self) {
        let wakers = {
            let mut state = self.lock();
            state.raised = true;
            std::mem::take(&mut state.wakers)
        };
        wakers.into_values().for_each(Waker::wake);
    }

    /// Whether the flag is raised.
    pub fn is_raised(&self) -> bool {
        self.lock().raised
    }

    /// Has `waker` woken when the flag is raised: at once if it is.
    pub fn subscribe(self: &Arc<Self>, waker: &Waker) -> Subscription {
        let mut state = self.lock();
        if state.raised {
            drop(state);
            waker.wake_by_ref();
            return Subscription { signal: Arc::clone(self), key: u64::MAX };
        }
        let key = state.next_key;
        state.next_key += 1;
        state.wakers.insert(key, waker.clone());
        Subscription { signal: Arc::clone(self), key }
    }

    /// Waits for the flag.
    pub async fn raised(self: &Arc<Self>) {
        let mut subscription = None;
        poll_fn(|context| {
            if self.is_raised() {
                return Poll::Ready(());
            }
            subscription = Some(self.subscribe(context.waker()));
            Poll::Pending
        })
        .await;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends when dropped.
pub struct Subscription {
    signal: Arc<Signal>,
    key: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.signal.lock().wakers.remove(&self.key);
    }
}

//! A flag that a task can wait for, set from any thread.

use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

/// Holds one notice, for one waiter.
#[derive(Default)]
pub struct Notify {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_set: bool,
    waiter: Option<Waker>,
}

impl Notify {
    /// Leaves a notice, and wakes the waiter.
    pub fn set(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_set = true;
        let waiter = state.waiter.take();
        drop(state);
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }

    /// Waits for the next notice, and takes it.
    pub async fn wait(&self) {
        std::future::poll_fn(|context| {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if std::mem::take(&mut state.is_set) {
                return Poll::Ready(());
            }
            state.waiter = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

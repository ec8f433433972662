//! Turns: tasks on several threads that do one step in the order of their tickets.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Whose turn it is.
#[derive(Default)]
pub struct Turns {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The ticket whose turn it is.
    now: u64,
    /// There are no more turns.
    ended: bool,
    waiting: BTreeMap<u64, Waker>,
}

impl Turns {
    /// Waits for the turn of `ticket`; false if it never comes.
    pub async fn wait(&self, ticket: u64) -> bool {
        poll_fn(|context| {
            let mut state = self.lock();
            if state.ended {
                return Poll::Ready(false);
            }
            if state.now == ticket {
                return Poll::Ready(true);
            }
            state.waiting.insert(ticket, context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Ends the current turn.
    pub fn advance(&self) {
        let mut state = self.lock();
        state.now += 1;
        let now = state.now;
        let next = state.waiting.remove(&now);
        drop(state);
        if let Some(next) = next {
            next.wake();
        }
    }

    /// Ends all turns, and wakes everything that waits for one.
    pub fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_values().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

//! Rights to work on something that one task at a time may work on, named by number.
//!
//! Invariants
//! - I1 A number is claimed at most once; the claim ends when it is dropped, also when its future
//!   is.
//! - I2 Who waits for a claim is woken when it ends.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

/// The claims that are held, and who waits for each.
#[derive(Default)]
pub struct Claims {
    held: Mutex<HashMap<u64, Vec<Waker>>>,
}

impl Claims {
    /// The right to work on `key`. Waits while another task has it; `None` then, as there may be
    /// nothing left to do.
    pub async fn claim_or_wait(&self, key: u64) -> Option<Claim<'_>> {
        if let Some(claim) = self.try_claim(key) {
            return Some(claim);
        }
        self.wait(key).await;
        None
    }

    /// The right to work on `key`, as soon as nobody else has it.
    pub async fn claim(&self, key: u64) -> Claim<'_> {
        loop {
            if let Some(claim) = self.claim_or_wait(key).await {
                return claim;
            }
        }
    }

    /// The right to work on `key`, if nobody has it now.
    pub fn try_claim(&self, key: u64) -> Option<Claim<'_>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.contains_key(&key) {
            return None;
        }
        held.insert(key, Vec::new());
        Some(Claim { claims: self, key })
    }

    fn wait(&self, key: u64) -> impl Future<Output = ()> + use<'_> {
        let mut waited = false;
        std::future::poll_fn(move |context| {
            let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            match held.get_mut(&key) {
                Some(waiters) if !waited => {
                    waited = true;
                    // Who was woken by something else and tries again is there already.
                    if !waiters.iter().any(|waiter| waiter.will_wake(context.waker())) {
                        waiters.push(context.waker().clone());
                    }
                    Poll::Pending
                }
                // Woken: the claim ended. Whoever still has something to do tries.
                _ => Poll::Ready(()),
            }
        })
    }
}

/// A right; given back on drop.
pub struct Claim<'a> {
    claims: &'a Claims,
    key: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut held = self.claims.held.lock().unwrap_or_else(PoisonError::into_inner);
        let waiters = held.remove(&self.key).unwrap_or_default();
        drop(held);
        waiters.into_iter().for_each(Waker::wake);
    }
}

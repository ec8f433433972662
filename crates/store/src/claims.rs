//! Which ranges of a file are being written past the page cache, so that a block that is read,
//! changed and written back holds nothing from before another write.
//!
//! Invariants
//! - I1 A range is claimed from before the first I/O on it until the last is done.
//! - I2 Of two granted claims that overlap neither is [`Kind::Parts`]: whole blocks may be written
//!   over each other, since neither write keeps bytes of before.
//! - I3 Claims are granted in the order in which they came, so that none waits for ever.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// What is written in a claimed range.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Whole blocks.
    Whole,
    /// Parts of blocks, or the space and the length of the file.
    Parts,
}

/// The claims on one file.
#[derive(Default)]
pub(crate) struct Claims {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// In the order in which they came.
    entries: Vec<Entry>,
    next_number: u64,
}

struct Entry {
    number: u64,
    range: Range<u64>,
    kind: Kind,
    /// Of who waits for it to be granted.
    waker: Option<Waker>,
}

impl Entry {
    fn keeps_out(&self, other: &Self) -> bool {
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && (self.kind == Kind::Parts || other.kind == Kind::Parts)
    }
}

impl Claims {
    /// Claims `range`, and waits until everybody who was earlier and is in the way is done.
    pub(crate) async fn claim(self: &Arc<Self>, range: Range<u64>, kind: Kind) -> Claim {
        let number = self.state().add(range, kind);
        let claim = Claim { claims: Arc::clone(self), number };
        poll_fn(|context| {
            let mut state = claim.claims.state();
            let position = state.position(number);
            let (earlier, rest) = state.entries.split_at_mut(position);
            let entry = &mut rest[0];
            if !earlier.iter().any(|other| other.keeps_out(entry)) {
                let unused = entry.waker.take();
                drop(state);
                drop(unused);
                return Poll::Ready(());
            }
            let replaced = entry.waker.replace(context.waker().clone());
            // Outside of the lock: the last of a foreign waker may drop claims.
            drop(state);
            drop(replaced);
            Poll::Pending
        })
        .await;
        claim
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, range: Range<u64>, kind: Kind) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.entries.push(Entry { number, range, kind, waker: None });
        number
    }

    fn position(&self, number: u64) -> usize {
        let found = self.entries.iter().position(|entry| entry.number == number);
        found.expect("a claim is in the list as long as it lives")
    }
}

/// A claimed range. Gives it up when it is dropped.
pub(crate) struct Claim {
    claims: Arc<Claims>,
    number: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.claims.state();
        let position = state.position(self.number);
        let gone = state.entries.remove(position);
        let later = state.entries.iter_mut().skip(position);
        let wakers: Vec<Waker> = later
            .filter(|entry| gone.keeps_out(entry))
            .filter_map(|entry| entry.waker.take())
            .collect();
        drop(state);
        drop(gone);
        wakers.into_iter().for_each(Waker::wake);
    }
}

//! What all boots from a store share in a process: memory for what they hold, and the store, which
//! guests have first.
//!
//! Invariants
//! - I1 The chunks of all images take no more than [`CHUNK_BYTES_MAX`].
//! - I2 No more than [`FETCHES_MAX`] parts are fetched at a time, and no further one is begun
//!   beside [`BESIDE_GUESTS_MAX`] while a guest of any volume that boots, or has, waits for the
//!   store.

use mica_rt::sync::Waiters;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Bytes of chunks, whatever each image may have.
const CHUNK_BYTES_MAX: u64 = 1 << 30;
/// Parts that are fetched at a time, and how many of them beside guests that wait for the store.
pub(crate) const FETCHES_MAX: usize = 16;
const BESIDE_GUESTS_MAX: usize = 4;

/// See the module.
#[derive(Default)]
pub(crate) struct Ahead {
    chunk_bytes: AtomicU64,
    /// Reads of guests that are under way.
    guests: AtomicUsize,
    fetches: AtomicUsize,
    /// Woken when there are fewer of either.
    fewer: Waiters,
}

impl Ahead {
    /// Takes memory for `bytes` of chunks, if there is any left.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let take = |taken: u64| taken.checked_add(bytes).filter(|taken| *taken <= CHUNK_BYTES_MAX);
        self.chunk_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Gives memory back that [`Self::take`] took.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.chunk_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A guest may wait for the store until what is returned is dropped.
    pub(crate) fn guest(self: &Arc<Self>) -> GuestRead {
        self.guests.fetch_add(1, Ordering::Relaxed);
        GuestRead(Arc::clone(self))
    }

    /// Waits until a part may be fetched, which lasts until what is returned is dropped.
    pub(crate) async fn fetch(self: &Arc<Self>) -> Fetch {
        self.fewer.until(|| self.try_fetch()).await
    }

    fn try_fetch(self: &Arc<Self>) -> Option<Fetch> {
        let max = match self.guests.load(Ordering::SeqCst) {
            0 => FETCHES_MAX,
            _ => BESIDE_GUESTS_MAX,
        };
        let begin = |count| (count < max).then_some(count + 1);
        let begun = self.fetches.fetch_update(Ordering::SeqCst, Ordering::SeqCst, begin);
        begun.is_ok().then(|| Fetch(Arc::clone(self)))
    }
}

/// A read of a guest that is under way.
pub(crate) struct GuestRead(Arc<Ahead>);

impl Drop for GuestRead {
    fn drop(&mut self) {
        if self.0.guests.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.fewer.wake_all();
        }
    }
}

/// A part that is being fetched.
pub(crate) struct Fetch(Arc<Ahead>);

impl Drop for Fetch {
    fn drop(&mut self) {
        self.0.fetches.fetch_sub(1, Ordering::SeqCst);
        self.0.fewer.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_parts_are_fetched_while_any_guest_waits() {
        let ahead = Arc::new(Ahead::default());
        let begun = || std::iter::from_fn(|| ahead.try_fetch()).collect::<Vec<_>>();
        let guest = ahead.guest();
        let mut fetches = begun();
        assert_eq!(fetches.len(), BESIDE_GUESTS_MAX);
        drop(guest);
        fetches.extend(begun());
        assert_eq!(fetches.len(), FETCHES_MAX);
        let _guest = ahead.guest();
        fetches.truncate(BESIDE_GUESTS_MAX);
        assert!(ahead.try_fetch().is_none(), "they go on, and no other begins");
        fetches.pop();
        assert!(ahead.try_fetch().is_some());
    }
}

//! How many clients of an address have not chosen an export.

use super::limits::HANDSHAKES_MAX;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts a client that has not chosen an export, until this is dropped.
pub(super) struct Handshake(Arc<AtomicUsize>);

impl Handshake {
    /// `None` if there are too many.
    pub(super) fn new(count: &Arc<AtomicUsize>) -> Option<Self> {
        let one_more = |count| (count < HANDSHAKES_MAX).then_some(count + 1);
        let counted = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        counted.ok().map(|_| Self(Arc::clone(count)))
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

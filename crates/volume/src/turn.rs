//! The order of what happens in this process.

use std::sync::atomic::{AtomicU64, Ordering};

/// When something happened, beside what else did.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Turn(u64);

impl Turn {
    /// After all that there were.
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::SeqCst))
    }
}

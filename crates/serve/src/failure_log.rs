//! Which failures are logged: clients and guests can cause as many as they like, and must not fill
//! the host's log.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Maximum number of failures of one kind and one client that are logged.
const LOGGED_MAX: u32 = 16;

/// Counts the failures of one kind that were logged.
#[derive(Default)]
pub(crate) struct FailureLog {
    logged: AtomicU32,
}

impl FailureLog {
    /// Whether to log one more.
    pub(crate) fn admits(&self) -> bool {
        // Counting further would wrap some day, and restart the log.
        let more = |logged| (logged < LOGGED_MAX).then_some(logged + 1);
        self.logged.fetch_update(Relaxed, Relaxed, more).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_first_failures_nothing_is_logged() {
        let log = FailureLog::default();
        let admitted = (0..1000).filter(|_| log.admits()).count();
        assert_eq!(admitted, 16);
        assert!(!log.admits());
    }
}

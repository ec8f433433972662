//! The system's clock, for tests with threads and sockets of the system.

use std::time::{Duration, Instant};

/// The time.
#[expect(clippy::disallowed_methods, reason = "threads of the system live by the real clock")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Lets other threads run for `duration`.
#[expect(clippy::disallowed_methods, reason = "threads of the system live by the real clock")]
pub(crate) fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

/// Waits until something is so, which other threads see to.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited in vain until {what}");
        pause(Duration::from_millis(1));
    }
}

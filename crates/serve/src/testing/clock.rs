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

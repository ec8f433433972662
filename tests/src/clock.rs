//! The one place that reads the real clock and sleeps: what is measured and waited for here are
//! other processes, which no simulated clock drives.

use std::time::{Duration, Instant};

/// Now.
#[expect(clippy::disallowed_methods, reason = "other processes live by the real clock")]
#[inline]
pub fn now() -> Instant {
    Instant::now()
}

/// Waits.
#[expect(clippy::disallowed_methods, reason = "other processes live by the real clock")]
pub fn sleep(duration: Duration) {
    std::thread::sleep(duration);
}

/// Calls `done` repeatedly, every `pause`, until it returns a value or `limit` has passed.
pub fn poll<T>(limit: Duration, pause: Duration, mut done: impl FnMut() -> Option<T>) -> Option<T> {
    let start = now();
    loop {
        if let Some(value) = done() {
            return Some(value);
        }
        if start.elapsed() >= limit {
            return None;
        }
        sleep(pause);
    }
}

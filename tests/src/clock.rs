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

/// Calls `done` repeatedly, every `pause`, until it returns a value or `limit` has passed. Then it
/// does so a little longer: if this process was stopped meanwhile, so were perhaps those that it
/// waits for, and they need a moment.
pub fn poll<T>(limit: Duration, pause: Duration, mut done: impl FnMut() -> Option<T>) -> Option<T> {
    let start = now();
    let mut late: Option<Instant> = None;
    loop {
        if let Some(value) = done() {
            return Some(value);
        }
        match late {
            Some(late) if late.elapsed() >= limit / 10 => return None,
            None if start.elapsed() >= limit => late = Some(now()),
            _ => {}
        }
        sleep(pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: the storm and a server were stopped together for longer than the limit, and the
    /// server was judged before it had gone on.
    #[test]
    fn who_was_stopped_for_longer_than_the_limit_looks_again() {
        let mut looks = 0;
        let found = poll(Duration::from_millis(200), Duration::from_millis(1), || {
            looks += 1;
            if looks == 1 {
                // As if it were stopped here.
                sleep(Duration::from_millis(300));
            }
            (looks == 3).then_some(looks)
        });
        assert_eq!(found, Some(3));
        assert_eq!(poll(Duration::ZERO, Duration::from_millis(1), || None::<()>), None);
    }
}

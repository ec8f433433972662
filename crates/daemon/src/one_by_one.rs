//! Opening one image after another, where two that are opened at the same time may each have seen
//! the other's locks.
//!
//! Invariants
//! - I1 Nobody waits for a disk that hangs in opening for longer than [`TURN_LIMIT`]: then two are
//!   opened at the same time once more, of which one may be refused.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// For the opening of another disk, which takes a moment unless its storage hangs.
pub(crate) const TURN_LIMIT: Duration = Duration::from_secs(5);

/// Whose turn it is.
#[derive(Default)]
pub(crate) struct OneByOne {
    is_taken: Mutex<bool>,
    freed: Condvar,
}

/// A turn, until this is dropped.
pub(crate) struct Turn<'a>(&'a OneByOne);

impl OneByOne {
    /// Waits up to `limit` for a turn; `None` if another one takes longer.
    pub(crate) fn turn(&self, limit: Duration) -> Option<Turn<'_>> {
        let mut is_taken = self.lock();
        self.freed.wait_while_for(&mut is_taken, |is_taken| *is_taken, limit);
        if *is_taken {
            return None;
        }
        *is_taken = true;
        Some(Turn(self))
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_taken.lock()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.lock() = false;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: a disk that hung in opening held a lock, for which others waited without end.
    #[test]
    fn turn_that_never_ends_is_not_waited_for() {
        let all = OneByOne::default();
        let hanging = all.turn(Duration::ZERO).expect("nobody else");
        assert!(all.turn(Duration::from_millis(1)).is_none());
        drop(hanging);
        assert!(all.turn(Duration::ZERO).is_some());
        assert!(all.turn(Duration::ZERO).is_some(), "it was dropped");
    }
}

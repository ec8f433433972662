//! Retrying while another process holds an image.

use mica_block::{ErrorKind, Result};
use std::sync::mpsc;
use std::time::Duration;

/// How long to wait for an image that another process holds.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    pub(crate) limit: Duration,
    /// Pause between two attempts.
    pub(crate) pause: Duration,
}

/// Calls `open` until it succeeds or fails for another reason than that the image is held; gives up
/// once `patience` has run out or `is_cancelled`.
///
/// # Errors
/// Those of the last call of `open`.
pub(crate) fn while_held<T>(
    patience: Patience,
    is_cancelled: impl Fn() -> bool,
    mut open: impl FnMut() -> Result<T>,
) -> Result<T> {
    let mut waited = Duration::ZERO;
    loop {
        let outcome = open();
        let is_held = outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Denied);
        if !is_held || waited >= patience.limit || is_cancelled() {
            return outcome;
        }
        sleep(patience.pause);
        waited += patience.pause;
    }
}

fn sleep(time: Duration) {
    // Nobody ever sends. This thread has no executor to sleep on.
    let (_sender, never) = mpsc::channel::<()>();
    let _ = never.recv_timeout(time);
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::Error;

    const BRIEF: Patience =
        Patience { limit: Duration::from_millis(3), pause: Duration::from_millis(1) };

    /// The outcome, and the number of attempts.
    fn attempt(is_cancelled: bool, outcomes: &[Option<ErrorKind>]) -> (Option<ErrorKind>, usize) {
        let mut count = 0;
        let outcome = while_held(
            BRIEF,
            || is_cancelled,
            || {
                let outcome = outcomes[count.min(outcomes.len() - 1)];
                count += 1;
                outcome.map_or(Ok(()), |kind| Err(Error::new(kind, "refused")))
            },
        );
        (outcome.err().map(|error| error.kind()), count)
    }

    #[test]
    fn held_image_is_tried_again_until_it_is_free() {
        let held = Some(ErrorKind::Denied);
        assert_eq!(attempt(false, &[held, held, None]), (None, 3));
        assert_eq!(
            attempt(false, &[held, Some(ErrorKind::Corrupt)]),
            (Some(ErrorKind::Corrupt), 2)
        );
    }

    #[test]
    fn image_that_stays_held_is_given_up() {
        let held = Some(ErrorKind::Denied);
        assert_eq!(attempt(false, &[held]), (held, 4), "at once, and after each of three pauses");
        assert_eq!(attempt(true, &[held]), (held, 1), "cancelled");
    }
}

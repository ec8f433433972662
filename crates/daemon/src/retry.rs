//! Retrying while another process holds an image, the system has no thread to spare, or an address
//! is not free yet.

use mica_block::{Error, ErrorKind, Result};
use rustix::io::Errno;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long to wait for an image that another process holds.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    pub(crate) limit: Duration,
    /// Pause between two attempts.
    pub(crate) pause: Duration,
}

/// Calls `open` until it succeeds or fails for a reason that stays: not that the image is held, or
/// that the system asks to try again. Gives up once `patience` has run out or `is_cancelled`. What
/// `open` itself waits counts.
///
/// # Errors
/// Those of the last call of `open`.
pub(crate) fn while_held<T>(
    patience: Patience,
    is_cancelled: impl Fn() -> bool,
    open: impl FnMut() -> Result<T>,
) -> Result<T> {
    retry_by(&clock(), is_passing, patience, is_cancelled, open)
}

/// Calls `act` until it succeeds, or fails for a reason that is not `passing`, or `patience` has
/// run out.
///
/// # Errors
/// Those of the last call of `act`.
pub(crate) fn retry_while<T>(
    passing: impl Fn(&Error) -> bool,
    patience: Patience,
    act: impl FnMut() -> Result<T>,
) -> Result<T> {
    retry_by(&clock(), passing, patience, || false, act)
}

fn clock() -> Clock<impl Fn() -> Duration, fn(Duration)> {
    Clock { elapsed: stopwatch(), sleep }
}

/// Says how long ago this was called, also to a thread that has no executor.
pub(crate) fn stopwatch() -> impl Fn() -> Duration {
    #[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
    let start = Instant::now();
    move || start.elapsed()
}

/// Whether somebody still listens at an address.
pub(crate) fn is_address_in_use(error: &Error) -> bool {
    error.raw_os_error() == Some(Errno::ADDRINUSE.raw_os_error())
}

/// Whether the image is held, or the system asks to try again.
pub(crate) fn is_passing(error: &Error) -> bool {
    let is_short = error.raw_os_error() == Some(Errno::AGAIN.raw_os_error());
    error.kind() == ErrorKind::Denied || is_short
}

/// A clock that starts with the first attempt.
struct Clock<E, S> {
    elapsed: E,
    sleep: S,
}

fn retry_by<T>(
    clock: &Clock<impl Fn() -> Duration, impl Fn(Duration)>,
    passing: impl Fn(&Error) -> bool,
    patience: Patience,
    is_cancelled: impl Fn() -> bool,
    mut open: impl FnMut() -> Result<T>,
) -> Result<T> {
    loop {
        let outcome = open();
        if !outcome.as_ref().is_err_and(&passing)
            || (clock.elapsed)() >= patience.limit
            || is_cancelled()
        {
            return outcome;
        }
        (clock.sleep)(patience.pause);
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
    use std::cell::Cell;

    const BRIEF: Patience =
        Patience { limit: Duration::from_millis(3), pause: Duration::from_millis(1) };

    /// The outcome, and the number of attempts, each of which takes a while.
    fn attempt(
        is_cancelled: bool,
        outcomes: &[Option<ErrorKind>],
        each: Duration,
    ) -> (Option<ErrorKind>, usize) {
        let mut count = 0;
        let now = Cell::new(Duration::ZERO);
        let pass = |time| now.set(now.get() + time);
        let outcome = retry_by(
            &Clock { elapsed: || now.get(), sleep: pass },
            is_passing,
            BRIEF,
            || is_cancelled,
            || {
                let outcome = outcomes[count.min(outcomes.len() - 1)];
                count += 1;
                pass(each);
                outcome.map_or(Ok(()), |kind| Err(Error::new(kind, "refused")))
            },
        );
        (outcome.err().map(|error| error.kind()), count)
    }

    #[test]
    fn held_image_is_tried_again_until_it_is_free() {
        let held = Some(ErrorKind::Denied);
        assert_eq!(attempt(false, &[held, held, None], Duration::ZERO), (None, 3));
        assert_eq!(
            attempt(false, &[held, Some(ErrorKind::Corrupt)], Duration::ZERO),
            (Some(ErrorKind::Corrupt), 2)
        );
    }

    #[test]
    fn image_that_stays_held_is_given_up() {
        let held = Some(ErrorKind::Denied);
        let tried = attempt(false, &[held], Duration::ZERO);
        assert_eq!(tried, (held, 4), "at once, and after each of three pauses");
        assert_eq!(attempt(true, &[held], Duration::ZERO), (held, 1), "cancelled");
    }

    /// The story: attempts that themselves waited for a dead process did not count, so that a limit
    /// of seconds lasted an hour.
    #[test]
    fn time_within_attempts_counts() {
        let held = Some(ErrorKind::Denied);
        assert_eq!(attempt(false, &[held], Duration::from_millis(1)), (held, 2));
        assert_eq!(attempt(false, &[held], BRIEF.limit), (held, 1));
    }
}

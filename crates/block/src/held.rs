//! Files that a process still holds which is dead, or about to let go of them: who finds a lock
//! like that waits for it instead of giving up, whatever opens the file.

use crate::{Error, Result};
use std::time::Duration;
use std::{fmt, io};

/// How often to retry a file that a dead process still holds: at first, and at most.
const HELD_TURNS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(200)];

/// The cause of an error: a lock is held, and nothing shows that its holder is alive, or that it
/// needs it for long.
#[derive(Debug)]
struct MayBeReleased(Duration);

impl fmt::Display for MayBeReleased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not released within {:?}", self.0)
    }
}

impl std::error::Error for MayBeReleased {}

/// The cause of a conflict that may resolve itself within this time.
#[must_use]
pub fn may_be_released_within(limit: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, MayBeReleased(limit))
}

/// For how long it is worth retrying what failed with `error`: a lock was held by a process that is
/// dead, or may be, or by one that holds it for a moment.
#[must_use]
pub fn lock_patience(error: &Error) -> Option<Duration> {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if let Some(MayBeReleased(limit)) = inner.and_then(|inner| inner.downcast_ref()) {
            return Some(*limit);
        }
        cause = error.source();
    }
    None
}

/// Calls `open`, and again for a while if only a dead process keeps it from opening an image: the
/// system releases what that process held a moment later. A warning says what is waited for.
///
/// # Errors
/// Those of `open`.
pub async fn wait_for_dead<T>(mut open: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let [mut turn, turn_max] = HELD_TURNS;
    // Each kind of error has its own patience, from when it first came: an image may be replaced
    // when somebody has just let go of it.
    let mut kinds = Vec::<(Duration, mica_rt::Instant)>::new();
    loop {
        let error = match open().await {
            Err(error) => error,
            opened => return opened,
        };
        let Some(patience) = lock_patience(&error) else { return Err(error) };
        let now = mica_rt::now();
        match kinds.iter().find(|(kind, _)| *kind == patience) {
            Some((_, since)) if now.saturating_since(*since) >= patience => return Err(error),
            Some(_) => {}
            None => {
                if kinds.is_empty() {
                    tracing::warn!("{error}: waiting until the system releases it");
                }
                kinds.push((patience, now));
            }
        }
        mica_rt::sleep(turn).await;
        turn = (turn * 2).min(turn_max);
    }
}

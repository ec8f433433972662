//! Whether an idle queue polls its ring for a while before it sleeps.
//!
//! A driver that sends the next request as soon as it has the answer to the last one makes the
//! queue sleep and wake for each: a notification, which for a real guest is an exit, and a trip
//! through the scheduler. Polling for as long as that takes costs no more. If polling found nothing
//! it is not repeated until a sleep turns out to have been short.

use mica_rt::{Instant, Looking, look};
use std::time::Duration;

/// How long it polls: about as long as a sleep and a wake-up take, so that polling in vain costs no
/// more than it would have saved.
const LOOK: Duration = Duration::from_micros(50);
/// A sleep up to this long was short.
const SHORT_SLEEP: Duration = Duration::from_micros(60);

/// What a queue remembers of its last pauses.
#[derive(Default)]
pub(super) struct Attention {
    pays: bool,
    /// While it looks: its right to, and when it gives up.
    until: Option<(Looking, Instant)>,
    slept_at: Option<Instant>,
}

/// What a queue that found nothing does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pause {
    /// It begins to look: it does not want to be notified.
    Begin,
    /// It looks again.
    Look,
    /// It asks to be notified and sleeps.
    Sleep,
}

impl Attention {
    /// There was something to do.
    pub(super) fn found(&mut self, now: Instant) {
        self.pays |= self.until.take().is_some();
        if let Some(slept_at) = self.slept_at.take() {
            self.pays |= now.saturating_since(slept_at) <= SHORT_SLEEP;
        }
    }

    /// The ring is not looked at for the time being: others may look instead.
    pub(super) fn look_away(&mut self) {
        self.until = None;
    }

    /// There was nothing to do.
    pub(super) fn pause(&mut self, now: Instant) -> Pause {
        if let Some((_, until)) = &self.until
            && now < *until
        {
            return Pause::Look;
        }
        if self.until.is_none()
            && self.pays
            && let Some(looking) = look()
        {
            self.until = Some((looking, now.after(LOOK)));
            return Pause::Begin;
        }
        (self.pays, self.until, self.slept_at) = (false, None, Some(now));
        Pause::Sleep
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_rt::{Backend, Executor, now, sleep};

    #[test]
    fn polling_continues_while_it_pays() {
        Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(async {
            let mut attention = Attention::default();
            assert_eq!(attention.pause(now()), Pause::Sleep, "nothing is known yet");
            sleep(Duration::from_micros(40)).await;
            attention.found(now());
            assert_eq!(attention.pause(now()), Pause::Begin, "the sleep was short");
            sleep(Duration::from_micros(10)).await;
            assert_eq!(attention.pause(now()), Pause::Look);
            attention.found(now());
            assert_eq!(attention.pause(now()), Pause::Begin, "looking found something");
            sleep(Duration::from_micros(60)).await;
            assert_eq!(attention.pause(now()), Pause::Sleep, "it found nothing");
            sleep(Duration::from_millis(10)).await;
            attention.found(now());
            assert_eq!(attention.pause(now()), Pause::Sleep, "the sleep was long");
        });
    }
}

//! Whether an idle queue polls its ring for a while before it sleeps.
//!
//! A driver that sends the next request as soon as it has the answer to the last one makes the
//! queue sleep and wake for each: a notification, which for a real guest is an exit, and a trip
//! through the scheduler. Polling for as long as that takes costs no more. If polling found nothing
//! it is not repeated until a sleep turns out to have been short.
//!
//! What counts is the time that an idle executor spends on polling. While it works for other queues
//! a look costs next to nothing, and few looks say little, however long they took together: so a
//! queue gives up after a while and a number of looks. And it waits for the driver only since it
//! gave the driver an answer.

use mica_rt::{Instant, Looking, look};
use std::time::Duration;

/// How long it polls: about as long as a sleep and a wake-up take, so that polling in vain costs no
/// more than it would have saved.
const LOOK: Duration = Duration::from_micros(50);
/// How often it looks at least: fewer looks take that long only if the executor is busy.
const LOOKS_MIN: u32 = 16;
/// A sleep up to this long was short.
const SHORT_SLEEP: Duration = Duration::from_micros(60);

/// What a queue remembers of its last pauses.
#[derive(Default)]
pub(super) struct Attention {
    pays: bool,
    search: Option<Search>,
    slept_at: Option<Instant>,
}

/// A queue that looks.
struct Search {
    _right: Looking,
    /// The first look since the driver last got answers; `None` until there is one.
    began: Option<Instant>,
    /// Looks since then.
    looks: u32,
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
        self.pays |= self.search.take().is_some();
        if let Some(slept_at) = self.slept_at.take() {
            self.pays |= now.saturating_since(slept_at) <= SHORT_SLEEP;
        }
    }

    /// The driver got answers, and has what it needs for its next requests.
    pub(super) fn answered(&mut self) {
        if let Some(search) = &mut self.search {
            (search.began, search.looks) = (None, 0);
        }
    }

    /// The ring is not looked at for the time being: others may look instead.
    pub(super) fn look_away(&mut self) {
        self.search = None;
    }

    /// There was nothing to do.
    pub(super) fn pause(&mut self, now: Instant) -> Pause {
        if let Some(search) = &mut self.search {
            search.looks += 1;
            let began = *search.began.get_or_insert(now);
            if search.looks < LOOKS_MIN || now.saturating_since(began) < LOOK {
                return Pause::Look;
            }
        } else if self.pays
            && let Some(right) = look()
        {
            self.search = Some(Search { _right: right, began: Some(now), looks: 0 });
            return Pause::Begin;
        }
        (self.pays, self.search, self.slept_at) = (false, None, Some(now));
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
            looks(&mut attention, LOOKS_MIN - 1);
            sleep(LOOK).await;
            assert_eq!(attention.pause(now()), Pause::Sleep, "it found nothing");
            sleep(Duration::from_millis(10)).await;
            attention.found(now());
            assert_eq!(attention.pause(now()), Pause::Sleep, "the sleep was long");
        });
    }

    fn looks(attention: &mut Attention, count: u32) {
        for _ in 0..count {
            assert_eq!(attention.pause(now()), Pause::Look);
        }
    }

    /// One that looks already.
    fn looking() -> Attention {
        let mut attention = Attention { pays: true, ..Attention::default() };
        assert_eq!(attention.pause(now()), Pause::Begin);
        attention
    }

    #[test]
    fn queue_of_a_busy_executor_looks_for_longer() {
        Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(async {
            let mut attention = looking();
            for _ in 1..LOOKS_MIN {
                sleep(LOOK).await;
                looks(&mut attention, 1);
            }
            sleep(LOOK).await;
            assert_eq!(attention.pause(now()), Pause::Sleep);
        });
    }

    #[test]
    fn queue_waits_for_its_driver_since_the_last_answer() {
        Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(async {
            let mut attention = looking();
            for _ in 0..3 {
                looks(&mut attention, LOOKS_MIN - 1);
                sleep(LOOK).await;
                attention.answered();
            }
            looks(&mut attention, LOOKS_MIN);
            sleep(LOOK).await;
            assert_eq!(attention.pause(now()), Pause::Sleep);
        });
    }
}

//! The clock of an executor and its timers.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::OnceLock;
use std::task::Waker;
use std::time::Duration;

/// A point in time, measured from an arbitrary start that all executors of the process share.
/// Virtual under the `sim` backend, where each executor has a time of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Instant(Duration);

impl Instant {
    pub(crate) const fn from_start(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    /// Time from `earlier` to here; zero if `earlier` lies after.
    pub fn saturating_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The point `duration` later.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

pub(crate) type TimerKey = (Instant, u64);

/// The timers of one executor, by due time.
#[derive(Default)]
pub(crate) struct Timers {
    by_due: BTreeMap<TimerKey, Waker>,
    next_id: u64,
}

impl Timers {
    /// Returns the timer's key, and the waker that it had: to be dropped outside of any borrow.
    pub(crate) fn register(
        &mut self,
        key: Option<TimerKey>,
        due: Instant,
        waker: &Waker,
    ) -> (TimerKey, Option<Waker>) {
        let key = key.unwrap_or_else(|| {
            self.next_id += 1;
            (due, self.next_id)
        });
        let replaced = self.by_due.insert(key, waker.clone());
        (key, replaced)
    }

    pub(crate) fn remove(&mut self, key: TimerKey) -> Option<Waker> {
        self.by_due.remove(&key)
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.by_due.keys().next().map(|(due, _)| *due)
    }

    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let entry = self.by_due.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }
}

/// Where an executor gets the time from.
#[derive(Clone)]
pub(crate) enum Clock {
    System(std::time::Instant),
    Virtual(Rc<Cell<Duration>>),
}

impl Clock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the system's clock")]
    pub(crate) fn system() -> Self {
        static START: OnceLock<std::time::Instant> = OnceLock::new();
        Self::System(*START.get_or_init(std::time::Instant::now))
    }

    pub(crate) fn now(&self) -> Instant {
        match self {
            Self::System(start) => Instant::from_start(start.elapsed()),
            Self::Virtual(elapsed) => Instant::from_start(elapsed.get()),
        }
    }
}

//! Which lines of one kind are logged: clients and guests can cause as many as they like, and must
//! not fill the host's log.

use crate::clock::{Clock, Instant};
use parking_lot::Mutex;
use std::fmt;
use std::time::Duration;

/// Lets a burst of lines of one kind through, and after that one in each period, which says how
/// many were left out before it.
pub struct LogLimit {
    burst: u32,
    period: Duration,
    state: Mutex<State>,
}

struct State {
    /// Lines that may still follow at once.
    left: u32,
    /// From when on time counts towards the next line.
    since: Option<Instant>,
    omitted: u64,
}

/// How many lines were left out since the last one, to be shown at the end of the next; nothing if
/// there were none.
#[must_use = "the line is to be logged, and says it"]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Omitted(u64);

impl LogLimit {
    /// For failures: after the first 16 one in a minute.
    pub const fn failures() -> Self {
        Self::new(16, Duration::from_secs(60))
    }

    /// For what well-behaved clients do often, too: after the first 100 one in a second.
    pub const fn visits() -> Self {
        Self::new(100, Duration::from_secs(1))
    }

    /// For what is the same for all who meet with it: one in a minute.
    pub const fn once_a_minute() -> Self {
        Self::new(1, Duration::from_secs(60))
    }

    const fn new(burst: u32, period: Duration) -> Self {
        let state = State { left: burst, since: None, omitted: 0 };
        Self { burst, period, state: Mutex::new(state) }
    }

    /// Whether to log one more line.
    pub fn admit(&self) -> Option<Omitted> {
        // Not that of an executor: some of the callers have none.
        self.admit_at(Clock::system().now())
    }

    fn admit_at(&self, now: Instant) -> Option<Omitted> {
        let mut state = self.state.lock();
        let since = *state.since.get_or_insert(now);
        let periods = now.saturating_since(since).as_nanos() / self.period.as_nanos().max(1);
        if let Ok(gained) = u32::try_from(periods)
            && gained < self.burst.saturating_sub(state.left)
        {
            state.left += gained;
            state.since = Some(since.after(self.period * gained));
        } else {
            state.left = self.burst;
            state.since = Some(now);
        }
        match state.left.checked_sub(1) {
            Some(left) => {
                state.left = left;
                Some(Omitted(std::mem::take(&mut state.omitted)))
            }
            None => {
                state.omitted += 1;
                None
            }
        }
    }
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::failures()
    }
}

impl fmt::Display for Omitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            1 => f.write_str(" (a line like this was left out before)"),
            more => write!(f, " ({more} lines like this were left out before)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(limit: &LogLimit, times_ms: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let at = |ms| Instant::from_start(Duration::from_millis(ms));
        times_ms.into_iter().filter_map(|ms| limit.admit_at(at(ms))).map(|it| it.0).collect()
    }

    #[test]
    fn after_a_burst_one_line_of_each_minute_says_what_was_left_out() {
        let limit = LogLimit::failures();
        assert_eq!(said(&limit, (0..1000).map(|_| 0)), [0; 16]);
        // Ten a second, for three minutes.
        assert_eq!(said(&limit, (0..1801).map(|n| n * 100)), [1584, 599, 599]);
    }

    #[test]
    fn after_silence_there_is_a_burst_again_and_not_more() {
        let limit = LogLimit::failures();
        assert_eq!(said(&limit, [0; 20]).len(), 16);
        assert_eq!(said(&limit, [u64::MAX / 2_000_000; 20]), [&[4][..], &[0; 15]].concat());
    }

    #[test]
    fn rare_lines_are_all_logged() {
        let limit = LogLimit::once_a_minute();
        assert_eq!(said(&limit, (0..100).map(|n| n * 60_000)), [0; 100]);
    }

    #[test]
    fn line_says_how_many_were_left_out() {
        assert_eq!(Omitted(0).to_string(), "");
        assert_eq!(Omitted(7).to_string(), " (7 lines like this were left out before)");
    }
}

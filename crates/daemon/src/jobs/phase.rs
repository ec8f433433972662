//! What a job is doing, and what may become of that.
//!
//! | | pause | resume | cancel | end |
//! |---|---|---|---|---|
//! | running | paused | | cancelling | ended |
//! | paused | | running | cancelling | ended |
//! | cancelling | | | | ended |
//! | ended | | | | |

use mica_block::Result;
use mica_stack::merge::Ended;
use std::time::{Duration, Instant};

/// What a job is doing.
pub(super) enum Phase {
    /// It copies.
    Running,
    /// It rests until somebody resumes it.
    Paused { since: Instant },
    /// It was told to end, and does at its next step.
    Cancelling,
    /// It touches the disk no more.
    Ended { at: Instant, outcome: Result<Ended> },
}

/// What happens to a job.
pub(super) enum Event {
    Pause,
    Resume,
    Cancel,
    End(Result<Ended>),
}

/// The phase of a job, and for how long it was paused before.
pub(super) struct Course {
    phase: Phase,
    rested: Duration,
}

impl Course {
    /// Of a job that begins.
    pub(super) fn new() -> Self {
        Self { phase: Phase::Running, rested: Duration::ZERO }
    }

    pub(super) fn phase(&self) -> &Phase {
        &self.phase
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended { .. })
    }

    /// At `now`, this `event` happens: the table above.
    pub(super) fn apply(&mut self, event: Event, now: Instant) {
        let next = match (&self.phase, event) {
            (Phase::Running, Event::Pause) => Phase::Paused { since: now },
            (Phase::Paused { .. }, Event::Resume) => Phase::Running,
            (Phase::Running | Phase::Paused { .. }, Event::Cancel) => Phase::Cancelling,
            (Phase::Running | Phase::Paused { .. } | Phase::Cancelling, Event::End(outcome)) => {
                Phase::Ended { at: now, outcome }
            }
            (Phase::Running, Event::Resume)
            | (Phase::Paused { .. }, Event::Pause)
            | (Phase::Cancelling, Event::Pause | Event::Resume | Event::Cancel)
            | (Phase::Ended { .. }, _) => return,
        };
        self.rested = self.rested_at(now);
        self.phase = next;
    }

    /// For how long it was paused until `now`, or until it ended.
    pub(super) fn rested_at(&self, now: Instant) -> Duration {
        let resting = match self.phase {
            Phase::Paused { since } => now.duration_since(since),
            Phase::Running | Phase::Cancelling | Phase::Ended { .. } => Duration::ZERO,
        };
        self.rested + resting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::{Error, ErrorKind};

    fn end() -> Event {
        Event::End(Err(Error::new(ErrorKind::Io, "the end")))
    }

    fn name(course: &Course) -> &'static str {
        match course.phase {
            Phase::Running => "running",
            Phase::Paused { .. } => "paused",
            Phase::Cancelling => "cancelling",
            Phase::Ended { .. } => "ended",
        }
    }

    #[test]
    fn job_goes_on_as_the_table_at_the_head_of_this_file_says() {
        let rows = include_str!("phase.rs").lines().take_while(|line| line.starts_with("//!"));
        let rows: Vec<Vec<_>> = rows
            .filter_map(|row| row.strip_prefix("//! | "))
            .map(|row| row.trim_end_matches('|').split('|').map(str::trim).collect())
            .collect();
        let states = &rows[1..];
        assert_eq!(states.len(), 4);
        let now = super::super::now();
        for row in states {
            for (column, event) in
                [Event::Pause, Event::Resume, Event::Cancel, end()].into_iter().enumerate()
            {
                let mut course = Course::new();
                match row[0] {
                    "running" => {}
                    "paused" => course.apply(Event::Pause, now),
                    "cancelling" => course.apply(Event::Cancel, now),
                    _ => course.apply(end(), now),
                }
                assert_eq!(name(&course), row[0]);
                course.apply(event, now);
                let next = if row[column + 1].is_empty() { row[0] } else { row[column + 1] };
                assert_eq!(name(&course), next, "event {column} of one that is {}", row[0]);
            }
        }
    }

    /// The story: the time of a job that ended while it was paused went on to be taken from what it
    /// had worked, for as long as it was told of.
    #[test]
    fn job_rests_only_while_it_is_paused() {
        let began = super::super::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut course = Course::new();
        course.apply(Event::Pause, at(1));
        course.apply(Event::Pause, at(2));
        assert_eq!(course.rested_at(at(3)), Duration::from_secs(2));
        course.apply(Event::Resume, at(4));
        course.apply(Event::Resume, at(5));
        assert_eq!(course.rested_at(at(6)), Duration::from_secs(3));
        course.apply(Event::Pause, at(10));
        course.apply(Event::Cancel, at(11));
        course.apply(end(), at(12));
        assert_eq!(course.rested_at(at(100)), Duration::from_secs(4));
        let mut failed = Course::new();
        failed.apply(Event::Pause, at(1));
        failed.apply(end(), at(3));
        assert_eq!(failed.rested_at(at(100)), Duration::from_secs(2));
    }
}

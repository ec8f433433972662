//! What each step took, reported at the end.

use mica_tests::clock;
use std::time::{Duration, Instant};

/// Times of steps.
pub(super) struct Clock {
    since: Instant,
    laps: Vec<(&'static str, Duration)>,
}

impl Clock {
    /// The first step begins.
    pub(super) fn start() -> Self {
        Self { since: clock::now(), laps: Vec::new() }
    }

    /// The step `name` has ended, and the next begins.
    pub(super) fn lap(&mut self, name: &'static str) {
        let now = clock::now();
        self.laps.push((name, now - self.since));
        self.since = now;
    }

    /// Says what each took.
    pub(super) fn tell(&self) {
        let all: Duration = self.laps.iter().map(|(_, time)| *time).sum();
        println!();
        for (name, time) in self.laps.iter().chain([&("all of it", all)]) {
            println!("{:>5} s  {name}", time.as_secs());
        }
    }
}

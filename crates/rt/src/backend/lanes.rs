//! What waits for a thread, sorted by what it may have to wait for: one lane for each file and way
//! of waiting.
//!
//! Invariants
//! - I1 A job begins only while fewer of its lane are at work than the lane has turns, so one file,
//!   however long it makes its jobs wait, does not take the threads from the others.
//! - I2 The jobs of a lane begin in the order in which they were added; lanes take turns.
//! - I3 A lane stands in `ready` once if it has a job that waits and a free turn, otherwise not at
//!   all.
//! - I4 `startable` is the number of jobs that may begin at once, of all lanes together.

use crate::file::File;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Jobs of a lane at work at once, at first: enough to keep a disk busy at depth 32.
pub(super) const TURNS_MAX: usize = 32;
/// Lanes that are kept when they are empty, so that a job need not create its lane again.
const EMPTY_MAX: usize = 64;

/// Name of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct LaneKey {
    /// Its address. Once the last job is finished, another file may get it, and the lane with it.
    file: usize,
    is_serial: bool,
}

impl LaneKey {
    /// The lane of what the kernel does with a file one after the other, because it locks the file:
    /// a second thread would only wait for the first.
    pub(super) fn serial(file: &Arc<File>) -> Self {
        Self { file: Arc::as_ptr(file).addr(), is_serial: true }
    }

    pub(super) fn parallel(file: &Arc<File>) -> Self {
        Self { file: Arc::as_ptr(file).addr(), is_serial: false }
    }
}

pub(super) struct Lanes<Job> {
    lanes: HashMap<LaneKey, Lane<Job>>,
    /// Lanes whose next job may begin.
    ready: VecDeque<LaneKey>,
    startable: usize,
    /// Turns of a lane that is not serial.
    turns: usize,
}

struct Lane<Job> {
    waiting: VecDeque<Job>,
    working: usize,
    /// Whether it stands in `ready`.
    is_ready: bool,
}

impl<Job> Lane<Job> {
    /// Jobs that may begin.
    fn startable(&self, key: LaneKey, turns: usize) -> usize {
        let turns = if key.is_serial { 1 } else { turns };
        self.waiting.len().min(turns.saturating_sub(self.working))
    }

    /// Makes it stand in `ready` if it is to (I3).
    fn queue(&mut self, key: LaneKey, turns: usize, ready: &mut VecDeque<LaneKey>) {
        if !self.is_ready && self.startable(key, turns) > 0 {
            self.is_ready = true;
            ready.push_back(key);
        }
    }
}

impl<Job> Default for Lanes<Job> {
    fn default() -> Self {
        Self { lanes: HashMap::new(), ready: VecDeque::new(), startable: 0, turns: TURNS_MAX }
    }
}

impl<Job> Lanes<Job> {
    /// Whether a job may begin.
    pub(super) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// How many jobs may begin at once.
    pub(super) fn startable(&self) -> usize {
        self.startable
    }

    /// Changes a lane, which exists, and what depends on it.
    fn change<T>(&mut self, key: LaneKey, change: impl FnOnce(&mut Lane<Job>) -> T) -> T {
        let lane = self.lanes.get_mut(&key).expect("a lane with a job exists");
        let before = lane.startable(key, self.turns);
        let changed = change(lane);
        self.startable = self.startable - before + lane.startable(key, self.turns);
        lane.queue(key, self.turns, &mut self.ready);
        changed
    }

    pub(super) fn add(&mut self, key: LaneKey, job: Job) {
        let made = || Lane { waiting: VecDeque::new(), working: 0, is_ready: false };
        self.lanes.entry(key).or_insert_with(made);
        self.change(key, |lane| lane.waiting.push_back(job));
    }

    /// Takes the job that is next. Its lane has one turn less until [`Self::end`].
    pub(super) fn begin(&mut self) -> Option<(LaneKey, Job)> {
        let key = self.ready.pop_front()?;
        let job = self.change(key, |lane| {
            lane.working += 1;
            lane.is_ready = false;
            lane.waiting.pop_front().expect("a ready lane has a job that waits")
        });
        Some((key, job))
    }

    /// A job of this lane has ended.
    pub(super) fn end(&mut self, key: LaneKey) {
        let is_empty = self.change(key, |lane| {
            lane.working -= 1;
            lane.working == 0 && lane.waiting.is_empty()
        });
        if is_empty && self.lanes.len() > EMPTY_MAX {
            self.lanes.remove(&key);
        }
    }

    /// Gives each lane that is not serial so many turns.
    pub(super) fn set_turns(&mut self, turns: usize) {
        if std::mem::replace(&mut self.turns, turns.max(1)) == self.turns {
            return;
        }
        self.ready.clear();
        self.startable = 0;
        for (key, lane) in &mut self.lanes {
            lane.is_ready = false;
            self.startable += lane.startable(*key, self.turns);
            lane.queue(*key, self.turns, &mut self.ready);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::next_random;

    fn of(key: LaneKey, turns: usize) -> usize {
        if key.is_serial { 1 } else { turns }
    }

    #[test]
    fn lanes_do_what_a_plain_model_does() {
        for seed in 0..200 {
            let mut state = seed;
            let mut below = |bound: usize| {
                usize::try_from(next_random(&mut state) % bound as u64).expect("below a usize")
            };
            let mut lanes = Lanes::default();
            // For each lane the jobs that wait, and how many are at work.
            let mut model: HashMap<LaneKey, (VecDeque<u32>, usize)> = HashMap::new();
            let mut working = Vec::new();
            let mut turns = TURNS_MAX;
            let files = 1 + below(200);
            for job in 0..2000 {
                let key = LaneKey { file: below(files), is_serial: below(2) == 0 };
                if below(200) == 0 {
                    turns = 1 + below(TURNS_MAX);
                    lanes.set_turns(turns);
                }
                match below(3) {
                    0 => {
                        lanes.add(key, job);
                        model.entry(key).or_default().0.push_back(job);
                    }
                    1 => match lanes.begin() {
                        Some((key, begun)) => {
                            let lane = model.get_mut(&key).unwrap();
                            assert_eq!(lane.0.pop_front(), Some(begun), "seed {seed}: in order");
                            assert!(lane.1 < of(key, turns), "seed {seed}");
                            lane.1 += 1;
                            working.push(key);
                        }
                        None => {
                            let may_begin = |(key, lane): (&LaneKey, &(VecDeque<u32>, usize))| {
                                !lane.0.is_empty() && lane.1 < of(*key, turns)
                            };
                            assert!(!model.iter().any(may_begin), "seed {seed}: none forgotten");
                        }
                    },
                    _ if working.is_empty() => {}
                    _ => {
                        let ended = working.swap_remove(below(working.len()));
                        lanes.end(ended);
                        model.get_mut(&ended).unwrap().1 -= 1;
                    }
                }
                assert!(lanes.lanes.len() <= EMPTY_MAX + files * 2, "seed {seed}");
                let startable = model.iter().map(|(key, (waiting, working))| {
                    waiting.len().min(of(*key, turns).saturating_sub(*working))
                });
                assert_eq!(lanes.startable(), startable.sum(), "seed {seed}");
            }
        }
    }

    #[test]
    fn file_that_waits_leaves_turns_to_the_others() {
        let stuck = LaneKey { file: 1, is_serial: false };
        let other = LaneKey { file: 2, is_serial: true };
        let mut lanes = Lanes::default();
        for job in 0..100 {
            lanes.add(stuck, job);
        }
        lanes.add(other, 100);
        lanes.add(other, 101);
        let begun: Vec<_> = std::iter::from_fn(|| lanes.begin()).collect();
        assert_eq!(begun.iter().filter(|(key, _)| *key == stuck).count(), TURNS_MAX);
        assert_eq!(begun[1], (other, 100), "lanes take turns");
        assert_eq!(begun.len(), TURNS_MAX + 1, "the serial lane has one turn");
        lanes.end(other);
        assert_eq!(lanes.begin(), Some((other, 101)));
    }

    #[test]
    fn empty_lanes_do_not_pile_up() {
        let mut lanes = Lanes::default();
        for file in 0..10_000 {
            lanes.add(LaneKey { file, is_serial: true }, ());
            let (key, ()) = lanes.begin().unwrap();
            lanes.end(key);
        }
        assert!(lanes.lanes.len() <= EMPTY_MAX + 1);
    }
}

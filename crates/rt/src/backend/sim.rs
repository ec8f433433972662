//! The simulator's backend: time passes only when there is nothing else to do (or when a task spins
//! for long, so that it does not spin forever), and what completes next follows from a seed. There
//! are no files and no sockets here, only simulated operations.

use crate::clock::Clock;
use crate::op::{OpKey, OpKind, Ops, SimWork};
use mica_units::next_random;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::time::Duration;

pub(crate) struct Sim {
    clock: Rc<Cell<Duration>>,
    /// The state of the random number generator.
    random: u64,
    /// Operations by the time at which they complete; the second part breaks ties at random.
    due: BTreeMap<(Duration, u64), OpKey>,
    /// Turns since the executor was last idle.
    busy_turns: u32,
}

/// A task that spins gets this many turns; then time passes anyway, in steps that double.
const BUSY_TURNS_MAX: u32 = 100;
const BUSY_STEP_BITS_MAX: u32 = 24;

impl Sim {
    pub(crate) fn new(seed: u64) -> Self {
        Self { clock: Rc::default(), random: seed, due: BTreeMap::new(), busy_turns: 0 }
    }

    pub(crate) fn clock(&self) -> Clock {
        Clock::Virtual(Rc::clone(&self.clock))
    }

    pub(crate) fn random_below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).expect("a small bound");
        usize::try_from(next_random(&mut self.random) % bound).expect("below a usize")
    }

    pub(crate) fn submit(&mut self, key: OpKey, op: &mut OpKind) -> Option<i32> {
        let OpKind::Simulated { latency, .. } = op else { return Some(-libc::ENOSYS) };
        // Between half and twice the nominal latency, so that operations overtake each other.
        let nominal = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX / 4).max(1);
        let nanos = nominal / 2 + next_random(&mut self.random) % (nominal * 3 / 2 + 1);
        let at = self.clock.get() + Duration::from_nanos(nanos);
        let tie = next_random(&mut self.random);
        self.due.insert((at, tie), key);
        None
    }

    pub(crate) fn turn(
        &mut self,
        wait: Option<Duration>,
        ops: &mut Ops,
        completions: &mut Vec<(OpKey, i32)>,
    ) {
        if wait == Some(Duration::ZERO) {
            self.busy_turns = self.busy_turns.saturating_add(1);
            if let Some(spinning) = self.busy_turns.checked_sub(BUSY_TURNS_MAX) {
                let step = Duration::from_nanos(1 << spinning.min(BUSY_STEP_BITS_MAX));
                self.clock.set(self.clock.get() + step);
                self.complete_due(ops, completions);
            }
            return;
        }
        self.busy_turns = 0;
        let limit = wait.map(|wait| self.clock.get() + wait);
        let next = self.due.keys().next().map(|(at, _)| *at);
        match (next, limit) {
            (None, None) => panic!("sim: every task waits for something that never happens"),
            (Some(at), limit) if limit.is_none_or(|limit| at <= limit) => self.clock.set(at),
            (_, Some(limit)) => return self.clock.set(limit),
            (Some(_), None) => unreachable!("without a limit every time is admitted"),
        }
        self.complete_due(ops, completions);
    }

    fn complete_due(&mut self, ops: &mut Ops, completions: &mut Vec<(OpKey, i32)>) {
        let now = self.clock.get();
        while let Some(entry) = self.due.first_entry()
            && entry.key().0 <= now
        {
            let key = entry.remove();
            let OpKind::Simulated { work, buf, .. } = ops.kind_mut(key) else {
                unreachable!("only simulated operations are submitted");
            };
            let work: SimWork = work.take().expect("an operation completes once");
            completions.push((key, code_of(work(buf))));
        }
    }
}

fn code_of(result: io::Result<usize>) -> i32 {
    match result {
        Ok(count) => i32::try_from(count).unwrap_or(i32::MAX),
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

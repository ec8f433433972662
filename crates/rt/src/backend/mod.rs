//! The three ways in which an executor does I/O, behind one set of calls.
//!
//! `uring` is for production. `pool` gives the same results where the system refuses io_uring.
//! `sim` is a virtual clock and simulated devices, so that the code above runs from a seed.

mod in_place;
mod lanes;
mod lone_sync;
mod offload;
mod pool;
mod sim;
mod threads;
mod uring;

use crate::clock::Clock;
use crate::op::{OpKey, OpKind, Ops};
use crate::remote::Remote;
use crate::task_key::TaskKey;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Which backend an executor uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backend {
    /// io_uring, or the pool where the system refuses io_uring (said in the log).
    Auto,
    /// io_uring.
    Uring,
    /// Threads that call pread, and poll for sockets.
    Pool,
    /// The simulator: a virtual clock, everything in an order that follows from the seed.
    Sim {
        /// Where the order and the latencies come from.
        seed: u64,
    },
}

pub(crate) struct Driver {
    /// Completions not yet handed to their futures; kept here to reuse its memory.
    pub(crate) completions: Vec<(OpKey, i32)>,
    kind: Kind,
}

enum Kind {
    Uring(Box<uring::Uring>),
    Pool(Box<pool::Pool>),
    Sim(Box<sim::Sim>),
}

impl Driver {
    pub(crate) fn new(backend: Backend, remote: &Arc<Remote>) -> io::Result<Self> {
        let uring = || uring::Uring::new(Arc::clone(remote)).map(|uring| Kind::Uring(uring.into()));
        let pool = || pool::Pool::new(Arc::clone(remote)).map(|pool| Kind::Pool(pool.into()));
        let kind = match backend {
            Backend::Uring => uring()?,
            Backend::Pool => pool()?,
            Backend::Sim { seed } => Kind::Sim(Box::new(sim::Sim::new(seed))),
            Backend::Auto => match uring() {
                Ok(kind) => kind,
                Err(error) => {
                    tracing::warn!(%error, "io_uring is not permitted here: using a thread pool");
                    pool()?
                }
            },
        };
        Ok(Self { completions: Vec::new(), kind })
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.kind {
            Kind::Uring(_) => "uring",
            Kind::Pool(_) => "pool",
            Kind::Sim(_) => "sim",
        }
    }

    pub(crate) fn clock(&self) -> Clock {
        match &self.kind {
            Kind::Uring(_) | Kind::Pool(_) => Clock::system(),
            Kind::Sim(sim) => sim.clock(),
        }
    }

    pub(crate) fn submit(&mut self, key: OpKey, op: &mut OpKind) {
        let refused = match &mut self.kind {
            Kind::Uring(uring) => uring.submit(key, op),
            Kind::Pool(pool) => pool.submit(key, op),
            Kind::Sim(sim) => sim.submit(key, op),
        };
        if let Some(code) = refused {
            self.completions.push((key, code));
        }
    }

    pub(crate) fn cancel(&mut self, key: OpKey) {
        match &mut self.kind {
            Kind::Uring(uring) => uring.cancel(key),
            Kind::Pool(pool) => pool.cancel(key),
            Kind::Sim(_) => {}
        }
    }

    /// Waits at most `wait` (forever if `None`) for something to happen, and collects completions.
    pub(crate) fn turn(
        &mut self,
        wait: Option<Duration>,
        ops: &mut Ops,
        completions: &mut Vec<(OpKey, i32)>,
    ) {
        completions.append(&mut self.completions);
        let wait = if completions.is_empty() { wait } else { Some(Duration::ZERO) };
        match &mut self.kind {
            Kind::Uring(uring) => uring.turn(wait, ops, completions),
            Kind::Pool(pool) => pool.turn(wait, ops, completions),
            Kind::Sim(sim) => sim.turn(wait, ops, completions),
        }
    }

    /// Takes back the memory of a list of completions that the caller has emptied. Operations that
    /// were refused in the meantime stay on the list.
    pub(crate) fn give_back(&mut self, mut emptied: Vec<(OpKey, i32)>) {
        emptied.append(&mut self.completions);
        self.completions = emptied;
    }

    /// Which of the ready tasks runs next.
    pub(crate) fn pick_ready(&mut self, ready: &mut VecDeque<TaskKey>) -> Option<TaskKey> {
        match &mut self.kind {
            Kind::Sim(sim) if !ready.is_empty() => {
                let index = sim.random_below(ready.len());
                ready.remove(index)
            }
            _ => ready.pop_front(),
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "how to wait for the system does not depend on the virtual clock"
)]
fn now() -> Instant {
    Instant::now()
}

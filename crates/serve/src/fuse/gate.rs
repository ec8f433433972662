//! Limits how much is under way at once, and drains it.
//!
//! The thread that takes requests from the kernel passes each through here before it hands it over.
//! If there is no room it waits, and the kernel holds back the rest.
//!
//! Invariants
//! - I1 Nobody reaches the disk but through [`Entered`], and after [`Gate::close`] nobody enters.
//! - I2 A request leaves when it is dropped, which is after its answer; so once the gate is drained
//!   every request is answered.

use crate::budget::{Party, Pool, Share};
use mica_block::Disk;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::time::Duration;

/// Data of one request at most; the kernel divides what is longer.
pub(super) const REQUEST_BYTES: u32 = 1 << 20;
/// Requests of one file under way.
pub(super) const REQUESTS_MAX: usize = 256;
/// Data of these requests.
pub(super) const BUDGET_BYTES: usize = 16 << 20;
/// The part of it that a file has for itself, no matter what others do; the rest comes from the
/// budget of the process.
const RESERVE_BYTES: usize = 2 * REQUEST_BYTES as usize;

/// The gate before one disk.
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// `None` once closed.
    disk: Option<Arc<dyn Disk>>,
    requests: usize,
    bytes: usize,
    share: Share,
}

/// A request that is under way.
pub(super) struct Entered {
    gate: Arc<Gate>,
    disk: Arc<dyn Disk>,
    bytes: usize,
}

impl Gate {
    pub(super) fn new(disk: Arc<dyn Disk>, pool: &Arc<Pool>) -> Arc<Self> {
        let share = Share::new(&Party::new(pool), RESERVE_BYTES, BUDGET_BYTES);
        let state = State { disk: Some(disk), requests: 0, bytes: 0, share };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Waits until there is room for a request with `bytes` of data; `None` once closed. It waits
    /// only for others of its file: a request that is alone gets in.
    pub(super) fn enter(self: &Arc<Self>, bytes: usize) -> Option<Entered> {
        let bytes = bytes.min(BUDGET_BYTES);
        let is_full = |state: &mut State| {
            state.disk.is_some()
                && (state.requests == REQUESTS_MAX
                    || state.bytes > 0 && !state.share.covers(state.bytes + bytes))
        };
        let mut state = self.lock();
        self.changed.wait_while(&mut state, is_full);
        let disk = Arc::clone(state.disk.as_ref()?);
        state.requests += 1;
        state.bytes += bytes;
        Some(Entered { gate: Arc::clone(self), disk, bytes })
    }

    /// The length of the disk; `None` once closed.
    pub(super) fn disk_len(&self) -> Option<u64> {
        self.lock().disk.as_ref().map(|disk| disk.geometry().len)
    }

    /// Admits no more requests.
    pub(super) fn close(&self) {
        let disk = self.lock().disk.take();
        self.changed.notify_all();
        // The disk is dropped outside of the lock.
        drop(disk);
    }

    /// Waits until all requests have left, for at most `limit`. Returns how many have not.
    pub(super) fn drain(&self, limit: Duration) -> usize {
        let is_busy = |state: &mut State| state.requests > 0;
        let mut state = self.lock();
        self.changed.wait_while_for(&mut state, is_busy, limit);
        state.requests
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Entered {
    pub(super) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Whether the gate has been closed since: long requests then give up.
    pub(super) fn is_closing(&self) -> bool {
        self.gate.lock().disk.is_none()
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.requests -= 1;
        state.bytes -= self.bytes;
        state.share.trim(state.bytes);
        drop(state);
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::POOL_BYTES;
    use crate::testing::memory::MemoryDisk;
    use std::sync::mpsc;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(30);

    fn gate() -> Arc<Gate> {
        Gate::new(Arc::new(MemoryDisk::new(1 << 20)), &Pool::new(POOL_BYTES))
    }

    /// Enters on a thread of its own, and reports whether it got in.
    fn enter_elsewhere(gate: &Arc<Gate>, bytes: usize) -> mpsc::Receiver<bool> {
        let (sender, receiver) = mpsc::channel();
        let gate = Arc::clone(gate);
        std::thread::spawn(move || sender.send(gate.enter(bytes).is_some()));
        receiver
    }

    #[test]
    fn request_without_room_waits_until_another_leaves() {
        let gate = gate();
        let first = gate.enter(BUDGET_BYTES - 1).expect("open");
        let _second = gate.enter(1).expect("there is room");

        let third = enter_elsewhere(&gate, 1);
        assert!(third.recv_timeout(SHORT).is_err(), "it waits");
        drop(first);

        assert_eq!(third.recv_timeout(LONG), Ok(true));
    }

    #[test]
    fn number_of_requests_is_bounded_too() {
        let gate = gate();
        let mut inside: Vec<_> = (0..REQUESTS_MAX).map(|_| gate.enter(0).expect("open")).collect();

        let one_more = enter_elsewhere(&gate, 0);
        assert!(one_more.recv_timeout(SHORT).is_err(), "it waits");
        inside.pop();

        assert_eq!(one_more.recv_timeout(LONG), Ok(true));
    }

    #[test]
    fn closing_refuses_waiting_and_new_requests_and_signals_those_inside() {
        let gate = gate();
        let inside = gate.enter(BUDGET_BYTES).expect("open");
        let waiting = enter_elsewhere(&gate, 1);
        assert!(waiting.recv_timeout(SHORT).is_err(), "it waits");

        gate.close();

        assert_eq!(waiting.recv_timeout(LONG), Ok(false));
        assert!(gate.enter(0).is_none() && gate.disk_len().is_none());
        assert!(inside.is_closing());
        assert_eq!(gate.drain(SHORT), 1);
        drop(inside);
        assert_eq!(gate.drain(LONG), 0);
    }

    #[test]
    fn request_larger_than_the_budget_runs_alone() {
        let gate = gate();
        let large = gate.enter(2 * BUDGET_BYTES).expect("open");
        let small = enter_elsewhere(&gate, 1);
        assert!(small.recv_timeout(SHORT).is_err(), "it waits");
        drop(large);
        assert_eq!(small.recv_timeout(LONG), Ok(true));
    }
}

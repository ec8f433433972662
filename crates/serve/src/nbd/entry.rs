//! An export that is served: the disk, and what the clients that chose it share, wherever they
//! came from.

use super::export::Export;
use super::limits::Limits;
use super::stats::{Counters, QueueStats};
use crate::budget::{Party, Pool};
use mica_rt::LogLimit;
use mica_rt::sync::Signal;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::time::Duration;

/// An export that is served.
pub(super) struct Entry {
    pub(super) export: Export,
    pub(super) limits: Limits,
    /// The memory of the process that its clients hold.
    pub(super) party: Arc<Party>,
    /// Raised when it is no longer served: sessions answer what they have admitted, and end.
    pub(super) stop: Arc<Signal>,
    /// Raised when those that are still there are dropped.
    pub(super) given_up: Signal,
    /// What is logged of requests that failed.
    pub(super) failures: Arc<LogLimit>,
    /// And of clients that come, and that go.
    pub(super) arrivals: LogLimit,
    pub(super) departures: LogLimit,
    clients: Mutex<Clients>,
    /// Woken when the last client has left.
    none: Condvar,
    /// One for each executor.
    queues: Vec<QueueStats>,
}

#[derive(Default)]
struct Clients {
    count: usize,
    /// Nobody is admitted any more.
    is_closed: bool,
}

impl Entry {
    pub(super) fn new(export: Export, limits: Limits, queues: usize, pool: &Arc<Pool>) -> Self {
        Self {
            export,
            limits,
            party: Party::new(pool),
            stop: Arc::default(),
            given_up: Signal::default(),
            failures: Arc::default(),
            arrivals: LogLimit::visits(),
            departures: LogLimit::visits(),
            clients: Mutex::default(),
            none: Condvar::default(),
            queues: (0..queues).map(|_| QueueStats::default()).collect(),
        }
    }

    /// What a queue counts.
    pub(super) fn stats(&self, queue: usize) -> &QueueStats {
        &self.queues[queue]
    }

    pub(super) fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        self.queues.iter().for_each(|queue| queue.add_to(&mut sum));
        sum
    }

    /// Clients that are there now.
    pub(super) fn clients(&self) -> usize {
        self.lock().count
    }

    /// Takes a client. `None` if there are as many as there may be, or it is being stopped.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Client> {
        let mut clients = self.lock();
        if clients.is_closed || clients.count >= self.limits.connections_max {
            return None;
        }
        clients.count += 1;
        Some(Client { entry: Arc::clone(self) })
    }

    /// Ends all sessions, those with requests in flight after the drain deadline.
    pub(super) fn stop_and_wait(&self) {
        self.lock().is_closed = true;
        self.stop.raise();
        let deadline = self.limits.drain_deadline;
        let left = self.wait_for_none(deadline);
        if left > 0 {
            tracing::warn!(left, "dropping connections with requests in flight");
            self.given_up.raise();
            // What drops them only has to take its turn.
            self.wait_for_none(deadline);
        }
    }

    /// Waits until there are no clients, and says how many are left if that takes too long.
    fn wait_for_none(&self, deadline: Duration) -> usize {
        let any = |clients: &mut Clients| clients.count > 0;
        let mut clients = self.lock();
        self.none.wait_while_for(&mut clients, any, deadline);
        clients.count
    }

    fn lock(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock()
    }
}

/// A client of an export, which is counted until this is dropped.
pub(super) struct Client {
    entry: Arc<Entry>,
}

impl Client {
    pub(super) fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut clients = self.entry.lock();
        clients.count -= 1;
        if clients.count == 0 {
            self.entry.none.notify_all();
        }
    }
}

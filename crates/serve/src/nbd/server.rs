//! The server of one disk: an export, the seats that it has at addresses, and its end.
//!
//! At shutdown the export leaves its seats first, so that nobody finds it any more; then every
//! session answers what it has admitted and ends, and what is not over by the deadline is dropped.

use super::entry::Entry;
use super::export::Export;
use super::exports::Seat;
use super::limits::{Limits, NAME_BYTES_MAX};
use super::stats::Counters;
use crate::workers::Workers;
use mica_block::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::Arc;

/// What a server needs to start.
pub struct ServerConfig {
    /// Where it is offered, and under which names.
    pub seats: Vec<Arc<Seat>>,
    /// What is offered.
    pub export: Export,
    /// The executors; connections are spread over them.
    pub workers: Arc<Workers>,
    /// Limits of what clients may use.
    pub limits: Limits,
}

/// Starts servers.
#[derive(Debug)]
pub struct Server;

impl Server {
    /// Starts serving.
    ///
    /// # Errors
    /// As [`Server::prepare`].
    pub fn start(config: ServerConfig) -> Result<Running> {
        Ok(Self::prepare(config)?.start())
    }

    /// Does all that can fail, and serves nobody yet: clients that ask for it wait.
    ///
    /// # Errors
    /// `Invalid` for a configuration that makes no sense.
    pub fn prepare(config: ServerConfig) -> Result<Prepared> {
        let ServerConfig { seats, export, workers, limits } = config;
        if export.name.len() > NAME_BYTES_MAX || export.description.len() > NAME_BYTES_MAX {
            let what = "an export's name and description have at most 4096 bytes each";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let entry = Entry::new(export, limits, workers.handles().len(), workers.pool());
        Ok(Prepared(Running { entry: Arc::new(entry), seats, _workers: workers }))
    }
}

/// A server that only has to be told to start.
#[derive(Debug)]
pub struct Prepared(Running);

impl Prepared {
    /// Starts serving.
    pub fn start(self) -> Running {
        let Self(running) = self;
        running.seats.iter().for_each(|seat| seat.serves(&running.entry));
        running
    }
}

/// A server that runs. Dropping it shuts it down.
pub struct Running {
    entry: Arc<Entry>,
    seats: Vec<Arc<Seat>>,
    /// They run for as long as it does.
    _workers: Arc<Workers>,
}

impl Running {
    /// Its counters so far.
    pub fn counters(&self) -> Counters {
        self.entry.counters()
    }

    /// Clients that are connected to it now.
    pub fn connections_open(&self) -> usize {
        self.entry.clients()
    }

    /// Lets requests in flight end within the drain deadline, and closes every connection. Clients
    /// that ask for the export then wait, unless the seat says otherwise. Returns when all of that
    /// is done; what a dropped connection left to a disk may still be under way there
    /// ([`mica_block::Manage::idle`]).
    pub fn shutdown(mut self) -> Counters {
        self.stop_and_wait();
        self.counters()
    }

    fn stop_and_wait(&mut self) {
        self.seats.drain(..).for_each(|seat| seat.leaves(&self.entry));
        self.entry.stop_and_wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop_and_wait();
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({:?})", self.entry.export)
    }
}

#[cfg(test)]
mod tests;

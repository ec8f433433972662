//! The server: listeners, connections spread over shared executors, and shutdown.
//!
//! The first executor accepts and hands connections out in turn. At shutdown the listeners close
//! first, then every session answers what it has admitted and ends; what is not over by the
//! deadline is dropped.

use super::connection::{Common, QueueShared, Secured, serve};
use super::export::Export;
use super::limits::{Limits, NAME_BYTES_MAX};
use super::stats::Counters;
use crate::listener::{Family, Listener, tune};
use crate::workers::Workers;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::sync::Signal;
use mica_rt::{Handle, Socket, Stream, sleep};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What a server needs to start.
pub struct ServerConfig {
    /// Where clients connect.
    pub listeners: Vec<Listener>,
    /// What they are offered; at least one.
    pub exports: Vec<Export>,
    /// The executors; connections are spread over them.
    pub workers: Arc<Workers>,
    /// Limits of what clients may use.
    pub limits: Limits,
}

/// Starts servers.
#[derive(Debug)]
pub struct Server;

/// Pause after an accept that failed for lack of resources (descriptors, memory).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl Server {
    /// Starts serving.
    ///
    /// # Errors
    /// As [`Server::prepare`].
    pub fn start(config: ServerConfig) -> Result<Running> {
        Ok(Self::prepare(config)?.start())
    }

    /// Does all that can fail, and serves nobody yet: clients that connect wait.
    ///
    /// # Errors
    /// `Invalid` for a configuration that makes no sense, `Denied` for one that would send plain
    /// text beyond this machine unasked.
    pub fn prepare(config: ServerConfig) -> Result<Prepared> {
        check(&config)?;
        config.listeners.iter().try_for_each(Listener::check_secured)?;
        let ServerConfig { listeners, exports, workers, limits } = config;
        let stop = Arc::new(Signal::default());
        let common = Arc::new(Common::new(exports, limits, Arc::clone(&stop), workers.pool()));
        let peer = |handle: &Handle| Peer { handle: handle.clone(), shared: Arc::default() };
        let dispatch = Arc::new(Dispatch {
            common,
            peers: workers.handles().iter().map(peer).collect(),
            next: AtomicUsize::new(0),
            open: Arc::default(),
            given_up: Arc::default(),
        });
        Ok(Prepared(Running { stop, dispatch, listeners, _workers: workers }))
    }
}

/// A server that only has to be told to start.
#[derive(Debug)]
pub struct Prepared(Running);

impl Prepared {
    /// Starts serving.
    pub fn start(self) -> Running {
        let Self(running) = self;
        let Running { dispatch, listeners, .. } = &running;
        for listener in listeners {
            let (socket, family) = (Arc::clone(&listener.socket), listener.family);
            let (dispatch_here, secured) = (Arc::clone(dispatch), listener.security.tls.clone());
            let accepting = move || accept_all(socket, family, secured, dispatch_here);
            dispatch.peers[0].handle.spawn_with(accepting);
        }
        running
    }
}

/// A server that runs. Dropping it shuts it down.
pub struct Running {
    stop: Arc<Signal>,
    dispatch: Arc<Dispatch>,
    listeners: Vec<Listener>,
    /// They run for as long as it does.
    _workers: Arc<Workers>,
}

impl Running {
    /// Its counters so far.
    pub fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        self.dispatch.peers.iter().for_each(|peer| peer.shared.stats.add_to(&mut sum));
        sum
    }

    /// Connections that are open now.
    pub fn connections_open(&self) -> usize {
        *self.dispatch.open.count()
    }

    /// Stops accepting, lets requests in flight end within the drain deadline, and closes every
    /// connection. Returns when all of that is done; what a dropped connection left to a disk may
    /// still be under way there ([`mica_block::Manage::idle`]).
    pub fn shutdown(mut self) -> Counters {
        self.stop_and_wait();
        self.counters()
    }

    fn stop_and_wait(&mut self) {
        // Socket files go first, so that no client finds a server that is shutting down.
        self.listeners.clear();
        self.stop.raise();
        let Dispatch { common, open, given_up, .. } = &*self.dispatch;
        let deadline = common.limits.drain_deadline;
        let left = open.wait_for_none(deadline);
        if left > 0 {
            tracing::warn!(left, "dropping connections with requests in flight");
            given_up.raise();
            // What drops them only has to take its turn.
            open.wait_for_none(deadline);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop_and_wait();
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({} workers)", self.dispatch.peers.len())
    }
}

fn check(config: &ServerConfig) -> Result<()> {
    let invalid = |what: &str| Err(Error::new(ErrorKind::Invalid, what));
    if config.exports.is_empty() {
        return invalid("a server needs an export");
    }
    for (index, export) in config.exports.iter().enumerate() {
        if export.name.len() > NAME_BYTES_MAX || export.description.len() > NAME_BYTES_MAX {
            return invalid("an export's name and description have at most 4096 bytes each");
        }
        if config.exports[..index].iter().any(|other| other.name == export.name) {
            return invalid("two exports have the same name");
        }
    }
    Ok(())
}

/// How many connections are open, over all executors.
#[derive(Default)]
struct Open {
    count: Mutex<usize>,
    none: Condvar,
}

impl Open {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there are none, and says how many are left if that takes too long.
    fn wait_for_none(&self, deadline: Duration) -> usize {
        let waited = self.none.wait_timeout_while(self.count(), deadline, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A queue as the accepting side sees it.
struct Peer {
    handle: Handle,
    shared: Arc<QueueShared>,
}

/// Gives connections to queues.
struct Dispatch {
    common: Arc<Common>,
    peers: Vec<Peer>,
    next: AtomicUsize,
    open: Arc<Open>,
    /// Raised when those that are still open are dropped.
    given_up: Arc<Signal>,
}

impl Dispatch {
    fn hand_over(&self, socket: Socket, family: Family, secured: Secured) {
        let index = self.next.fetch_add(1, Ordering::Relaxed) % self.peers.len();
        let Peer { handle, shared } = &self.peers[index];
        let Some(guard) = OpenConnection::new(&self.open, self.common.limits.connections_max)
        else {
            // Runs on the first executor, whose counter this is.
            self.peers[0].shared.stats.connections_refused.add(1);
            tracing::debug!("closed a connection: there are too many");
            return;
        };
        tune(&socket, family);
        let (common, shared) = (Arc::clone(&self.common), Arc::clone(shared));
        let given_up = Arc::clone(&self.given_up);
        handle.spawn_with(move || async move {
            let _guard = guard;
            let session = serve(Stream::Socket(Arc::new(socket)), secured, common, shared);
            given_up.unless_raised(session).await;
        });
    }
}

/// Counts a connection while it is open, wherever it is.
struct OpenConnection {
    open: Arc<Open>,
}

impl OpenConnection {
    /// `None` if there are `max` already.
    fn new(open: &Arc<Open>, max: usize) -> Option<Self> {
        let mut count = open.count();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(Self { open: Arc::clone(open) })
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let mut count = self.open.count();
        *count -= 1;
        if *count == 0 {
            self.open.none.notify_all();
        }
    }
}

async fn accept_all(
    listener: Arc<Socket>,
    family: Family,
    secured: Secured,
    dispatch: Arc<Dispatch>,
) {
    let stop = Arc::clone(&dispatch.common.stop);
    while let Some(accepted) = stop.unless_raised(listener.accept()).await {
        match accepted {
            Ok(socket) => dispatch.hand_over(socket, family, secured.clone()),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests;

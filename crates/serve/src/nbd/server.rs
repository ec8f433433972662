//! The server: listeners, queue threads with an executor each, connections spread over them, and
//! the way down.
//!
//! The first queue accepts and hands connections out in turn. At shutdown the listeners close
//! first, then every session answers what it has admitted and ends; what is not over by the
//! deadline is dropped with its executor.

use super::connection::{Common, serve, unless_stopped};
use super::limits::{Limits, NAME_BYTES_MAX};
use super::stats::{Counters, QueueStats};
pub use crate::discard::Discard;
use crate::listener::{Family, Listener, tune};
use crate::signal::Signal;
use crate::workers::start_executor;
use mica_block::{Disk, Error, ErrorKind, Result};
use mica_rt::{Backend, Handle, Socket, Stream, sleep, timeout};
use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

/// A disk and what it is called.
pub struct Export {
    /// What is served.
    pub disk: Arc<dyn Disk>,
    /// Its name. The first export is also served under the empty name.
    pub name: String,
    /// Shown to people who list the exports; may be empty.
    pub description: String,
    /// What becomes of space that clients do not need any more.
    pub discard: Discard,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?})", self.name)
    }
}

/// What a server needs to start.
pub struct ServerConfig {
    /// Where clients connect.
    pub listeners: Vec<Listener>,
    /// What they get; at least one.
    pub exports: Vec<Export>,
    /// Threads; connections are spread over them.
    pub queues: usize,
    /// How they do I/O.
    pub backend: Backend,
    /// What clients may cost.
    pub limits: Limits,
}

/// Starts servers.
#[derive(Debug)]
pub struct Server;

/// Most queues of a server.
const QUEUES_MAX: usize = 256;
/// After an accept that failed for want of something (descriptors, memory).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl Server {
    /// Starts the queues and returns once all of them serve.
    ///
    /// # Errors
    /// `Invalid` for a configuration that makes no sense; else what the backend says.
    pub fn start(config: ServerConfig) -> Result<Running> {
        check(&config)?;
        let stop = Arc::new(Signal::default());
        let common = Arc::new(Common::new(config.exports, config.limits, Arc::clone(&stop)));
        let queues: Vec<Arc<QueueShared>> = (0..config.queues).map(|_| Arc::default()).collect();
        // If a later queue does not start, dropping this stops the earlier ones.
        let mut running =
            Running { stop, queues, threads: Vec::new(), listeners: config.listeners };
        let mut peers = Vec::new();
        for index in 0..running.queues.len() {
            let queue = Arc::clone(&running.queues[index]);
            let (thread, handle) = start_queue(index, queue, &common, config.backend)?;
            running.threads.push(thread);
            let shared = Arc::clone(&running.queues[index]);
            peers.push(Peer { handle, shared });
        }
        let dispatch = Arc::new(Dispatch {
            common,
            peers,
            next: AtomicUsize::new(0),
            connections: Arc::default(),
        });
        for listener in &running.listeners {
            let (socket, family) = (Arc::clone(&listener.socket), listener.family);
            let dispatch_here = Arc::clone(&dispatch);
            let accepting = move || accept_all(socket, family, dispatch_here);
            dispatch.peers[0].handle.spawn_with(accepting);
        }
        Ok(running)
    }
}

/// A server that runs. Dropping it shuts it down.
pub struct Running {
    stop: Arc<Signal>,
    queues: Vec<Arc<QueueShared>>,
    threads: Vec<JoinHandle<()>>,
    listeners: Vec<Listener>,
}

impl Running {
    /// What it did so far.
    pub fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        self.queues.iter().for_each(|queue| queue.stats.add_to(&mut sum));
        sum
    }

    /// Connections that are open now.
    pub fn connections_open(&self) -> usize {
        self.queues.iter().map(|queue| queue.active.load(Ordering::Relaxed)).sum()
    }

    /// Stops accepting, lets requests in flight end within the drain deadline, closes every
    /// connection and ends the threads. Returns when all of that is done.
    pub fn shutdown(mut self) -> Counters {
        self.stop_and_join();
        self.counters()
    }

    fn stop_and_join(&mut self) {
        // Socket files go first, so that no client finds a server that is going away.
        self.listeners.clear();
        self.stop.raise();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a queue ended by a failure in the server");
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({} queues)", self.queues.len())
    }
}

fn check(config: &ServerConfig) -> Result<()> {
    let invalid = |what: &str| Err(Error::new(ErrorKind::Invalid, what));
    if config.exports.is_empty() {
        return invalid("a server needs an export");
    }
    if !(1..=QUEUES_MAX).contains(&config.queues) {
        return invalid("a server has between 1 and 256 queues");
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

/// What a queue shares with the rest of the server.
#[derive(Default)]
pub(super) struct QueueShared {
    pub(super) stats: QueueStats,
    /// Connections that were given to it and are not over.
    active: AtomicUsize,
    /// Woken when there are none left.
    idle: Mutex<Option<Waker>>,
}

impl QueueShared {
    fn lock_idle(&self) -> std::sync::MutexGuard<'_, Option<Waker>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no connection is left.
    async fn drained(&self) {
        poll_fn(|context| {
            // The waker is in place before the count is looked at, so that no end is missed.
            *self.lock_idle() = Some(context.waker().clone());
            if self.active.load(Ordering::Acquire) == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

fn start_queue(
    index: usize,
    queue: Arc<QueueShared>,
    common: &Arc<Common>,
    backend: Backend,
) -> Result<(JoinHandle<()>, Handle)> {
    let common = Arc::clone(common);
    let until = move || async move {
        common.stop.raised().await;
        if timeout(common.limits.drain_deadline, queue.drained()).await.is_err() {
            let left = queue.active.load(Ordering::Relaxed);
            tracing::warn!(left, "connections are dropped with requests in flight");
        }
        // Work that a client left behind still has to end on this executor.
        for export in &common.exports {
            let _ = timeout(common.limits.drain_deadline, export.disk.idle()).await;
        }
    };
    start_executor(&format!("mica-queue-{index}"), backend, until)
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
    /// Open ones, over all queues.
    connections: Arc<AtomicUsize>,
}

impl Dispatch {
    fn hand_over(&self, socket: Socket, family: Family) {
        let index = self.next.fetch_add(1, Ordering::Relaxed) % self.peers.len();
        let Peer { handle, shared } = &self.peers[index];
        let Some(guard) =
            OpenConnection::new(&self.connections, shared, self.common.limits.connections_max)
        else {
            // Runs on the first queue, whose counter this is.
            self.peers[0].shared.stats.connections_refused.add(1);
            tracing::debug!("a connection was closed: there are too many");
            return;
        };
        tune(&socket, family);
        let (common, shared) = (Arc::clone(&self.common), Arc::clone(shared));
        handle.spawn_with(move || async move {
            let _guard = guard;
            serve(Stream::Socket(Arc::new(socket)), common, shared).await;
        });
    }
}

/// Counts a connection while it is open, wherever it is.
struct OpenConnection {
    all: Arc<AtomicUsize>,
    queue: Arc<QueueShared>,
}

impl OpenConnection {
    /// `None` if there are `max` already. Only the accepting thread opens connections, so looking
    /// and adding need not be one step.
    fn new(all: &Arc<AtomicUsize>, queue: &Arc<QueueShared>, max: usize) -> Option<Self> {
        if all.load(Ordering::Acquire) >= max {
            return None;
        }
        all.fetch_add(1, Ordering::AcqRel);
        queue.active.fetch_add(1, Ordering::AcqRel);
        Some(Self { all: Arc::clone(all), queue: Arc::clone(queue) })
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.all.fetch_sub(1, Ordering::AcqRel);
        if self.queue.active.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(waker) = self.queue.lock_idle().take()
        {
            waker.wake();
        }
    }
}

async fn accept_all(listener: Arc<Socket>, family: Family, dispatch: Arc<Dispatch>) {
    let stop = Arc::clone(&dispatch.common.stop);
    while let Some(accepted) = unless_stopped(&stop, listener.accept()).await {
        match accepted {
            Ok(socket) => dispatch.hand_over(socket, family),
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests;

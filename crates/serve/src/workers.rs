//! Executors that servers share: a thread each.

use crate::budget::{POOL_BYTES, Pool};
use crate::idle::IdleTime;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::sync::Signal;
use mica_rt::{Backend, Executor, Handle};
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Maximum number of threads of a process that serves.
const WORKERS_MAX: usize = 256;

/// What somebody started on a worker.
#[derive(Debug)]
#[must_use]
pub struct Spawned<T>(mpsc::Receiver<T>);

impl<T> Spawned<T> {
    /// Waits for it. Not to be called on a worker.
    ///
    /// # Errors
    /// `Io` if the worker ended before it did, by a failure in the server.
    pub fn wait(self) -> Result<T> {
        self.0.recv().map_err(|_| Error::new(ErrorKind::Io, "a worker failed"))
    }
}

/// Threads with an executor each. They end when this is dropped; what still runs on them is
/// dropped.
pub struct Workers {
    handles: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<Signal>,
    /// Memory for everything that their clients send and request.
    pool: Arc<Pool>,
    /// Devices so far, each of which begins on another worker.
    homes: AtomicUsize,
    idle: Arc<IdleTime>,
}

impl Workers {
    /// Whether a process may have `count` of them.
    ///
    /// # Errors
    /// `Invalid` for none or too many.
    pub fn check_count(count: usize) -> Result<()> {
        if (1..=WORKERS_MAX).contains(&count) {
            return Ok(());
        }
        let context = format!("queues {count}: a server has 1 to {WORKERS_MAX} worker threads");
        Err(Error::new(ErrorKind::Invalid, context))
    }

    /// Starts `count` of them.
    ///
    /// # Errors
    /// `Invalid` for none or too many; else any error of the backend or the system.
    pub fn start(count: usize, backend: Backend) -> Result<Arc<Self>> {
        Self::check_count(count)?;
        let (stop, pool) = (Arc::default(), Pool::new(POOL_BYTES));
        let mut workers = Self {
            handles: Vec::new(),
            threads: Vec::new(),
            stop,
            pool,
            homes: AtomicUsize::default(),
            idle: Arc::new(IdleTime::open()),
        };
        // Each makes its ring while the others do.
        let mut starts = Vec::new();
        for index in 0..count {
            let start = workers.begin(format!("mica-worker-{index}"), backend)?;
            starts.push(start);
        }
        for start in starts {
            workers.handles.push(start.handle()?);
        }
        Ok(Arc::new(workers))
    }

    /// Starts one more thread, whose executor is still to come.
    fn begin(&mut self, name: String, backend: Backend) -> Result<Start> {
        let stop = Arc::clone(&self.stop);
        let (sender, receiver) = mpsc::channel();
        let body = move || {
            let executor = match Executor::new(backend) {
                Ok(executor) => executor,
                Err(error) => {
                    // The starter waits for one answer; if it is gone, nobody needs it.
                    let _ = sender.send(Err(error));
                    return;
                }
            };
            let _ = sender.send(Ok(executor.handle()));
            executor.block_on(async move { stop.raised().await });
        };
        let start = Start { name, receiver };
        let thread = std::thread::Builder::new().name(start.name.clone()).spawn(body);
        self.threads.push(thread.map_err(|error| Error::from_io(start.context(), error))?);
        Ok(start)
    }

    /// Runs what `make` makes on the first of them, and waits for it. Not to be called on one of
    /// them.
    ///
    /// # Errors
    /// `Io` if they ended before it did, by a failure in the server.
    pub fn run<T, M, F>(&self, make: M) -> Result<T>
    where
        T: Send + 'static,
        M: FnOnce() -> F + Send + 'static,
        F: Future<Output = T> + 'static,
    {
        self.spawn(make).wait()
    }

    /// Starts what `make` makes on the first of them.
    pub fn spawn<T, M, F>(&self, make: M) -> Spawned<T>
    where
        T: Send + 'static,
        M: FnOnce() -> F + Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let (sender, receiver) = mpsc::channel();
        // Always the same: another one that hangs holds up nobody who waits here.
        self.handles[0].spawn_with(move || async move {
            // Nobody may wait for it any more.
            let _ = sender.send(make().await);
        });
        Spawned(receiver)
    }

    /// What the clients of all servers on them share.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// The worker on which the next device begins.
    pub(crate) fn next_home(&self) -> usize {
        self.homes.fetch_add(1, Ordering::Relaxed) % self.handles.len()
    }

    /// A clock of the time that nobody uses.
    pub(crate) fn idle(&self) -> &Arc<IdleTime> {
        &self.idle
    }

    /// The handles through which they get work.
    pub fn handles(&self) -> &[Handle] {
        &self.handles
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop.raise();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker thread panicked");
            }
        }
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workers({})", self.handles.len())
    }
}

/// A thread that is about to have an executor.
struct Start {
    name: String,
    receiver: mpsc::Receiver<io::Result<Handle>>,
}

impl Start {
    /// Waits for its executor.
    fn handle(self) -> Result<Handle> {
        match self.receiver.recv() {
            Ok(Ok(handle)) => Ok(handle),
            Ok(Err(error)) => Err(Error::from_io(self.context(), error)),
            Err(_) => Err(Error::new(ErrorKind::Io, self.context())),
        }
    }

    fn context(&self) -> String {
        format!("starting {}", self.name)
    }
}

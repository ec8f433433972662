//! The thread that keeps the sidecars of all chains of a process up to date, one chain at a time.
//!
//! It is there while there are chains: a process at its limit of threads may need this one for what
//! serves the disks, when a takeover has failed that had closed them all.

use mica_block::{Error, ErrorKind, Manage, ManageIndex, Result};
use mica_rt::sync::{SharedLock, Signal};
use mica_rt::{Backend, Executor, Handle};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

/// The thread, while there is something to index.
#[derive(Default)]
pub(crate) struct IndexThread {
    running: Mutex<Option<Running>>,
    /// Held while a chain is indexed.
    turn: Arc<SharedLock>,
}

struct Running {
    /// Chains that are kept.
    chains: usize,
    handle: Handle,
    stop: Arc<Signal>,
    thread: JoinHandle<()>,
}

/// What keeps the sidecars of one chain.
pub(crate) struct Indexer {
    index_thread: Arc<IndexThread>,
    disk: Arc<dyn Manage>,
    stop: Arc<Signal>,
    /// Nothing is sent: it ends with the work.
    ended: mpsc::Receiver<()>,
}

impl IndexThread {
    /// Keeps the sidecars of a disk from now on. `None` if there is nothing to index, or no thread
    /// for it: the disk is served without.
    pub(crate) fn keep(self: &Arc<Self>, disk: Arc<dyn Manage>) -> Option<Indexer> {
        disk.index()?;
        let handle = self.take_up().inspect_err(|error| {
            tracing::warn!(%error, "no index will be written until the next start");
        });
        let (ends, ended) = mpsc::channel();
        let stop = Arc::<Signal>::default();
        let (indexed, stopping, turn) =
            (Arc::clone(&disk), Arc::clone(&stop), Arc::clone(&self.turn));
        handle.ok()?.spawn_with(move || async move {
            if let Some(index) = indexed.index() {
                keep_index(index, &stopping, &turn).await;
            }
            drop((indexed, ends));
        });
        Some(Indexer { index_thread: Arc::clone(self), disk, stop, ended })
    }

    /// One chain more.
    fn take_up(&self) -> Result<Handle> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let running = match &mut *running {
            Some(running) => running,
            none => none.insert(start()?),
        };
        running.chains += 1;
        Ok(running.handle.clone())
    }

    /// One chain less.
    fn put_down(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let last = running.take_if(|running| {
            running.chains -= 1;
            running.chains == 0
        });
        let Some(Running { stop, thread, .. }) = last else { return };
        stop.raise();
        if thread.join().is_err() {
            tracing::warn!("the index thread panicked");
        }
    }
}

fn start() -> Result<Running> {
    let failed = |error| Error::from_io("starting the index thread", error);
    let (sender, started) = mpsc::channel();
    let stop = Arc::<Signal>::default();
    let stopping = Arc::clone(&stop);
    // It does large sequential reads, one at a time: plain threads serve that as well as a ring
    // does and leave the guests' rings alone.
    let body = move || match Executor::new(Backend::Pool) {
        Ok(executor) => {
            let _ = sender.send(Ok(executor.handle()));
            executor.block_on(stopping.raised());
        }
        Err(error) => drop(sender.send(Err(error))),
    };
    let thread = std::thread::Builder::new().name("mica-index".to_owned()).spawn(body);
    let thread = thread.map_err(failed)?;
    let ended = |_| Error::new(ErrorKind::Io, "the index thread ended");
    let handle = started.recv().map_err(ended)?.map_err(failed)?;
    Ok(Running { chains: 0, handle, stop, thread })
}

impl Indexer {
    /// Stops after the layer that is being indexed.
    pub(crate) fn stop(self) {
        self.stop.raise();
        if let Some(index) = self.disk.index() {
            index.call();
        }
        // It has ended when nobody is left who could send.
        let _ = self.ended.recv();
        self.index_thread.put_down();
    }
}

async fn keep_index(index: &dyn ManageIndex, stop: &Signal, turn: &SharedLock) {
    loop {
        let Some(alone) = stop.unless_raised(turn.alone()).await else { return };
        let mut go_on = |_| match stop.is_raised() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        match index.build(&mut go_on).await {
            Ok(0) => {}
            Ok(built) => tracing::info!(built, "the index was written"),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(%error, "the index is incomplete");
            }
            Err(error) => {
                tracing::warn!(
                    "the index cannot be written, so each start walks the chain: {error:?}; \
                     --index-dir puts it elsewhere"
                );
                return;
            }
        }
        drop(alone);
        // Wakes up for a damaged sidecar, or for the end.
        index.called().await;
    }
}

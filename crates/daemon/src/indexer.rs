//! The thread that keeps the sidecars of a chain up to date.

use mica_block::{ErrorKind, Manage, ManageIndex};
use mica_rt::{Backend, Executor};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The thread.
pub(crate) struct Indexer {
    disk: Arc<dyn Manage>,
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Indexer {
    /// `None` if there is nothing to index, or no thread for it: the disk is served without.
    pub(crate) fn start(disk: Arc<dyn Manage>) -> Option<Self> {
        disk.index()?;
        let stopping = Arc::new(AtomicBool::new(false));
        let (indexed, flag) = (Arc::clone(&disk), Arc::clone(&stopping));
        let body = move || {
            // It does large sequential reads, one at a time: plain threads serve that as well as a
            // ring does and leave the guests' rings alone.
            let Some(index) = indexed.index() else { return };
            match Executor::new(Backend::Pool) {
                Ok(executor) => executor.block_on(keep_index(index, &flag)),
                Err(error) => tracing::warn!(%error, "no index will be written"),
            }
        };
        match std::thread::Builder::new().name("mica-index".to_owned()).spawn(body) {
            Ok(thread) => Some(Self { disk, stopping, thread }),
            Err(error) => {
                tracing::warn!(%error, "no index will be written until the next start");
                None
            }
        }
    }

    /// Stops after the layer that is being indexed.
    pub(crate) fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        if let Some(index) = self.disk.index() {
            index.call();
        }
        if self.thread.join().is_err() {
            tracing::warn!("the index thread panicked");
        }
    }
}

async fn keep_index(index: &dyn ManageIndex, stopping: &AtomicBool) {
    let is_stopping = || stopping.load(Ordering::Acquire);
    while !is_stopping() {
        let mut go_on = |_| match is_stopping() {
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
        // Wakes up for a damaged sidecar, or for the end.
        index.called().await;
    }
}

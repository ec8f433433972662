//! The thread that keeps the sidecars of a chain up to date.

use mica_block::{Error, ErrorKind, Result};
use mica_qcow2::Chain;
use mica_rt::{Backend, Executor};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The thread.
pub(crate) struct Indexer {
    chain: Arc<Chain>,
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Indexer {
    pub(crate) fn start(chain: Arc<Chain>) -> Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let (indexed, flag) = (Arc::clone(&chain), Arc::clone(&stopping));
        let thread = std::thread::Builder::new()
            .name("mica-index".to_owned())
            .spawn(move || {
                // Large reads in a row, one at a time: plain threads serve that as well as a ring
                // does, and leave the guests' rings alone.
                match Executor::new(Backend::Pool) {
                    Ok(executor) => executor.block_on(keep_index(&indexed, &flag)),
                    Err(error) => tracing::warn!(%error, "no index is written"),
                }
            })
            .map_err(|error| Error::from_io("starting the index", error))?;
        Ok(Self { chain, stopping, thread })
    }

    /// Stops after the layer that is being written.
    pub(crate) fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        self.chain.call_for_index();
        if self.thread.join().is_err() {
            tracing::warn!("the index thread failed");
        }
    }
}

async fn keep_index(chain: &Chain, stopping: &AtomicBool) {
    let is_stopping = || stopping.load(Ordering::Acquire);
    while !is_stopping() {
        let mut go_on = |_| match is_stopping() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        match chain.build_index(&mut go_on).await {
            Ok(0) => {}
            Ok(built) => tracing::info!(built, "the index is written"),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(%error, "the index is not complete");
            }
            Err(error) => {
                tracing::warn!(
                    "the index is not written, so that the chain is walked at each start: \
                     {error:?}; --index-dir names another place for it"
                );
                return;
            }
        }
        // A damaged sidecar calls, or the end.
        chain.index_called_for().await;
    }
}

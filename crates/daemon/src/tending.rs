//! The thread of a disk that has work of its own.

use mica_block::Manage;
use mica_rt::{Backend, Executor};
use std::sync::Arc;

/// Lets `disk` do its own work, on a thread of its own, until it is closed. All that the disk
/// promises holds without that, too.
pub(crate) fn tend(disk: Arc<dyn Manage>) {
    let body = move || match Executor::new(Backend::Pool) {
        Ok(executor) => executor.block_on(disk.tend()),
        Err(error) => tracing::warn!(%error, "a volume is written only when a client flushes"),
    };
    let thread = std::thread::Builder::new().name("mica-tend".to_owned());
    if let Err(error) = thread.spawn(body) {
        tracing::warn!(%error, "a volume is written only when a client flushes");
    }
}

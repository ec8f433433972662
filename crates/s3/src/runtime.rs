//! The thread of tokio, on which everything that knows HTTP runs.

use mica_block::{Error, Result};
use std::future::Future;
use std::thread::JoinHandle;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// The thread. It ends when this is dropped, and with it what is under way.
pub(crate) struct Runtime {
    handle: Handle,
    /// Dropped to end the thread.
    _end: oneshot::Sender<()>,
    _thread: JoinHandle<()>,
}

impl Runtime {
    pub(crate) fn start() -> Result<Self> {
        let failed = |error| Error::from_io("starting the thread for buckets", error);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("mica-bucket".to_owned());
        let thread = thread.spawn(move || {
            // It fails when the other end is dropped.
            let _ = runtime.block_on(ended);
        });
        Ok(Self { handle, _end: end, _thread: thread.map_err(failed)? })
    }

    /// Begins `work` on the thread; it goes on if what this gives is dropped.
    ///
    /// # Panics
    /// When awaited, if `work` panicked.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = T> + 'static {
        let (answer, answered) = oneshot::channel();
        self.handle.spawn(async move {
            // Perhaps nobody waits any more.
            let _ = answer.send(work.await);
        });
        async move { answered.await.expect("a request to a bucket panicked") }
    }
}

//! Executors that servers share: a thread each.

use crate::signal::Signal;
use mica_block::{Error, Result};
use mica_rt::{Backend, Executor, Handle};
use std::fmt;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Threads with an executor each. They end when this is dropped; what runs on them then is given
/// up.
pub struct Workers {
    handles: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<Signal>,
}

impl Workers {
    /// Starts `count` of them.
    ///
    /// # Errors
    /// What the backend says, or the system.
    pub fn start(count: usize, backend: Backend) -> Result<Arc<Self>> {
        let mut workers = Self { handles: Vec::new(), threads: Vec::new(), stop: Arc::default() };
        for index in 0..count.max(1) {
            let stop = Arc::clone(&workers.stop);
            let until = move || async move { stop.raised().await };
            let (thread, handle) = start_executor(&format!("mica-worker-{index}"), backend, until)?;
            workers.threads.push(thread);
            workers.handles.push(handle);
        }
        Ok(Arc::new(workers))
    }

    /// With which they are given work.
    pub fn handles(&self) -> &[Handle] {
        &self.handles
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop.raise();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker ended by a failure in the server");
            }
        }
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workers({})", self.handles.len())
    }
}

/// Starts a thread with an executor that runs until what `until` makes is ready.
pub(crate) fn start_executor<F: Future<Output = ()>>(
    name: &str,
    backend: Backend,
    until: impl FnOnce() -> F + Send + 'static,
) -> Result<(JoinHandle<()>, Handle)> {
    let context = || format!("starting {name}");
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
        executor.block_on(until());
    };
    let thread = std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|error| Error::from_io(context(), error))?;
    match receiver.recv() {
        Ok(Ok(handle)) => Ok((thread, handle)),
        Ok(Err(error)) => Err(Error::from_io(context(), error)),
        Err(_) => Err(Error::new(mica_block::ErrorKind::Io, context())),
    }
}

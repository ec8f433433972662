//! Threads for what librados does only while its caller waits, and for copies that take long.

use mica_block::{Error, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that do one job after the other, and end when this is dropped.
pub(crate) struct Threads {
    jobs: Sender<Job>,
}

impl Threads {
    pub(crate) fn start(name: &str, count: usize) -> Result<Self> {
        let (jobs, waiting) = channel();
        let waiting: Arc<Mutex<Receiver<Job>>> = Arc::new(Mutex::new(waiting));
        for _ in 0..count {
            let waiting = Arc::clone(&waiting);
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread
                .spawn(move || {
                    let next = || waiting.lock().recv();
                    while let Ok(job) = next() {
                        job();
                    }
                })
                .map_err(|error| Error::from_io("starting a thread for a pool", error))?;
        }
        Ok(Self { jobs })
    }

    /// Does `job` when a thread is free.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        // The threads end only with this, unless a job panicked: then nobody waits for it either.
        let _ = self.jobs.send(Box::new(job));
    }
}

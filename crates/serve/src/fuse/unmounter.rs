//! A thread that mounts and unmounts for others.
//!
//! A server that puts itself into a sandbox may neither mount nor unmount. This thread is started
//! first and stays outside.

use super::mount::MountPoint;
use mica_block::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// The thread. It ends when this is dropped.
pub struct Unmounter {
    jobs: mpsc::Sender<Job>,
}

enum Job {
    Unmount { mount: MountPoint, done: mpsc::Sender<Result<()>> },
    Mount(Box<dyn FnOnce() + Send>),
}

/// How long an unmount may take. It waits for nobody, so it is quick or stuck.
const LIMIT: Duration = Duration::from_secs(10);

impl Unmounter {
    /// Starts it: from a thread that is in no sandbox yet.
    ///
    /// # Errors
    /// What the system says.
    pub fn start() -> Result<Arc<Self>> {
        let (jobs, asked) = mpsc::channel::<Job>();
        let work = move || {
            for job in asked {
                match job {
                    // Who does not wait any more does not want to know.
                    Job::Unmount { mount, done } => drop(done.send(mount.unmount())),
                    Job::Mount(mount) => mount(),
                }
            }
        };
        std::thread::Builder::new()
            .name("mica-unmount".to_owned())
            .spawn(work)
            .map_err(|error| Error::from_io("starting the thread that unmounts", error))?;
        Ok(Arc::new(Self { jobs }))
    }

    pub(super) fn unmount(&self, mount: MountPoint) -> Result<()> {
        let (done, answer) = mpsc::channel();
        self.jobs.send(Job::Unmount { mount, done }).map_err(|_| stuck())?;
        answer.recv_timeout(LIMIT).map_err(|_| stuck())?
    }

    /// Runs what mounts something. Its own waits have their limits.
    pub(super) fn mount<T: Send + 'static>(
        &self,
        mount: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (done, answer) = mpsc::channel();
        let job = Box::new(move || drop(done.send(mount())));
        self.jobs.send(Job::Mount(job)).map_err(|_| stuck())?;
        answer.recv().map_err(|_| stuck())?
    }
}

fn stuck() -> Error {
    Error::new(ErrorKind::Io, "the thread that mounts does not answer")
}

impl fmt::Debug for Unmounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unmounter")
    }
}

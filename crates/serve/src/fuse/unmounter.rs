//! A thread that unmounts for others.
//!
//! A server that puts itself into a sandbox may not unmount any more what it mounted before. This
//! thread is started first and stays outside.

use super::mount::MountPoint;
use mica_block::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// The thread. It ends when this is dropped.
pub struct Unmounter {
    jobs: mpsc::Sender<Job>,
}

struct Job {
    mount: MountPoint,
    done: mpsc::Sender<Result<()>>,
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
                // Who does not wait any more does not want to know.
                let _ = job.done.send(job.mount.unmount());
            }
        };
        std::thread::Builder::new()
            .name("mica-unmount".to_owned())
            .spawn(work)
            .map_err(|error| Error::from_io("starting the thread that unmounts", error))?;
        Ok(Arc::new(Self { jobs }))
    }

    pub(super) fn unmount(&self, mount: MountPoint) -> Result<()> {
        let stuck = || Error::new(ErrorKind::Io, "the thread that unmounts does not answer");
        let (done, answer) = mpsc::channel();
        self.jobs.send(Job { mount, done }).map_err(|_| stuck())?;
        answer.recv_timeout(LIMIT).map_err(|_| stuck())?
    }
}

impl fmt::Debug for Unmounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unmounter")
    }
}

//! The disks that a process serves. The set is run-time state: the configuration only says what it
//! starts with.

use crate::served::Served;
use mica_block::{Error, ErrorKind, Result};
use std::sync::{Arc, PoisonError, RwLock};

/// Threads that act on disks at the same time.
const ACTS_MAX: usize = 64;

/// The disks, in the order in which they were added. A disk is identified by its name; callers hold
/// the disk itself, never an index, because the set may change meanwhile.
#[derive(Default)]
pub(crate) struct Disks {
    all: RwLock<Vec<Arc<Served>>>,
}

impl Disks {
    /// Adds a disk that is served.
    ///
    /// # Errors
    /// `Invalid` if the name is taken.
    pub(crate) fn add(&self, disk: Arc<Served>) -> Result<()> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let name = &disk.name;
        if all.iter().any(|other| other.name == *name) {
            return Err(Error::new(ErrorKind::Invalid, format!("two disks are called {name:?}")));
        }
        all.push(disk);
        Ok(())
    }

    /// The current disks.
    pub(crate) fn all(&self) -> Vec<Arc<Served>> {
        self.all.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The disk called `name`.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Served>> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().find(|disk| disk.name == name).cloned()
    }
}

/// Calls `act` for each of `disks`, many at a time, so that a slow one delays few others.
pub(crate) fn each_of<'disks, T: Send>(
    disks: &'disks [Arc<Served>],
    act: impl Fn(&Served) -> T + Sync,
) -> Vec<T> {
    let act = &act;
    let mut all = Vec::new();
    for some in disks.chunks(ACTS_MAX) {
        std::thread::scope(|scope| {
            let begin = |served: &'disks Arc<Served>| {
                let thread = std::thread::Builder::new().name("mica-act".to_owned());
                thread.spawn_scoped(scope, move || act(served)).map_err(|_| served)
            };
            let begun: Vec<_> = some.iter().map(begin).collect();
            all.extend(begun.into_iter().map(|begun| match begun {
                Ok(thread) => match thread.join() {
                    Ok(done) => done,
                    Err(panic) => std::panic::resume_unwind(panic),
                },
                // No thread to be had: do it on this one.
                Err(served) => act(served),
            }));
        });
    }
    all
}

//! The disks that a process serves. The set is run-time state: the configuration only says what it
//! starts with.

use crate::served::Served;
use mica_block::{Error, ErrorKind, Result};
use std::sync::{Arc, PoisonError, RwLock};

/// Threads that act on disks at the same time.
const THREADS_MAX: usize = 64;

/// The disks, in the order in which they were added. A disk is identified by its name; callers hold
/// the disk itself, never an index, because the set may change meanwhile.
#[derive(Default)]
pub(crate) struct Disks {
    all: RwLock<Vec<Arc<Served>>>,
}

impl Disks {
    /// Adds a disk that is open.
    ///
    /// # Errors
    /// `Invalid` if the name is taken.
    pub(crate) fn add(&self, disk: Arc<Served>) -> Result<()> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let name = &disk.name;
        if all.iter().any(|other| other.name == *name) {
            return Err(Error::new(ErrorKind::Invalid, format!("two disks are named {name:?}")));
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

/// Calls `act` for each of `disks`, many at a time, so that a slow one delays few others. A single
/// one needs no thread besides this.
pub(crate) fn each_of<'disks, T: Send>(
    disks: &'disks [Arc<Served>],
    act: impl Fn(&Served) -> T + Sync,
) -> Vec<T> {
    let act = &act;
    let mut all = Vec::new();
    for some in disks.chunks(THREADS_MAX) {
        std::thread::scope(|scope| {
            let start = |served: &'disks Arc<Served>| {
                let thread = std::thread::Builder::new().name("mica-act".to_owned());
                thread.spawn_scoped(scope, move || act(served)).map_err(|_| served)
            };
            let Some((last, others)) = some.split_last() else { return };
            let started: Vec<_> = others.iter().map(start).collect();
            let done = act(last);
            all.extend(started.into_iter().map(|started| match started {
                Ok(thread) => match thread.join() {
                    Ok(done) => done,
                    Err(panic) => std::panic::resume_unwind(panic),
                },
                // No thread could be started: do it on this one.
                Err(served) => act(served),
            }));
            all.push(done);
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DiskConfig;
    use crate::servers::Resources;
    use crate::sockets::Sockets;
    use mica_rt::Backend;
    use mica_serve::Workers;
    use mica_serve::fuse::MountsHere;
    use mica_store::Handles;
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    /// A disk of zeros at `socket`.
    fn disk(name: &str, socket: &Path, resources: &Resources) -> Arc<Served> {
        let mut config = DiskConfig::new(name.to_owned(), PathBuf::from("1M"));
        config.images.format = "null".to_owned();
        config.settings.nbd = vec![socket.display().to_string()];
        let mut inherited = Sockets::default();
        let served = Served::prepare(config, resources, &mut inherited, Duration::ZERO);
        Arc::new(served.expect("opened"))
    }

    #[test]
    fn disks_keep_their_order_and_a_name_is_used_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let resources = Resources {
            handles: Handles::new(4),
            workers: Workers::start(1, Backend::Pool).expect("workers"),
            mounts: Arc::<MountsHere>::default(),
        };
        let new = |name, socket| disk(name, &folder.path().join(socket), &resources);
        let disks = Disks::default();
        disks.add(new("b", "1")).expect("added");
        disks.add(new("a", "2")).expect("added");
        let before = disks.all();
        let second = new("b", "3");
        assert!(disks.add(Arc::clone(&second)).is_err(), "the name is in use");
        disks.add(new("c", "4")).expect("added");

        assert_eq!(each_of(&disks.all(), |disk| disk.name.clone()), ["b", "a", "c"]);
        assert_eq!(before.len(), 2, "a list that was taken before stays as it was");
        assert!(disks.named("a").is_some_and(|disk| Arc::ptr_eq(&disk, &before[1])));
        assert!(disks.named("d").is_none());
        for disk in disks.all().into_iter().chain([second]) {
            disk.stop().expect("closed");
        }
    }
}

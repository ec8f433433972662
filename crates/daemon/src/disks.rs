//! The disks that a process serves. The set is run-time state: the configuration only says what it
//! starts with.
//!
//! Invariants
//! - I1 A name belongs to one disk of the set. Where disks may be served is decided before
//!   ([`Addresses`](crate::addresses::Addresses)).
//! - I2 A disk is in the set from before it is opened until it is closed, so that whoever closes
//!   all disks closes it.

use crate::served::Served;
use mica_block::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that act on disks at the same time.
const THREADS_MAX: usize = 64;
/// Threads that open disks at the same time.
const OPENERS_MAX: usize = 4;

/// The disks, in the order in which they were added. A disk is identified by its name; callers hold
/// the disk itself, never an index, because the set may change meanwhile.
#[derive(Default)]
pub(crate) struct Disks {
    set: RwLock<Set>,
}

#[derive(Default)]
struct Set {
    all: Vec<Arc<Served>>,
    named: BTreeMap<String, Arc<Served>>,
}

impl Disks {
    /// Adds a disk that is not open yet.
    ///
    /// # Errors
    /// `Invalid` if its name is taken.
    pub(crate) fn add(&self, disk: Arc<Served>) -> Result<()> {
        let mut set = self.set.write();
        let Set { all, named } = &mut *set;
        let name = &disk.name;
        if named.contains_key(name) {
            return Err(taken(name));
        }
        named.insert(name.clone(), Arc::clone(&disk));
        all.push(disk);
        Ok(())
    }

    /// Whether a disk may have this name.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub(crate) fn check_name(&self, name: &str) -> Result<()> {
        self.named(name).map_or(Ok(()), |_| Err(taken(name)))
    }

    /// Removes a disk, which is closed. Its places are free for another one.
    pub(crate) fn remove(&self, disk: &Arc<Served>) {
        disk.doors().leave_addresses();
        let mut set = self.set.write();
        let Set { all, named } = &mut *set;
        let before = all.len();
        all.retain(|other| !Arc::ptr_eq(other, disk));
        // It may have been removed already, and another one have its name.
        if all.len() < before {
            named.remove(&disk.name);
        }
    }

    /// The current disks.
    pub(crate) fn all(&self) -> Vec<Arc<Served>> {
        self.set.read().all.clone()
    }

    /// The disk called `name`.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Served>> {
        let set = self.set.read();
        set.named.get(name).cloned()
    }
}

fn taken(name: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("there is a disk named {name:?} already"))
}

/// Calls `act` for each of `disks`, many at a time, so that a slow one delays few others. A single
/// one needs no thread besides this.
pub(crate) fn each_of<T: Send>(disks: &[Arc<Served>], act: impl Fn(&Served) -> T + Sync) -> Vec<T> {
    each_by(THREADS_MAX, disks, |served| act(served))
}

/// Calls `open` for each of `disks`, a few at a time, beginning with the first.
pub(crate) fn open_each<D: Sync, T: Send>(disks: &[D], open: impl Fn(&D) -> T + Sync) -> Vec<T> {
    each_by(OPENERS_MAX, disks, open)
}

fn each_by<D: Sync, T: Send>(
    threads_max: usize,
    disks: &[D],
    act: impl Fn(&D) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let position = next.fetch_add(1, Ordering::Relaxed);
            let Some(disk) = disks.get(position) else { return done };
            done.push((position, act(disk)));
        }
    };
    let mut all = std::thread::scope(|scope| {
        let others = disks.len().min(threads_max).saturating_sub(1);
        let thread = || std::thread::Builder::new().name("mica-act".to_owned());
        // If the system has no thread to spare, this one does what the others do not.
        let started: Vec<_> =
            (0..others).map_while(|_| thread().spawn_scoped(scope, work).ok()).collect();
        let mut all = work();
        for thread in started {
            match thread.join() {
                Ok(done) => all.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        all
    });
    all.sort_unstable_by_key(|(position, _)| *position);
    all.into_iter().map(|(_, done)| done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DiskConfig;
    use crate::helper::Outside;
    use crate::servers::Resources;
    use crate::settings::NbdPlace;
    use crate::sockets::Sockets;
    use mica_qcow2::MapCache;
    use mica_rt::Backend;
    use mica_serve::Workers;
    use mica_serve::fuse::MountsHere;
    use mica_stack::{Format, Patience, Stores};
    use mica_store::Handles;
    use std::os::unix::fs::MetadataExt;
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    /// A disk of zeros at `socket`.
    fn disk(name: &str, socket: &Path, resources: &Resources) -> Arc<Served> {
        let mut config = DiskConfig::new(name.to_owned(), PathBuf::from("1M"));
        config.images.format = Format::Null;
        config.settings.nbd = vec![NbdPlace::Unix(socket.to_owned())];
        Arc::new(Served::new(config, &mut Sockets::default(), resources).expect("a free place"))
    }

    fn open(disk: &Served) {
        disk.prepare(Duration::ZERO).expect("opened");
        disk.start();
    }

    fn resources() -> Resources {
        Resources {
            handles: Handles::new(4),
            workers: Workers::start(1, Backend::Pool).expect("workers"),
            outside: Outside::default(),
            mounts: Arc::<MountsHere>::default(),
            cache: MapCache::default(),
            stores: Arc::new(Stores::new(Handles::new(4), 1 << 20, Patience::Guest)),
            indexers: Arc::default(),
            one_by_one: Arc::default(),
            tending: Arc::default(),
            gc: crate::settings::GcMode::Off,
            addresses: Arc::default(),
        }
    }

    #[test]
    fn disks_keep_their_order_and_names_are_used_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let resources = resources();
        let new = |name, socket| disk(name, &folder.path().join(socket), &resources);
        let disks = Disks::default();
        disks.add(new("b", "1")).expect("added");
        disks.add(new("a", "2")).expect("added");
        let before = disks.all();
        assert!(disks.add(new("b", "3")).is_err(), "the name is in use");
        disks.add(new("c", "4")).expect("added");

        assert_eq!(each_of(&disks.all(), |disk| disk.name.clone()), ["b", "a", "c"]);
        assert_eq!(before.len(), 2, "a list that was taken before stays as it was");
        assert!(disks.named("a").is_some_and(|disk| Arc::ptr_eq(&disk, &before[1])));
        assert!(disks.named("d").is_none());

        disks.remove(&before[1]);
        assert!(disks.named("a").is_none());
        let second = new("a", "2");
        disks.add(Arc::clone(&second)).expect("its name is free");
        disks.remove(&before[1]);
        assert!(disks.named("a").is_some_and(|disk| Arc::ptr_eq(&disk, &second)));
        assert_eq!(each_of(&disks.all(), |disk| disk.name.clone()), ["b", "c", "a"]);
    }

    #[test]
    fn socket_of_several_disks_is_there_from_the_first_that_is_open_to_the_last() {
        let folder = tempfile::tempdir().expect("a folder");
        let (resources, socket) = (resources(), folder.path().join("s"));
        let [a, b] = ["a", "b"].map(|name| disk(name, &socket, &resources));
        assert!(!socket.exists());
        open(&a);
        let before = socket.symlink_metadata().expect("there").ino();
        open(&b);
        a.stop().expect("closed");
        a.undrain(&|| false).expect("served");
        b.remove().expect("closed");
        assert_eq!(
            socket.symlink_metadata().expect("there").ino(),
            before,
            "the same all the time"
        );
        a.stop().expect("closed");
        assert!(!socket.exists());

        let mut config = a.config();
        config.settings.vhost_user = Some(socket);
        config.settings.nbd.clear();
        let error = Served::new(config, &mut Sockets::default(), &resources).map(drop);
        let error = error.expect_err("it is for NBD").to_string();
        assert!(error.contains("the disk \"a\" is served at"), "{error}");
    }

    #[test]
    fn disk_comes_back_only_if_somebody_asks_for_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let (resources, socket) = (resources(), folder.path().join("s"));
        let disk = disk("a", &socket, &resources);
        assert_eq!(disk.condition(), "starting");
        open(&disk);
        assert_eq!((disk.condition(), socket.exists()), ("serving", true));
        assert!(disk.undrain(&|| false).is_err(), "it is served");
        disk.stop().expect("closed");
        assert_eq!((disk.condition(), socket.exists()), ("drained", false));
        let again = disk.prepare(Duration::ZERO);
        assert_eq!(again.expect_err("it was stopped").kind(), ErrorKind::Denied);
        disk.undrain(&|| false).expect("served");
        assert_eq!((disk.condition(), socket.exists()), ("serving", true));
        disk.stop().expect("closed");

        let stopped = self::disk("b", &socket, &resources);
        stopped.stop().expect("there is nothing to close");
        let late = stopped.prepare(Duration::ZERO);
        assert_eq!(late.expect_err("it was stopped before").kind(), ErrorKind::Denied);
        assert!(!socket.exists());
    }

    #[test]
    fn disk_that_cannot_be_served_says_why_until_it_can() {
        let folder = tempfile::tempdir().expect("a folder");
        let (resources, socket) = (resources(), folder.path().join("s"));
        std::fs::write(&socket, "not a socket").expect("written");
        let disk = disk("a", &socket, &resources);
        let error = disk.prepare(Duration::ZERO).expect_err("taken");
        assert_eq!(disk.condition(), "failed");
        assert_eq!(disk.failure().expect("a reason").to_string(), error.to_string());
        disk.start();
        assert_eq!(disk.condition(), "failed");
        assert!(disk.undrain(&|| false).is_err(), "still taken");

        std::fs::remove_file(&socket).expect("removed");
        disk.undrain(&|| false).expect("served");
        assert!(disk.failure().is_none());
        disk.stop().expect("closed");
        assert_eq!(disk.condition(), "drained");

        std::fs::write(&socket, "not a socket").expect("written");
        assert!(disk.undrain(&|| false).is_err(), "taken again");
        assert_eq!(disk.condition(), "drained", "that is what somebody wanted");
        assert!(disk.failure().is_none());
        std::fs::remove_file(&socket).expect("removed");
        disk.undrain(&|| false).expect("served");
        disk.stop().expect("closed");
    }
}

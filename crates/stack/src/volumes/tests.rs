use super::*;
use mica_block::{
    Disk as _, Entry, Error, ErrorKind, LocalFuture, Manage, Object, ObjectName, Objects,
    PutFuture, Result,
};
use mica_rt::sync::Signal;
use mica_rt::{Backend, Buf, Executor};
use mica_store::Handles;
use mica_store::object::MemoryObjects;
use mica_units::GuestOffset;
use mica_volume::{ExtentId, NewVolume, SnapshotPer, VolumeName};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const LEN: u64 = 1 << 30;

pub(super) fn run<T>(test: impl Future<Output = T>) -> T {
    Executor::new(Backend::Pool).expect("threads").block_on(test)
}

fn stores() -> Stores {
    Stores::new(Handles::new(64), 1 << 20, Patience::Verb)
}

fn volume(folder: &Path, name: &str) -> VolumeUrl {
    format!("file://{}/{name}", folder.display()).parse().expect("a URL")
}

async fn make(stores: &Stores, url: &VolumeUrl) -> Result<()> {
    stores.open_or_make(&url.store).await?.volumes().create(&url.name, LEN).await
}

const WRITE: VolumeOptions = VolumeOptions {
    access: VolumeAccess::Write,
    key: None,
    force: false,
    log: None,
    durability: None,
    keep: None,
    snapshot_per: SnapshotPer::Interval,
    boot_fetch: 0,
    faults: StoreFaults::NONE,
};

async fn write(disk: &dyn Manage, byte: u8) -> Result<()> {
    disk.write(GuestOffset::ZERO, Buf::from_slice(&[byte; 4096])).await.0?;
    disk.flush().await
}

async fn first(disk: &dyn Manage) -> u8 {
    let range = mica_units::GuestRange::new(GuestOffset::ZERO, 4096).expect("on the disk");
    let plan = disk.plan(range, Vec::new()).finish().await.expect("planned");
    mica_block::read_whole(disk, &plan).await.expect("read")[0]
}

pub(super) fn kind<T>(result: Result<T>) -> ErrorKind {
    result.map(drop).map_err(|error: Error| error.kind()).expect_err("refused")
}

#[test]
fn store_is_made_in_a_directory_that_may_be_made_but_not_in_one_that_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let stores = stores();
        let url = volume(&folder.path().join("store"), "web");
        assert_eq!(kind(stores.open(&url.store).await), ErrorKind::NotFound);
        make(&stores, &url).await.expect("made");
        assert_eq!(kind(make(&stores, &url).await), ErrorKind::Invalid, "it is there");
        let deep = volume(&folder.path().join("mnt/store"), "web");
        let error = make(&stores, &deep).await.expect_err("no such directory").in_one_line();
        assert!(error.ends_with("/mnt"), "{error}");
        std::fs::write(folder.path().join("note"), "mine").expect("written");
        let taken = volume(folder.path(), "web");
        assert_eq!(kind(make(&stores, &taken).await), ErrorKind::Invalid, "not empty");
    });
}

#[test]
fn store_is_opened_once_and_what_is_in_it_is_found_again() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let stores = stores();
        let url = volume(folder.path(), "web");
        make(&stores, &url).await.expect("made");
        let [a, b] = [stores.open(&url.store).await, stores.open(&url.store).await];
        assert!(Arc::ptr_eq(&a.expect("open"), &b.expect("open")));
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        assert_eq!(disk.geometry().len, LEN);
        write(&*disk, 7).await.expect("written");
        disk.close().await.expect("closed");
        let read = stores.open_volume(&url, &VolumeOptions::default()).await.expect("open");
        assert_eq!((first(&*read).await, read.is_writable()), (7, false));
        let other = VolumeUrl { snapshot: Some("none".to_owned()), ..url };
        assert_eq!(kind(stores.open_volume(&other, &WRITE).await), ErrorKind::NotFound);
    });
}

#[test]
fn volume_is_open_once_on_this_machine_and_its_dead_writer_is_no_obstacle() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        // Another process has other stores.
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        make(&stores, &url).await.expect("made");
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        write(&*disk, 1).await.expect("written");
        let again = others.open_volume(&url, &WRITE).await.map(drop).expect_err("it is open");
        let own = format!("process {} of this machine", std::process::id());
        assert!(again.in_one_line().contains(&own), "{again}");
        let store = others.open(&url.store).await.expect("open");
        assert_eq!(kind(store.delete(&url.name, false).await), ErrorKind::Denied);
        // It ends without closing the volume, as one that is killed does.
        drop(disk);
        let disk = others.open_volume(&url, &WRITE).await.expect("its writer is dead");
        assert_eq!(first(&*disk).await, 1);
        disk.close().await.expect("closed");
        drop(disk);
        store.delete(&url.name, false).await.expect("deleted");
        assert_eq!(kind(stores.open_volume(&url, &WRITE).await), ErrorKind::NotFound);
        assert_eq!(locks(folder.path()), 0);
    });
}

/// The story: a server hung, and nobody could take its volume over on the same machine: the lock of
/// the folder was in the way, although the fence decides.
#[test]
fn lock_that_is_held_is_passed_by_with_force() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        make(&stores, &url).await.expect("made");
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        write(&*disk, 1).await.expect("written");
        disk.flush().await.expect("it is in the store");
        // Where the volume is not taken, the lock is whose it was.
        let no_log = LogPlace { path: folder.path().to_owned(), len: 1 << 20 };
        let forced = VolumeOptions { force: true, ..WRITE };
        let failing = VolumeOptions { log: Some(no_log), ..forced.clone() };
        others.open_volume(&url, &failing).await.map(drop).expect_err("a folder is no log");
        assert_eq!(kind(others.open_volume(&url, &WRITE).await), ErrorKind::Denied);
        let new = others.open_volume(&url, &forced).await.expect("taken over");
        assert_eq!(first(&*new).await, 1);
        assert_eq!(kind(write(&*disk, 2).await), ErrorKind::Denied, "it was fenced");
        // The end of the old one does nothing to the lock of the new one.
        let _ = disk.close().await;
        drop(disk);
        assert_eq!(kind(stores.open_volume(&url, &WRITE).await), ErrorKind::Denied);
        assert_eq!(locks(folder.path()), 1);
        let store = stores.open(&url.store).await.expect("open");
        store.delete(&url.name, true).await.expect("deleted");
        assert_eq!(locks(folder.path()), 0);
        drop(new);
    });
}

/// How many files of locks there are, beside the one that stays once a lock was taken by force.
fn locks(folder: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(folder.join(".locks")) else { return 0 };
    entries.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.file_name() != ".gate")).count()
}

/// The story: each mistyped name left a file.
#[test]
fn name_that_no_volume_has_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let stores = stores();
        let (web, wob) = (volume(folder.path(), "web"), volume(folder.path(), "wob"));
        make(&stores, &web).await.expect("made");
        let store = stores.open(&wob.store).await.expect("open");
        assert_eq!(kind(stores.open_volume(&wob, &WRITE).await), ErrorKind::NotFound);
        assert_eq!(kind(store.settle(&wob.name).await), ErrorKind::NotFound);
        assert_eq!(kind(store.delete(&wob.name, true).await), ErrorKind::NotFound);
        let log = folder.path().join("log");
        let place = LogPlace { path: log.clone(), len: 1 << 20 };
        let with_log = VolumeOptions { log: Some(place), ..WRITE };
        assert_eq!(kind(stores.open_volume(&wob, &with_log).await), ErrorKind::NotFound);
        assert_eq!(locks(folder.path()), 0);
        assert!(!log.exists());
    });
}

/// The story: `--log-size 4k` left a file of 4 KiB, which is no log, and was in the way of the next
/// try.
#[test]
fn log_that_would_be_too_short_is_not_made() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let stores = stores();
        let url = volume(&folder.path().join("store"), "web");
        make(&stores, &url).await.expect("made");
        let log = folder.path().join("log");
        let with = |len| {
            let place = LogPlace { path: log.clone(), len };
            VolumeOptions { log: Some(place), ..WRITE }
        };
        assert_eq!(kind(stores.open_volume(&url, &with(4096)).await), ErrorKind::Invalid);
        assert!(!log.exists());
        let disk = stores.open_volume(&url, &with(1 << 20)).await.expect("open");
        disk.close().await.expect("closed");
    });
}

/// The story: an import ended early, and what it had copied was served as the image.
#[test]
fn part_of_an_image_is_only_deleted() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        let made_in = stores.open_or_make(&url.store).await.expect("a store");
        let begin = || made_in.begin_import(&url.name, LEN, None, NewVolume::default());
        let made = begin().await.expect("made");
        let import = |made| VolumeOptions { access: VolumeAccess::Import(made), ..WRITE };
        let disk = stores.open_volume(&url, &import(made)).await.expect("open");
        write(&*disk, 1).await.expect("written");
        let read = VolumeOptions::default();
        assert_eq!(kind(others.open_volume(&url, &read).await), ErrorKind::Denied, "under way");
        // It ends as one that is killed does.
        drop(disk);
        for options in [&read, &WRITE, &VolumeOptions { force: true, ..WRITE }] {
            let refused = others.open_volume(&url, options).await.map(drop).expect_err("a part");
            assert!(refused.to_string().contains("is incomplete"), "{refused}");
        }
        let store = others.open(&url.store).await.expect("open");
        assert_eq!(kind(store.settle(&url.name).await), ErrorKind::Denied);
        store.delete(&url.name, false).await.expect("deleted");
        let made = begin().await.expect("made");
        let disk = stores.open_volume(&url, &import(made)).await.expect("open");
        disk.close().await.expect("closed");
        drop(disk);
        others.open_volume(&url, &WRITE).await.expect("all of it").close().await.expect("closed");
    });
}

/// The story: an import was killed before it opened the volume that it had made, which looked like
/// an image of zeros.
#[test]
fn import_that_has_not_begun_to_write_is_no_image() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        let store = stores.open_or_make(&url.store).await.expect("a store");
        let made = store.begin_import(&url.name, 1 << 20, None, NewVolume::default()).await;
        let made = made.expect("made");
        for options in [&VolumeOptions::default(), &WRITE] {
            let refused = others.open_volume(&url, options).await.map(drop).expect_err("a part");
            assert!(refused.to_string().contains("is incomplete"), "{refused}");
        }
        let again = store
            .begin_import(&url.name, 1 << 20, None, NewVolume::default())
            .await
            .expect_err("it is there");
        assert_eq!(again.kind(), ErrorKind::Invalid);
        assert_eq!(kind(others.open_volume(&url, &WRITE).await), ErrorKind::Denied, "as before");
        let import = |made| VolumeOptions { access: VolumeAccess::Import(made), ..WRITE };
        let disk = stores.open_volume(&url, &import(made)).await.expect("open");
        disk.close().await.expect("closed");
        drop(disk);
        others.open_volume(&url, &WRITE).await.expect("all of it").close().await.expect("closed");
    });
}

/// The story: an import that a signal ended closed its volume before it deleted it, and in between
/// half an image looked like all of it.
#[test]
fn import_that_is_undone_never_looks_whole_and_leaves_another_of_its_name() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        let (store, other) = (stores.open_or_make(&url.store).await.expect("a store"), &url.store);
        let other = others.open(other).await.expect("open");
        let begin = || store.begin_import(&url.name, 1 << 20, None, NewVolume::default());
        let import = |made| VolumeOptions { access: VolumeAccess::Import(made), ..WRITE };
        let made = begin().await.expect("made");
        let disk = stores.open_volume(&url, &import(made)).await.expect("open");
        write(&*disk, 1).await.expect("written");
        disk.volume().expect("a volume").abort_import().await.expect("deleted");
        drop(disk);
        // What there would be if its last head had not come.
        let heads = folder.path().join("volumes/web");
        let names = std::fs::read_dir(&heads).expect("a folder").map(|entry| entry.expect("read"));
        let last = names.map(|entry| entry.file_name()).max().expect("heads");
        let kept = folder.path().join("kept");
        std::fs::rename(heads.join(&last), &kept).expect("moved");
        let refused = others.open_volume(&url, &WRITE).await.map(drop).expect_err("a part");
        assert!(refused.to_string().contains("is incomplete"), "{refused}");
        std::fs::rename(&kept, heads.join(&last)).expect("moved");
        assert!(!store.undo_import(&url.name, made).await.expect("it is no more"));
        assert_eq!(std::fs::read_dir(folder.path().join(".locks")).expect("a folder").count(), 0);

        let made = begin().await.expect("made");
        drop(stores.open_volume(&url, &import(made)).await.expect("open"));
        assert!(!store.undo_import(&url.name, made).await.expect("its writer is fenced"));
        assert_eq!(kind(other.settle(&url.name).await), ErrorKind::NotFound);

        let made = begin().await.expect("made");
        other.delete(&url.name, true).await.expect("deleted");
        make(&others, &url).await.expect("made");
        assert_eq!(kind(stores.open_volume(&url, &import(made)).await), ErrorKind::Denied);
        assert!(!store.undo_import(&url.name, made).await.expect("left alone"));
        others.open_volume(&url, &WRITE).await.expect("there").close().await.expect("closed");
        other.delete(&url.name, true).await.expect("deleted");

        let first = begin().await.expect("made");
        other.delete(&url.name, true).await.expect("deleted");
        let second = begin().await.expect("made");
        assert_eq!(kind(stores.open_volume(&url, &import(first)).await), ErrorKind::Denied);
        let disk = stores.open_volume(&url, &import(second)).await.expect("nobody has it");
        disk.close().await.expect("closed");
    });
}

/// The story: `mica volume gc` compacted a volume, and the server that was started meanwhile
/// failed.
#[test]
fn compaction_gives_way_to_a_server_that_starts() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        make(&stores, &url).await.expect("made");
        let store = stores.open(&url.store).await.expect("open");
        let compactor = store.compactor().await.expect("asked").expect("nobody else is one");
        let (sparse, never) = (nothing_sparse(&url), Signal::default());
        compactor.compact(&sparse, None, &never).await.expect("nothing to do");
        // What it does while it has something to do.
        let refuse = mica_volume::Claimed::Refuse;
        let compacting = store.volumes().open_volume(&url.name, refuse).await.expect("open");
        let disk = others.open_volume(&url, &WRITE).await.expect("open");
        write(&*disk, 1).await.expect("written");
        assert_eq!(
            kind(compactor.compact(&sparse, None, &never).await),
            ErrorKind::Denied,
            "it is open"
        );
        assert_eq!(kind(write(&compacting, 2).await), ErrorKind::Denied, "it was fenced");
        assert_eq!(first(&*disk).await, 1);
        disk.close().await.expect("closed");
    });
}

fn nothing_sparse(url: &VolumeUrl) -> mica_volume::Sparse {
    let (name, extents) = (url.name.clone(), Vec::new());
    mica_volume::Sparse { name, extents, bytes: 0, live_bytes: 0 }
}

/// The story: `mica volume gc` was killed while it compacted a volume, and from then on every
/// collection left that alone, until somebody served it.
#[test]
fn volume_whose_compactor_was_killed_is_compacted_by_the_next_one_only() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        make(&stores, &url).await.expect("made");
        let (store, other) = (
            stores.open(&url.store).await.expect("open"),
            others.open(&url.store).await.expect("open"),
        );
        let (sparse, never) = (nothing_sparse(&url), Signal::default());
        let lives = store.compactor().await.expect("asked").expect("nobody else is one");
        let refuse = mica_volume::Claimed::Refuse;
        let compacting = store.volumes().open_volume(&url.name, refuse).await.expect("open");
        assert!(other.compactor().await.expect("asked").is_none(), "one lives");
        write(&compacting, 1).await.expect("nobody has fenced it");
        compacting.flush().await.expect("flushed");
        // As one that is killed: nothing is closed.
        drop((compacting, lives));
        let next = other.compactor().await.expect("asked").expect("nobody else is one");
        let info = other.volumes().info(&url.name).await.expect("known");
        assert!(other.is_left_to_compactors(&info).await, "{info:?}");
        next.compact(&sparse, None, &never).await.expect("its writer is dead");
        assert_eq!(other.volumes().info(&url.name).await.expect("known").open_on, None);
        let disk = others.open_volume(&url, &WRITE).await.expect("nobody has it");
        assert_eq!(first(&*disk).await, 1);
        disk.close().await.expect("closed");
    });
}

/// A store that takes so many more heads of volumes.
struct FewHeads {
    inner: MemoryObjects,
    left: AtomicU64,
}

impl Objects for FewHeads {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn is_far(&self) -> bool {
        self.inner.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        self.inner.open(name)
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let less = |left: u64| left.checked_sub(1);
        let is_head = name.as_str().starts_with("volumes/");
        if is_head && self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
            let error = Error::new(ErrorKind::Limit, "no more heads");
            return Box::pin(async move { (Err(error), content) });
        }
        self.inner.put_if_absent(name, content)
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.inner.list(folder, after)
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        self.inner.delete(name)
    }
}

/// Writes a block of a volume, and returns the extents that it is in, which are lost.
async fn lose_a_block(store: &Store, objects: &dyn Objects, name: &VolumeName) -> Vec<ExtentId> {
    let mut writers = Vec::new();
    for at in [0, 4096] {
        let refuse = mica_volume::Claimed::Refuse;
        let volume = store.volumes().open_volume(name, refuse).await.expect("open");
        let bytes = Buf::from_slice(&[1; 4096]);
        volume.write(GuestOffset::new(at), bytes).await.0.expect("written");
        volume.flush().await.expect("flushed");
        writers.push(volume.writer().expect("it writes"));
        volume.close().await.expect("closed");
    }
    let folder = ObjectName::new(&format!("extents/{:010x}", writers[0].number())).expect("a name");
    let mut extents = Vec::new();
    for entry in objects.list(Some(&folder), None).await.expect("listed") {
        let Entry::Object { name, .. } = entry else { continue };
        let number = name.as_str().rsplit('/').next().expect("not empty");
        let sequence = u32::from_str_radix(number, 16).expect("a number");
        extents.push(ExtentId { writer: writers[0], sequence });
        objects.delete(&name).await.expect("deleted");
    }
    assert!(!extents.is_empty());
    extents
}

/// The story: what shows that a compactor lives stayed in memory until the machine restarted if the
/// compactor failed.
#[test]
fn sign_of_a_compactor_that_failed_stays_only_while_its_volume_is_open() {
    run(async {
        let (inner, left) = (MemoryObjects::new("bucket"), AtomicU64::new(u64::MAX));
        let objects = Arc::new(FewHeads { inner, left });
        let store = Store::of_bucket(Arc::clone(&objects) as _).await.expect("made");
        let name = VolumeName::new("web").expect("a name");
        store.volumes().create(&name, LEN).await.expect("made");
        let identity = store.volumes().identity();
        let signs = || {
            let hex: String = identity.iter().map(|byte| format!("{byte:02x}")).collect();
            let folder = crate::volumes_folder(crate::usual_redo_directory()).expect("a folder");
            let names = std::fs::read_dir(folder).expect("listed");
            let names = names.map(|entry| entry.expect("listed").file_name());
            names.filter(|name| name.to_string_lossy().contains(&hex)).count()
        };
        let is_open = async |name: &VolumeName| {
            store.volumes().info(name).await.expect("known").open_on.is_some()
        };
        let extents = lose_a_block(&store, &*objects, &name).await;
        let compactor = store.compactor().await.expect("asked").expect("nobody else is one");
        let mut sparse = mica_volume::Sparse { name, extents, bytes: 0, live_bytes: 0 };
        let never = Signal::default();
        compactor.compact(&sparse, None, &never).await.expect_err("an extent is lost");
        assert_eq!((is_open(&sparse.name).await, signs()), (false, 0));
        sparse.extents.clear();
        // That which opens it.
        objects.left.store(1, Ordering::Relaxed);
        compactor.compact(&sparse, None, &never).await.expect_err("it cannot be closed");
        assert_eq!((is_open(&sparse.name).await, signs()), (true, 1));
        objects.left.store(u64::MAX, Ordering::Relaxed);
        compactor.compact(&sparse, None, &never).await.expect("its writer is dead");
        assert_eq!((is_open(&sparse.name).await, signs()), (false, 0));
    });
}

/// The story: a store was moved without its files whose names begin with a dot, after a server with
/// a log had been killed. `mica volume gc` fenced the dead writer, and what that had acknowledged
/// was no more than its log had, which nobody could replay any more. So did verbs and servers.
#[test]
fn log_that_only_the_head_names_is_waited_for() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let url = volume(&folder.path().join("store"), "web");
        let log = LogPlace { path: folder.path().join("log"), len: 1 << 20 };
        let with_log = VolumeOptions { log: Some(log), ..WRITE };
        let killed = stores();
        make(&killed, &url).await.expect("made");
        let disk = killed.open_volume(&url, &with_log).await.expect("open");
        write(&*disk, 7).await.expect("acknowledged");
        drop((disk, killed));
        std::fs::remove_dir_all(folder.path().join("store/.locks")).expect("removed");
        let stores = stores();
        let store = stores.open(&url.store).await.expect("open");
        let info = store.volumes().info(&url.name).await.expect("known");
        assert!(!store.is_left_to_compactors(&info).await, "{info:?}");
        let compactor = store.compactor().await.expect("asked").expect("nobody else is one");
        let (sparse, never) = (nothing_sparse(&url), Signal::default());
        assert_eq!(kind(compactor.compact(&sparse, None, &never).await), ErrorKind::Denied);
        let refusals = [
            store.settle(&url.name).await.map(drop),
            store.delete(&url.name, false).await,
            store.check_readable(&url.name).await.map(drop),
            stores.open_volume(&url, &WRITE).await.map(drop),
        ];
        for refused in refusals {
            assert_eq!(kind(refused), ErrorKind::Denied);
        }
        let refused = stores.open_volume(&url, &WRITE).await.map(drop).expect_err("without it");
        assert!(refused.to_string().contains("--log-device"), "{refused}");
        let disk = stores.open_volume(&url, &with_log).await.expect("its log is here");
        assert_eq!(first(&*disk).await, 7);
        disk.close().await.expect("closed");
        drop(disk);
        compactor.compact(&sparse, None, &never).await.expect("nobody has it open");
    });
}

/// The story: a storm killed `mica volume gc` while it wrote sparse extents again; every verb went
/// on with the volume but `clone`, which said that it was open.
#[test]
fn volume_whose_writer_was_killed_here_is_cloned() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let (url, clone) = (volume(folder.path(), "web"), volume(folder.path(), "clone"));
        make(&stores, &url).await.expect("made");
        let store = others.open(&url.store).await.expect("open");
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        write(&*disk, 1).await.expect("written");
        let refused = store.clone_volume(&url.name, None, &clone.name).await.expect_err("it lives");
        assert!(refused.to_string().contains("take a snapshot"), "{refused}");
        write(&*disk, 2).await.expect("nobody has fenced it");
        // It ends without closing the volume, as one that is killed does.
        drop(disk);
        store.clone_volume(&url.name, None, &clone.name).await.expect("cloned");
        for url in [&url, &clone] {
            let disk = others.open_volume(url, &WRITE).await.expect("nobody has it");
            assert_eq!(first(&*disk).await, 2);
            disk.close().await.expect("closed");
        }
    });
}

/// The story: the same before a head had the snapshot that its writer had taken: `clone` said to
/// try again, for ever.
#[test]
fn snapshot_whose_writer_was_killed_before_a_head_had_it_is_cloned() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let (url, clone) = (volume(folder.path(), "web"), volume(folder.path(), "clone"));
        make(&stores, &url).await.expect("made");
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        let heads = || {
            let all = std::fs::read_dir(folder.path().join("volumes/web")).expect("heads");
            all.map(|head| head.expect("a head").path()).collect::<Vec<_>>()
        };
        let opening = heads();
        write(&*disk, 1).await.expect("written");
        disk.snapshots().expect("a volume").take("a").await.expect("taken");
        disk.volume().expect("a volume").checkpoint().await.expect("in a head");
        drop(disk);
        // As if it had not come to that.
        for head in heads().iter().filter(|head| !opening.contains(head)) {
            std::fs::remove_file(head).expect("removed");
        }
        let (store, which) = (
            others.open(&url.store).await.expect("open"),
            mica_block::Which::Label("a".to_owned()),
        );
        store.clone_volume(&url.name, Some(&which), &clone.name).await.expect("cloned");
        let disk = others.open_volume(&clone, &WRITE).await.expect("nobody has it");
        assert_eq!(first(&*disk).await, 1);
        disk.close().await.expect("closed");
    });
}

/// The story: two machines had one name, and a store over a network that kept no locks.
#[test]
fn writer_of_another_machine_with_our_name_may_be_alive() {
    let folder = tempfile::tempdir().expect("a folder");
    run(async {
        let (stores, others) = (stores(), self::stores());
        let url = volume(folder.path(), "web");
        make(&stores, &url).await.expect("made");
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        let note = folder.path().join(".locks/web");
        let own = std::fs::read_to_string(&note).expect("a note");
        assert!(own.contains("\nboot "), "{own}");
        drop(disk);
        let other: Vec<_> = own
            .lines()
            .map(|line| match line.split_once(' ') {
                Some((key @ ("machine" | "boot"), _)) => format!("{key} abc"),
                _ => line.to_owned(),
            })
            .chain(["machine abc".to_owned()])
            .collect();
        std::fs::write(&note, other.join("\n")).expect("written");
        let machine_is_known = Path::new("/etc/machine-id").metadata();
        if machine_is_known.is_ok_and(|file| file.len() > 0) {
            assert_eq!(kind(others.open_volume(&url, &WRITE).await), ErrorKind::Denied);
        }
        std::fs::write(&note, own).expect("written");
        others.open_volume(&url, &WRITE).await.expect("open").close().await.expect("closed");
    });
}

#[test]
fn stores_in_memory_are_for_tests_of_one_process() {
    run(async {
        let stores = stores();
        let url: VolumeUrl = "memory:x/web".parse().expect("a URL");
        make(&stores, &url).await.expect("made");
        let disk = stores.open_volume(&url, &WRITE).await.expect("open");
        write(&*disk, 3).await.expect("written");
        disk.close().await.expect("closed");
        assert_eq!(kind(self::stores().open(&url.store).await), ErrorKind::NotFound);
    });
}

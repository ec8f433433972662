//! Stores that read one file share its descriptor.

use crate::{on_each_backend, read};
use mica_block::{ErrorKind, Store};
use mica_store::{CacheMode, FileStore, Handles, Located, Locking, WritableFile};
use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// A file that was last written an hour ago.
fn old_file(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, [1; 8192]).unwrap();
    set_modified(&path, SystemTime::now() - Duration::from_secs(3600));
    path
}

fn set_modified(path: &Path, time: SystemTime) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_times(FileTimes::new().set_modified(time)).unwrap();
}

fn open(path: &Path, locking: Locking, cache: CacheMode, handles: &Arc<Handles>) -> FileStore {
    let mut located = Located::find(path).unwrap();
    FileStore::new_shared(&mut located, cache, locking, handles).unwrap()
}

fn open_locked(path: &Path, handles: &Arc<Handles>) -> FileStore {
    open(path, Locking::On, CacheMode::Writeback, handles)
}

/// Files that take the descriptors of all others.
fn others(folder: &Path, handles: &Arc<Handles>) -> Vec<FileStore> {
    let open = |number| open_locked(&old_file(folder, &format!("other{number}")), handles);
    (0..9).map(open).collect()
}

async fn pass_by(others: &[FileStore]) {
    for _ in 0..2 {
        for other in others {
            read(other, 0, 4).await.unwrap();
        }
    }
}

#[test]
fn any_number_of_stores_in_one_file_has_one_descriptor() {
    let folder = tempfile::tempdir().unwrap();
    let path = old_file(folder.path(), "base");
    for locking in [Locking::On, Locking::ForceShare, Locking::Off] {
        on_each_backend(|| async {
            let handles = Handles::new(16);
            let mut stores: Vec<_> =
                (0..10).map(|_| open(&path, locking, CacheMode::Writeback, &handles)).collect();
            for store in &stores {
                assert_eq!(read(store, 0, 4).await.unwrap(), [1; 4]);
            }
            assert_eq!(handles.open_count(), 1);
            let last = stores.pop();
            drop(stores);
            assert_eq!(handles.open_count(), 1, "one still reads it");
            drop(last);
            assert_eq!(handles.open_count(), 0);
        });
    }
}

#[test]
fn stores_that_read_a_file_in_different_ways_share_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = old_file(folder.path(), "base");
    on_each_backend(|| async {
        let handles = Handles::new(16);
        let stores = [
            open(&path, Locking::On, CacheMode::Writeback, &handles),
            open(&path, Locking::On, CacheMode::None, &handles),
            open(&path, Locking::ForceShare, CacheMode::Writeback, &handles),
        ];
        for store in &stores {
            assert_eq!(read(store, 0, 4).await.unwrap(), [1; 4]);
        }
        assert_eq!(handles.open_count(), stores.len());
    });
}

/// The directory of one clone goes away, and its way to the common base with it.
#[test]
fn store_opens_a_shared_file_again_by_its_own_name() {
    let folder = tempfile::tempdir().unwrap();
    let base = old_file(folder.path(), "base");
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    fs::create_dir(&second).unwrap();
    let by = |clone: &Path| clone.join("..").join("base");
    on_each_backend(|| async {
        fs::create_dir(&first).unwrap();
        let handles = Handles::new(4);
        let clones = [open_locked(&by(&first), &handles), open_locked(&by(&second), &handles)];
        assert_eq!(handles.open_count(), 1);
        fs::remove_dir(&first).unwrap();
        pass_by(&others(folder.path(), &handles)).await;
        let error = read(&clones[0], 0, 4).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("first"), "{error}");
        assert_eq!(read(&clones[1], 0, 4).await.unwrap(), [1; 4]);
        assert!(base.exists());
    });
}

/// Who opens a file after it was changed does not inherit the refusal of who opened it before.
#[test]
fn file_that_changed_while_it_was_closed_is_refused_only_to_those_who_knew_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = old_file(folder.path(), "base");
    on_each_backend(|| async {
        let handles = Handles::new(4);
        let before = open_locked(&path, &handles);
        let others = others(folder.path(), &handles);
        pass_by(&others).await;
        set_modified(&path, SystemTime::now() - Duration::from_secs(1800));
        let after = open_locked(&path, &handles);
        for _ in 0..2 {
            let error = read(&before, 0, 4).await.unwrap_err();
            assert!(error.to_string().contains("was written to while it was in use"), "{error}");
            assert_eq!(read(&after, 0, 4).await.unwrap(), [1; 4]);
            pass_by(&others).await;
        }
        let later = open_locked(&path, &handles);
        drop(after);
        assert_eq!(read(&later, 0, 4).await.unwrap(), [1; 4]);
        set_modified(&path, SystemTime::now() - Duration::from_secs(3600));
    });
}

#[test]
fn image_that_a_disk_reads_is_not_opened_for_writing_even_without_a_descriptor() {
    let folder = tempfile::tempdir().unwrap();
    let path = old_file(folder.path(), "base");
    on_each_backend(|| async {
        let handles = Handles::new(4);
        let write = |locking| {
            let mut located = Located::find(&path).unwrap();
            WritableFile::open(&mut located, CacheMode::Writeback, locking, &handles)
        };
        let store = open_locked(&path, &handles);
        pass_by(&others(folder.path(), &handles)).await;
        let error = write(Locking::On).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("another disk of this process"), "{error}");
        drop(store);
        write(Locking::On).unwrap();
    });
}

#[test]
fn descriptors_that_are_set_aside_are_given_up_at_once() {
    let folder = tempfile::tempdir().unwrap();
    on_each_backend(|| async {
        let handles = Handles::new(12);
        let stores = others(folder.path(), &handles);
        assert_eq!((handles.open_count(), handles.bound()), (9, 12));
        let aside = handles.set_aside(7);
        assert_eq!((handles.open_count(), handles.bound()), (5, 5));
        let more = handles.set_aside(100);
        assert_eq!(handles.bound(), 4, "a few it keeps");
        pass_by(&stores).await;
        assert!(handles.open_count() <= 4);
        drop((aside, more));
        pass_by(&stores).await;
        assert_eq!(handles.open_count(), stores.len());
    });
}

#[test]
fn threads_that_open_and_close_one_file_at_once_share_it_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = old_file(folder.path(), "base");
    let handles = Handles::new(16);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let store = open_locked(&path, &handles);
                    assert_eq!(store.len().unwrap(), 8192);
                    assert!(handles.open_count() <= 4);
                }
            });
        }
    });
    assert_eq!(handles.open_count(), 0);
}

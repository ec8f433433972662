//! The bounded cache of descriptors.

use crate::{on_each_backend, open, read};
use mica_block::{ErrorKind, Store};
use mica_rt::{Backend, Executor, join_all};
use mica_store::{CacheMode, FileStore, Handles};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files that hold their own number.
fn numbered_files(folder: &Path, count: u32) -> Vec<PathBuf> {
    let write = |number: u32| {
        let path = folder.join(format!("layer{number}"));
        std::fs::write(&path, number.to_le_bytes().repeat(1024)).unwrap();
        path
    };
    (0..count).map(write).collect()
}

fn open_all(paths: &[PathBuf], cache: CacheMode, handles: &Arc<Handles>) -> Vec<Arc<FileStore>> {
    paths.iter().map(|path| Arc::new(open(path, cache, handles).unwrap())).collect()
}

async fn read_number(store: &FileStore) -> u32 {
    u32::from_le_bytes(read(store, 4, 4).await.unwrap().try_into().unwrap())
}

#[test]
fn more_files_than_descriptors_are_read_in_turn() {
    let folder = tempfile::tempdir().unwrap();
    let paths = numbered_files(folder.path(), 50);
    on_each_backend(|| async {
        for cache in [CacheMode::Writeback, CacheMode::None] {
            let handles = Handles::new(5);
            let stores = open_all(&paths, cache, &handles);
            for _ in 0..3 {
                for (number, store) in stores.iter().enumerate() {
                    assert_eq!(read_number(store).await as usize, number);
                    assert!(handles.open_count() <= 5);
                }
            }
            drop(stores);
            assert_eq!(handles.open_count(), 0);
        }
    });
}

/// Each of the reads needs a descriptor of its own at the same time: those without one wait.
#[test]
fn more_files_than_descriptors_are_read_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let paths = numbered_files(folder.path(), 200);
    on_each_backend(|| async {
        let handles = Handles::new(5);
        let stores = open_all(&paths, CacheMode::None, &handles);
        let numbers = join_all(stores.iter().map(|store| read_number(store))).await;
        assert!(numbers.iter().zip(0..).all(|(number, expected)| *number == expected));
        assert!(handles.open_count() <= 5);
    });
}

#[test]
fn store_dropped_while_its_read_waits_leaves_nothing_open() {
    let folder = tempfile::tempdir().unwrap();
    let paths = numbered_files(folder.path(), 30);
    on_each_backend(|| async {
        let handles = Handles::new(4);
        let stores = open_all(&paths, CacheMode::None, &handles);
        let reads: Vec<_> = stores
            .iter()
            .map(|store| store.read_at(mica_rt::Buf::new(4096), mica_units::HostOffset::ZERO))
            .collect();
        drop(stores);
        for (number, (result, buf)) in join_all(reads).await.into_iter().enumerate() {
            result.unwrap();
            assert_eq!(buf[0] as usize, number);
        }
        assert_eq!(handles.open_count(), 0);
    });
}

#[test]
fn layer_in_use_keeps_its_descriptor_over_those_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let paths = numbered_files(folder.path(), 40);
    on_each_backend(|| async {
        let handles = Handles::new(8);
        let stores = open_all(&paths, CacheMode::Writeback, &handles);
        read_number(&stores[0]).await;
        std::fs::rename(&paths[0], folder.path().join("away")).unwrap();
        for store in &stores[1..] {
            read_number(store).await;
            // It would fail if it had to be opened again.
            read_number(&stores[0]).await;
        }
        std::fs::rename(folder.path().join("away"), &paths[0]).unwrap();
    });
}

/// Reads from `store` after all others, so that it must be opened again.
async fn read_reopened(stores: &[Arc<FileStore>]) -> mica_block::Result<Vec<u8>> {
    for store in &stores[1..] {
        read_number(store).await;
    }
    read(&*stores[0], 0, 4).await
}

#[test]
fn file_that_was_replaced_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    on_each_backend(|| async {
        let paths = numbered_files(folder.path(), 20);
        let stores = open_all(&paths, CacheMode::Writeback, &Handles::new(4));
        read_number(&stores[0]).await;
        assert!(read_reopened(&stores).await.is_ok());

        let other = folder.path().join("other");
        std::fs::write(&other, vec![9; 4096]).unwrap();
        std::fs::rename(&other, &paths[0]).unwrap();
        let error = read_reopened(&stores).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("was replaced while it was in use"), "{error}");

        std::fs::remove_file(&paths[0]).unwrap();
        let error = read_reopened(&stores).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    });
}

#[test]
fn file_that_changed_its_length_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    on_each_backend(|| async {
        let paths = numbered_files(folder.path(), 20);
        let stores = open_all(&paths, CacheMode::Writeback, &Handles::new(4));
        read_number(&stores[0]).await;
        std::fs::File::options().write(true).open(&paths[0]).unwrap().set_len(17).unwrap();
        let error = read_reopened(&stores).await.unwrap_err();
        assert!(error.to_string().contains("changed its length"), "{error}");
    });
}

#[test]
fn file_that_became_something_else_is_reported_and_blocks_nobody() {
    let folder = tempfile::tempdir().unwrap();
    on_each_backend(|| async {
        let paths = numbered_files(folder.path(), 20);
        let stores = open_all(&paths, CacheMode::Writeback, &Handles::new(4));
        std::fs::remove_file(&paths[0]).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&paths[0]).status().unwrap();
        assert!(made.success());
        let error = read(&*stores[0], 0, 4).await.unwrap_err();
        assert!(error.to_string().contains("a FIFO"), "{error}");
        std::fs::remove_file(&paths[0]).unwrap();
    });
}

#[test]
fn threads_share_few_descriptors_and_read_the_right_files() {
    let folder = tempfile::tempdir().unwrap();
    let paths = numbered_files(folder.path(), 60);
    for backend in [Backend::Uring, Backend::Pool] {
        let handles = Handles::new(6);
        let stores = open_all(&paths, CacheMode::Writeback, &handles);
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let (stores, handles) = (&stores, &handles);
                scope.spawn(move || {
                    let Ok(executor) = Executor::new(backend) else { return };
                    executor.block_on(async {
                        for round in 0..500 {
                            let batch: Vec<_> = (0..4)
                                .map(|at| (round * 7 + thread * 13 + at * 29) % stores.len())
                                .collect();
                            let reads = batch.iter().map(|number| read_number(&stores[*number]));
                            let numbers = join_all(reads).await;
                            assert!(numbers.iter().zip(&batch).all(|(a, b)| *a as usize == *b));
                            assert!(handles.open_count() <= 6);
                        }
                    });
                });
            }
        });
    }
}

#[test]
fn calls_beside_reads_work_when_every_descriptor_is_busy() {
    let folder = tempfile::tempdir().unwrap();
    let paths = numbered_files(folder.path(), 20);
    on_each_backend(|| async {
        let stores = open_all(&paths, CacheMode::Writeback, &Handles::new(4));
        let reads = stores
            .iter()
            .map(|store| store.read_at(mica_rt::Buf::new(16), mica_units::HostOffset::ZERO));
        let reads: Vec<_> = reads.collect();
        for store in &stores {
            assert_eq!(store.len().unwrap(), 4096);
        }
        join_all(reads).await;
    });
}

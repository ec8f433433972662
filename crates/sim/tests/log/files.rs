//! Logs in files of this machine: locks, threads, what is shared.

use mica_block::ErrorKind;
use mica_rt::{Backend, Executor, join_all};
use mica_store::{CacheMode, Handles, Located, Locking, WritableFile};
use mica_volume::{LogDevice, Record, Writer};
use std::path::Path;
use std::sync::Arc;

fn open(path: &Path) -> mica_block::Result<Arc<WritableFile>> {
    let mut located = Located::find(path)?;
    let (cache, handles) = (CacheMode::default(), Handles::new(8));
    WritableFile::open(&mut located, cache, Locking::On, &handles).map(Arc::new)
}

fn executor() -> Executor {
    Executor::new(Backend::Pool).expect("a backend")
}

const LEN: u64 = 4 << 20;

#[test]
fn log_is_one_processs_and_has_all_its_space() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    std::fs::File::create(&path).unwrap();
    executor().block_on(async {
        let device = LogDevice::create(open(&path).unwrap(), LEN, [1; 16]).await.unwrap();
        let error = open(&path).err().expect("another process is refused");
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("log"), "{error}");
        drop(device);
        let file = open(&path).unwrap();
        assert!(mica_block::Store::allocated_bytes(&*file).unwrap() >= LEN - (16 << 10));
        LogDevice::open(file, [2; 16]).await.unwrap();
    });
}

/// Volumes on several threads, each with its own executor, push and sync at once.
#[test]
fn volumes_on_several_threads_share_a_log() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    std::fs::File::create(&path).unwrap();
    let writer = Writer::new(5).unwrap();
    let (volumes, rounds, at_once) = (3_u8, 40, 4);
    executor().block_on(async {
        let device = LogDevice::create(open(&path).unwrap(), LEN, [1; 16]).await.unwrap();
        let mut logs = Vec::new();
        for volume in 0..volumes {
            logs.push(device.start([7; 16], [volume; 16], writer, 0).await.unwrap());
        }
        std::thread::scope(|scope| {
            // Two threads for each volume: both push into one log.
            for log in logs.iter().chain(&logs) {
                scope.spawn(move || {
                    executor().block_on(async {
                        for _ in 0..rounds {
                            let writes = (0..at_once).map(|_| async {
                                let ticket = log.push(Record::Data { block: 1, bytes: &[7; 4096] });
                                log.written(ticket.expect("there is room")).await.unwrap();
                            });
                            join_all(writes).await;
                            log.sync().await.unwrap();
                            log.free(log.next().saturating_sub(8));
                        }
                        // What this executor does for the log in the background ends before it.
                        log.rest().await;
                    });
                });
            }
        });
        assert!(logs.iter().all(|log| log.next() == 2 * rounds * at_once));
    });
    executor().block_on(async {
        let device = LogDevice::open(open(&path).unwrap(), [2; 16]).await.unwrap();
        for volume in 0..volumes {
            let pushed = 2 * rounds * at_once;
            let log =
                device.go_on([volume; 16], (Writer::FIRST, writer), pushed - 8).await.unwrap();
            assert_eq!(log.recovered(), pushed - 8..pushed);
        }
    });
}

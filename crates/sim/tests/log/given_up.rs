//! Logs that nobody opens any more, and the room that logs leave each other.

use crate::damage::{RECORDS, VOLUME, fill, simulated, small_log, writer};
use mica_block::{ErrorKind, Store};
use mica_store::MemoryStore;
use mica_volume::{DropLog, LogDevice};
use std::sync::Arc;

#[test]
fn log_of_a_volume_that_is_gone_is_listed_and_dropped() {
    simulated(async || {
        let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", small_log().await));
        let device = LogDevice::open(Arc::clone(&file), [9; 16]).await.unwrap();
        let summary = device.summaries().await.unwrap().remove(0);
        assert_eq!((summary.found.volume, summary.found.store), (VOLUME, [2; 16]));
        assert_eq!((summary.records, summary.live_bytes), (0..RECORDS, 2 * (16 << 10)));
        let error = device.drop_log([5; 16], DropLog::Anyway).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let error = device.drop_log(VOLUME, DropLog::IfStored).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("9 records"), "{error}");
        // That did not use it up. While somebody has it, it is refused in any case.
        let log = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.unwrap();
        let error = device.drop_log(VOLUME, DropLog::Anyway).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert_eq!(device.summaries().await.unwrap(), []);
        drop(log);
        device.drop_log(VOLUME, DropLog::Anyway).await.unwrap();
        drop(device);
        let device = LogDevice::open(file, [8; 16]).await.unwrap();
        assert_eq!(device.found(VOLUME), None);
        let aside = device.summaries().await.unwrap().remove(0);
        assert_eq!((aside.found.is_set_aside, aside.live_bytes), (true, 0));
        // Its space is there for others.
        let log = device.start([2; 16], [6; 16], writer(4), 0).await.unwrap();
        for _ in 0..12 {
            log.free(log.next());
            log.has_room().await.unwrap();
            fill(&log, 1).await;
        }
    });
}

#[test]
fn log_whose_records_are_all_in_the_store_is_dropped_without_force() {
    simulated(async || {
        let file = Arc::new(MemoryStore::new_writable("log", small_log().await));
        let device = LogDevice::open(file, [9; 16]).await.unwrap();
        // The state that is found has everything; the process dies before it does more.
        drop(device.go_on(VOLUME, (writer(1), writer(3)), RECORDS).await.unwrap());
        device.drop_log(VOLUME, DropLog::IfStored).await.unwrap();
        assert_eq!(device.found(VOLUME), None);
    });
}

#[test]
fn log_is_as_full_as_its_own_share_unless_the_device_is_emptier() {
    simulated(async || {
        let file = Arc::new(MemoryStore::new_writable("log", vec![0; 4096 + 20 * (16 << 10)]));
        let device = LogDevice::open(file, [1; 16]).await.unwrap();
        let large = device.start([2; 16], [1; 16], writer(1), 0).await.unwrap();
        let small = device.start([2; 16], [2; 16], writer(2), 0).await.unwrap();
        fill(&small, 1).await;
        let part = |log: &mica_volume::Log| {
            let room = log.room();
            room.used as f64 / room.len as f64
        };
        fill(&large, 5).await;
        // A record takes a segment here: five of a share of eight, but of seventeen that there are.
        assert!(part(&large) < 0.5, "{:?}", large.room());
        let mut fullest = part(&large);
        while large.next() < 13 {
            fill(&large, 1).await;
            assert!(part(&large) >= fullest, "{:?}", large.room());
            fullest = part(&large);
        }
        assert!(fullest > 0.8, "{:?}", large.room());
        assert!(part(&small) < 0.25, "it is not slowed: {:?}", small.room());
        large.free(large.next());
        assert!(part(&large) < 0.2, "{:?}", large.room());
    });
}

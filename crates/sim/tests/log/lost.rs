//! What was durable and is not there any more, or may not have got there: it is never passed over.

use crate::damage::{LEN, RECORDS, VOLUME, fill, simulated, small_log, writer};
use mica_block::{Error, ErrorKind, Store, read_exact, write_all};
use mica_rt::{Backend, Buf, Executor};
use mica_store::MemoryStore;
use mica_store::faulty::{DelayOptions, DelayStore, Operation, Operations};
use mica_units::HostOffset;
use mica_volume::{LogDevice, Record};
use std::sync::Arc;
use std::time::Duration;

/// The story: an executor ended while a write of its was under way. The next write of the log was
/// done by another executor, and everything before was taken for written.
#[test]
fn write_that_was_dropped_is_never_acknowledged() {
    let slow = DelayOptions {
        operations: Operations::NONE.with(Operation::Write),
        time: Duration::from_millis(10),
    };
    let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", vec![0; LEN]));
    let executor = || Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
    let slow_file: Arc<dyn Store> = Arc::new(DelayStore::new(Arc::clone(&file), slow));
    let record = |block| Record::Data { block, bytes: &[3; 4096] };
    let (log, ticket) = executor().block_on(async {
        let device = LogDevice::open(slow_file, [1; 16]).await.unwrap();
        let log = device.start([2; 16], VOLUME, writer(1), 0).await.unwrap();
        let ticket = log.push(record(0)).unwrap();
        let waited = mica_rt::timeout(Duration::from_millis(5), log.written(ticket)).await;
        assert!(waited.is_err(), "it is under way");
        (log, ticket)
    });
    executor().block_on(async {
        let pushed = log.push(record(1));
        let error = match pushed {
            Ok(later) => log.written(later).await.expect_err("the one before is lost"),
            Err(mica_volume::NotPushed::Failed(error)) => error,
            Err(other) => panic!("{other:?}"),
        };
        assert!(error.to_string().contains("takes no more writes"), "{error}");
        log.written(ticket).await.expect_err("nobody knows whether it is there");
        log.sync().await.expect_err("nothing is acknowledged any more");
        drop(log);
        // The next process goes on with what there is.
        let device = LogDevice::open(file, [2; 16]).await.unwrap();
        let log = device.go_on(VOLUME, (writer(1), writer(2)), 0).await.unwrap();
        assert!(log.recovered().end <= 1);
    });
}

/// The log of two processes, in whose bytes `damage` does something.
async fn damaged(damage: impl FnOnce(&mut Vec<u8>)) -> (Arc<dyn Store>, Arc<LogDevice>) {
    let mut bytes = small_log().await;
    damage(&mut bytes);
    let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", bytes));
    let device = LogDevice::open(Arc::clone(&file), [9; 16]).await.unwrap();
    (file, device)
}

const SEGMENT: usize = 16 << 10;

fn is_corrupt(error: &Error, wanted: &[&str]) {
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    for wanted in wanted {
        assert!(error.to_string().contains(wanted), "{wanted:?} in {error}");
    }
}

#[test]
fn log_without_the_segment_that_it_needs_is_refused() {
    simulated(async || {
        // Zeros in place of a header: as if the segment had never been begun.
        let (_, device) = damaged(|bytes| bytes[4096..4096 + 512].fill(0)).await;
        let error = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.err().unwrap();
        is_corrupt(&error, &["records 0 to 5", "is missing", "by force"]);
        // Nothing was used up; and where the state has all that, nothing is lost.
        assert!(device.found(VOLUME).is_some());
        let log = device.go_on(VOLUME, (writer(1), writer(3)), 6).await.unwrap();
        assert_eq!(log.recovered(), 6..RECORDS);
    });
}

#[test]
fn log_that_lacks_a_group_in_the_middle_is_refused() {
    simulated(async || {
        let (_, device) = damaged(|bytes| bytes[2 * 4096 + 40] ^= 1).await;
        let error = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.err().unwrap();
        is_corrupt(&error, &["records 0 to 5", "segment at 4096"]);
        // By force, it is set aside, and the volume has another log.
        device.set_aside(VOLUME).await.unwrap();
        drop(device.start([2; 16], VOLUME, writer(3), 0).await.unwrap());
        drop(device.go_on(VOLUME, (writer(1), writer(4)), 0).await.unwrap());
    });
}

#[test]
fn segment_with_a_damaged_header_is_kept_until_somebody_gives_it_up() {
    simulated(async || {
        // The newest one of the volume: without it, the log would seem to end before it.
        let at = 4096 + SEGMENT;
        let (file, device) = damaged(|bytes| bytes[at + 70] ^= 1).await;
        let error = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.err().unwrap();
        is_corrupt(&error, &[&format!("segment at {at}"), "may be behind it"]);
        assert_eq!(device.damaged_segments(), [at as u64]);
        // Another volume has nothing there. It does not take the segment, however long it goes on.
        let log = device.start([2; 16], [7; 16], writer(4), 0).await.unwrap();
        for _ in 0..20 {
            log.free(log.next());
            log.has_room().await.unwrap();
            fill(&log, 1).await;
        }
        log.free(log.next());
        log.end().await.unwrap();
        drop((log, device));
        let device = LogDevice::open(Arc::clone(&file), [8; 16]).await.unwrap();
        assert_eq!(device.damaged_segments(), [at as u64]);
        // The bit is right again, as from a copy of the file.
        let header = read_exact(&*file, HostOffset::new(at as u64), 4096).await.unwrap();
        let mut header = header.to_vec();
        header[70] ^= 1;
        drop(device);
        write_all(&*file, Buf::from_slice(&header), HostOffset::new(at as u64)).await.unwrap();
        let device = LogDevice::open(Arc::clone(&file), [7; 16]).await.unwrap();
        assert_eq!(
            device.go_on(VOLUME, (writer(1), writer(5)), 0).await.unwrap().recovered(),
            0..RECORDS
        );
    });
}

#[test]
fn what_is_in_damaged_segments_can_be_given_up() {
    simulated(async || {
        let at = 4096 + SEGMENT;
        let (file, device) = damaged(|bytes| bytes[at + 70] ^= 1).await;
        assert_eq!(device.drop_damaged().await.unwrap(), 1);
        assert_eq!(device.drop_damaged().await.unwrap(), 0);
        assert!(device.damaged_segments().is_empty());
        // What the first process knew to be there is there.
        let log = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.unwrap();
        assert_eq!(log.recovered(), 0..6);
        drop((log, device));
        let device = LogDevice::open(file, [8; 16]).await.unwrap();
        assert!(device.damaged_segments().is_empty());
    });
}

/// Three records of one segment, each in a group of its own, and synced or not; a bit of the second
/// is wrong.
async fn with_damage_in_the_newest_segment(is_synced: bool) -> Arc<LogDevice> {
    let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", vec![0; LEN]));
    let device = LogDevice::open(Arc::clone(&file), [1; 16]).await.unwrap();
    let log = device.start([2; 16], VOLUME, writer(1), 0).await.unwrap();
    for number in 0..3 {
        let ticket = log.push(Record::Drop { number }).unwrap();
        log.written(ticket).await.unwrap();
        if is_synced {
            log.sync().await.unwrap();
        }
    }
    drop((log, device));
    let mut bytes = read_exact(&*file, HostOffset::ZERO, LEN).await.unwrap().to_vec();
    bytes[3 * 4096 + 40] ^= 1;
    let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", bytes));
    LogDevice::open(file, [9; 16]).await.unwrap()
}

/// The story: a bit of a record in the newest segment was wrong, and what had been synced behind it
/// was gone without a word. What a power cut leaves looks alike, except for what was synced.
#[test]
fn gap_before_what_says_that_it_was_durable_is_damage() {
    simulated(async || {
        let device = with_damage_in_the_newest_segment(true).await;
        let error = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.err().unwrap();
        is_corrupt(&error, &["records 1 to 1", "segment at 4096", "by force"]);
        let log = device.go_on(VOLUME, (writer(1), writer(3)), 3).await.unwrap();
        assert_eq!(log.recovered(), 3..3, "the store has all of it");
    });
}

#[test]
fn gap_before_what_was_under_way_with_it_ends_the_log() {
    simulated(async || {
        let device = with_damage_in_the_newest_segment(false).await;
        let log = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.unwrap();
        assert_eq!(log.recovered(), 0..1);
    });
}

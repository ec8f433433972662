//! Bits that flip, and files that are cut: never a panic, never a record that was not pushed.

use crate::model::Made;
use mica_block::{ErrorKind, Store, read_exact};
use mica_rt::{Backend, Executor};
use mica_store::MemoryStore;
use mica_units::HostOffset;
use mica_volume::{Log, LogDevice, Record, Writer};
use std::sync::Arc;

pub(crate) const VOLUME: [u8; 16] = [1; 16];
pub(crate) const LEN: usize = 4096 + 8 * (16 << 10);
pub(crate) const RECORDS: u64 = 9;
/// The shortest log.
const SHORT: usize = 4096 + 3 * (16 << 10);

pub(crate) fn simulated(work: impl AsyncFnOnce()) {
    Executor::new(Backend::Sim { seed: 1 }).expect("the simulator").block_on(work());
}

pub(crate) fn writer(number: u64) -> Writer {
    Writer::new(number).unwrap()
}

/// Two processes' records in two segments, one group each.
pub(crate) async fn small_log() -> Vec<u8> {
    let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", vec![0; LEN]));
    let mut number = 0;
    for process in 0..2_u8 {
        let device = LogDevice::open(Arc::clone(&file), [process; 16]).await.unwrap();
        let log = match process {
            0 => device.start([2; 16], VOLUME, writer(1), 0).await.unwrap(),
            _ => device.go_on(VOLUME, (writer(1), writer(2)), 0).await.unwrap(),
        };
        let count = if process == 0 { 6 } else { RECORDS - 6 };
        for _ in 0..count {
            let made = Made::new(number);
            log.push(made.record()).unwrap();
            number += 1;
            if number == 3 {
                log.sync().await.unwrap();
            }
        }
        log.sync().await.unwrap();
    }
    read_exact(&*file, HostOffset::ZERO, LEN).await.unwrap().to_vec()
}

/// Pushes `count` blocks, each in a group of its own, which takes two of a segment's four blocks.
pub(crate) async fn fill(log: &Log, count: u64) {
    for block in 0..count {
        let ticket = log.push(Record::Data { block, bytes: &[5; 4096] }).expect("there is room");
        log.written(ticket).await.unwrap();
    }
    log.sync().await.unwrap();
}

/// How many records are found in `bytes`; each is one that was pushed. `None` if the log is
/// refused.
async fn records_in(bytes: Vec<u8>) -> Option<u64> {
    let file = Arc::new(MemoryStore::new_writable("log", bytes));
    let device = LogDevice::open(file, [9; 16]).await.ok()?;
    let log = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.ok()?;
    let mut next = 0;
    let read = log.read(0, |number, record| {
        assert_eq!((number, record), (next, Made::new(next).record()));
        next += 1;
        Ok(())
    });
    read.await.expect("what is found can be read");
    assert!(next <= RECORDS);
    Some(next)
}

#[test]
fn flipped_bit_anywhere_leaves_a_prefix_or_is_refused() {
    simulated(async || {
        let good = small_log().await;
        assert_eq!(records_in(good.clone()).await, Some(RECORDS));
        let mut seen = std::collections::BTreeMap::new();
        for at in 0..good.len() {
            // Of bytes that are zeros, a few are as good as all.
            let is_zeros = good[at.saturating_sub(64)..good.len().min(at + 64)] == [0; 128];
            if is_zeros && at % 509 > 0 {
                continue;
            }
            let mut bytes = good.clone();
            bytes[at] ^= 1 << (at % 8);
            *seen.entry(records_in(bytes).await).or_insert(0) += 1;
        }
        // What the second process found durable is there, or the log is refused. Its own last group
        // may as well never have been written whole.
        for outcome in [None, Some(6), Some(RECORDS)] {
            assert!(seen.contains_key(&outcome), "{outcome:?} of {seen:?}");
        }
        assert_eq!(seen.len(), 3, "{seen:?}");
    });
}

#[test]
fn file_that_is_cut_anywhere_leaves_a_prefix_or_is_refused() {
    simulated(async || {
        let good = small_log().await;
        let mut last = None;
        for len in (0..LEN).filter(|len| len % 61 == 0 || len % 4096 < 40) {
            // Within the sector of a header, that is damaged.
            if let Some(found) = records_in(good[..len].to_vec()).await {
                let found = Some(found);
                assert!(found >= last, "{found:?} of {len} bytes, {last:?} of fewer");
                last = found;
            }
        }
        assert_eq!(last, Some(RECORDS));
    });
}

#[test]
fn what_is_not_a_log_is_refused_and_left_as_it_is() {
    simulated(async || {
        let late = [vec![0; LEN - 1], vec![1]].concat();
        for bytes in [vec![1; LEN], late, vec![0; SHORT - 1], Vec::new()] {
            let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("disk", bytes.clone()));
            let error = LogDevice::open(Arc::clone(&file), [1; 16]).await.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains("disk"), "{error}");
            assert_eq!(file.len().unwrap(), bytes.len() as u64);
            let left = read_exact(&*file, HostOffset::ZERO, bytes.len()).await.unwrap();
            assert_eq!(*left, *bytes);
        }
    });
}

#[test]
fn log_is_made_once_and_only_of_nothing() {
    simulated(async || {
        let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", Vec::new()));
        let device = LogDevice::create(Arc::clone(&file), LEN as u64, [1; 16]).await.unwrap();
        assert_eq!(device.volumes(), []);
        assert_eq!(file.len().unwrap(), LEN as u64);
        let error = LogDevice::create(Arc::clone(&file), LEN as u64, [2; 16]).await.err().unwrap();
        assert!(error.to_string().contains("is a log already"), "{error}");
        let short: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", Vec::new()));
        let error = LogDevice::create(Arc::clone(&short), 4096, [2; 16]).await.err().unwrap();
        assert!(error.to_string().contains(&format!("at least {SHORT}")), "{error}");
        assert_eq!(short.len().unwrap(), 0, "it is as it was");
        // There is no space: it shows now.
        let full = Arc::new(MemoryStore::new_writable("log", Vec::new()).limited(8192));
        let error = LogDevice::create(full, LEN as u64, [2; 16]).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    });
}

#[test]
fn log_that_was_set_aside_is_shown_to_people_and_to_nobody_else() {
    simulated(async || {
        let file = Arc::new(MemoryStore::new_writable("log", small_log().await));
        let device = LogDevice::open(file, [9; 16]).await.unwrap();
        assert_eq!(device.found(VOLUME).unwrap().writers, [writer(1), writer(2)]);
        device.set_aside(VOLUME).await.unwrap();
        assert_eq!(device.found(VOLUME), None);
        let error = device.go_on(VOLUME, (writer(1), writer(3)), 0).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let aside = device.volumes().remove(0);
        assert!(aside.is_set_aside && aside.volume == VOLUME);
        let mut next = 0;
        let look = device.look(&aside, |number, record| {
            assert_eq!((number, record), (next, Made::new(next).record()));
            next += 1;
            Ok(())
        });
        look.await.unwrap();
        assert_eq!(next, RECORDS);
    });
}

#[test]
fn log_goes_on_where_the_state_is_and_is_refused_if_it_lacks_what_the_state_lacks() {
    simulated(async || {
        let open = async |from: u64| {
            let file = Arc::new(MemoryStore::new_writable("log", small_log().await));
            let device = LogDevice::open(file, [9; 16]).await.unwrap();
            let log = device.go_on(VOLUME, (writer(1), writer(3)), from).await;
            log.map(|log| (log.recovered(), log.next()))
        };
        assert_eq!(open(4).await.unwrap(), (4..RECORDS, RECORDS));
        // The state is ahead, as extents are put before records are durable, too.
        assert_eq!(open(100).await.unwrap(), (100..100, 100));
        let file = Arc::new(MemoryStore::new_writable("log", vec![0; LEN]));
        let device = LogDevice::open(file, [8; 16]).await.unwrap();
        drop(device.start([2; 16], VOLUME, writer(1), 50).await.unwrap());
        let error = device.go_on(VOLUME, (writer(1), writer(2)), 49).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        // That did not use it up.
        let log = device.go_on(VOLUME, (writer(1), writer(2)), 50).await.unwrap();
        let error = device.go_on(VOLUME, (writer(1), writer(2)), 50).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Denied, "it is in use");
        let error = device.start([2; 16], VOLUME, writer(3), 0).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Denied);
        drop(log);
    });
}

#[test]
fn log_names_no_more_writers_than_it_can() {
    simulated(async || {
        let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", small_log().await));
        for number in 3..=32 {
            let device = LogDevice::open(Arc::clone(&file), [3; 16]).await.unwrap();
            drop(device.go_on(VOLUME, (writer(1), writer(number)), 0).await.unwrap());
        }
        let device = LogDevice::open(file, [9; 16]).await.unwrap();
        let error = device.go_on(VOLUME, (writer(1), writer(33)), 0).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Limit);
        // One that is named goes on, has won, and forgets the others.
        let log = device.go_on(VOLUME, (writer(1), writer(32)), 0).await.unwrap();
        assert_eq!(log.recovered(), 0..RECORDS);
        log.only(writer(32));
        log.free(RECORDS);
        fill(&log, 6).await;
        drop(log);
        assert_eq!(device.found(VOLUME).unwrap().writers, [writer(32)]);
        drop(device.go_on(VOLUME, (writer(1), writer(33)), RECORDS).await.unwrap());
        assert_eq!(device.found(VOLUME).unwrap().writers, [writer(32), writer(33)]);
    });
}

//! Stores that misbehave, under the simulator's clock.

use crate::read;
use mica_block::{ErrorKind, Space, Store};
use mica_rt::{Backend, Buf, Executor, now};
use mica_store::MemoryStore;
use mica_store::faulty::{
    DelayOptions, DelayStore, ErrorOptions, ErrorStore, LogOptions, LogStore, Operation,
    Operations, When,
};
use mica_units::HostOffset;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new("memory", vec![5; 1 << 20]))
}

fn in_sim<F: Future<Output = ()>>(test: impl Fn() -> F) {
    Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(test());
}

fn errors(when: When) -> ErrorStore {
    let operations = Operations::READS;
    ErrorStore::new(memory(), ErrorOptions { operations, when, errno: libc::ENOSPC })
}

#[test]
fn delay_passes_before_the_read() {
    in_sim(|| async {
        let (operations, time) = (Operations::READS, Duration::from_secs(60));
        let store = DelayStore::new(memory(), DelayOptions { operations, time });
        let began = now();
        assert_eq!(read(&store, 0, 4).await.unwrap(), [5; 4]);
        assert!(now().saturating_since(began) >= Duration::from_secs(60));
    });
}

/// The story: a verb that syncs what it wrote asked its store for that outside of its executor, and
/// panicked where the store was slow.
#[test]
fn slow_store_may_be_asked_outside_of_an_executor() {
    let (operations, time) = (Operations::ALL, Duration::from_secs(60));
    let memory = Arc::new(MemoryStore::new_writable("memory", vec![5; 4]));
    let store = DelayStore::new(memory, DelayOptions { operations, time });
    let (synced, read) = (store.sync(), store.read_at(Buf::new(4), HostOffset::ZERO));
    let executor = Executor::new(Backend::Sim { seed: 1 }).unwrap();
    executor.block_on(async {
        synced.await.unwrap();
        let (read, buf) = read.await;
        read.unwrap();
        assert_eq!(buf[..], [5; 4]);
    });
}

#[test]
fn every_third_read_fails_with_the_requested_errno() {
    in_sim(|| async {
        let store = errors(When::Every(3));
        for number in 1..=9 {
            let result = read(&store, 0, 4).await;
            assert_eq!(result.is_err(), number % 3 == 0);
            if let Err(error) = result {
                assert_eq!(error.kind(), ErrorKind::NoSpace);
                assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
            }
        }
    });
}

#[test]
fn reads_that_touch_a_range_fail() {
    in_sim(|| async {
        let store = errors(When::Ranges(vec![100..200, 4096..8192]));
        for (offset, len, fails) in
            [(0, 100, false), (0, 101, true), (199, 1, true), (200, 100, false), (5000, 1, true)]
        {
            assert_eq!(read(&store, offset, len).await.is_err(), fails, "{len} at {offset}");
        }
    });
}

#[test]
fn share_of_reads_fails_and_follows_from_the_seed() {
    in_sim(|| async {
        let failures = async |share, seed| {
            let store = errors(When::Rate { share, seed });
            let mut failed = Vec::new();
            for number in 0..10_000 {
                if read(&store, 0, 1).await.is_err() {
                    failed.push(number);
                }
            }
            failed
        };
        assert_eq!(failures(0.0, 1).await.len(), 0);
        assert_eq!(failures(1.0, 1).await.len(), 10_000);
        let some = failures(0.01, 1).await;
        assert!((50..200).contains(&some.len()), "{} of 10000", some.len());
        assert_eq!(some, failures(0.01, 1).await);
        assert_ne!(some, failures(0.01, 2).await);
    });
}

#[test]
fn log_has_one_line_for_each_operation() {
    in_sim(|| async {
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let sunk = Arc::clone(&lines);
        let sink = Arc::new(move |line: &str| sunk.lock().push(line.to_owned()));
        let (operations, time) = (Operations::READS, Duration::from_millis(2));
        let slow = DelayStore::new(memory(), DelayOptions { operations, time });
        let store = LogStore::new(Arc::new(slow), LogOptions { sink });
        read(&store, 512, 10).await.unwrap();
        read(&store, 0, 10).await.unwrap();
        store.run_at(mica_units::HostOffset::ZERO, 7).unwrap();
        let lines = lines.lock();
        assert_eq!(lines[0], "0.000000 read memory offset=0x200 len=10 ok in 2000 us");
        assert_eq!(lines[1], "0.002000 read memory offset=0x0 len=10 ok in 2000 us");
        assert_eq!(lines[2], "- run memory offset=0x0 len=7 Data for 7");
        assert_eq!(lines.len(), 3);
    });
}

#[test]
fn operation_with_the_number_fails_and_does_nothing() {
    in_sim(|| async {
        let memory = Arc::new(MemoryStore::new_writable("memory", vec![5; 100]));
        let operations = Operations::from(Operation::Write).with(Operation::Sync);
        let options = ErrorOptions { operations, when: When::Nth(3), errno: libc::EIO };
        let store = ErrorStore::new(memory, options);
        let write = async |byte: u8| {
            let buf = mica_rt::Buf::from_slice(&[byte; 10]);
            store.write_at(buf, mica_units::HostOffset::ZERO).await.0
        };
        write(1).await.unwrap();
        store.sync().await.unwrap();
        assert_eq!(write(2).await.unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(read(&store, 0, 11).await.unwrap(), [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5]);
        write(3).await.unwrap();
        store.sync().await.unwrap();
        assert_eq!(read(&store, 0, 2).await.unwrap(), [3, 3]);
    });
}

#[test]
fn operations_fail_from_a_number_on() {
    in_sim(|| async {
        for (operation, change) in [
            (Operation::Punch, Space::Punch),
            (Operation::Zero, Space::Zero),
            (Operation::Allocate, Space::Allocate),
        ] {
            let memory = Arc::new(MemoryStore::new_writable("memory", vec![5; 100]));
            let operations = operation.into();
            let options = ErrorOptions { operations, when: When::From(2), errno: libc::EOPNOTSUPP };
            let store = ErrorStore::new(memory, options);
            let act = || store.space(change, mica_units::HostOffset::ZERO, 10);
            act().await.unwrap();
            for _ in 0..3 {
                let error = act().await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                assert!(error.to_string().contains("injected"), "{error}");
            }
            store.set_len(50).await.unwrap();
            store.sync().await.unwrap();
        }
    });
}

#[test]
fn delay_and_log_cover_every_operation() {
    in_sim(|| async {
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let sunk = Arc::clone(&lines);
        let sink = Arc::new(move |line: &str| sunk.lock().push(line.to_owned()));
        let memory = Arc::new(MemoryStore::new_writable("memory", vec![5; 100]));
        let (operations, time) = (Operations::ALL, Duration::from_millis(1));
        let slow = DelayStore::new(memory, DelayOptions { operations, time });
        let store = LogStore::new(Arc::new(slow), LogOptions { sink });
        let at = mica_units::HostOffset::ZERO;
        store.write_at(mica_rt::Buf::zeroed(10), at).await.0.unwrap();
        store.sync().await.unwrap();
        store.space(Space::Punch, at, 5).await.unwrap();
        store.set_len(7).await.unwrap();
        let expected = [
            "0.000000 write memory offset=0x0 len=10 ok in 1000 us",
            "0.001000 sync memory ok in 1000 us",
            "0.002000 punch memory offset=0x0 len=5 ok in 1000 us",
            "0.003000 set-len memory len=7 ok in 1000 us",
        ];
        assert_eq!(*lines.lock(), expected);
        assert_eq!(store.len().unwrap(), 7);
    });
}

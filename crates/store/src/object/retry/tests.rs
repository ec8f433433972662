//! Retries over a store that fails, in the simulator.

use super::*;
use crate::object::testing::conform;
use crate::object::{FaultyObjects, FaultyOptions, MemoryObjects, ObjectOperation, Throttle};
use mica_rt::{Backend, Executor, join_all, spawn, timeout};

const MS: Duration = Duration::from_millis(1);
const OPTIONS: RetryOptions = RetryOptions {
    pause_min: Duration::from_millis(10),
    pause_max: Duration::from_millis(500),
    seed: 9,
    tries_max: None,
};

fn name(text: &str) -> ObjectName {
    ObjectName::new(text).expect("a name")
}

/// Retries over faults over `memory`.
fn over(memory: &MemoryObjects, options: FaultyOptions) -> (RetryObjects, FaultyObjects) {
    let faulty = FaultyObjects::new(Arc::new(memory.clone()), options);
    (RetryObjects::new(Arc::new(faulty.clone()), OPTIONS), faulty)
}

/// Everything that goes wrong and comes to an end.
fn all_faults(seed: u64) -> FaultyOptions {
    FaultyOptions {
        seed,
        latency: 5 * MS,
        throttle: Some(Throttle { served: 20, refused: 7 }),
        refused: 0.1,
        slow: 0.1,
        late: 0.1,
        slow_by: 400 * MS,
        lost: 0.1,
        ..FaultyOptions::default()
    }
}

fn simulated<T>(seed: u64, future: impl Future<Output = T>) -> T {
    Executor::new(Backend::Sim { seed }).expect("the simulator").block_on(future)
}

#[test]
fn one_of_several_writers_wins_each_name_whatever_gets_lost() {
    const WRITERS: usize = 4;
    const NAMES: usize = 12;
    let (mut lost_wins, mut puts_of_all) = (0, 0);
    for seed in 0..60 {
        simulated(seed, async {
            let memory = MemoryObjects::new("memory");
            let content = |writer, number| format!("put {number} of writer {writer}, and no other");
            let writers = (0..WRITERS).map(|writer| {
                let faults = all_faults(seed * 100 + writer as u64);
                let (retry, faulty) = over(&memory, faults);
                spawn(async move {
                    let mut puts = Vec::new();
                    for number in 0..NAMES {
                        let content = Buf::from_slice(content(writer, number).as_bytes());
                        let (put, content) =
                            retry.put_if_absent(&name(&format!("n{number}")), content).await;
                        assert!(!content.is_empty(), "it comes back");
                        puts.push(put.expect("it never gives up"));
                    }
                    (puts, faulty.requests())
                })
            });
            let puts = join_all(writers).await;
            let check = |when: &str| {
                for number in 0..NAMES {
                    let won = |(writer, (puts, _)): (usize, &(Vec<Put>, u64))| {
                        (puts[number] == Put::Done).then_some(writer)
                    };
                    let winners: Vec<_> = puts.iter().enumerate().filter_map(won).collect();
                    assert_eq!(winners.len(), 1, "seed {seed}: n{number} {when}");
                    let stored = &memory.contents()[&name(&format!("n{number}"))];
                    assert_eq!(**stored, *content(winners[0], number).as_bytes(), "{when}");
                }
            };
            check("when all are answered");
            sleep(10_000 * MS).await;
            check("when late puts have arrived");
            puts_of_all += NAMES * WRITERS;
            lost_wins += puts.iter().map(|(_, requests)| requests).sum::<u64>();
        });
    }
    assert!(lost_wins > puts_of_all as u64, "some requests were repeated");
}

#[test]
fn store_with_faults_keeps_all_promises_behind_retries() {
    for seed in 0..3 {
        let memory = MemoryObjects::new("memory");
        // A late put may arrive after its object was deleted.
        let (retry, _) = over(&memory, FaultyOptions { late: 0.0, ..all_faults(seed) });
        conform(Backend::Sim { seed }, &(Arc::new(retry) as _));
    }
}

#[test]
fn put_whose_answer_is_lost_is_found_by_reading_and_not_put_again() {
    simulated(1, async {
        let memory = MemoryObjects::new("memory");
        let only = Some(ObjectOperation::Put);
        let lost = FaultyOptions { only, lost: 1.0, ..FaultyOptions::default() };
        let (retry, faulty) = over(&memory, lost);
        let (put, _) = retry.put_if_absent(&name("a"), Buf::from_slice(b"mine")).await;
        assert_eq!((put.expect("put"), faulty.requests()), (Put::Done, 1));
        // The name is another's: what we put is not there, however often that is.
        for other in [&b"your"[..], b"mine and more", b"min", b"", b"mine\0"] {
            let (put, _) = retry.put_if_absent(&name("a"), Buf::from_slice(other)).await;
            assert_eq!(put.expect("put"), Put::Exists, "{other:?}");
        }
    });
}

#[test]
fn put_that_arrives_between_the_look_and_the_next_attempt_is_its_own() {
    for seed in 0..200 {
        simulated(seed, async {
            let memory = MemoryObjects::new("memory");
            let late = FaultyOptions {
                seed,
                only: Some(ObjectOperation::Put),
                latency: 10 * MS,
                late: 0.5,
                slow_by: 20 * MS,
                ..FaultyOptions::default()
            };
            let (retry, _) = over(&memory, late);
            let (put, _) = retry.put_if_absent(&name("a"), Buf::from_slice(b"mine")).await;
            assert_eq!(put.expect("put"), Put::Done, "seed {seed}: nobody else puts");
        });
    }
}

#[test]
fn answer_that_is_no_failure_of_the_store_is_not_asked_for_again() {
    simulated(1, async {
        let memory = MemoryObjects::new("memory");
        let (retry, faulty) = over(&memory, FaultyOptions::default());
        let (read, _) = retry.open(&name("none")).read_end(Buf::new(1)).await;
        assert_eq!(read.unwrap_err().kind(), ErrorKind::NotFound);
        let (read, _) = retry.open(&name("none")).read_at(Buf::new(1), 0).await;
        assert_eq!(read.unwrap_err().kind(), ErrorKind::NotFound);
        retry.put_if_absent(&name("a"), Buf::new(0)).await.0.expect("put");
        let (put, _) = retry.put_if_absent(&name("a/b"), Buf::new(0)).await;
        assert_eq!(put.unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(faulty.requests(), 4);
    });
}

#[test]
fn request_is_repeated_for_as_long_as_the_caller_waits_with_bounded_pauses() {
    simulated(1, async {
        let memory = MemoryObjects::new("memory");
        let refused = FaultyOptions { refused: 1.0, ..FaultyOptions::default() };
        let (retry, faulty) = over(&memory, refused);
        let hour = Duration::from_secs(3600);
        let put = retry.put_if_absent(&name("a"), Buf::new(0));
        assert!(timeout(hour, put).await.is_err());
        // One in each quarter to half of a second, and the first few.
        let requests = faulty.requests();
        assert!((7_200..15_000).contains(&requests), "{requests} attempts in an hour");
        sleep(hour).await;
        assert_eq!(faulty.requests(), requests, "nobody waits any more");
    });
}

#[test]
fn request_of_a_verb_ends_after_its_tries() {
    simulated(1, async {
        let memory = MemoryObjects::new("memory");
        let faults = FaultyOptions { refused: 1.0, ..FaultyOptions::default() };
        let faulty = FaultyObjects::new(Arc::new(memory), faults);
        let options = RetryOptions { tries_max: Some(4), ..OPTIONS };
        let retry = RetryObjects::new(Arc::new(faulty), options);
        assert_eq!(retry.list(None, None).await.unwrap_err().kind(), ErrorKind::Io);
        let (put, content) = retry.put_if_absent(&name("a"), Buf::from_slice(b"bytes")).await;
        assert_eq!((put.unwrap_err().kind(), &*content), (ErrorKind::Io, &b"bytes"[..]));
    });
}

use super::*;
use crate::{Backend, Executor, join_all, timeout, yield_now};
use mica_units::next_random;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn simulated(seed: u64) -> Executor {
    Executor::new(Backend::Sim { seed }).expect("the simulator")
}

/// The claims that are granted, as a plain list.
#[derive(Default)]
struct Model {
    granted: RefCell<Vec<(u64, RangeInclusive<u64>, Mode)>>,
    next: Cell<u64>,
}

impl Model {
    /// Records a grant, which must not conflict with any other (I2).
    fn grant(&self, range: RangeInclusive<u64>, mode: Mode) -> u64 {
        let mut granted = self.granted.borrow_mut();
        for (_, other, other_mode) in &*granted {
            let overlaps = range.start() <= other.end() && other.start() <= range.end();
            let both_share = (mode, *other_mode) == (Mode::Shared, Mode::Shared);
            assert!(!overlaps || both_share, "{range:?} {mode:?} beside {other:?} {other_mode:?}");
        }
        self.next.set(self.next.get() + 1);
        granted.push((self.next.get(), range, mode));
        self.next.get()
    }

    fn end(&self, number: u64) {
        self.granted.borrow_mut().retain(|(other, ..)| *other != number);
    }
}

/// A range, mostly short, at times up to the last number there is.
fn random_range(random: &mut u64) -> RangeInclusive<u64> {
    let first = next_random(random) % 40;
    let len = match next_random(random) % 8 {
        0..=4 => 0,
        5 | 6 => next_random(random) % 20,
        _ => u64::MAX - first,
    };
    first..=first + len
}

/// Tasks claim at random, some of them give up waiting; all of them finish (I3, I4).
#[test]
fn claims_that_overlap_are_shared_whatever_the_order() {
    for seed in 0..200 {
        let (claims, model, done) = (Claims::default(), Model::default(), Cell::new(0));
        let task = async |index: u64| {
            let mut random = seed << 16 | index;
            for _ in 0..10 {
                let range = random_range(&mut random);
                let mode = match next_random(&mut random) % 2 {
                    0 => Mode::Shared,
                    _ => Mode::Exclusive,
                };
                let claim = claims.claim_range(range.clone(), mode);
                let claim = match next_random(&mut random) % 4 {
                    0 => {
                        timeout(Duration::from_nanos(next_random(&mut random) % 5000), claim).await
                    }
                    _ => Ok(claim.await),
                };
                let Ok(claim) = claim else { continue };
                let number = model.grant(range, mode);
                for _ in 0..next_random(&mut random) % 4 {
                    yield_now().await;
                }
                model.end(number);
                drop(claim);
            }
            done.set(done.get() + 1);
        };
        simulated(seed).block_on(join_all((0..20).map(task)));
        assert_eq!(done.get(), 20, "seed {seed}");
        assert!(claims.lock().entries.is_empty(), "seed {seed}");
    }
}

#[test]
fn claims_are_granted_in_the_order_of_the_requests() {
    simulated(1).block_on(async {
        let (claims, granted) = (Claims::default(), RefCell::new(Vec::new()));
        let held = claims.claim(7).await;
        let ask = async |name, range, mode| {
            let claim = claims.claim_range(range, mode).await;
            granted.borrow_mut().push(name);
            yield_now().await;
            drop(claim);
        };
        let release = async {
            yield_now().await;
            assert_eq!(*granted.borrow(), ["elsewhere"]);
            drop(held);
        };
        let asking: [std::pin::Pin<Box<dyn Future<Output = ()>>>; 5] = [
            Box::pin(ask("first", 0..=10, Mode::Exclusive)),
            Box::pin(ask("elsewhere", 11..=11, Mode::Exclusive)),
            Box::pin(ask("shared", 3..=3, Mode::Shared)),
            Box::pin(ask("last", 3..=3, Mode::Exclusive)),
            Box::pin(release),
        ];
        join_all(asking).await;
        assert_eq!(*granted.borrow(), ["elsewhere", "first", "shared", "last"]);
    });
}

#[test]
fn claim_that_is_given_up_while_it_waits_unblocks_the_next() {
    simulated(1).block_on(async {
        let claims = Claims::default();
        let _held = claims.claim_range(0..=4, Mode::Shared).await;
        let asked = claims.claim_range(4..=9, Mode::Exclusive);
        let give_up = async {
            assert!(timeout(Duration::from_millis(1), asked).await.is_err());
        };
        let behind = async {
            drop(claims.claim_range(4..=4, Mode::Shared).await);
        };
        let both: [std::pin::Pin<Box<dyn Future<Output = ()>>>; 2] =
            [Box::pin(give_up), Box::pin(behind)];
        join_all(both).await;
    });
}

#[test]
fn one_claims_and_the_others_are_woken_when_it_ends() {
    simulated(1).block_on(async {
        let (claims, loads) = (Claims::default(), Cell::new(0));
        let load = async || {
            if let Some(_claim) = claims.claim_or_wait(u64::MAX).await {
                yield_now().await;
                loads.set(loads.get() + 1);
            }
            assert_eq!(loads.get(), 1);
        };
        join_all((0..5).map(|_| load())).await;
        assert!(claims.try_claim(u64::MAX).is_some());
    });
}

#[test]
fn threads_lose_no_wake_up_and_no_update() {
    let claims = Claims::default();
    // Read and written back in two steps: an update is lost if two tasks do it at once.
    let sum = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (claims, sum) = (&claims, &sum);
            scope.spawn(move || {
                let executor = Executor::new(Backend::Pool).expect("a backend");
                executor.block_on(async {
                    for turn in 0..200 {
                        let mode = match (turn + thread) % 2 {
                            0 => Mode::Exclusive,
                            _ => Mode::Shared,
                        };
                        let _claim = claims.claim_range(thread..=7, mode).await;
                        let before = sum.load(Ordering::Relaxed);
                        yield_now().await;
                        if mode == Mode::Exclusive {
                            sum.store(before + 1, Ordering::Relaxed);
                        }
                    }
                });
            });
        }
    });
    assert_eq!(sum.load(Ordering::Relaxed), 400);
}

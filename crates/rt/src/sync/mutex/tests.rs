use super::super::testing::Woken;
use super::*;
use crate::{Backend, Executor, join_all, timeout, yield_now};
use mica_units::next_random;
use std::cell::{Cell, RefCell};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

fn is_free(mutex: &Mutex) -> bool {
    mutex.lock_queue().places.is_empty()
}

/// Tasks ask at random, and some of them give up waiting.
#[test]
fn one_task_at_a_time_has_it_in_the_order_of_the_requests() {
    for seed in 0..200 {
        let (mutex, done) = (Mutex::default(), Cell::new(0));
        let (has_it, last) = (Cell::new(false), Cell::new(None));
        let task = async |index: u64| {
            let mut random = seed << 16 | index;
            for _ in 0..10 {
                let lock = mutex.lock();
                let locked = match next_random(&mut random) % 3 {
                    0 => timeout(Duration::from_nanos(next_random(&mut random) % 5000), lock).await,
                    _ => Ok(lock.await),
                };
                let Ok(locked) = locked else { continue };
                assert!(!has_it.replace(true), "seed {seed}");
                assert!(last.replace(Some(locked.ticket)) < Some(locked.ticket), "seed {seed}");
                for _ in 0..next_random(&mut random) % 4 {
                    yield_now().await;
                }
                has_it.set(false);
                drop(locked);
            }
            done.set(done.get() + 1);
        };
        let executor = Executor::new(Backend::Sim { seed }).expect("the simulator");
        executor.block_on(join_all((0..20).map(task)));
        assert_eq!(done.get(), 20, "seed {seed}");
        assert!(is_free(&mutex), "seed {seed}");
    }
}

/// Tasks that wait in this order, and how often the last of them was woken.
fn waiting<'a>(mutex: &'a Mutex, count: usize) -> Vec<(Waiting<'a>, Arc<Woken>)> {
    let mut tasks: Vec<(Waiting<'a>, _)> =
        (0..count).map(|_| (Box::pin(mutex.lock()) as Waiting<'a>, Arc::default())).collect();
    for task in &mut tasks {
        assert!(poll(task).is_pending());
    }
    tasks
}

type Waiting<'a> = Pin<Box<dyn Future<Output = Locked<'a>> + 'a>>;

fn poll<'a>((task, woken): &mut (Waiting<'a>, Arc<Woken>)) -> Poll<Locked<'a>> {
    task.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(woken))))
}

#[test]
fn task_that_gives_up_leaves_the_others_where_they_stand() {
    let mutex = Mutex::default();
    let held = mutex.try_lock().expect("it is free");
    let mut tasks = waiting(&mutex, 3);
    drop(tasks.remove(1));
    for task in &mut tasks {
        assert!(poll(task).is_pending(), "it is held");
    }
    drop(held);
    let Poll::Ready(first) = poll(&mut tasks[0]) else { panic!("its turn") };
    assert!(poll(&mut tasks[1]).is_pending());
    drop(first);
    assert!(poll(&mut tasks[1]).is_ready());
    tasks.clear();
    assert!(is_free(&mutex));
}

#[test]
fn task_that_gives_up_when_its_turn_has_come_wakes_the_next() {
    let mutex = Mutex::default();
    let held = mutex.try_lock().expect("it is free");
    let mut tasks = waiting(&mutex, 2);
    drop(held);
    // It has not looked yet.
    drop(tasks.remove(0));
    assert_eq!(tasks[0].1.count(), 1);
    assert!(poll(&mut tasks[0]).is_ready());
}

#[test]
fn request_that_was_never_polled_is_no_request() {
    let mutex = Mutex::default();
    let never = mutex.lock();
    assert!(mutex.try_lock().is_some());
    drop(never);
    assert!(is_free(&mutex));
}

#[test]
fn nobody_overtakes_a_task_that_waits() {
    let mutex = Mutex::default();
    let held = mutex.try_lock().expect("it is free");
    let mut tasks = waiting(&mutex, 1);
    drop(held);
    assert!(mutex.try_lock().is_none());
    let mut later = pin!(mutex.lock());
    let mut context = Context::from_waker(Waker::noop());
    assert!(later.as_mut().poll(&mut context).is_pending());
    let Poll::Ready(locked) = poll(&mut tasks[0]) else { panic!("its turn") };
    drop(locked);
    assert!(later.as_mut().poll(&mut context).is_ready());
}

#[test]
fn one_does_the_work_and_the_others_are_woken_when_it_is_done() {
    let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
    executor.block_on(async {
        let (mutex, loads) = (Mutex::default(), RefCell::new(Vec::new()));
        let load = async |index: usize| {
            if let Some(_locked) = mutex.lock_or_wait().await {
                yield_now().await;
                loads.borrow_mut().push(index);
            }
            assert_eq!(loads.borrow().len(), 1);
        };
        join_all((0..5).map(load)).await;
        assert!(mutex.try_lock().is_some());
    });
}

#[test]
fn threads_lose_no_wake_up_and_no_update() {
    let mutex = Mutex::default();
    // Read and written back in two steps: an update is lost if two tasks do it at once.
    let sum = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (mutex, sum) = (&mutex, &sum);
            scope.spawn(move || {
                let executor = Executor::new(Backend::Pool).expect("a backend");
                executor.block_on(async {
                    for _ in 0..200 {
                        let _locked = mutex.lock().await;
                        let before = sum.load(Ordering::Relaxed);
                        yield_now().await;
                        sum.store(before + 1, Ordering::Relaxed);
                    }
                });
            });
        }
    });
    assert_eq!(sum.load(Ordering::Relaxed), 800);
}

//! Each backend runs tasks the same way: time, fairness, work and wake-ups from other threads.

use crate::common::{Group, file_of, on_each_backend, pattern, real_backends};
use mica_rt::{
    Access, Backend, Buf, Executor, catch_panic, now, read_at, sleep, spawn, timeout, yield_now,
};
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

#[test]
fn sleeps_end_in_the_order_of_their_times() {
    let backends = real_backends().into_iter().chain([mica_rt::Backend::Sim { seed: 1 }]);
    for backend in backends {
        Executor::new(backend).unwrap().block_on(async {
            let began = now();
            let order: Rc<RefCell<Vec<u64>>> = Rc::default();
            let group = Group::new();
            for millis in [30, 10, 20, 0] {
                let order = Rc::clone(&order);
                group.spawn(async move {
                    sleep(Duration::from_millis(millis)).await;
                    order.borrow_mut().push(millis);
                });
            }
            group.finish().await;
            assert_eq!(*order.borrow(), [0, 10, 20, 30]);
            assert!(now().saturating_since(began) >= Duration::from_millis(30));
        });
    }
}

#[test]
fn timeout_passes_on_what_is_in_time() {
    on_each_backend(|| async {
        assert_eq!(timeout(Duration::from_secs(5), async { 3 }).await, Ok(3));
        assert!(timeout(Duration::from_millis(2), sleep(Duration::from_secs(5))).await.is_err());
    });
}

/// A task that is always ready must not keep others from their completions and timers.
#[test]
fn busy_task_does_not_starve_others() {
    let content = pattern(4096);
    on_each_backend(|| async {
        for access in [Access::Buffered, Access::Direct] {
            let Some(file) = file_of(&content, access) else { continue };
            let done = Rc::new(Cell::new(0));
            let reader = Rc::clone(&done);
            spawn(async move {
                read_at(&file, Buf::new(4096), 0).await.0.unwrap();
                reader.set(reader.get() + 1);
            });
            let sleeper = Rc::clone(&done);
            spawn(async move {
                sleep(Duration::from_millis(1)).await;
                sleeper.set(sleeper.get() + 1);
            });
            let began = now();
            while done.get() < 2 {
                yield_now().await;
                let took = now().saturating_since(began);
                assert!(took < Duration::from_secs(60), "only {} of 2 finished", done.get());
            }
        }
    });
}

#[test]
fn threads_give_work_and_none_of_it_is_lost() {
    const THREADS: usize = 4;
    const TASKS: usize = 2000;
    for backend in real_backends() {
        let executor = Executor::new(backend).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        let givers: Vec<_> = (0..THREADS)
            .map(|_| {
                let (handle, done) = (executor.handle(), Arc::clone(&done));
                std::thread::spawn(move || {
                    for _ in 0..TASKS {
                        let done = Arc::clone(&done);
                        handle.spawn_with(move || async move {
                            yield_now().await;
                            done.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                })
            })
            .collect();
        executor.block_on(async {
            while done.load(Ordering::Relaxed) < THREADS * TASKS {
                sleep(Duration::from_millis(1)).await;
            }
        });
        givers.into_iter().for_each(|giver| giver.join().unwrap());
    }
}

/// A flag that another thread raises, with the waker to call.
#[derive(Default)]
struct Flag {
    raised: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Flag {
    async fn wait(&self) {
        poll_fn(|context| {
            *self.waker.lock() = Some(context.waker().clone());
            match self.raised.swap(false, Ordering::SeqCst) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }

    fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        if let Some(waker) = self.waker.lock().take() {
            waker.wake();
        }
    }
}

/// Two executors wake each other in turn; a lost wake-up hangs them both. Once with the
/// future of `block_on`, once with a task.
#[test]
fn wake_ups_across_threads_are_never_lost() {
    const ROUNDS: usize = 3000;
    async fn play(mine: &Flag, theirs: &Flag) {
        for _ in 0..ROUNDS {
            mine.wait().await;
            theirs.raise();
        }
    }
    for backend in real_backends() {
        for in_a_task in [false, true] {
            let flags = Arc::new((Flag::default(), Flag::default()));
            flags.0.raise();
            let other = Arc::clone(&flags);
            let thread = std::thread::spawn(move || {
                Executor::new(backend).unwrap().block_on(play(&other.1, &other.0));
            });
            Executor::new(backend).unwrap().block_on(async {
                if in_a_task {
                    let group = Group::new();
                    let flags = Arc::clone(&flags);
                    let done = Rc::new(Cell::new(false));
                    let told = Rc::clone(&done);
                    group.spawn(async move {
                        play(&flags.0, &flags.1).await;
                        told.set(true);
                    });
                    group.finish().await;
                    assert!(done.get());
                } else {
                    play(&flags.0, &flags.1).await;
                }
            });
            thread.join().unwrap();
        }
    }
}

/// A panic in a task affects what waits for it, and neither others nor the executor.
#[test]
fn panic_of_a_task_resumes_in_what_waits_for_it() {
    on_each_backend(|| async {
        let fails = || {
            spawn(async {
                sleep(Duration::from_millis(1)).await;
                panic!("this panic is part of the test");
            })
        };
        // Nobody waits for this one.
        drop(fails());
        let waited = catch_panic(async { fails().await }).await;
        assert!(waited.is_err_and(|panic| panic.is::<&str>()));
        assert_eq!(spawn(async { 3 }).await, 3);
    });
}

#[test]
fn panic_in_a_detached_task_ends_nothing_else() {
    on_each_backend(|| async {
        spawn(async { panic!("this panic is part of the test") });
        sleep(Duration::from_millis(1)).await;
    });
    for backend in real_backends() {
        let executor = Executor::new(backend).unwrap();
        let (handle, done) = (executor.handle(), Arc::new(AtomicBool::new(false)));
        let is_done = Arc::clone(&done);
        std::thread::spawn(move || {
            // In the closure that makes the future, and in the future.
            handle.spawn_with(|| -> std::future::Ready<()> {
                panic!("this panic is part of the test")
            });
            handle.spawn_with(|| async { panic!("this panic is part of the test") });
            handle.spawn_with(move || async move { done.store(true, Ordering::Release) });
        });
        executor.block_on(async {
            while !is_done.load(Ordering::Acquire) {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

#[test]
#[should_panic(expected = "this panic is part of the test")]
fn the_simulator_hides_no_panic() {
    let executor = Executor::new(Backend::Sim { seed: 1 }).unwrap();
    executor.block_on(async {
        spawn(async { panic!("this panic is part of the test") });
        sleep(Duration::from_millis(1)).await;
    });
}

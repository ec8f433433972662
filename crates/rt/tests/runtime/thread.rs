//! Calls on threads of the executor.

use crate::common::{file_of, on_each_backend};
use mica_rt::{Access, Backend, Executor, catch_panic, join_all, on_thread, sleep};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

#[test]
fn calls_run_on_other_threads_with_their_file_and_return_what_they_find() {
    on_each_backend(async || {
        let file = file_of(b"1234567", Access::Buffered).unwrap();
        let here = std::thread::current().id();
        let calls = (0..100).map(|number| {
            on_thread(&file, move |file| {
                let len = rustix::fs::fstat(file).unwrap().st_size;
                (number, len, std::thread::current().id())
            })
        });
        for (at, (number, len, thread)) in join_all(calls).await.into_iter().enumerate() {
            assert_eq!((at, number, len), (at, at, 7));
            assert_ne!(thread, here);
        }
    });
}

#[test]
fn executor_goes_on_while_a_call_waits() {
    on_each_backend(async || {
        let file = file_of(b"", Access::Buffered).unwrap();
        let (sender, receiver) = channel();
        let call = on_thread(&file, move |_| receiver.recv().unwrap());
        sleep(Duration::from_millis(1)).await;
        sender.send(5).unwrap();
        assert_eq!(call.await, 5);
    });
}

#[test]
fn panic_of_a_call_continues_in_whoever_waits_and_the_thread_lives() {
    on_each_backend(async || {
        let file = file_of(b"", Access::Buffered).unwrap();
        for _ in 0..50 {
            let call = on_thread(&file, |_| assert!(std::hint::black_box(false), "on purpose"));
            assert!(catch_panic(call).await.is_err());
        }
        assert_eq!(on_thread(&file, |_| 5).await, 5);
    });
}

#[test]
fn call_that_nobody_waits_for_runs_to_its_end() {
    on_each_backend(async || {
        let file = file_of(b"", Access::Buffered).unwrap();
        let has_run = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&has_run);
        drop(on_thread(&file, move |_| flag.store(true, Ordering::SeqCst)));
        while !has_run.load(Ordering::SeqCst) {
            sleep(Duration::from_millis(1)).await;
        }
    });
}

#[test]
#[should_panic(expected = "a call on a thread without an outcome")]
fn simulator_has_no_threads() {
    let executor = Executor::new(Backend::Sim { seed: 1 }).unwrap();
    let file = file_of(b"", Access::Buffered).unwrap();
    executor.block_on(async { on_thread(&file, |_| ()).await });
}

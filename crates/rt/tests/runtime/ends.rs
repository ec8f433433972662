//! Executors that end, and what they leave behind: tasks, operations, other executors.

use crate::common::{file_of, pattern, real_backends, socket_pair};
use mica_rt::{Access, Buf, Executor, read_at, sleep, spawn, timeout, yield_now};
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

/// Records when it is dropped.
struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn executor_that_ends_drops_its_tasks_and_later_work() {
    for backend in real_backends() {
        let dropped = Arc::new(AtomicUsize::new(0));
        let executor = Executor::new(backend).unwrap();
        let handle = executor.handle();
        let (stream, _peer) = socket_pair();
        let token = Dropped(Arc::clone(&dropped));
        executor.block_on(async {
            spawn(async move {
                let _token = token;
                let (_, _) = stream.recv(Buf::new(10)).await;
            });
            yield_now().await;
            yield_now().await;
        });
        assert_eq!(dropped.load(Ordering::SeqCst), 1, "block_on drops the tasks that are left");
        let token = Dropped(Arc::clone(&dropped));
        handle.spawn_with(move || async move { drop(token) });
        drop(executor);
        assert_eq!(dropped.load(Ordering::SeqCst), 2, "work that was never taken is dropped");
        let token = Dropped(Arc::clone(&dropped));
        handle.spawn_with(move || async move { drop(token) });
        assert_eq!(dropped.load(Ordering::SeqCst), 3, "work for an executor that ended is dropped");
    }
}

/// A future that outlives its executor must neither hang nor crash.
#[test]
fn operation_may_outlive_its_executor() {
    for backend in real_backends() {
        let executor = Executor::new(backend).unwrap();
        let (stream, _peer) = socket_pair();
        let file = file_of(&pattern(4096), Access::Buffered).unwrap();
        let (recv, read) = executor.block_on(async {
            let mut recv = Box::pin(async move { stream.recv(Buf::new(10)).await });
            poll_fn(|context| {
                assert!(recv.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            (recv, read_at(&file, Buf::new(4096), 0))
        });
        drop(executor);
        drop(recv);
        drop(read);
    }
}

#[test]
fn executor_runs_again_after_block_on() {
    for backend in real_backends() {
        let executor = Executor::new(backend).unwrap();
        for round in 0..100 {
            let result = executor.block_on(async {
                spawn(async { sleep(Duration::from_secs(100)).await });
                yield_now().await;
                round
            });
            assert_eq!(result, round);
        }
    }
}

/// An executor may end in a task of another one: both must be left in order.
#[test]
fn executor_may_end_inside_another() {
    for backend in real_backends() {
        let inner = Executor::new(backend).unwrap();
        let (stream, _peer) = socket_pair();
        inner.block_on(async {
            let recv = Box::pin(async move { stream.recv(Buf::new(10)).await });
            assert!(timeout(Duration::ZERO, recv).await.is_err());
        });
        Executor::new(backend).unwrap().block_on(async move {
            sleep(Duration::from_millis(1)).await;
            drop(inner);
            sleep(Duration::from_millis(1)).await;
        });
    }
}

#[test]
#[should_panic(expected = "an executor inside an executor")]
fn block_on_inside_an_executor_panics() {
    let outer = Executor::new(mica_rt::Backend::Pool).unwrap();
    outer.block_on(async {
        Executor::new(mica_rt::Backend::Pool).unwrap().block_on(async {});
    });
}

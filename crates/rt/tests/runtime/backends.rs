//! Each backend gives the same results: reads, sockets, time, wake-ups, ends.

use crate::common::{file_of, on_each_backend, pattern, real_backends};
use mica_rt::{
    Access, Buf, Executor, Socket, Stream, now, read_at, sleep, spawn, timeout, yield_now,
};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

fn socket_pair() -> (Stream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Stream::Socket(Arc::new(Socket::new(ours).unwrap())), theirs)
}

fn stream_pair() -> (Stream, Stream) {
    let (left, right) = socket_pair();
    (left, Stream::Socket(Arc::new(Socket::new(right).unwrap())))
}

/// Spawns tasks and waits for all of them.
struct Group(Rc<Cell<usize>>);

impl Group {
    fn new() -> Self {
        Self(Rc::default())
    }

    fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let count = Rc::clone(&self.0);
        count.set(count.get() + 1);
        spawn(async move {
            future.await;
            count.set(count.get() - 1);
        });
    }

    async fn finish(self) {
        while self.0.get() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

#[test]
fn reads_are_whole_and_short_only_at_the_end() {
    let content = pattern(100_000);
    on_each_backend(|| async {
        let file = file_of(&content, Access::Buffered).unwrap();
        for (offset, len, expected) in [
            (0, 100_000, 100_000),
            (1, 4095, 4095),
            (99_000, 4096, 1000),
            (99_999, 1, 1),
            (100_000, 1, 0),
            (1 << 40, 512, 0),
            (5, 0, 0),
        ] {
            let (count, buf) = read_at(&file, Buf::new(len), offset as u64).await;
            assert_eq!(count.unwrap(), expected, "{len} bytes at {offset}");
            let start = offset.min(content.len());
            assert_eq!(buf[..expected], content[start..start + expected]);
        }
    });
}

#[test]
fn direct_reads_come_to_an_end_that_is_not_aligned() {
    for len in [8192, 8192 + 512, 8192 + 1, 511, 4096 + 4095] {
        let content = pattern(len);
        let Some(file) = file_of(&content, Access::Direct) else { return };
        on_each_backend(|| async {
            let (count, buf) = read_at(&file, Buf::new(16384), 0).await;
            assert_eq!(count.unwrap(), len);
            assert_eq!(buf[..len], content);
            let (count, buf) = read_at(&file, Buf::new(8192), 4096).await;
            let expected = len.saturating_sub(4096);
            assert_eq!(count.unwrap(), expected);
            assert_eq!(buf[..expected], content[len - expected..]);
        });
    }
}

#[test]
fn error_of_the_system_comes_back_with_the_buffer() {
    on_each_backend(|| async {
        let directory = std::fs::File::open(std::env::temp_dir()).unwrap();
        let file = Arc::new(mica_rt::File::new(directory.into(), Access::Buffered));
        let (result, buf) = read_at(&file, Buf::new(4096), 0).await;
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EISDIR));
        assert_eq!(buf.len(), 4096);
    });
}

/// More at once than a submission queue holds, and than a completion queue holds.
#[test]
fn thousands_of_reads_at_once_all_come_back() {
    let content = pattern(1 << 20);
    on_each_backend(|| async {
        let file = file_of(&content, Access::Buffered).unwrap();
        let content = Rc::new(content.clone());
        let group = Group::new();
        for number in 0..6000_u64 {
            let (file, content) = (Arc::clone(&file), Rc::clone(&content));
            group.spawn(async move {
                let offset = number * 97;
                let (count, buf) = read_at(&file, Buf::new(64), offset).await;
                assert_eq!(count.unwrap(), 64);
                let start = usize::try_from(offset).unwrap();
                assert_eq!(*buf, content[start..start + 64]);
            });
        }
        group.finish().await;
    });
}

#[test]
fn direct_reads_at_once_all_come_back() {
    let content = pattern(1 << 20);
    let Some(file) = file_of(&content, Access::Direct) else { return };
    on_each_backend(|| async {
        let content = Rc::new(content.clone());
        let group = Group::new();
        for number in 0..512_u64 {
            let (file, content) = (Arc::clone(&file), Rc::clone(&content));
            group.spawn(async move {
                let offset = number * 4096 % (1 << 20);
                let (count, buf) = read_at(&file, Buf::new(4096), offset).await;
                assert_eq!(count.unwrap(), 4096);
                let start = usize::try_from(offset).unwrap();
                assert_eq!(*buf, content[start..start + 4096]);
            });
        }
        group.finish().await;
    });
}

async fn receive_all(stream: Stream, len: usize) -> Vec<u8> {
    let mut received = Vec::new();
    while received.len() < len {
        let (count, buf) = stream.recv(Buf::new(30_000)).await;
        let count = count.unwrap();
        assert!(count > 0, "the stream ended after {} bytes", received.len());
        received.extend(&buf[..count]);
    }
    received
}

/// More bytes than a socket buffers, in more buffers than one call takes, both ways at once.
async fn exchange(left: Stream, right: Stream) {
    let content = pattern(1_500_000);
    let bufs = |content: &[u8]| -> VecDeque<Buf> {
        let mut bufs: VecDeque<Buf> = content.chunks(700).map(Buf::from_slice).collect();
        bufs.insert(3, Buf::new(0));
        bufs
    };
    let group = Group::new();
    for (from, to) in [(left.clone(), right.clone()), (right, left)] {
        let sent = bufs(&content);
        group.spawn(async move { from.send(sent).await.unwrap() });
        let content = content.clone();
        group.spawn(async move {
            let received = receive_all(to, content.len()).await;
            assert!(received == content, "other bytes came out than went in");
        });
    }
    group.finish().await;
}

#[test]
fn streams_carry_both_ways_at_once() {
    on_each_backend(|| async {
        let (left, right) = stream_pair();
        exchange(left, right).await;
    });
}

#[test]
fn streams_in_memory_carry_both_ways_at_once() {
    on_each_backend(|| async {
        let (left, right) = Stream::memory_pair(4096);
        exchange(left, right).await;
    });
    let sim = Executor::new(mica_rt::Backend::Sim { seed: 5 }).unwrap();
    sim.block_on(async {
        let (left, right) = Stream::memory_pair(4096);
        exchange(left, right).await;
    });
}

#[test]
fn peer_that_closed_ends_recv_and_refuses_send() {
    on_each_backend(|| async {
        let (stream, peer) = socket_pair();
        drop(peer);
        let (count, _) = stream.recv(Buf::new(10)).await;
        assert_eq!(count.unwrap(), 0);
        let error = stream.send([Buf::from_slice(b"x")].into()).await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPIPE));
    });
}

#[test]
fn end_in_memory_that_was_dropped_ends_recv_and_refuses_send() {
    on_each_backend(|| async {
        let (stream, peer) = Stream::memory_pair(100);
        let clone = peer.clone();
        peer.send([Buf::from_slice(b"last")].into()).await.unwrap();
        drop(peer);
        drop(clone);
        let (count, buf) = stream.recv(Buf::new(10)).await;
        assert_eq!(&buf[..count.unwrap()], b"last");
        let (count, _) = stream.recv(Buf::new(10)).await;
        assert_eq!(count.unwrap(), 0);
        let error = stream.send([Buf::from_slice(b"x")].into()).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    });
}

#[test]
fn shutdown_ends_a_recv_that_waits() {
    on_each_backend(|| async {
        let (stream, _peer) = socket_pair();
        let other = stream.clone();
        let group = Group::new();
        group.spawn(async move {
            let (count, _) = stream.recv(Buf::new(10)).await;
            assert_eq!(count.unwrap(), 0);
        });
        sleep(Duration::from_millis(5)).await;
        other.shutdown();
        group.finish().await;
    });
}

#[test]
fn accept_waits_for_a_connection() {
    let folder = tempfile::tempdir().unwrap();
    let number = AtomicUsize::new(0);
    on_each_backend(|| async {
        let name = format!("socket{}", number.fetch_add(1, Ordering::Relaxed));
        let path = folder.path().join(name);
        let listener = Arc::new(Socket::new(UnixListener::bind(&path).unwrap()).unwrap());
        let client = std::thread::spawn(move || {
            let mut client = UnixStream::connect(path).unwrap();
            std::io::Write::write_all(&mut client, b"hello").unwrap();
        });
        for _ in 0..1 {
            let stream = Stream::Socket(Arc::new(listener.accept().await.unwrap()));
            assert_eq!(receive_all(stream, 5).await, b"hello");
        }
        client.join().unwrap();
        assert!(timeout(Duration::from_millis(5), listener.accept()).await.is_err());
    });
}

/// What arrives after a receive was given up belongs to the next one.
#[test]
fn recv_that_was_dropped_takes_nothing_that_comes_later() {
    on_each_backend(|| async {
        let (stream, mut peer) = socket_pair();
        for round in 0..50_u8 {
            let given_up = timeout(Duration::ZERO, stream.recv(Buf::new(10))).await;
            assert!(given_up.is_err());
            sleep(Duration::from_millis(1)).await;
            std::io::Write::write_all(&mut peer, &[round]).unwrap();
            let (count, buf) = stream.recv(Buf::new(10)).await;
            assert_eq!(&buf[..count.unwrap()], [round]);
        }
    });
}

#[test]
fn thousands_of_receives_can_be_given_up_at_once() {
    on_each_backend(|| async {
        let (stream, _peer) = socket_pair();
        for _ in 0..3 {
            let mut waiting: Vec<_> =
                (0..3000).map(|_| Box::pin(stream.recv(Buf::new(16)))).collect();
            poll_fn(|context| {
                for recv in &mut waiting {
                    assert!(recv.as_mut().poll(context).is_pending());
                }
                Poll::Ready(())
            })
            .await;
            sleep(Duration::from_millis(1)).await;
            drop(waiting);
            yield_now().await;
        }
        sleep(Duration::from_millis(5)).await;
    });
}

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
fn timeout_lets_what_is_in_time_through() {
    on_each_backend(|| async {
        assert_eq!(timeout(Duration::from_secs(5), async { 3 }).await, Ok(3));
        assert!(timeout(Duration::from_millis(2), sleep(Duration::from_secs(5))).await.is_err());
    });
}

/// A task that is always ready must not keep others from their completions and timers.
#[test]
fn busy_task_starves_nobody() {
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
                assert!(took < Duration::from_secs(10), "only {} of 2 came", done.get());
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
            *self.waker.lock().unwrap() = Some(context.waker().clone());
            match self.raised.swap(false, Ordering::SeqCst) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }

    fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        if let Some(waker) = self.waker.lock().unwrap().take() {
            waker.wake();
        }
    }
}

/// Two executors wake each other in turn; a wake-up that is lost hangs them both. Once with the
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

/// Says when it is dropped.
struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn executor_that_ends_drops_its_tasks_and_what_comes_later() {
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
fn block_on_inside_an_executor_is_told() {
    let outer = Executor::new(mica_rt::Backend::Pool).unwrap();
    outer.block_on(async {
        Executor::new(mica_rt::Backend::Pool).unwrap().block_on(async {});
    });
}

//! Each backend carries bytes the same way, over sockets and in memory: sends, receives, ends.

use crate::common::{Group, on_each_backend, pattern, socket_pair};
use mica_rt::{Buf, Executor, Socket, Stream, sleep, timeout, yield_now};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

fn stream_pair() -> (Stream, Stream) {
    let (left, right) = socket_pair();
    (left, Stream::Socket(Arc::new(Socket::new(right).unwrap())))
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
            assert!(received == content, "the bytes received differ from those sent");
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

/// What arrives after a receive was cancelled belongs to the next one.
#[test]
fn recv_that_was_dropped_takes_nothing_that_arrives_later() {
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
fn thousands_of_receives_can_be_cancelled_at_once() {
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

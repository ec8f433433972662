//! Certificates that are good and bad, and records over a stream.

use super::testing::{self, Pki};
use super::*;
use mica_block::ErrorKind;
use mica_rt::{Backend, Buf, Executor, Stream, join_all, spawn};
use rcgen::{ExtendedKeyUsagePurpose, KeyPair, date_time_ymd};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConnection, SupportedProtocolVersion};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;

const VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];

fn refused(pki: &Pki, clients: Clients) -> (ErrorKind, String) {
    let error = pki.load(clients).expect_err("refused");
    (error.kind(), error.in_one_line())
}

#[test]
fn what_is_missing_is_named_and_so_is_the_layout() {
    for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        let pki = Pki::new();
        std::fs::remove_file(pki.path().join(name)).expect("it was there");
        let (kind, text) = refused(&pki, Clients::Verified);
        assert_eq!(kind, ErrorKind::NotFound);
        assert!(text.contains(&format!("/{name},")), "{text}");
        assert!(text.contains("a directory for TLS holds"), "{text}");
    }
    let pki = Pki::new();
    std::fs::remove_file(pki.path().join("ca-cert.pem")).expect("it was there");
    pki.tls(Clients::Any);
}

#[test]
fn files_that_are_something_else_are_refused() {
    for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        for content in ["", "nonsense", "-----BEGIN CERTIFICATE-----\nxx\n-----END", "\0\0"] {
            let pki = Pki::new();
            pki.write(name, content);
            let (kind, text) = refused(&pki, Clients::Verified);
            assert_eq!(kind, ErrorKind::Invalid);
            assert!(text.contains(name) && !text.contains('\n'), "{text}");
        }
    }
    let pki = Pki::new();
    pki.write("ca-crl.pem", "nonsense");
    assert!(refused(&pki, Clients::Verified).1.contains("ca-crl.pem"));
    let pki = Pki::new();
    pki.write("server-key.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\n");
    assert!(refused(&pki, Clients::Any).1.contains("passphrase"));
    let pki = Pki::new();
    pki.write("server-cert.pem", &"-".repeat(5 << 20));
    assert!(refused(&pki, Clients::Any).1.contains("too large"));
    let pki = Pki::new();
    std::fs::remove_file(pki.path().join("server-key.pem")).expect("it was there");
    rustix::fs::mkfifoat(rustix::fs::CWD, pki.path().join("server-key.pem"), 0o600.into())
        .expect("a pipe");
    assert!(refused(&pki, Clients::Any).1.contains("is not a file"));
}

#[test]
fn key_of_another_certificate_is_refused() {
    let pki = Pki::new();
    pki.write("server-key.pem", &KeyPair::generate().expect("a key").serialize_pem());
    let (kind, text) = refused(&pki, Clients::Any);
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(text.contains("server-key.pem does not belong to"), "{text}");
}

#[test]
fn certificates_that_every_client_refuses_are_refused_here() {
    let pki = Pki::new();
    pki.certify_server(|parameters| parameters.not_after = date_time_ymd(2020, 1, 1));
    let (kind, text) = refused(&pki, Clients::Any);
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(text.contains("server-cert.pem expired") && text.contains("days ago"), "{text}");

    pki.certify_server(|parameters| parameters.not_before = date_time_ymd(4000, 1, 1));
    assert!(refused(&pki, Clients::Verified).1.contains("is the clock of this machine right?"));

    pki.certify_server(|parameters| {
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    });
    assert!(refused(&pki, Clients::Verified).1.contains("serverAuth"));
}

#[test]
fn certificate_of_another_ca_is_served() {
    // Its clients know that one.
    let (pki, other) = (Pki::new(), Pki::new());
    for name in ["server-cert.pem", "server-key.pem"] {
        std::fs::copy(other.path().join(name), pki.path().join(name)).expect("copied");
    }
    pki.tls(Clients::Verified);
    pki.tls(Clients::Any);
}

/// The two ends of a connection in memory, once for each version: a server's and a client's.
fn with_connections<F: Future<Output = ()>>(
    test: impl Fn(TlsStream<'static>, Client) -> F + Copy + 'static,
) {
    let pki = Pki::new();
    let tls = pki.tls(Clients::Any);
    for (seed, version) in VERSIONS.into_iter().enumerate() {
        let executor = Executor::new(Backend::Sim { seed: seed as u64 }).expect("the simulator");
        executor.block_on(async {
            let (near, far) = Stream::memory_pair(64 << 10);
            let mut connection = pki.connect(None, version);
            let far: &'static Stream = Box::leak(Box::new(far));
            let accepted = std::cell::Cell::new(None);
            let server = async { accepted.set(Some(TlsStream::accept(far, &tls).await)) };
            let client = async {
                testing::shake_hands(&mut connection, &near).await.expect("good certificates");
            };
            let both: [Pin<Box<dyn Future<Output = ()>>>; 2] = [Box::pin(server), Box::pin(client)];
            join_all(both).await;
            let server = accepted.take().expect("joined").expect("a connection");
            test(server, Client { connection, stream: near }).await;
        });
    }
}

struct Client {
    connection: Box<ClientConnection>,
    stream: Stream,
}

impl Client {
    async fn send(&mut self, bytes: &[u8]) {
        testing::send(&mut self.connection, &self.stream, bytes).await.expect("connected");
    }

    async fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while out.len() < len {
            let more = testing::receive(&mut self.connection, &self.stream).await;
            out.extend(more.expect("connected"));
        }
        assert_eq!(out.len(), len, "nothing beyond");
        out
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| at.to_le_bytes()[0] ^ (at / 251).to_le_bytes()[0]).collect()
}

#[test]
fn bytes_come_out_however_the_buffers_are_cut() {
    with_connections(async |server, mut client| {
        let expected = pattern(700_000);
        let sent = expected.clone();
        spawn(async move {
            for chunk in sent.chunks(99_991) {
                client.send(chunk).await;
            }
        });
        let mut out = Vec::<u8>::new();
        for len in [1, 2, 3, 4096, 65_536, 1 << 20].into_iter().cycle() {
            let (result, buf) = server.recv(Buf::new(len)).await;
            out.extend(&buf[..result.expect("connected")]);
            assert!(server.is_within_bounds());
            if out.len() == expected.len() {
                break;
            }
        }
        assert!(out == expected);
    });
}

#[test]
fn bytes_go_out_however_the_batches_are_cut() {
    with_connections(async |server, mut client| {
        let expected = pattern(1 << 20);
        let sizes = [28, 4096, 28, 16_384, 1, 16_383, 300_000, 32, 16_385, 32_768, 5, 7];
        let sent = expected.clone();
        spawn(async move {
            let mut rest = &sent[..];
            let mut turn = 0_usize;
            while !rest.is_empty() {
                let mut batch = VecDeque::new();
                for size in sizes.iter().cycle().skip(turn).take(1 + turn % 5) {
                    let (now, later) = rest.split_at(rest.len().min(*size));
                    batch.push_back(Buf::from_slice(now));
                    rest = later;
                }
                turn += 1;
                match turn % 2 {
                    0 => server.send(batch).await.expect("connected"),
                    _ => server.send_now(batch).await.expect("connected"),
                }
            }
            server.close().await;
        });
        assert!(client.receive(expected.len()).await == expected);
        let end = testing::receive(&mut client.connection, &client.stream).await;
        assert_eq!(end.expect_err("a goodbye").kind(), io::ErrorKind::ConnectionAborted);
    });
}

#[test]
fn goodbye_is_an_end_and_silence_is_not() {
    with_connections(async |server, mut client| {
        client.send(b"abc").await;
        client.connection.send_close_notify();
        testing::flush(&mut client.connection, &client.stream).await.expect("connected");
        let (result, buf) = server.recv(Buf::new(2)).await;
        assert_eq!((result.expect("plain bytes"), &*buf), (2, &b"ab"[..]));
        let (result, buf) = server.recv(buf).await;
        assert_eq!((result.expect("plain bytes"), buf[0]), (1, b'c'));
        let (result, buf) = server.recv(buf).await;
        assert_eq!(result.expect("a goodbye"), 0);
        assert_eq!(server.recv(buf).await.0.expect("still"), 0);
    });
    with_connections(async |server, mut client| {
        client.send(b"abc").await;
        drop(client);
        let (result, buf) = server.recv(Buf::new(10)).await;
        assert_eq!(result.expect("plain bytes"), 3);
        let (result, buf) = server.recv(buf).await;
        assert_eq!(result.expect_err("cut off").kind(), io::ErrorKind::UnexpectedEof);
        assert!(server.recv(buf).await.0.is_err());
        server.close().await;
    });
}

#[test]
fn record_that_was_changed_on_the_way_ends_the_connection() {
    with_connections(async |server, mut client| {
        let mut records = Vec::new();
        io::Write::write_all(&mut client.connection.writer(), b"abc").expect("room");
        client.connection.write_tls(&mut records).expect("room");
        *records.last_mut().expect("a record") ^= 1;
        client.stream.send(VecDeque::from([Buf::from_slice(&records)])).await.expect("connected");
        let (result, buf) = server.recv(Buf::new(10)).await;
        assert_eq!(result.expect_err("changed").kind(), io::ErrorKind::InvalidData);
        // Nothing is believed after it, whatever comes.
        client.send(b"abc").await;
        assert!(server.recv(buf).await.0.is_err());
        assert!(server.send(VecDeque::from([Buf::from_slice(b"x")])).await.is_err());
        server.close().await;
        let received = testing::receive(&mut client.connection, &client.stream).await;
        assert!(received.expect_err("an alert").to_string().contains("BadRecordMac"));
    });
}

#[test]
fn keys_are_changed_when_the_client_asks_and_not_without_end() {
    let test = async |server: TlsStream<'static>, mut client: Client| {
        if client.connection.protocol_version() != Some(rustls::ProtocolVersion::TLSv1_3) {
            return;
        }
        for _ in 0..100 {
            client.connection.refresh_traffic_keys().expect("TLS 1.3");
            client.send(b"abc").await;
            let (result, buf) = server.recv(Buf::new(3)).await;
            assert_eq!((result.expect("plain bytes"), &*buf), (3, &b"abc"[..]));
            server.send(VecDeque::from([buf])).await.expect("connected");
            assert_eq!(client.receive(3).await, b"abc");
        }
        for _ in 0..100 {
            client.connection.refresh_traffic_keys().expect("TLS 1.3");
            testing::flush(&mut client.connection, &client.stream).await.expect("connected");
        }
        let (result, _) = server.recv(Buf::new(3)).await;
        assert_eq!(result.expect_err("too many").kind(), io::ErrorKind::InvalidData);
    };
    with_connections(test);
}

#[test]
fn close_notify_does_not_wait() {
    with_connections(async |server, client| {
        // The client takes nothing: the send does not end, and nothing follows the part that went.
        let batch = VecDeque::from([Buf::zeroed(1 << 20)]);
        assert!(
            mica_rt::timeout(std::time::Duration::from_secs(1), server.send(batch)).await.is_err()
        );
        let before = mica_rt::now();
        server.close().await;
        assert!(mica_rt::now() < before.after(std::time::Duration::from_millis(1)));
        drop(client);
    });
}

//! Connections that start TLS, and what strangers try around it.

use super::*;
use crate::nbd::protocol::option;
use crate::nbd::testing::{
    Client, MIB, MemoryDisk, PatternDisk, World, info_data, meta_data, option_header, request,
    simulated, simulated_memory,
};
use crate::testing::random::Random;
use crate::tls::Clients;
use crate::tls::testing::{self, Identity, Pki};
use mica_rt::{Buf, spawn};
use rcgen::{ExtendedKeyUsagePurpose, date_time_ymd};
use rustls::SupportedProtocolVersion;
use rustls::version::{TLS12, TLS13};
use std::collections::VecDeque;
use std::time::Duration;

const VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];
const UNSUP: u32 = 1;
const INVALID: u32 = 3;
const TLS_REQD: u32 = 5;

fn disk() -> PatternDisk {
    PatternDisk::data(4 * MIB)
}

/// Servers whose clients authenticate, or not, for both versions of TLS.
fn secured(
    clients: Clients,
    policy: TlsPolicy,
    test: impl AsyncFn(&World, &Pki, &'static SupportedProtocolVersion),
) {
    let pki = Pki::new();
    for version in VERSIONS {
        simulated(disk, async |mut world| {
            world.secured = Some((pki.tls(clients), policy));
            test(&world, &pki, version).await;
        });
    }
}

async fn greeted(world: &World) -> Client {
    let mut client = world.connect();
    client.greet(3).await;
    client
}

/// A client behind TLS that has asked for nothing yet.
async fn established(
    world: &World,
    pki: &Pki,
    identity: Option<&Identity>,
    version: &'static SupportedProtocolVersion,
) -> Client {
    let mut client = greeted(world).await;
    client.start_tls(pki.connect(identity, version)).await.expect("good certificates");
    client
}

async fn go(client: &mut Client) {
    client.option(option::STRUCTURED_REPLY, &[]).await;
    client.expect_ack(option::STRUCTURED_REPLY).await;
    client.option(option::GO, &info_data(b"disk", &[])).await;
    assert_eq!(client.option_replies(option::GO).await.len(), 2);
}

async fn assert_reads(client: &mut Client, at: u64, len: u32) {
    client.request(0, 0, at, at, len).await;
    let chunks = client.chunks(at).await;
    let data = crate::nbd::testing::assemble(&chunks, at);
    assert!(data == disk().content(at..at + u64::from(len)), "{len} bytes at {at}");
}

#[test]
fn disk_is_read_behind_tls_and_the_end_is_announced() {
    secured(Clients::Verified, TlsPolicy::Required, async |world, pki, version| {
        let identity = pki.client(|_| {});
        let mut client = established(world, pki, Some(&identity), version).await;
        client.option(option::LIST, &[]).await;
        assert_eq!(client.option_replies(option::LIST).await.len(), 2);
        go(&mut client).await;
        for (at, len) in [(0, 1), (1, 511), (4096, 4096), (0, 4 << 20), (16_383, 100_002)] {
            assert_reads(&mut client, at, len).await;
        }
        for at in 0..100 {
            client.request(0, 0, at, at * 512, 4096).await;
        }
        for _ in 0..100 {
            assert!(client.reply().await.is_some());
        }
        client.request(0, 2, 0, 0, 0).await;
        assert!(client.is_closed().await);
        assert!(client.heard_goodbye());
        world.until_open(0).await;
        assert_eq!((world.counters().sessions, world.counters().protocol_errors), (1, 0));
    });
}

#[test]
fn disk_is_written_behind_tls() {
    let pki = Pki::new();
    for version in VERSIONS {
        let disk = || MemoryDisk::new(4 << 20);
        simulated_memory(disk, crate::nbd::Discard::Unmap, async |mut world, _| {
            world.secured = Some((pki.tls(Clients::Any), TlsPolicy::Required));
            let mut client = established(&world, &pki, None, version).await;
            go(&mut client).await;
            let mut random = Random(1);
            for (at, len) in [(0, 512), (512, 20_000), (65_536, 1 << 20), (3 << 20, 512 << 10)] {
                let payload: Vec<u8> = (0..len).map(|_| random.byte()).collect();
                client.request(0, 1, 1, at, len).await;
                client.send(&payload).await.expect("connected");
                assert_eq!(client.chunks(1).await.len(), 1);
                client.request(0, 0, 2, at, len).await;
                let chunks = client.chunks(2).await;
                assert!(crate::nbd::testing::assemble(&chunks, at) == payload);
            }
        });
    }
}

#[test]
fn nothing_is_disclosed_before_tls_where_it_is_required() {
    secured(Clients::Any, TlsPolicy::Required, async |world, pki, version| {
        let mut client = greeted(world).await;
        let name = info_data(b"disk", &[]);
        let meta = meta_data(b"disk", &[b"base:allocation"]);
        let long = vec![0; 100_000];
        let asked: [(u32, &[u8]); 8] = [
            (option::LIST, &[]),
            (option::INFO, &name),
            (option::GO, &name),
            (option::GO, b"malformed"),
            (option::STRUCTURED_REPLY, &[]),
            (option::SET_META_CONTEXT, &meta),
            (4711, &long),
            (option::LIST, &long),
        ];
        for (asked, data) in asked {
            client.option(asked, data).await;
            assert_eq!(client.expect_error(asked).await, TLS_REQD);
        }
        client.start_tls(pki.connect(None, version)).await.expect("good certificates");
        go(&mut client).await;
        assert_reads(&mut client, 0, 512).await;

        let mut client = greeted(world).await;
        client.option(option::EXPORT_NAME, b"disk").await;
        assert!(client.is_closed().await);
        let mut client = greeted(world).await;
        client.option(option::ABORT, &[]).await;
        client.expect_ack(option::ABORT).await;
        assert!(client.is_closed().await);
    });
}

#[test]
fn client_may_choose_where_tls_is_offered() {
    secured(Clients::Any, TlsPolicy::Offered, async |world, pki, version| {
        world.assert_serves().await;
        let mut client = established(world, pki, None, version).await;
        go(&mut client).await;
        assert_reads(&mut client, 0, 512).await;
    });
    // Where there is none, the option is as unknown as any other.
    simulated(disk, async |world| {
        let mut client = greeted(&world).await;
        client.option(option::STARTTLS, &[]).await;
        assert_eq!(client.expect_error(option::STARTTLS).await, UNSUP);
    });
}

#[test]
fn nothing_that_was_negotiated_before_tls_is_kept() {
    // CVE-2021-3716, CVE-2019-14842.
    secured(Clients::Any, TlsPolicy::Offered, async |world, pki, version| {
        let mut client = greeted(world).await;
        client.option(option::STRUCTURED_REPLY, &[]).await;
        client.expect_ack(option::STRUCTURED_REPLY).await;
        let meta = meta_data(b"disk", &[b"base:allocation"]);
        client.option(option::SET_META_CONTEXT, &meta).await;
        assert_eq!(client.option_replies(option::SET_META_CONTEXT).await.len(), 2);

        client.start_tls(pki.connect(None, version)).await.expect("good certificates");

        client.option(option::SET_META_CONTEXT, &meta).await;
        assert_eq!(client.expect_error(option::SET_META_CONTEXT).await, INVALID);
        go(&mut client).await;
        // The context is not selected: block status is refused.
        client.request(0, 7, 1, 0, 512).await;
        assert_eq!(client.chunk_error(1).await.0, crate::nbd::testing::EINVAL);
    });
}

#[test]
fn tls_is_started_once_and_without_data() {
    secured(Clients::Any, TlsPolicy::Required, async |world, pki, version| {
        let mut client = greeted(world).await;
        client.option(option::STARTTLS, b"x").await;
        assert_eq!(client.expect_error(option::STARTTLS).await, INVALID);
        client.start_tls(pki.connect(None, version)).await.expect("good certificates");
        for _ in 0..3 {
            client.option(option::STARTTLS, &[]).await;
            assert_eq!(client.expect_error(option::STARTTLS).await, INVALID);
        }
        go(&mut client).await;
        assert_reads(&mut client, 0, 512).await;
    });
}

#[test]
fn plain_text_behind_starttls_is_not_believed() {
    // CVE-2021-3716: what somebody on the path puts behind STARTTLS must not count as sent behind
    // TLS.
    secured(Clients::Any, TlsPolicy::Offered, async |world, pki, version| {
        let injected = [option_header(option::STRUCTURED_REPLY, 0), vec![0], vec![0x16, 3, 1, 0]];
        for behind in injected {
            let mut client = greeted(world).await;
            let bytes = [option_header(option::STARTTLS, 0), behind].concat();
            client.send(&bytes).await.expect("connected");
            assert!(client.is_closed().await);
        }
        assert_eq!(world.counters().protocol_errors, 3);

        // What comes after the answer is no TLS, and is answered by an alert and the end.
        let mut client = greeted(world).await;
        client.option(option::STARTTLS, &[]).await;
        client.expect_ack(option::STARTTLS).await;
        client.option(option::LIST, &[]).await;
        let alert = client.receive(7).await.expect("an alert");
        assert_eq!(alert[0], 0x15);
        assert!(client.is_closed().await);

        let mut client = established(world, pki, None, version).await;
        go(&mut client).await;
    });
}

/// Whether a client gets an answer to LIST.
async fn is_let_in(
    world: &World,
    pki: &Pki,
    identity: Option<&Identity>,
    version: &'static SupportedProtocolVersion,
) -> bool {
    let mut client = greeted(world).await;
    if client.start_tls(pki.connect(identity, version)).await.is_err() {
        return false;
    }
    // In TLS 1.3 a client hears only now what the server thinks of it.
    let sent = client.send(&option_header(option::LIST, 0)).await.is_ok();
    sent && client.receive(20).await.is_some()
}

#[test]
fn clients_are_verified_before_any_export_is_listed() {
    secured(Clients::Verified, TlsPolicy::Required, async |world, pki, version| {
        let good = pki.client(|_| {});
        let stranger = Pki::new().client(|_| {});
        let expired = pki.client(|made| made.not_after = date_time_ymd(2020, 1, 1));
        let early = pki.client(|made| made.not_before = date_time_ymd(4000, 1, 1));
        let server = pki.client(|made| {
            made.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        });
        assert!(is_let_in(world, pki, Some(&good), version).await);
        for bad in [None, Some(&stranger), Some(&expired), Some(&early), Some(&server)] {
            assert!(!is_let_in(world, pki, bad, version).await);
        }
        assert_eq!(world.counters().protocol_errors, 5);
        world.until_open(0).await;
    });
}

#[test]
fn revoked_clients_are_kept_out() {
    let pki = Pki::new();
    let good = pki.client(|made| made.serial_number = Some(1.into()));
    let revoked = pki.client(|_| {});
    pki.revoke(4000);
    let current = pki.tls(Clients::Verified);
    pki.revoke(2021);
    let outdated = pki.tls(Clients::Verified);
    simulated(disk, async |mut world| {
        world.secured = Some((current.clone(), TlsPolicy::Required));
        assert!(is_let_in(&world, &pki, Some(&good), &TLS13).await);
        assert!(!is_let_in(&world, &pki, Some(&revoked), &TLS13).await);
        // Later revocations are unknown.
        world.secured = Some((outdated.clone(), TlsPolicy::Required));
        assert!(!is_let_in(&world, &pki, Some(&good), &TLS13).await);
    });
}

#[test]
fn peer_that_stops_in_the_middle_is_cut_off() {
    secured(Clients::Verified, TlsPolicy::Required, async |world, pki, version| {
        let identity = pki.client(|_| {});
        // Nothing, a part of a record, and a whole one with no answer to what comes back.
        for part in [0, 1, 4, 100, usize::MAX] {
            let mut client = greeted(world).await;
            client.option(option::STARTTLS, &[]).await;
            client.expect_ack(option::STARTTLS).await;
            let mut hello = Vec::new();
            pki.connect(Some(&identity), version).write_tls(&mut hello).expect("room");
            hello.truncate(part);
            client.send(&hello).await.expect("connected");
            spawn(async move {
                sleep(Duration::from_secs(60)).await;
                drop(client);
            });
        }
        sleep(Duration::from_secs(29)).await;
        assert_eq!(world.open(), 5);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(world.open(), 0);
        assert_eq!(world.counters().deadlines_passed, 5);
    });
}

#[test]
fn crowd_of_clients_waits_its_turn() {
    secured(Clients::Any, TlsPolicy::Required, async |world, pki, version| {
        let before = now();
        let mut clients = Vec::new();
        for _ in 0..150 {
            clients.push(established(world, pki, None, version).await);
        }
        // Beyond the burst of 50, 200 a second.
        let took = now().saturating_since(before);
        assert!(took >= Duration::from_millis(450), "{took:?}");
        for client in &mut clients {
            go(client).await;
        }
    });
}

#[test]
fn client_that_takes_no_replies_is_ended_behind_tls_too() {
    secured(Clients::Any, TlsPolicy::Required, async |world, pki, version| {
        let mut client = established(world, pki, None, version).await;
        go(&mut client).await;
        for at in 0..8 {
            client.request(0, 0, at, 0, 1 << 20).await;
        }
        sleep(Duration::from_secs(59)).await;
        assert_eq!(world.open(), 1);
        sleep(Duration::from_secs(10)).await;
        assert_eq!(world.open(), 0);
        assert_eq!(world.counters().deadlines_passed, 1);
    });
}

#[test]
fn sessions_behind_tls_end_at_shutdown_with_a_goodbye() {
    secured(Clients::Any, TlsPolicy::Required, async |world, pki, version| {
        let mut idle = established(world, pki, None, version).await;
        go(&mut idle).await;
        world.stop();
        assert!(idle.is_closed().await);
        assert!(idle.heard_goodbye());
        world.until_open(0).await;
    });
}

/// A client that behaves, but for one thing that happens to the bytes it sends.
async fn damaged(
    world: &World,
    pki: &Pki,
    version: &'static SupportedProtocolVersion,
    random: &mut Random,
) {
    let mut client = greeted(world).await;
    client.option(option::STARTTLS, &[]).await;
    client.expect_ack(option::STARTTLS).await;
    let mut connection = pki.connect(None, version);
    let stream = client.stream.clone();
    let damaged_turn = random.below(6);
    for turn in 0..6 {
        if !connection.is_handshaking() {
            let name = info_data(b"disk", &[]);
            let len = u32::try_from(name.len()).expect("short");
            let read = request(0, 0, 1, 0, 4096);
            let bytes = [option_header(option::GO, len), name, read].concat();
            let _ = std::io::Write::write_all(&mut connection.writer(), &bytes);
        }
        let mut records = Vec::new();
        while connection.wants_write() {
            connection.write_tls(&mut records).expect("room");
        }
        if turn == damaged_turn && !records.is_empty() {
            let at = usize::try_from(random.below(records.len() as u64)).expect("small");
            match random.below(4) {
                0 => records[at] ^= 1 << random.below(8),
                1 => records.truncate(at),
                2 => records.insert(at, random.byte()),
                _ => records.extend((0..random.below(300)).map(|_| random.byte())),
            }
        }
        let sent = stream.send(VecDeque::from([Buf::from_slice(&records)])).await;
        let received = timeout(Duration::from_secs(1), testing::receive(&mut connection, &stream));
        if sent.is_err() || matches!(received.await, Ok(Err(_))) {
            break;
        }
    }
    stream.shutdown();
}

#[test]
fn server_survives_records_that_are_nearly_right() {
    let pki = Pki::new();
    for seed in 0..300 {
        let mut random = Random(seed);
        simulated(disk, async |mut world| {
            world.secured = Some((pki.tls(Clients::Any), TlsPolicy::Required));
            let mut random = Random(random.0 ^ 0x5eed);
            for version in VERSIONS {
                damaged(&world, &pki, version, &mut random).await;
            }
            world.until_open(0).await;
            assert_eq!(world.counters().panics, 0, "seed {seed}");
        });
        random.next();
    }
}

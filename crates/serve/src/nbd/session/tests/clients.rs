//! Clients that ask much, take little, are slow or leave; and the end of the server.

use super::*;
use crate::nbd::limits::{BUDGET_BYTES, RECEIVE_BYTES_MAX};
use crate::nbd::protocol::Request;
use crate::nbd::testing::{EPERM, Reply, assemble, request, simulated};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn many_requests_at_once_are_all_answered_once() {
    simulated(mixed, async |world| {
        let mut client = world.session().await;
        let mut random = 88_172_645_463_325_252_u64;
        for _ in 0..3 {
            let mut bytes = Vec::new();
            for cookie in 0..1000_u64 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let at = random % (3 * MIB);
                let len = 1 + u32::try_from(random >> 40 & 0x3fff).expect("small");
                let kind = if cookie % 10 == 0 { STATUS } else { READ };
                bytes.extend(request(0, kind, cookie << 32 | at, at, len));
            }
            let stream = client.stream.clone();
            mica_rt::spawn(async move {
                stream.send(VecDeque::from([Buf::from_slice(&bytes)])).await.expect("connected");
            });
            let mut open: BTreeMap<u64, Vec<(u16, Vec<u8>)>> = BTreeMap::new();
            let mut answered = BTreeSet::new();
            while answered.len() < 1000 {
                let Some(Reply::Chunk { is_last, kind, cookie, data }) = client.reply().await
                else {
                    panic!("a chunk is due");
                };
                open.entry(cookie).or_default().push((kind, data));
                if is_last {
                    let chunks = open.remove(&cookie).expect("just pushed");
                    if chunks[0].0 != 5 {
                        let at = cookie & 0xffff_ffff;
                        let data = assemble(&chunks, at);
                        assert!(data == mixed().content(at..at + data.len() as u64));
                    }
                    assert!(answered.insert(cookie), "answered twice");
                }
            }
            assert!(open.is_empty());
        }
    });
}

#[test]
fn client_that_never_takes_its_replies_is_not_read_from_and_then_dropped() {
    // nbdkit 1.32.5 died of this.
    simulated(slow, async |world| {
        let mut witness = world.session().await;
        let client = world.session().await;
        let sent = Rc::new(Cell::new(0));
        let (stream, count) = (client.stream.clone(), Rc::clone(&sent));
        mica_rt::spawn(async move {
            for cookie in 0..30_000 {
                let one = request(0, READ, cookie, (cookie % 512) * 65536, 65536);
                if stream.send(VecDeque::from([Buf::from_slice(&one)])).await.is_err() {
                    return;
                }
                count.set(count.get() + 1);
            }
        });
        mica_rt::sleep(Duration::from_secs(20)).await;
        // What was admitted, what is in the receive buffer and in the pipe, and no more.
        let admitted = BUDGET_BYTES / 65536;
        let waiting = (RECEIVE_BYTES_MAX + (64 << 10)) / Request::BYTES;
        assert!(sent.get() <= admitted + waiting, "{} requests were taken", sent.get());
        assert!(world.reading.most() <= BUDGET_BYTES as u64);
        witness.request(0, READ, 1, 0, 512).await;
        assert_eq!(witness.reply_data(1).await.len(), 512);
        assert_eq!(world.open(), 2);

        mica_rt::sleep(Duration::from_secs(50)).await;

        assert_eq!(world.open(), 1);
        assert_eq!(world.counters().deadlines_passed, 1);
        world.assert_serves().await;
    });
}

#[test]
fn client_that_sends_3000_reads_and_leaves_frees_everything() {
    simulated(slow, async |world| {
        let client = world.session().await;
        let stream = client.stream.clone();
        let bytes: Vec<u8> =
            (0..3000).flat_map(|cookie| request(0, READ, cookie, cookie * 4096, 4096)).collect();
        let sending =
            mica_rt::timeout(Duration::from_secs(1), stream.send([Buf::from_slice(&bytes)].into()));
        let _ = sending.await;
        drop(stream);
        drop(client);
        world.until_open(0).await;
        mica_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(world.reading.now(), 0);
        world.assert_serves().await;
    });
}

#[test]
fn client_that_leaves_while_its_reads_are_in_flight_is_gone_at_once() {
    simulated(slow, async |world| {
        let client = world.session().await;
        for cookie in 0..100 {
            client.request(0, READ, cookie, cookie * 65536, 65536).await;
        }
        mica_rt::sleep(Duration::from_millis(1)).await;
        assert!(world.reading.now() > 0);
        drop(client);
        mica_rt::yield_now().await;
        mica_rt::sleep(Duration::from_micros(1)).await;
        assert_eq!(world.open(), 0);
        assert_eq!(world.reading.now(), 0);
    });
}

#[test]
fn client_that_leaves_in_the_middle_of_a_request_is_gone_at_once() {
    simulated(small, async |world| {
        let client = world.session().await;
        client.send(&request(0, READ, 1, 0, 512)[..13]).await.expect("connected");
        drop(client);
        let client = world.session().await;
        client.request(0, command::WRITE, 1, 0, 1 << 20).await;
        client.send(&[0; 1000]).await.expect("connected");
        drop(client);
        world.until_open(0).await;
    });
}

#[test]
fn request_that_trickles_in_has_a_deadline_and_idleness_has_none() {
    simulated(small, async |world| {
        let mut idle = world.session().await;
        let mut client = world.session().await;
        // Fast enough: 28 bytes in 28 seconds.
        for byte in request(0, READ, 1, 0, 512) {
            client.send(&[byte]).await.expect("connected");
            mica_rt::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(client.reply_data(1).await.len(), 512);
        // Too slow.
        for byte in request(0, READ, 1, 0, 512) {
            if client.send(&[byte]).await.is_err() {
                break;
            }
            mica_rt::sleep(Duration::from_millis(1200)).await;
        }
        assert!(client.is_closed().await);
        assert_eq!(world.counters().deadlines_passed, 1);

        mica_rt::sleep(Duration::from_secs(1_000_000)).await;
        idle.request(0, READ, 1, 0, 512).await;
        assert_eq!(idle.reply_data(1).await.len(), 512);
    });
}

#[test]
fn payload_that_arrives_steadily_has_no_deadline_and_a_trickle_has() {
    simulated(small, async |world| {
        let mut client = world.session().await;
        client.request(0, command::WRITE, 1, 0, 1 << 20).await;
        for _ in 0..16 {
            client.send(&[0; 65536]).await.expect("connected");
            mica_rt::sleep(Duration::from_secs(20)).await;
        }
        assert_eq!(client.chunk_error(1).await, (EPERM, None));
        client.request(0, command::WRITE, 2, 0, 1 << 20).await;
        for _ in 0..100 {
            if client.send(&[0; 100]).await.is_err() {
                break;
            }
            mica_rt::sleep(Duration::from_secs(1)).await;
        }
        assert!(client.is_closed().await);
        assert_eq!(world.counters().deadlines_passed, 1);
    });
}

#[test]
fn goodbye_is_answered_by_closing_after_what_is_in_flight() {
    simulated(slow, async |world| {
        let mut client = world.session().await;
        let mut bytes = Vec::new();
        for cookie in 0..10 {
            bytes.extend(request(0, READ, cookie, 0, 4096));
        }
        bytes.extend(request(0, command::DISC, 0, 0, 0));
        bytes.extend(request(0, READ, 666, 0, 4096));
        client.send(&bytes).await.expect("connected");
        let mut cookies = Vec::new();
        while let Some(Reply::Chunk { cookie, .. }) = client.reply().await {
            cookies.push(cookie);
        }
        cookies.sort_unstable();
        assert_eq!(cookies, Vec::from_iter(0..10));
        world.until_open(0).await;
    });
}

#[test]
fn shutdown_answers_what_is_in_flight_and_closes_all_connections() {
    // CVE-2024-7409.
    simulated(slow, async |world| {
        let _idle = world.session().await;
        let partial = world.session().await;
        partial.send(&request(0, READ, 1, 0, 512)[..20]).await.expect("connected");
        let _half_open = world.connect();
        let mut client = world.session().await;
        for cookie in 0..10 {
            client.request(0, READ, cookie, 0, 4096).await;
        }
        mica_rt::sleep(Duration::from_millis(1)).await;

        world.stop();

        let mut answered = 0;
        while let Some(Reply::Chunk { .. }) = client.reply().await {
            answered += 1;
        }
        assert_eq!(answered, 10);
        world.until_open(0).await;
    });
}

#[test]
fn slots_run_out_and_come_back() {
    let disk =
        || PatternDisk { latency: Some(Duration::from_millis(10)), ..PatternDisk::data(MIB) };
    simulated(disk, async |world| {
        let mut client = world.session().await;
        let bytes: Vec<u8> = (0..1000).flat_map(|cookie| request(0, READ, cookie, 0, 16)).collect();
        client.send(&bytes).await.expect("connected");
        mica_rt::sleep(Duration::from_millis(1)).await;
        assert_eq!(world.reading.now(), 16 * SLOTS_MAX as u64);
        let mut cookies = Vec::new();
        for _ in 0..1000 {
            let Some(Reply::Chunk { cookie, .. }) = client.reply().await else { panic!("a chunk") };
            cookies.push(cookie);
        }
        cookies.sort_unstable();
        assert_eq!(cookies, Vec::from_iter(0..1000));
    });
}

#[test]
fn held_back_requests_do_not_starve_a_client_that_reads_slowly() {
    simulated(slow, async |world| {
        let mut client = world.session().await;
        let bytes: Vec<u8> =
            (0..64).flat_map(|cookie| request(0, READ, cookie, cookie * MIB, 1 << 20)).collect();
        client.send(&bytes).await.expect("connected");
        let mut done = 0;
        let mut received = 0;
        while done < 64 {
            let Some(Reply::Chunk { is_last, data, .. }) = client.reply().await else {
                panic!("a chunk is due");
            };
            received += data.len() - 8;
            done += usize::from(is_last);
            mica_rt::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(received, 64 << 20);
        assert!(world.reading.most() <= BUDGET_BYTES as u64);
    });
}

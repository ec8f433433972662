use super::*;
use crate::nbd::limits::{BUDGET_BYTES, PAYLOAD_BYTES_MAX, RECEIVE_BYTES_MAX, STATUS_EXTENTS_MAX};
use crate::nbd::protocol::{Request, command, command_flag};
use crate::nbd::testing::{
    PatternDisk, RUN_BYTES, Reply, assemble, decode_error, request, simulated, simulated_seeds,
    simulated_with_broken_disk,
};
use mica_block::ExtentKind;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const MIB: u64 = 1 << 20;

const READ: u16 = command::READ;
const STATUS: u16 = command::BLOCK_STATUS;

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const EOVERFLOW: u32 = 75;

fn small() -> PatternDisk {
    PatternDisk::data(MIB)
}

fn mixed() -> PatternDisk {
    PatternDisk::mixed(4 * MIB)
}

/// A disk whose reads take a while.
fn slow() -> PatternDisk {
    PatternDisk { latency: Some(Duration::from_millis(10)), ..PatternDisk::data(64 * MIB) }
}

/// Ranges that begin, end and cross at every kind of border.
const RANGES: [(u64, u32); 10] = [
    (0, 1),
    (0, 512),
    (1, 4095),
    (4095, 2),
    (4096, 4096),
    (8000, 5000),
    (12345, 54321),
    (0, 262_144),
    (262_143, 2),
    (1000, 1 << 20),
];

#[test]
fn structured_reads_give_the_disk_s_bytes() {
    simulated(mixed, async |world| {
        let disk = mixed();
        let mut client = world.session().await;
        for (at, len) in RANGES {
            client.request(0, READ, at, at, len).await;
            let data = assemble(&client.chunks(at).await, at);
            assert!(data == disk.content(at..at + u64::from(len)), "{len} bytes at {at}");
        }
    });
}

#[test]
fn simple_reads_give_the_disk_s_bytes() {
    simulated(mixed, async |world| {
        let disk = mixed();
        let mut client = world.simple_session().await;
        for (at, len) in RANGES {
            client.request(0, READ, at, at, len).await;
            assert_eq!(client.reply().await, Some(Reply::Simple { cookie: at, error: 0 }));
            let data = client.receive(len as usize).await.expect("data");
            assert!(data == disk.content(at..at + u64::from(len)), "{len} bytes at {at}");
        }
    });
}

#[test]
fn unfragmented_reads_come_in_one_chunk() {
    simulated(mixed, async |world| {
        let disk = mixed();
        let mut client = world.session().await;
        for (at, len) in RANGES {
            client.request(command_flag::DF, READ, at, at, len).await;
            let chunks = client.chunks(at).await;
            assert_eq!(chunks.len(), 1);
            assert!(assemble(&chunks, at) == disk.content(at..at + u64::from(len)));
        }
    });
}

#[test]
fn zeros_are_told_and_not_sent() {
    let holes = || PatternDisk { kind: |_| ExtentKind::Hole, ..PatternDisk::data(64 * MIB) };
    simulated(holes, async |world| {
        let mut client = world.session().await;
        client.request(0, READ, 1, 512, 4096).await;
        client.request(0, READ, 2, 0, 32 << 20).await;
        let first = client.chunks(1).await;
        assert_eq!(first, [(2, [&512_u64.to_be_bytes()[..], &[0, 0, 16, 0]].concat())]);
        let second = client.chunks(2).await;
        assert!(second.iter().all(|(kind, _)| *kind == 2));
        assert_eq!(assemble(&second, 0).len(), 32 << 20);
    });
}

#[test]
fn largest_reads_are_served_within_the_budget() {
    let disk =
        || PatternDisk { latency: Some(Duration::from_millis(1)), ..PatternDisk::data(96 * MIB) };
    simulated(disk, async |world| {
        let mut structured = world.session().await;
        let mut simple = world.simple_session().await;
        for cookie in 0..3 {
            structured.request(0, READ, cookie, cookie * 32 * MIB, PAYLOAD_BYTES_MAX).await;
            simple.request(0, READ, cookie, cookie * 32 * MIB, PAYLOAD_BYTES_MAX).await;
        }
        for cookie in 0..3 {
            let start = cookie * 32 * MIB;
            let chunks = structured.chunks(cookie).await;
            assert_eq!(assemble(&chunks, start).len(), 32 << 20);
            assert_eq!(simple.reply().await, Some(Reply::Simple { cookie, error: 0 }));
            let data = simple.receive(32 << 20).await.expect("data");
            assert!(data[..4096] == disk().content(start..start + 4096));
        }
        assert!(world.reading.most() <= 2 * BUDGET_BYTES as u64);
    });
}

#[test]
fn reads_that_are_too_long_are_refused_without_memory() {
    let disk = || PatternDisk::data(8 << 30);
    simulated(disk, async |world| {
        let mut client = world.session().await;
        for len in [PAYLOAD_BYTES_MAX + 1, 0x8000_0000, u32::MAX] {
            client.request(0, READ, 1, 0, len).await;
            assert_eq!(client.chunk_error(1).await, (EOVERFLOW, None));
        }
        client.request(command_flag::DF, READ, 2, 0, 16 << 20).await;
        assert_eq!(client.chunk_error(2).await, (EOVERFLOW, None));
        let mut client = world.simple_session().await;
        client.request(0, READ, 3, 0, u32::MAX).await;
        assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 3, error: EINVAL }));
        assert_eq!(world.reading.most(), 0);
    });
}

#[test]
fn requests_that_make_no_sense_are_refused_and_the_session_goes_on() {
    simulated(small, async |world| {
        let mut client = world.session().await;
        let cases = [
            // Beyond the end, also where offset and length wrap.
            (0, READ, MIB, 1),
            (0, READ, MIB - 1, 2),
            (0, READ, u64::MAX, 1),
            (0, READ, u64::MAX - 511, 512),
            (0, READ, 1 << 63, 512),
            (0, STATUS, MIB, 1),
            (0, STATUS, 0, 0),
            (0, STATUS, u64::MAX, u32::MAX),
            // Flags of other commands, and of none.
            (command_flag::REQ_ONE, READ, 0, 1),
            (command_flag::DF, STATUS, 0, 1),
            (1 << 15, READ, 0, 1),
            (2, command::FLUSH, 0, 0),
            // CACHE, RESIZE and commands that do not exist.
            (0, 5, 0, 512),
            (0, 8, 0, 512),
            (0, 0xffff, 0, 0),
        ];
        for (index, (flags, kind, at, len)) in cases.into_iter().enumerate() {
            let cookie = index as u64;
            client.request(flags, kind, cookie, at, len).await;
            assert_eq!(client.chunk_error(cookie).await, (EINVAL, None), "case {index}");
        }
        client.request(0, READ, 99, 0, 512).await;
        assert_eq!(client.reply_data(99).await.len(), 512);
        assert_eq!(world.counters().errors, cases.len() as u64);
    });
}

#[test]
fn fua_and_flush_and_empty_reads_succeed() {
    simulated(small, async |world| {
        let mut client = world.session().await;
        for (kind, cookie) in [(command::FLUSH, 1), (READ, 2)] {
            client.request(command_flag::FUA, kind, cookie, 0, 0).await;
            assert_eq!(client.chunks(cookie).await, [(0, Vec::new())]);
        }
        let mut client = world.simple_session().await;
        for (kind, cookie) in [(command::FLUSH, 1), (READ, 2)] {
            client.request(command_flag::FUA, kind, cookie, 0, 0).await;
            assert_eq!(client.reply().await, Some(Reply::Simple { cookie, error: 0 }));
        }
    });
}

#[test]
fn writes_are_refused_and_their_payload_is_skipped() {
    simulated(small, async |world| {
        let mut client = world.session().await;
        for len in [0, 1, 27, 28, 4096, 3 << 20] {
            client.request(0, command::WRITE, 7, 0, len).await;
            // The payload looks like requests: none of it may be taken for one.
            let bytes: Vec<u8> =
                request(0, READ, 666, 0, 1).into_iter().cycle().take(len as usize).collect();
            client.send(&bytes).await.expect("connected");
            assert_eq!(client.chunk_error(7).await, (EPERM, None));
        }
        for kind in [command::TRIM, command::WRITE_ZEROES] {
            client.request(0, kind, 8, 0, u32::MAX).await;
            assert_eq!(client.chunk_error(8).await, (EPERM, None));
        }
        world.assert_serves().await;
    });
}

#[test]
fn write_of_4_gib_ends_the_connection() {
    simulated(small, async |world| {
        let mut client = world.session().await;
        client.request(0, command::WRITE, 7, 0, u32::MAX).await;
        assert!(client.is_closed().await);
        assert_eq!(world.counters().protocol_errors, 1);
        world.assert_serves().await;
    });
}

#[test]
fn rubbish_ends_only_the_connection_that_sent_it() {
    simulated(small, async |world| {
        let mut witness = world.session().await;
        for rubbish in [&[0; 28][..], b"GET / HTTP/1.1\r\nHost: disk\r\n\r\n", &[0xff; 100]] {
            let mut client = world.session().await;
            client.send(rubbish).await.expect("connected");
            assert!(client.is_closed().await);
        }
        // An option where a request is due, and a request with extended headers.
        for magic in [*b"IHAV", [0x21, 0xe4, 0x1c, 0x71]] {
            let mut client = world.session().await;
            let mut bytes = request(0, READ, 1, 0, 512);
            bytes[..4].copy_from_slice(&magic);
            client.send(&bytes).await.expect("connected");
            assert!(client.is_closed().await);
        }
        assert_eq!(world.counters().protocol_errors, 5);
        witness.request(0, READ, 1, 0, 512).await;
        assert_eq!(witness.reply_data(1).await.len(), 512);
    });
}

#[test]
fn status_covers_what_was_asked_and_joins_neighbours() {
    simulated(mixed, async |world| {
        let disk = mixed();
        let mut client = world.session().await;
        for (at, len) in RANGES {
            client.request(0, STATUS, at, at, len).await;
            let extents = client.status(at).await;
            assert_eq!(extents.iter().map(|(len, _)| u64::from(*len)).sum::<u64>(), len.into());
            assert!(extents.windows(2).all(|pair| pair[0].1 != pair[1].1));
            let mut offset = at;
            for (len, flags) in extents {
                let is_zero = |at: u64| (disk.kind)(at / RUN_BYTES).reads_as_zero();
                assert_eq!(flags & 2 != 0, is_zero(offset));
                offset += u64::from(len);
                assert_eq!(flags & 2 != 0, is_zero(offset - 1));
            }
        }
    });
}

#[test]
fn status_of_one_extent_is_one_extent() {
    simulated(mixed, async |world| {
        let mut client = world.session().await;
        client.request(command_flag::REQ_ONE, STATUS, 1, 100, 1 << 20).await;
        let extents = client.status(1).await;
        assert_eq!(extents, [(2 * 4096 - 100, 0)]);
        client.request(command_flag::REQ_ONE, STATUS, 2, 100, 50).await;
        assert_eq!(client.status(2).await, [(50, 0)]);
    });
}

#[test]
fn status_of_nearly_4_gib_is_clamped() {
    // CVE-2025-47711, CVE-2025-47712.
    let huge = || PatternDisk { kind: |_| ExtentKind::Hole, ..PatternDisk::data(8 << 30) };
    simulated_seeds(0..1, huge, async |world| {
        let mut client = world.session().await;
        for len in [u32::MAX, u32::MAX - 1, 0xffff_fe00, 0x8000_0000] {
            for flags in [0, command_flag::REQ_ONE] {
                client.request(flags, STATUS, 1, 0, len).await;
                assert_eq!(client.status(1).await, [(len, 3)]);
                client.request(flags, STATUS, 2, 4 << 30, len).await;
                assert_eq!(client.status(2).await, [(len, 3)]);
            }
        }
    });
}

#[test]
fn status_of_a_fragmented_disk_is_bounded_and_makes_progress() {
    let striped = || PatternDisk {
        kind: |run| if run % 2 == 0 { ExtentKind::Data } else { ExtentKind::Zero },
        ..PatternDisk::data(256 * MIB)
    };
    simulated(striped, async |world| {
        let mut client = world.session().await;
        let mut at = 0;
        while at < 256 * MIB {
            let len = u32::try_from(256 * MIB - at).expect("fits");
            client.request(0, STATUS, 1, at, len).await;
            let extents = client.status(1).await;
            assert!(extents.len() <= STATUS_EXTENTS_MAX);
            at += extents.iter().map(|(len, _)| u64::from(*len)).sum::<u64>();
        }
        assert_eq!(at, 256 * MIB);
    });
}

#[test]
fn status_without_a_context_is_refused() {
    simulated(small, async |world| {
        let mut client = world.simple_session().await;
        client.request(0, STATUS, 1, 0, 512).await;
        assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 1, error: EINVAL }));
    });
}

#[test]
fn failed_read_is_told_with_its_offset_and_the_session_goes_on() {
    for latency in [None, Some(Duration::from_millis(1))] {
        let bad =
            move || PatternDisk { bad: 5 * 4096..6 * 4096, latency, ..PatternDisk::data(4 * MIB) };
        simulated(bad, async |world| {
            let mut client = world.session().await;
            client.request(0, READ, 1, 5 * 4096, 4096).await;
            assert_eq!(client.chunk_error(1).await, (EIO, Some(5 * 4096)));
            client.request(0, READ, 2, 0, 4096).await;
            assert_eq!(client.reply_data(2).await.len(), 4096);
            let mut client = world.simple_session().await;
            client.request(0, READ, 3, 4096, 1 << 20).await;
            assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 3, error: EIO }));
            client.request(0, READ, 4, 0, 16).await;
            assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 4, error: 0 }));
        });
    }
}

#[test]
fn failure_after_a_part_of_the_data_ends_the_reply_with_an_error() {
    let bad = || PatternDisk { bad: MIB..MIB + 1, ..slow() };
    simulated(bad, async |world| {
        let mut client = world.session().await;
        client.request(0, READ, 1, 0, 2 << 20).await;
        let mut chunks = client.chunks(1).await;
        let error = chunks.pop().expect("an error");
        let (code, offset) = decode_error(&error);
        assert_eq!((code, offset), (EIO, Some(MIB)));
        let data = assemble(&chunks, 0);
        assert!(data == bad().content(0..MIB));
        client.request(command_flag::DF, READ, 2, 0, 2 << 20).await;
        assert_eq!(client.chunk_error(2).await, (EIO, Some(MIB)));
    });
}

#[test]
fn failure_after_a_simple_header_ends_the_connection() {
    let bad = || PatternDisk { bad: 20 * MIB..20 * MIB + 1, ..PatternDisk::data(64 * MIB) };
    simulated(bad, async |world| {
        let mut client = world.simple_session().await;
        client.request(0, READ, 1, 0, 32 << 20).await;
        assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 1, error: 0 }));
        assert!(client.receive(32 << 20).await.is_none());
        world.assert_serves().await;
    });
}

#[test]
fn disk_that_cannot_plan_fails_requests_only() {
    simulated_with_broken_disk(async |world| {
        let mut client = world.session().await;
        for (cookie, len) in [(1, 512), (2, 1 << 20)] {
            client.request(0, READ, cookie, 0, len).await;
            assert_eq!(client.chunk_error(cookie).await, (EIO, Some(0)));
            client.request(0, STATUS, cookie, 0, len).await;
            assert_eq!(client.chunk_error(cookie).await, (EIO, Some(0)));
        }
    });
}

#[test]
fn panic_ends_only_its_own_connection() {
    let poisoned = || PatternDisk { poisoned: 0..4096, ..small() };
    simulated(poisoned, async |world| {
        let mut witness = world.session().await;
        let mut client = world.session().await;
        client.request(0, READ, 1, 0, 512).await;
        assert!(client.is_closed().await);
        assert_eq!(world.counters().panics, 1);
        witness.request(0, READ, 1, 8192, 512).await;
        assert_eq!(assemble(&witness.chunks(1).await, 8192).len(), 512);
    });
}

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
fn request_that_comes_a_byte_a_second_has_a_deadline_and_idleness_has_none() {
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
fn payload_that_comes_steadily_has_no_deadline_and_a_trickle_has() {
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
fn shutdown_answers_what_is_in_flight_and_closes_everybody() {
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

use super::*;
use crate::discard::Discard;
use crate::nbd::limits::BUDGET_BYTES;
use crate::nbd::protocol::{command, command_flag};
use crate::nbd::testing::{
    Client, EINVAL, EIO, ENOSPC, ENOTSUP, EPERM, Event, MIB, MemoryDisk, Reply, World, info_data,
    request, simulated_memory,
};
use crate::sectors::PIECE_BYTES;
use mica_rt::sleep;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

const READ: u16 = command::READ;
const WRITE: u16 = command::WRITE;
const TRIM: u16 = command::TRIM;
const ZEROES: u16 = command::WRITE_ZEROES;
const FLUSH: u16 = command::FLUSH;

fn small() -> MemoryDisk {
    MemoryDisk::new(8 * MIB)
}

/// A disk whose writes and flushes take a while.
fn slow() -> MemoryDisk {
    MemoryDisk { latency: Some(Duration::from_millis(10)), ..small() }
}

fn simulated(disk: impl Fn() -> MemoryDisk, test: impl AsyncFn(World, Arc<MemoryDisk>)) {
    simulated_memory(disk, Discard::Unmap, test);
}

/// Bytes that show their place and the request that wrote them.
fn payload(cookie: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64 * 7 + at as u64 / 251 + cookie * 31).to_le_bytes()[0]).collect()
}

/// Sends a write whose bytes are [`payload`].
async fn write(client: &Client, flags: u16, cookie: u64, at: u64, len: usize) {
    let count = u32::try_from(len).expect("short");
    let bytes = [request(flags, WRITE, cookie, at, count), payload(cookie, len)].concat();
    client.send(&bytes).await.expect("connected");
}

/// The error of the next reply, which must be for `cookie`; 0 for success.
async fn answer(client: &mut Client, cookie: u64) -> u32 {
    match client.reply().await.expect("a reply") {
        Reply::Simple { cookie: of, error } if of == cookie => error,
        other => panic!("{other:?} is no reply to {cookie}"),
    }
}

#[test]
fn what_is_written_is_there_whatever_its_length() {
    for disk in [small as fn() -> MemoryDisk, slow] {
        simulated(disk, async |world, disk| {
            let mut client = world.simple_session().await;
            let lens = [512, 4096, 3584, 16_384, 65_536, 66_048, 1 << 20, 4096, 6 << 20, 512];
            for (cookie, len) in (1..).zip(lens) {
                let at = 512 * cookie;
                write(&client, 0, cookie, at, len).await;
                assert_eq!(answer(&mut client, cookie).await, 0);
                let start = usize::try_from(at).expect("small");
                assert!(disk.bytes(start..start + len) == payload(cookie, len), "{len} bytes");
                client.request(0, READ, 0, at, 512).await;
                assert_eq!(answer(&mut client, 0).await, 0);
                assert_eq!(client.receive(512).await.expect("data"), payload(cookie, 512));
            }
            assert_eq!(world.counters().writes, 10);
            assert!(disk.is_quiet());
        });
    }
}

#[test]
fn writes_are_in_flight_side_by_side_and_within_the_budget() {
    simulated(slow, async |world, disk| {
        let mut client = world.session().await;
        let lens = [512, 4096, 100 << 10, 512 << 10];
        let mut cookies = BTreeSet::new();
        let sender = client.stream.clone();
        mica_rt::spawn(async move {
            for cookie in 0..100_u64 {
                let len = lens[usize::try_from(cookie).expect("small") % 4];
                let count = u32::try_from(len).expect("small");
                let head = request(0, WRITE, cookie, cookie % 16 * (512 << 10), count);
                let bytes = mica_rt::Buf::from_slice(&[head, payload(cookie, len)].concat());
                sender.send([bytes].into()).await.expect("connected");
            }
        });
        for _ in 0..100 {
            match client.reply().await.expect("a reply") {
                Reply::Chunk { is_last: true, kind: 0, cookie, .. } => {
                    assert!(cookies.insert(cookie), "{cookie} is answered twice");
                }
                other => panic!("{other:?} is no success"),
            }
        }
        assert_eq!(cookies.len(), 100);
        assert!(disk.writing.most() <= BUDGET_BYTES as u64, "beyond the budget");
        assert!(disk.writing.most() > MIB, "one after the other");
    });
}

#[test]
fn payload_beyond_the_budget_is_written_as_it_arrives() {
    let disk = || MemoryDisk { latency: slow().latency, ..MemoryDisk::new(64 * MIB) };
    simulated(disk, async |world, disk| {
        let mut client = world.simple_session().await;
        let sender = client.stream.clone();
        mica_rt::spawn(async move {
            for cookie in 0..3 {
                let head = request(0, WRITE, cookie, cookie * 16 * MIB, 16 << 20);
                let parts = [mica_rt::Buf::from_slice(&head), mica_rt::Buf::zeroed(16 << 20)];
                sender.send(parts.into()).await.expect("connected");
            }
        });
        for cookie in 0..3 {
            assert_eq!(answer(&mut client, cookie).await, 0);
        }
        assert!(disk.writing.most() <= BUDGET_BYTES as u64, "beyond the budget");
        assert_eq!(world.pool.taken(), 0, "all of it is given back");
    });
}

#[test]
fn export_says_what_it_takes() {
    simulated(small, async |world, _| {
        let mut client = world.connect();
        client.greet(3).await;
        client.option(7, &info_data(b"", &[3])).await;
        let replies = client.option_replies(7).await;
        let flags = u16::from_be_bytes(replies[0].1[10..12].try_into().expect("2 bytes"));
        // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, CAN_MULTI_CONN, FAST_ZERO.
        assert_eq!(flags, 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8 | 1 << 11);
        assert_eq!(replies[1].1[2..6], 1_u32.to_be_bytes());
    });
}

#[test]
fn fua_is_answered_after_a_flush() {
    simulated(slow, async |world, disk| {
        let mut client = world.simple_session().await;
        let fua = command_flag::FUA;
        write(&client, fua, 1, 0, 4096).await;
        assert_eq!(answer(&mut client, 1).await, 0);
        assert_eq!(disk.events(), [Event::Write { at: 0, len: 4096 }, Event::Flush]);
        client.request(fua, TRIM, 2, 4096, 4096).await;
        assert_eq!(answer(&mut client, 2).await, 0);
        assert_eq!(disk.events(), [Event::Discard { at: 4096, len: 4096 }, Event::Flush]);
        client.request(fua, ZEROES, 3, 0, 512).await;
        assert_eq!(answer(&mut client, 3).await, 0);
        assert_eq!(disk.events().last(), Some(&Event::Flush));
        client.request(0, FLUSH, 4, 0, 0).await;
        assert_eq!(answer(&mut client, 4).await, 0);
        assert_eq!(disk.events(), [Event::Flush]);
    });
}

#[test]
fn flags_of_zeroes_reach_the_disk() {
    let (no_hole, fast) = (command_flag::NO_HOLE, command_flag::FAST_ZERO);
    simulated(small, async |world, disk| {
        let mut client = world.simple_session().await;
        for flags in [0, no_hole, fast, no_hole | fast] {
            client.request(flags, ZEROES, 1, 1024, 4096).await;
            assert_eq!(answer(&mut client, 1).await, 0);
            let how = Zeroes { may_unmap: flags & no_hole == 0, fast: flags & fast != 0 };
            assert_eq!(disk.events(), [Event::Zeroes { at: 1024, len: 4096, how }]);
        }
        assert_eq!(disk.bytes(1024..5120), [0; 4096]);
        assert_eq!(disk.bytes(0..1024), [0xee; 1024]);
    });
    let disk = || MemoryDisk { slow_zeroes: true, ..small() };
    simulated(disk, async |world, _| {
        let mut client = world.simple_session().await;
        client.request(fast, ZEROES, 1, 0, 4096).await;
        assert_eq!(answer(&mut client, 1).await, ENOTSUP);
        client.request(0, ZEROES, 2, 0, 4096).await;
        assert_eq!(answer(&mut client, 2).await, 0);
    });
}

#[test]
fn nearly_4_gib_are_changed_in_pieces() {
    let disk = || MemoryDisk::new(8 << 30);
    simulated(disk, async |world, disk| {
        let mut client = world.simple_session().await;
        for kind in [ZEROES, TRIM] {
            let (start, len) = (MIB + 512, u32::MAX - 511);
            client.request(0, kind, 1, start, len).await;
            assert_eq!(answer(&mut client, 1).await, 0);
            let mut at = start;
            for event in disk.events() {
                let (from, len) = match event {
                    Event::Zeroes { at, len, .. } | Event::Discard { at, len } => (at, len),
                    other => panic!("{other:?} was not asked for"),
                };
                assert_eq!(from, at);
                assert!(len <= PIECE_BYTES);
                at += len;
            }
            assert_eq!(at, start + u64::from(len));
        }
    });
}

#[test]
fn discards_are_dropped_where_they_are_ignored() {
    simulated_memory(small, Discard::Ignore, async |world, disk| {
        let mut client = world.simple_session().await;
        client.request(0, TRIM, 1, 0, 4096).await;
        assert_eq!(answer(&mut client, 1).await, 0);
        assert_eq!(disk.events(), []);
        client.request(0, ZEROES, 2, 0, 4096).await;
        assert_eq!(answer(&mut client, 2).await, 0);
        let how = Zeroes { may_unmap: false, fast: false };
        assert_eq!(disk.events(), [Event::Zeroes { at: 0, len: 4096, how }]);
    });
}

#[test]
fn changes_that_make_no_sense_are_refused_and_the_session_continues() {
    simulated(small, async |world, disk| {
        let mut client = world.simple_session().await;
        let end = 8 * MIB;
        let refusals = [
            (0, WRITE, end - 512, 1024, ENOSPC),
            (0, WRITE, u64::MAX - 511, 512, ENOSPC),
            (command_flag::NO_HOLE, WRITE, 0, 512, EINVAL),
            (command_flag::DF, WRITE, 0, 512, EINVAL),
            (0, TRIM, end, 512, EINVAL),
            (0, ZEROES, end, 512, ENOSPC),
            (command_flag::DF, ZEROES, 0, 512, EINVAL),
            (command_flag::FAST_ZERO, TRIM, 0, 512, EINVAL),
            (command_flag::NO_HOLE, FLUSH, 0, 0, EINVAL),
        ];
        for (cookie, (flags, kind, at, len, error)) in (0..).zip(refusals) {
            client.request(flags, kind, cookie, at, len).await;
            if kind == WRITE {
                client.send(&vec![0x77; len as usize]).await.expect("connected");
            }
            assert_eq!(answer(&mut client, cookie).await, error, "{kind} of {len} bytes at {at}");
        }
        for (cookie, kind) in [(50, WRITE), (51, TRIM), (52, ZEROES)] {
            client.request(0, kind, cookie, 0, 0).await;
            assert_eq!(answer(&mut client, cookie).await, 0, "nothing to do");
        }
        assert_eq!(disk.events(), []);
        write(&client, 0, 60, end - 512, 512).await;
        assert_eq!(answer(&mut client, 60).await, 0);
    });
}

#[test]
fn payload_of_a_refused_write_is_skipped_whatever_its_length() {
    let disk = || MemoryDisk::new(64 * MIB);
    simulated(disk, async |world, disk| {
        let mut client = world.simple_session().await;
        for (cookie, len, error) in [(1, 512 << 10, ENOSPC), (2, 33 << 20, EINVAL)] {
            let at = if error == ENOSPC { 64 * MIB - 512 } else { 0 };
            client.request(0, WRITE, cookie, at, len).await;
            client.send(&vec![0x25; len as usize]).await.expect("connected");
            assert_eq!(answer(&mut client, cookie).await, error);
        }
        assert_eq!(disk.events(), []);
        write(&client, 0, 3, 0, 512).await;
        assert_eq!(answer(&mut client, 3).await, 0);
    });
}

#[test]
fn errors_of_the_disk_are_reported_by_kind() {
    for (kind, code) in [
        (ErrorKind::NoSpace, ENOSPC),
        (ErrorKind::Denied, EPERM),
        (ErrorKind::Invalid, EINVAL),
        (ErrorKind::Limit, EINVAL),
        (ErrorKind::Io, EIO),
        (ErrorKind::Corrupt, EIO),
        (ErrorKind::Unsupported, EIO),
    ] {
        let disk = || MemoryDisk { bad: 4096..8192, kind, flush_fails: true, ..small() };
        simulated(disk, async |world, _| {
            let mut client = world.simple_session().await;
            write(&client, 0, 1, 4096, 512).await;
            assert_eq!(answer(&mut client, 1).await, code, "{kind:?}");
            client.request(0, TRIM, 2, 0, 8192).await;
            assert_eq!(answer(&mut client, 2).await, code, "{kind:?}");
            client.request(0, ZEROES, 3, 0, 8192).await;
            assert_eq!(answer(&mut client, 3).await, code, "{kind:?}");
            write(&client, 0, 4, 0, 4096).await;
            assert_eq!(answer(&mut client, 4).await, 0);
            write(&client, command_flag::FUA, 5, 0, 4096).await;
            assert_eq!(answer(&mut client, 5).await, EIO, "the flush failed");
            client.request(0, FLUSH, 6, 0, 0).await;
            assert_eq!(answer(&mut client, 6).await, EIO);
        });
    }
}

#[test]
fn writes_of_a_client_that_left_count_as_in_flight_until_they_are_done() {
    simulated(slow, async |world, disk| {
        let client = world.simple_session().await;
        for cookie in 0..20 {
            let flags = if cookie % 2 == 0 { 0 } else { command_flag::FUA };
            write(&client, flags, cookie, cookie * 4096, 4096).await;
        }
        sleep(Duration::from_millis(1)).await;
        client.stream.shutdown();
        drop(client);
        sleep(Duration::from_millis(1)).await;
        assert!(!disk.is_quiet(), "the disk is still writing");
        world.until_open(0).await;
        assert!(disk.is_quiet());
        let writes = disk.events().into_iter().filter(|event| *event != Event::Flush);
        assert_eq!(writes.count(), 20, "all of them were done by then");
    });
}

#[test]
fn half_a_payload_blocks_nobody_and_is_never_written() {
    simulated(slow, async |world, disk| {
        let stuck = world.simple_session().await;
        stuck.request(0, WRITE, 1, 0, 1 << 20).await;
        stuck.send(&vec![0x11; 300_000]).await.expect("connected");
        sleep(Duration::from_millis(5)).await;
        assert!(disk.is_quiet(), "it is not at the disk");
        let mut other = world.simple_session().await;
        write(&other, 0, 2, 0, 8192).await;
        assert_eq!(answer(&mut other, 2).await, 0);
        stuck.stream.shutdown();
        world.until_open(1).await;
        // One that stays has its deadline.
        let mut lazy = world.simple_session().await;
        lazy.request(0, WRITE, 3, 0, 1 << 20).await;
        lazy.send(&vec![0x22; 300_000]).await.expect("connected");
        sleep(Duration::from_secs(31)).await;
        assert!(lazy.is_closed().await);
        assert_eq!(world.counters().deadlines_passed, 1);
        assert_eq!(disk.events(), [Event::Write { at: 0, len: 8192 }]);
        assert_eq!(disk.bytes(8192..9000), [0xee; 808]);
    });
}

#[test]
fn shutdown_answers_writes_in_flight_and_drops_what_is_half_there() {
    simulated(slow, async |world, disk| {
        let mut client = world.simple_session().await;
        for cookie in 0..3 {
            write(&client, 0, cookie, cookie * 4096, 4096).await;
        }
        client.request(0, WRITE, 3, 0, 1 << 20).await;
        client.send(&vec![0x33; 100_000]).await.expect("connected");
        sleep(Duration::from_millis(1)).await;
        world.stop();
        let mut answered = BTreeSet::new();
        for _ in 0..3 {
            match client.reply().await.expect("a reply") {
                Reply::Simple { cookie, error: 0 } => answered.insert(cookie),
                other => panic!("{other:?} is no success"),
            };
        }
        assert_eq!(answered.len(), 3);
        assert!(client.is_closed().await);
        world.until_open(0).await;
        assert_eq!(disk.events().len(), 3);
        assert!(disk.is_quiet());
    });
}

#[test]
fn single_bytes_are_changed_and_their_neighbours_stay() {
    for disk in [small as fn() -> MemoryDisk, slow] {
        simulated(disk, async |world, disk| {
            let mut client = world.simple_session().await;
            let mut model = vec![0xee; 1 << 20];
            let ranges = [
                (0, 1),
                (511, 1),
                (511, 2),
                (700, 100),
                (1024, 700),
                (1000, 1048),
                (4095, 4098),
                (1, 200_000),
                (512, 100_000),
            ];
            for (cookie, (at, len)) in (0_u64..).zip(ranges) {
                write(&client, 0, cookie, at as u64, len).await;
                assert_eq!(answer(&mut client, cookie).await, 0);
                model[at..at + len].copy_from_slice(&payload(cookie, len));
                assert!(disk.bytes(0..1 << 20) == model, "{len} bytes at {at}");
            }
            for (at, len) in ranges {
                let count = u32::try_from(len).expect("small");
                client.request(0, ZEROES, 1, at as u64, count).await;
                assert_eq!(answer(&mut client, 1).await, 0);
                model[at..at + len].fill(0);
                assert!(disk.bytes(0..1 << 20) == model, "{len} zeros at {at}");
            }
            disk.events();
            client.request(0, TRIM, 1, 700, 2000).await;
            assert_eq!(answer(&mut client, 1).await, 0);
            client.request(0, TRIM, 2, 700, 100).await;
            assert_eq!(answer(&mut client, 2).await, 0);
            assert_eq!(disk.events(), [Event::Discard { at: 1024, len: 1536 }]);
        });
    }
}

#[test]
fn neighbours_in_a_sector_do_not_lose_each_other_s_bytes() {
    simulated(slow, async |world, disk| {
        let mut client = world.simple_session().await;
        let mut other = world.simple_session().await;
        // Every byte of eight sectors by itself, in turns over two connections, and sectors that
        // are written as a whole among them.
        let bytes = 128;
        for at in 0..bytes {
            let client = if at % 2 == 0 { &client } else { &other };
            write(client, 0, at, at * 32, 32).await;
            write(client, 0, 1000 + at, 8192 + at * 512, 512).await;
        }
        for client in [&mut client, &mut other] {
            for _ in 0..bytes {
                let reply = client.reply().await.expect("a reply");
                assert!(matches!(reply, Reply::Simple { error: 0, .. }), "{reply:?}");
            }
        }
        for at in 0..bytes {
            let start = usize::try_from(at * 32).expect("small");
            assert_eq!(disk.bytes(start..start + 32), payload(at, 32));
            let start = usize::try_from(8192 + at * 512).expect("small");
            assert_eq!(disk.bytes(start..start + 512), payload(1000 + at, 512));
        }
    });
}

#[test]
fn failed_flush_has_no_offset_and_other_failures_one_in_their_range() {
    let disk = || MemoryDisk { bad: 8192..12_288, flush_fails: true, ..small() };
    simulated(disk, async |world, _| {
        let mut client = world.session().await;
        client.request(0, FLUSH, 1, 0, 0).await;
        assert_eq!(client.chunk_error(1).await, (EIO, None));
        write(&client, 0, 2, 10_000, 100).await;
        assert_eq!(client.chunk_error(2).await, (EIO, Some(10_000)));
        write(&client, command_flag::FUA, 3, 4096, 4096).await;
        assert_eq!(client.chunk_error(3).await, (EIO, Some(4096)));
        client.request(0, ZEROES, 4, 4100, 8192).await;
        assert_eq!(client.chunk_error(4).await, (EIO, Some(4608)));
    });
}

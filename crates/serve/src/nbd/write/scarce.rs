//! Clients of a process whose budget others have taken: what is large goes piece by piece.

use crate::budget::{Party, Share};
use crate::discard::Discard;
use crate::nbd::limits::{PAYLOAD_BYTES_MAX, RESERVE_BYTES};
use crate::nbd::protocol::{command, command_flag};
use crate::nbd::testing::{
    Client, EIO, Event, MIB, MemoryDisk, PatternDisk, Reply, assemble, request, simulated,
    simulated_memory,
};
use mica_rt::Buf;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

fn disk() -> MemoryDisk {
    MemoryDisk { latency: Some(Duration::from_millis(1)), ..MemoryDisk::new(64 * MIB) }
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251).to_le_bytes()[0]).collect()
}

async fn write(client: &Client, flags: u16, at: u64, len: usize) {
    let count = u32::try_from(len).expect("short");
    let head = request(flags, command::WRITE, at, at, count);
    let parts = [Buf::from_slice(&head), Buf::from_slice(&payload(len))];
    let sender = client.stream.clone();
    mica_rt::spawn(async move { sender.send(parts.into()).await.expect("connected") });
}

#[test]
fn write_of_any_length_is_done_within_the_reserve() {
    simulated_memory(disk, Discard::Unmap, async |world, disk| {
        let _others = world.others();
        let taken = world.pool.taken();
        let mut client = world.simple_session().await;
        for (at, len) in [(0, 6 << 20), (513, (6 << 20) + 7), (4096, 512), (1, 1 << 20)] {
            write(&client, 0, at, len).await;
            assert_eq!(client.reply().await, Some(Reply::Simple { cookie: at, error: 0 }));
            let start = usize::try_from(at).expect("small");
            assert!(disk.bytes(start..start + len) == payload(len), "{len} bytes at {at}");
            assert!(disk.writing.most() <= RESERVE_BYTES as u64, "{} at once", disk.writing.most());
        }
        assert_eq!((world.counters().writes, world.pool.taken()), (4, taken));
    });
}

#[test]
fn divided_write_that_is_to_be_durable_is_flushed_once_at_its_end() {
    simulated_memory(disk, Discard::Unmap, async |world, disk| {
        let _others = world.others();
        let mut client = world.simple_session().await;
        write(&client, command_flag::FUA, 0, 2 << 20).await;
        assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 0, error: 0 }));
        let events = disk.events();
        assert!(events.len() > 4, "it was not divided: {events:?}");
        let flushes = events.iter().filter(|event| **event == Event::Flush).count();
        assert_eq!((flushes, events.last()), (1, Some(&Event::Flush)));
    });
}

#[test]
fn divided_write_that_fails_is_answered_once_and_the_connection_continues() {
    for bad in [0..512, MIB..MIB + 512, 8 * MIB - 512..8 * MIB] {
        let disk = || MemoryDisk { bad: bad.clone(), ..disk() };
        simulated_memory(disk, Discard::Unmap, async |world, _| {
            let _others = world.others();
            let mut client = world.simple_session().await;
            write(&client, 0, 0, 8 << 20).await;
            assert_eq!(client.reply().await, Some(Reply::Simple { cookie: 0, error: EIO }));
            write(&client, 0, 16 * MIB, 4096).await;
            let answer = Reply::Simple { cookie: 16 * MIB, error: 0 };
            assert_eq!(client.reply().await, Some(answer));
        });
    }
}

#[test]
fn reads_of_any_length_are_served_within_the_reserve() {
    let disk =
        || PatternDisk { latency: Some(Duration::from_millis(1)), ..PatternDisk::data(64 * MIB) };
    let content = disk().content(0..32 * MIB);
    simulated(disk, async |world| {
        let _others = world.others();
        let mut structured = world.session().await;
        structured.request(0, command::READ, 1, 0, PAYLOAD_BYTES_MAX).await;
        assert!(assemble(&structured.chunks(1).await, 0) == content);
        // In one piece.
        structured.request(command_flag::DF, command::READ, 2, 512, 4 << 20).await;
        let chunks = structured.chunks(2).await;
        assert_eq!(chunks.len(), 1);
        assert!(assemble(&chunks, 512) == content[512..512 + (4 << 20)]);
        drop(structured);
        let mut simple = world.simple_session().await;
        simple.request(0, command::READ, 3, 0, PAYLOAD_BYTES_MAX).await;
        assert_eq!(simple.reply().await, Some(Reply::Simple { cookie: 3, error: 0 }));
        assert!(simple.receive(32 << 20).await.expect("data") == content);
        assert!(world.reading.most() <= RESERVE_BYTES as u64, "{}", world.reading.most());
    });
}

/// Each takes a page, however short it is.
#[test]
fn tiny_reads_in_flight_are_within_the_reserve() {
    let disk =
        || PatternDisk { latency: Some(Duration::from_millis(10)), ..PatternDisk::data(MIB) };
    simulated(disk, async |world| {
        let _others = world.others();
        let mut client = world.simple_session().await;
        let read = |cookie| request(0, command::READ, cookie, cookie, 1);
        let bytes: Vec<u8> = (0..1000).flat_map(read).collect();
        client.send(&bytes).await.expect("connected");
        mica_rt::sleep(Duration::from_millis(1)).await;
        assert_eq!(world.reading.now(), (RESERVE_BYTES / 4096) as u64);
        for _ in 0..1000 {
            assert!(matches!(client.reply().await, Some(Reply::Simple { error: 0, .. })));
            client.receive(1).await.expect("data");
        }
    });
}

/// Each of many clients begins a write of the largest payload, sends a part and never the rest.
#[test]
fn clients_that_never_finish_their_payload_do_not_block_others() {
    let disk = || MemoryDisk::new(64 * MIB);
    simulated_memory(disk, Discard::Unmap, async |world, _| {
        let mut greedy = Vec::new();
        for cookie in 0..64 {
            let client = world.simple_session().await;
            let head = request(0, command::WRITE, cookie, 0, PAYLOAD_BYTES_MAX);
            client.send(&[&head[..], &[7; 100_000]].concat()).await.expect("connected");
            greedy.push(client);
        }
        mica_rt::sleep(Duration::from_secs(1)).await;
        let other = Share::new(&Party::new(&world.pool), 0, 8 << 20);
        assert!(other.covers(8 << 20), "other disks notice nothing");
        let mut witness = world.simple_session().await;
        for (at, len) in [(0, 512), (MIB, 8 << 20)] {
            write(&witness, 0, at, len).await;
            assert_eq!(witness.reply().await, Some(Reply::Simple { cookie: at, error: 0 }));
        }
        greedy.clear();
        world.until_open(1).await;
        drop((witness, other));
        world.until_open(0).await;
        assert_eq!(world.pool.taken(), 0);
    });
}

/// One connection with everything at once, whatever the order in which it ends.
#[test]
fn requests_of_all_sizes_side_by_side_are_each_answered_once() {
    let disk: fn() -> MemoryDisk = disk;
    simulated_memory(disk, Discard::Unmap, async |world, disk: Arc<MemoryDisk>| {
        let _others = world.others();
        let mut client = world.simple_session().await;
        let lens = [512, 700_000, 4096, 3 << 20, 100, 300_000, 1 << 20];
        let sender = client.stream.clone();
        mica_rt::spawn(async move {
            for (cookie, len) in (0..70_u64).zip(lens.into_iter().cycle()) {
                let count = u32::try_from(len).expect("small");
                let head = request(0, command::WRITE, cookie, cookie % 2 * 4 * MIB, count);
                let parts = [Buf::from_slice(&head), Buf::from_slice(&payload(len))];
                sender.send(parts.into()).await.expect("connected");
            }
        });
        let mut answered = BTreeSet::new();
        for _ in 0..70 {
            match client.reply().await {
                Some(Reply::Simple { cookie, error: 0 }) => assert!(answered.insert(cookie)),
                other => panic!("{other:?} is no success"),
            }
        }
        assert_eq!(answered.len(), 70);
        assert!(disk.writing.most() <= RESERVE_BYTES as u64, "{}", disk.writing.most());
    });
}

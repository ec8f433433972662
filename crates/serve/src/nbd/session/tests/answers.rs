//! What reads and block status answer.

use super::*;
use crate::nbd::contexts::{Context, Part};
use crate::nbd::limits::{BUDGET_BYTES, PAYLOAD_BYTES_MAX, STATUS_EXTENTS_MAX};
use crate::nbd::protocol::command_flag;
use crate::nbd::testing::{
    RUN_BYTES, Reply, assemble, info_data, meta_data, simulated, simulated_seeds,
    simulated_with_contexts,
};
use mica_block::{ExtentKind, LocalFuture};
use mica_units::GuestRange;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
fn zeros_are_described_and_not_sent() {
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
        || PatternDisk { latency: Some(Duration::from_millis(1)), ..PatternDisk::data(64 * MIB) };
    simulated(disk, async |world| {
        let mut structured = world.session().await;
        let mut simple = world.simple_session().await;
        for cookie in 0..2 {
            structured.request(0, READ, cookie, cookie * 32 * MIB, PAYLOAD_BYTES_MAX).await;
            simple.request(0, READ, cookie, cookie * 32 * MIB, PAYLOAD_BYTES_MAX).await;
        }
        for cookie in 0..2 {
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
fn status_covers_what_was_asked_and_joins_neighbours() {
    simulated(mixed, async |world| {
        let disk = mixed();
        let mut client = world.session().await;
        for (at, len) in RANGES {
            client.request(0, STATUS, at, at, len).await;
            let extents = client.status(at).await;
            assert_eq!(extents.iter().map(|(len, _)| u64::from(*len)).sum::<u64>(), u64::from(len));
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

/// All of the disk in one part.
struct Whole;

impl Context for Whole {
    fn name(&self) -> &str {
        "test:whole"
    }

    fn parts(&self, range: GuestRange) -> LocalFuture<'_, mica_block::Result<Vec<Part>>> {
        Box::pin(std::future::ready(Ok(vec![Part { len: range.len(), flags: 1 }])))
    }
}

/// Parts of 4 KiB, counted as they are told.
struct Counted(Arc<AtomicU64>);

impl Context for Counted {
    fn name(&self) -> &str {
        "test:counted"
    }

    fn parts(&self, range: GuestRange) -> LocalFuture<'_, mica_block::Result<Vec<Part>>> {
        let (mut at, end) = (range.start().bytes(), range.end().bytes());
        let mut parts = Vec::new();
        while at < end {
            let number = at / RUN_BYTES;
            let len = ((number + 1) * RUN_BYTES).min(end) - at;
            parts.push(Part { len, flags: u32::try_from(number % 2).expect("small") });
            at += len;
        }
        self.0.fetch_add(parts.len() as u64, Ordering::Relaxed);
        Box::pin(std::future::ready(Ok(parts)))
    }
}

/// The story: QEMU takes one descriptor at a time, and asks about all that is left of the disk.
/// Each time 4 MiB were surveyed, which are thousands of parts of a fragmented disk.
#[test]
fn status_of_one_extent_costs_about_as_much_as_it_tells() {
    const LEN: u64 = 16 * MIB;
    let told = Arc::new(AtomicU64::new(0));
    let contexts: Vec<Arc<dyn Context>> = vec![Arc::new(Counted(Arc::clone(&told)))];
    simulated_with_contexts(PatternDisk::data(LEN), contexts, async |world| {
        let mut client = world.session_with(b"test:counted").await;
        let (mut at, mut count) = (0, 0);
        while at < LEN {
            let len = u32::try_from(LEN - at).expect("fits");
            client.request(command_flag::REQ_ONE, STATUS, 1, at, len).await;
            let (_, data) = client.chunks(1).await.swap_remove(0);
            at += u64::from(u32::from_be_bytes([data[4], data[5], data[6], data[7]]));
            count += 1;
        }
        assert_eq!(count, LEN / RUN_BYTES);
        let told = told.load(Ordering::Relaxed);
        assert!(told <= 20 * count, "{told} parts were told of for {count}");
    });
}

/// As many descriptors as QEMU gives, and the same bytes in each context: virtnbdbackup takes the
/// one for all of a disk, and puts the others side by side.
#[test]
fn contexts_of_one_status_describe_the_same_bytes() {
    let disk = PatternDisk {
        kind: |run| if run % 2 == 0 { ExtentKind::Data } else { ExtentKind::Zero },
        ..PatternDisk::data(STATUS_EXTENTS_MAX as u64 * RUN_BYTES + MIB)
    };
    let len = disk.len;
    simulated_with_contexts(disk, vec![Arc::new(Whole)], async |world| {
        let mut client = world.connect();
        client.greet(3).await;
        client.option(8, &[]).await;
        client.expect_ack(8).await;
        client.option(10, &meta_data(b"disk", &[b"base:allocation", b"test:whole"])).await;
        assert_eq!(client.option_replies(10).await.len(), 3);
        client.option(7, &info_data(b"disk", &[])).await;
        assert_eq!(client.option_replies(7).await.len(), 2);

        client.request(0, STATUS, 1, 0, u32::try_from(len).expect("fits")).await;
        let chunks = client.chunks(1).await;
        let described = chunks.iter().map(|(_, data)| {
            let lens = data[4..].as_chunks::<8>().0.iter();
            let lens =
                lens.map(|one| u64::from(u32::from_be_bytes([one[0], one[1], one[2], one[3]])));
            (lens.clone().count(), lens.sum::<u64>())
        });
        let all = STATUS_EXTENTS_MAX as u64 * RUN_BYTES;
        assert_eq!(described.collect::<Vec<_>>(), [(STATUS_EXTENTS_MAX, all), (1, all)]);
        // One of each is as long as it is.
        client.request(command_flag::REQ_ONE, STATUS, 2, 0, 1 << 20).await;
        let lens = client.chunks(2).await.into_iter().map(|(_, data)| data[4..8].to_vec());
        assert_eq!(
            lens.collect::<Vec<_>>(),
            [(4096_u32).to_be_bytes(), (1_u32 << 20).to_be_bytes()]
        );
    });
}

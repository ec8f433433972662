//! Attacks with which a reviewer broke the writing engine, each with its story.

use crate::chain::FOLDER;
use crate::plain::{L1_AT, OFFSET_MASK, Plain, REFCOUNT_TABLE_AT, range, read, write};
use mica_block::{Disk as _, ErrorKind, Manage as _};
use mica_qcow2_format::Version;
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::ImageWish;
use mica_rt::{Buf, join_all};
use mica_sim::crash::Mode;
use mica_sim::{ChangeFault, Latency, Loss, Operation, ReadFault, World, scenario};
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

const EIO: i32 = 5;
const MIB: u64 = 1 << 20;

fn failing_sync(nth: u64) -> ChangeFault {
    ChangeFault { operation: Operation::Sync, nth, lasting: false, errno: EIO }
}

/// The story: the sync during the creation of a refcount block failed, the failure was ignored, and
/// the next flush succeeded: the kernel reports a failed writeback once. Of 121 writes that were
/// acknowledged and flushed, up to 120 were lost after a power cut.
#[test]
fn sync_that_fails_while_counts_get_room_is_not_forgotten() {
    let wish = ImageWish { cluster_bytes: Some(512), ..ImageWish::default() };
    let struck = std::cell::Cell::new(0);
    scenario(24, |world| {
        let (wish, struck) = (&wish, &struck);
        async move {
            let image = Plain::new(&world, wish, 4 * MIB).await;
            let chain = image.open(Mode::Write).await;
            write(&chain, 0, 1, 512).await.unwrap();
            chain.flush().await.unwrap();
            world.inject_change(failing_sync(1 + world.seed() % 3));
            let mut acknowledged = Vec::new();
            for sector in 0..1200 {
                if write(&chain, sector * 512, 7, 512).await.is_ok() {
                    acknowledged.push(sector);
                }
                if world.fault_struck() {
                    break;
                }
            }
            if !world.heal_changes() {
                return;
            }
            struck.set(struck.get() + 1);
            let flushed = chain.flush().await;
            drop(chain);
            world.cut_power(Loss::Nothing);
            let chain = image.open(Mode::Read).await;
            for sector in acknowledged {
                let shown = read(&chain, sector * 512, 512).await.unwrap();
                assert!(flushed.is_err() || shown == [7; 512], "sector {sector} was flushed");
            }
        }
    });
    assert!(struck.get() >= 8, "the sync of a refcount block failed in {} runs only", struck.get());
}

/// The story: the mark in the header did not become durable, but the page in memory had it already,
/// so that the second write found nothing to do and continued.
#[test]
fn nothing_is_acknowledged_once_the_mark_of_a_writer_has_failed() {
    let wish = ImageWish { lazy_refcounts: Some(true), ..ImageWish::default() };
    for operation in [Operation::Sync, Operation::Write] {
        scenario(4, |world| {
            let wish = &wish;
            async move {
                let image = Plain::new(&world, wish, MIB).await;
                let chain = image.open(Mode::Write).await;
                world.inject_change(ChangeFault { operation, ..failing_sync(1) });
                write(&chain, 0, 1, 512).await.unwrap_err();
                assert!(world.heal_changes());
                write(&chain, 0, 1, 512).await.unwrap_err();
                chain.flush().await.unwrap_err();
                chain.close().await.unwrap_err();
            }
        });
    }
}

/// An overlay of clusters of 64 KiB over a raw base.
async fn overlay(world: &World) -> Plain {
    world.put(Path::new(FOLDER).join("base.raw"), vec![0x55; 1 << 20]);
    let wish = ImageWish {
        extended_l2: Some(false),
        cluster_bytes: Some(64 << 10),
        backing_name: Some(OsString::from("base.raw")),
        backing_format: Some("raw".to_owned()),
        ..ImageWish::default()
    };
    Plain::new(world, &wish, MIB).await
}

/// The story: half of a request was in flight when the other half could not read what it had to
/// copy. Its clusters were freed and given to the next write, which was acknowledged, and then the
/// old write overwrote it.
#[test]
fn write_that_fails_half_way_does_not_land_on_its_successor() {
    scenario(8, |world| async move {
        let image = overlay(&world).await;
        let (base, top) =
            (Path::new(FOLDER).join("base.raw"), Path::new(FOLDER).join("plain.qcow2"));
        world.set_latency(&base, Latency::Cached);
        world.set_latency(&top, Latency::Cached);
        let chain = image.open(Mode::Write).await;
        for cluster in [10, 11] {
            write(&chain, cluster << 16, 9, 65536).await.unwrap();
            chain.flush().await.unwrap();
        }
        world.set_latency(&top, Latency::Remote);
        world.inject(&base, ReadFault::FailAll(EIO));
        let (head, len) = [(0, 65536 + 512), (512, 65536), (0, 3 * 65536 + 512)]
            [usize::try_from(world.seed() % 3).unwrap()];
        write(&chain, head, 0xaa, len).await.unwrap_err();
        world.heal(&base);
        world.set_latency(&top, Latency::Cached);
        let successors: Vec<u64> = (5..9).collect();
        for cluster in &successors {
            write(&chain, cluster << 16, 0xbb, 65536).await.unwrap();
        }
        for delay in [0, 20] {
            mica_rt::sleep(Duration::from_millis(delay)).await;
            for cluster in &successors {
                let shown = read(&chain, cluster << 16, 65536).await.unwrap();
                assert!(shown.iter().all(|byte| *byte == 0xbb), "cluster {cluster}");
            }
        }
        let shown = read(&chain, 0, MIB).await.unwrap();
        let known = |byte: &u8| [0x55, 0xaa, 0xbb, 9].contains(byte);
        assert!(shown.iter().all(known));
        chain.close().await.unwrap();
        image.expect_sound().await;
    });
}

/// Shapes of images with compressed clusters.
fn packed_shapes() -> [ImageWish; 3] {
    [
        ImageWish { version: Some(Version::V2), ..ImageWish::default() },
        ImageWish::default(),
        ImageWish { extended_l2: Some(true), ..ImageWish::default() },
    ]
}

/// The story: the read of a compressed cluster looks up its entry again, and found the entry that
/// the guest had written meanwhile; it failed with "changed by another program".
#[test]
fn compressed_cluster_that_changes_after_the_plan_is_read_old_or_new() {
    for wish in packed_shapes() {
        scenario(6, |world| {
            let wish = &wish;
            async move {
                let image = Plain::packed(&world, wish, 16, 0x41).await;
                let chain = image.open(Mode::Write).await;
                let part = range(4 << 16, 65536);
                let extents = chain.plan(part, Vec::new()).finish().await.unwrap();
                if world.seed() % 2 == 0 {
                    chain.discard(range(0, MIB)).await.unwrap();
                }
                if world.seed() % 3 > 0 {
                    write(&chain, (4 << 16) + 8192, 3, 512).await.unwrap();
                }
                if world.seed() > 3 {
                    chain.flush().await.unwrap();
                    chain.flush().await.unwrap();
                }
                for extent in extents.iter() {
                    let buf = Buf::new(usize::try_from(extent.len).unwrap());
                    let (result, buf) = chain.read(extent, buf).await;
                    result.unwrap();
                    assert!(buf.iter().all(|byte| [0x41, 0, 3].contains(byte)), "{wish:?}");
                }
            }
        });
    }
}

/// The same while both are in flight.
#[test]
fn compressed_clusters_are_read_while_they_are_discarded_and_rewritten() {
    for wish in packed_shapes() {
        scenario(40, |world| {
            let wish = &wish;
            async move {
                let image = Plain::packed(&world, wish, 16, 0x41).await;
                let chain = image.open(Mode::Write).await;
                let read_some = async |_| {
                    for _ in 0..8 {
                        mica_rt::sleep(Duration::from_micros(world.random_below(200))).await;
                        let at = world.random_below(2000) * 512;
                        let shown = read(&chain, at, 16 << 10).await.unwrap();
                        let known = |byte: &u8| [0x41, 0, 3].contains(byte);
                        assert!(shown.iter().all(known), "{wish:?}");
                    }
                };
                let change_some = async {
                    for _ in 0..12 {
                        mica_rt::sleep(Duration::from_micros(world.random_below(150))).await;
                        let at = world.random_below(15) << 16;
                        match world.random_below(3) {
                            0 => chain.discard(range(at, 65536)).await.unwrap(),
                            1 => write(&chain, at + 4096, 3, 8192).await.unwrap(),
                            _ => chain.flush().await.unwrap(),
                        }
                    }
                };
                let readers = async { join_all((0..3).map(read_some)).await };
                let both: [std::pin::Pin<Box<dyn Future<Output = ()>>>; 2] = [
                    Box::pin(async {
                        readers.await;
                    }),
                    Box::pin(change_some),
                ];
                join_all(both).await;
                chain.close().await.unwrap();
                image.expect_sound().await;
            }
        });
    }
}

/// The story: work that outlives its request was counted down twice, so that the disk was never
/// idle again: SIGTERM hung, and freed clusters were never reused.
#[test]
fn disk_is_idle_when_its_requests_are_done_and_closes() {
    scenario(8, |world| async move {
        let image = overlay(&world).await;
        let chain = image.open(Mode::Write).await;
        for round in 0..3 {
            write(&chain, round << 16, 1, 512).await.unwrap();
            if world.seed() & 1 == 0 {
                write(&chain, round << 16, 2, 65536).await.unwrap();
            }
            if world.seed() & 2 == 0 {
                chain.flush().await.unwrap();
            }
            if world.seed() & 4 == 0 {
                chain.discard(range(0, 65536)).await.unwrap();
            }
        }
        let stop = async {
            chain.idle().await;
            chain.close().await.unwrap();
        };
        mica_rt::timeout(Duration::from_secs(5), stop).await.expect("it stops");
        image.expect_sound().await;
    });
}

/// The story: a header named one place for both tables, and the first write put the places of L2
/// tables over those of the refcount blocks, or the other way round.
#[test]
fn nothing_is_written_while_two_tables_have_one_place() {
    for (from, to) in [(REFCOUNT_TABLE_AT, L1_AT), (L1_AT, REFCOUNT_TABLE_AT)] {
        scenario(2, |world| async move {
            let image = Plain::new(&world, &ImageWish::default(), MIB).await;
            image.put(to, image.word(from));
            let before = image.file();
            let chain = image.open(Mode::Write).await;
            let written = write(&chain, 0, 1, 4096).await.unwrap_err();
            assert_eq!(written.kind(), ErrorKind::Corrupt, "{written:?}");
            chain.discard(range(0, MIB)).await.unwrap_err();
            chain.resize(1 << 40).await.unwrap_err();
            chain.close().await.unwrap();
            assert!(image.file() == before, "nothing was written");
        });
    }
}

/// The story: a disk with a bitmap grew, for which the header's sector was read, changed and
/// written, while a write found that the image was corrupt: the mark in between was lost.
#[test]
fn mark_of_a_corrupt_image_is_not_lost_beside_another_change_of_the_header() {
    for delay in (0..6000).step_by(40) {
        scenario(1, |world| async move {
            let image = Plain::new(&world, &ImageWish::default(), 16 * MIB).await;
            let add = vec![BitmapAction::Add(None)];
            edit_bitmap(&world, &Plain::top(), "changes", add).await.unwrap();
            let chain = image.open(Mode::Write).await;
            for at in [0, MIB] {
                write(&chain, at, 1, 512).await.unwrap();
            }
            chain.close().await.unwrap();
            drop(chain);
            // The second cluster that was written would lie over the L1 table.
            let entry = image.l2() + 16 * 8;
            image.put(entry, image.word(entry) & !OFFSET_MASK | image.l1());
            world.set_latency(Plain::top(), Latency::Flash);
            let chain = image.open(Mode::Write).await;
            write(&chain, 0, 1, 512).await.unwrap();
            let growing = async {
                let _ = chain.resize(1 << 40).await;
            };
            let writing = async {
                mica_rt::sleep(Duration::from_micros(delay)).await;
                write(&chain, MIB, 2, 512).await.unwrap_err();
            };
            let both: [std::pin::Pin<Box<dyn Future<Output = ()>>>; 2] =
                [Box::pin(growing), Box::pin(writing)];
            join_all(both).await;
            assert!(image.is_marked_corrupt(), "after {delay} us");
        });
    }
}

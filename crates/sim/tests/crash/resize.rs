//! Disks that get longer and shorter while the power goes: what is left has the old length or the
//! new one, and the part common to both is intact.

use crate::plain::{Plain, range, read, write};
use mica_block::{Disk as _, LocalFuture, Manage as _, Result, Zeroes};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::resize::Resizer;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{Loss, World, scenario};
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Where the header has the bits of a cluster, the length of the disk and the entries of the L1
/// table.
const CLUSTER_BITS_AT: u64 = 20;
const SIZE_AT: u64 = 24;
const L1_ENTRIES_AT: u64 = 36;
/// The part of the disk that is written.
const WRITTEN: u64 = 3 * MIB;

/// Resizes from the first size to the second, losing power after each operation in turn.
async fn cut_after_each(world: &World, wish: &ImageWish, (old, new): (u64, u64)) {
    for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
        for operations in 1.. {
            let world = World::new(world.seed() * 1000 + operations);
            let about = format!("{wish:?} {old} to {new}, cut after {operations}, losing {loss:?}");
            let image = Plain::new(&world, wish, old).await;
            let chain = image.open(Mode::Write).await;
            write(&chain, 0, 7, usize::try_from(WRITTEN).unwrap()).await.unwrap();
            chain.close().await.unwrap();
            drop(chain);
            world.cut_power_after(operations, loss);
            let resize = async {
                let mut resizer = Resizer::open(Arc::new(world.clone()), &Plain::top()).await?;
                resizer.resize(new).await
            };
            let ended = until_power_cut(&world, resize).await;
            world.keep_power();
            image.expect_uncorrupted(&about).await;
            expect_zeros_if_lengthened(&image, old, &about).await;
            // Later writes still succeed.
            let chain = image.open(Mode::Write).await;
            let len = chain.geometry().len;
            assert!(len == new || ended.is_none() && len == old, "{about}: {len} bytes");
            let shown = read(&chain, 0, len).await.unwrap();
            let kept = WRITTEN.min(new);
            assert!(shown.iter().take(usize::try_from(kept).unwrap()).all(|b| *b == 7), "{about}");
            assert!(shown.iter().skip(usize::try_from(WRITTEN).unwrap()).all(|b| *b == 0));
            write(&chain, len - 4096, 9, 4096).await.unwrap();
            chain.close().await.unwrap();
            drop(chain);
            image.expect_uncorrupted(&about).await;
            if let Some(done) = ended {
                done.unwrap();
                image.expect_sound().await;
                break;
            }
        }
    }
}

/// Another program makes the disk as long again as its tables reach, or `before`, by writing the
/// new length and nothing else.
async fn expect_zeros_if_lengthened(image: &Plain, before: u64, about: &str) {
    let image = image.in_another_world();
    let bytes = image.bytes(CLUSTER_BITS_AT, 4);
    let cluster = 1_u64 << u32::from_be_bytes(*bytes.first_chunk().unwrap());
    let tables = image.word(L1_ENTRIES_AT) >> 32;
    let (now, longer) = (image.word(SIZE_AT), (tables * cluster * cluster / 8).min(before));
    let end = now.next_multiple_of(cluster);
    if longer > end {
        image.put(SIZE_AT, longer);
        let chain = image.open(Mode::Read).await;
        let shown = read(&chain, end, longer - end).await.unwrap();
        assert!(shown.iter().all(|byte| *byte == 0), "{about}: what was beyond the end shows");
    }
}

fn every_shape(sizes: (u64, u64)) {
    for (cluster_bytes, refcount_bits) in [(512, 64), (4096, 64), (64 << 10, 16)] {
        let wish = ImageWish {
            cluster_bytes: Some(cluster_bytes),
            refcount_bits: Some(refcount_bits),
            ..ImageWish::default()
        };
        scenario(1, |world| {
            let wish = &wish;
            async move { cut_after_each(&world, wish, sizes).await }
        });
    }
}

#[test]
fn disks_that_get_shorter_survive_a_cut_after_every_operation() {
    every_shape((4 * MIB, MIB));
}

/// Entries beyond the new end name the first free cluster, which a copy of a table may get, or a
/// table. What is before the end is kept, whatever becomes of the shrink.
#[test]
fn entries_beyond_the_end_that_name_anything_take_nothing_from_the_rest() {
    const ENTRY_FLAG: u64 = 1 << 63;
    // So that there is a second L1 entry: one table is of 2 MiB.
    let wish = ImageWish { cluster_bytes: Some(4096), ..ImageWish::default() };
    scenario(1, |world| {
        let wish = &wish;
        async move {
            for (place, in_l1) in (0..24).flat_map(|place| [(place, false), (place, true)]) {
                let world = World::new(world.seed() + place);
                let image = Plain::new(&world, wish, 4 * MIB).await;
                let chain = image.open(Mode::Write).await;
                write(&chain, 0, 7, 12 << 12).await.unwrap();
                chain.close().await.unwrap();
                drop(chain);
                let named = (place * 4096) | ENTRY_FLAG;
                // Data that is named twice is freed once, and its bytes may be gone.
                if (0..12).any(|index| image.word(image.l2() + index * 8) == named) {
                    continue;
                }
                image.put(if in_l1 { image.l1() + 8 } else { image.l2() + 400 * 8 }, named);
                image.put(image.l2() + 500 * 8, (23 * 4096) | ENTRY_FLAG);
                let mut resizer = Resizer::open(Arc::new(world.clone()), &Plain::top()).await;
                if let Ok(resizer) = &mut resizer {
                    let _ = resizer.resize(MIB).await;
                }
                drop(resizer);
                let about = format!("cluster {place} is named, in the L1 table: {in_l1}");
                let chain = image.open(Mode::Read).await;
                let shown = read(&chain, 0, 12 << 12).await.unwrap();
                assert!(shown.iter().all(|byte| *byte == 7), "{about}");
            }
        }
    });
}

#[test]
fn disks_that_get_longer_survive_a_cut_after_every_operation() {
    every_shape((4 * MIB, 12 * MIB));
}

#[test]
fn disks_that_end_in_the_middle_of_a_cluster_survive_a_cut_after_every_operation() {
    every_shape((4 * MIB, 3 * MIB - 512));
}

/// The story: zeros up to the end of the disk, which lies in the middle of a cluster, took that
/// cluster for a whole one. Meanwhile the disk grew, and a write to the new part of it was lost.
#[test]
fn zeros_up_to_the_old_end_spare_what_is_written_behind_it_once_the_disk_grew() {
    const END: u64 = MIB + 4096;
    scenario(60, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), END).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, MIB, 7, 4096).await.unwrap();
        chain.close().await.unwrap();
        drop(chain);
        let chain = image.open(Mode::Write).await;
        // So that writes to what is there go straight to their place.
        write(&chain, MIB, 7, 512).await.unwrap();
        let zeroes = async {
            mica_rt::sleep(Duration::from_micros(world.random_below(400))).await;
            let how = Zeroes { may_unmap: world.random_below(2) == 0, fast: false };
            chain.write_zeroes(range(512 << 10, END - (512 << 10)), how).await
        };
        let grow = async {
            mica_rt::sleep(Duration::from_micros(world.random_below(400))).await;
            chain.resize(2 * MIB).await?;
            write(&chain, END, 9, 512).await
        };
        let both: [LocalFuture<'_, Result<()>>; 2] = [Box::pin(zeroes), Box::pin(grow)];
        mica_rt::join_all(both).await.into_iter().collect::<Result<()>>().unwrap();
        assert_eq!(read(&chain, END, 512).await.unwrap(), [9; 512]);
        assert_eq!(read(&chain, MIB, 4096).await.unwrap(), [0; 4096]);
        chain.close().await.unwrap();
        image.expect_sound().await;
    });
}

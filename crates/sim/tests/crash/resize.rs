//! Disks that get longer and shorter while the power goes: what is left has the old length or the
//! new one, and the part common to both is intact.

use crate::plain::{Plain, read, write};
use mica_block::{Disk as _, Manage as _};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::resize::Resizer;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{Loss, World, scenario};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
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

#[test]
fn disks_that_get_longer_survive_a_cut_after_every_operation() {
    every_shape((4 * MIB, 12 * MIB));
}

#[test]
fn disks_that_end_in_the_middle_of_a_cluster_survive_a_cut_after_every_operation() {
    every_shape((4 * MIB, 3 * MIB - 512));
}

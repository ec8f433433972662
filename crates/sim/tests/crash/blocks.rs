//! Refcount blocks that are made in the background while a guest writes, and the power goes, or the
//! process dies, at each step.

use crate::plain::{Plain, read, write};
use mica_block::{Disk as _, Manage as _, Result};
use mica_qcow2::Chain;
use mica_qcow2_tools::create::ImageWish;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{Loss, World, scenario};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Bytes of a write, eight clusters.
const WRITE: u64 = 4096;
/// Number of writes: to four regions of 32 KiB.
const WRITES: u64 = 32;

/// An image of clusters of 512 bytes with counts of 64 bits: a block counts 64 clusters.
async fn begin(world: &World) -> (Plain, Chain) {
    let wish =
        ImageWish { cluster_bytes: Some(512), refcount_bits: Some(64), ..ImageWish::default() };
    let image = Plain::new(world, &wish, MIB).await;
    let chain = image.open(Mode::Write).await;
    (image, chain)
}

/// A guest that flushes after each so many of its writes, or never. Counts the acknowledged writes.
async fn work(chain: &Chain, flush_each: Option<u64>, acknowledged: &Cell<u64>) -> Result<()> {
    for number in 0..WRITES {
        write(chain, number * WRITE, 7, usize::try_from(WRITE).unwrap()).await?;
        acknowledged.set(number + 1);
        if flush_each.is_some_and(|each| number % each == each - 1) {
            chain.flush().await?;
        }
    }
    Ok(())
}

/// How many blocks the table names.
fn blocks(image: &Plain) -> usize {
    let entries = (0..64).map(|entry| image.word(image.refcount_table() + entry * 8));
    entries.filter(|entry| *entry != 0).count()
}

async fn cut_after_each(seed: u64, flush_each: Option<u64>) {
    for loss in Loss::ALL {
        for operations in 1.. {
            let world = World::new(seed * 1000 + operations);
            let about = format!("cut after {operations}, losing {loss:?}, {flush_each:?}");
            let (image, chain) = begin(&world).await;
            world.cut_power_after(operations, loss);
            let acknowledged = Cell::new(0);
            let ended = until_power_cut(&world, work(&chain, flush_each, &acknowledged)).await;
            world.keep_power();
            if let Some(done) = ended {
                done.unwrap();
                chain.close().await.unwrap();
                drop(chain);
                image.expect_sound().await;
                assert!(blocks(&image) > 8, "blocks are made for regions that are not in use");
                break;
            }
            drop(chain);
            image.expect_uncorrupted(&about).await;
            let chain = image.open(Mode::Write).await;
            work(&chain, None, &acknowledged).await.unwrap();
            chain.close().await.unwrap();
            drop(chain);
            image.expect_uncorrupted(&about).await;
        }
    }
}

#[test]
fn blocks_that_are_made_ahead_survive_a_cut_after_every_operation() {
    for flush_each in [None, Some(5)] {
        scenario(1, |world| async move { cut_after_each(world.seed(), flush_each).await });
    }
}

#[test]
fn killed_while_blocks_are_made_ahead_a_writer_has_lost_and_leaked_nothing() {
    scenario(1, |world| async move {
        for (step, flush_each) in (0..).zip([None, Some(3)].into_iter().cycle()) {
            let world = World::new(world.seed() * 1000 + step);
            let about = format!("killed at step {step}");
            let (image, chain) = begin(&world).await;
            let (dying, armed) = (world.clone(), Rc::new(Cell::new(true)));
            let still = Rc::clone(&armed);
            mica_rt::spawn(async move {
                mica_rt::sleep(Duration::from_micros(step * 41)).await;
                if still.get() {
                    dying.kill();
                }
            });
            let acknowledged = Cell::new(0);
            let ended = until_power_cut(&world, work(&chain, flush_each, &acknowledged)).await;
            armed.set(false);
            drop(chain);
            if let Some(done) = ended {
                return done.unwrap();
            }
            let chain = image.open(Mode::Write).await;
            let shown = read(&chain, 0, acknowledged.get() * WRITE).await.unwrap();
            assert!(shown.iter().all(|byte| *byte == 7), "{about}: a write was acknowledged");
            chain.close().await.unwrap();
            drop(chain);
            image.expect_sound().await;
        }
    });
}

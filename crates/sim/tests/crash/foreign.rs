//! Another program writes an image whose writer was killed, and leaves the name of the log as it
//! is: QEMU does so if it opens an image for reading and reopens it for writing, to commit into it.

use crate::plain::{Plain, read, write};
use mica_block::{Disk as _, Manage as _};
use mica_qcow2_tools::create::ImageWish;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{World, scenario};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// The disk has three parts: what was flushed first, what is written after that, and what other
/// programs write.
const PART: u64 = 8 * MIB;
const BLOCK: u64 = 4096;
const FLUSHED: u8 = 1;
const WRITTEN: u8 = 7;
const FOREIGN: u8 = 9;

fn wish_at_random(world: &World) -> ImageWish {
    ImageWish {
        cluster_bytes: Some(4096 << world.random_below(6)),
        refcount_bits: Some(1 << world.random_below(6)),
        ..ImageWish::default()
    }
}

fn block_at_random(world: &World, part: u64) -> u64 {
    part * PART + world.random_below(PART / BLOCK) * BLOCK
}

/// Kills its server after at most `micros`, unless it is done earlier.
fn kill_within(world: &World, micros: u64) {
    let (there, life) = (world.clone(), Duration::from_micros(1 + world.random_below(micros)));
    let before = world.cuts();
    mica_rt::spawn(async move {
        mica_rt::sleep(life).await;
        if there.cuts() == before {
            there.kill();
        }
    });
}

/// A guest writes, and flushes at times, until its server is killed. Returns where its writes were
/// acknowledged.
async fn write_and_die(world: &World, image: &Plain) -> Vec<u64> {
    let chain = image.open(Mode::Write).await;
    write(&chain, 0, FLUSHED, 4096).await.unwrap();
    chain.flush().await.unwrap();
    let mut done = Vec::new();
    let (before, flush_one_in) = (world.cuts(), 6 + 80 * world.random_below(2));
    kill_within(world, 20_000);
    let work = async {
        loop {
            let at = block_at_random(world, 1);
            if write(&chain, at, WRITTEN, 4096).await.is_ok() && world.cuts() == before {
                done.push(at);
            }
            if world.random_below(flush_one_in) == 0 {
                let _ = chain.flush().await;
            }
        }
    };
    let ended: Option<()> = until_power_cut(world, work).await;
    assert!(ended.is_none());
    done
}

/// The story: mica served an image and was killed; `qemu-img commit` wrote into the image, which
/// still named its log; the log was applied over what QEMU had written, and two guest ranges then
/// shared clusters.
#[test]
fn log_is_not_applied_over_what_another_program_wrote() {
    scenario(60, |world| async move {
        let image = Plain::new(&world, &wish_at_random(&world), 3 * PART).await;
        write_and_die(&world, &image).await;
        if world.random_below(4) == 0 {
            // The process that takes over is killed, too.
            kill_within(&world, 1500);
            let _ = until_power_cut(&world, image.open(Mode::Write)).await;
            world.kill();
        }
        let elsewhere = image.in_another_world();
        let chain = elsewhere.open(Mode::Write).await;
        let places: Vec<_> =
            (0..1 + world.random_below(40)).map(|_| block_at_random(&world, 2)).collect();
        for at in &places {
            write(&chain, *at, FOREIGN, 4096).await.unwrap();
        }
        chain.close().await.unwrap();
        drop(chain);
        image.become_as(&elsewhere);
        let only_reads = world.random_below(2) == 0;
        for mode in [Mode::Read, Mode::Write].into_iter().skip(usize::from(!only_reads)) {
            let chain = image.open(mode).await;
            assert_eq!(read(&chain, 0, BLOCK).await.unwrap(), [FLUSHED; 4096]);
            for at in &places {
                assert_eq!(read(&chain, *at, BLOCK).await.unwrap(), [FOREIGN; 4096], "{at}");
            }
            if mode == Mode::Write {
                for _ in 0..20 {
                    let at = block_at_random(&world, 1);
                    write(&chain, at, WRITTEN, 4096).await.unwrap();
                }
                chain.close().await.unwrap();
            }
        }
        image.expect_uncorrupted("after another program wrote").await;
        let chain = image.open(Mode::Read).await;
        for at in &places {
            assert_eq!(read(&chain, *at, BLOCK).await.unwrap(), [FOREIGN; 4096], "{at}");
        }
    });
}

/// A writer is killed, and so is each process that takes over: the log matches what each of them
/// left.
#[test]
fn log_is_trusted_after_a_takeover_that_was_killed() {
    scenario(40, |world| async move {
        let image = Plain::new(&world, &wish_at_random(&world), 3 * PART).await;
        let done = write_and_die(&world, &image).await;
        for _ in 0..4 {
            kill_within(&world, 1500);
            let _ = until_power_cut(&world, image.open(Mode::Write)).await;
            world.kill();
        }
        for mode in [Mode::Read, Mode::Write] {
            let chain = image.open(mode).await;
            for at in &done {
                assert_eq!(read(&chain, *at, BLOCK).await.unwrap(), [WRITTEN; 4096], "{at}");
            }
            if mode == Mode::Write {
                chain.close().await.unwrap();
            }
        }
        image.expect_uncorrupted("after the takeovers").await;
    });
}

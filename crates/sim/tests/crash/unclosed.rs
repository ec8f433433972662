//! Frozen layers whose writer was killed before it closed them, or lost its power: whoever opens
//! the chain for writing closes them, and is interrupted while doing so, too.

use crate::kept::{DISK, Kept, MIB, Step};
use crate::plain::{Plain, write};
use crate::pushing::{make_overlay, mark_of};
use mica_block::{
    Disk as _, ErrorKind, Images as _, LocalFuture, Manage as _, ManageBitmaps as _, Result,
};
use mica_qcow2::read_header;
use mica_sim::crash::{Mode, loss_at_random, until_power_cut};
use mica_sim::{Loss, World, scenario};
use mica_units::{GuestOffset, GuestRange};
use std::path::{Path, PathBuf};

/// Where the autoclear bits are in a header.
const AUTOCLEAR_AT: u64 = 88;

const PUSHED: [Step; 4] =
    [Step::Write(5 * MIB), Step::Push, Step::Write(20 * MIB), Step::Write(70 * MIB)];
const MERGED: [Step; 5] =
    [Step::Push, Step::Write(5 * MIB), Step::Write(20 * MIB), Step::Commit, Step::Write(70 * MIB)];

/// The autoclear bits of the image at `path` that QEMU does not know.
async fn unknown_bits(world: &World, path: &Path) -> u64 {
    let store = world.open(path).unwrap().store;
    read_header(&*store).await.unwrap().autoclear.unknown
}

/// The layer that is written.
fn top(world: &World) -> PathBuf {
    match world.identify(&mark_of(&Plain::top())) {
        Ok(_) => Kept::above(),
        Err(_) => Plain::top(),
    }
}

/// Opens the chain, writes to it, and closes it, unless it is killed.
async fn use_once(kept: &Kept, top: &Path) -> Result<()> {
    let chain = kept.open(top, Mode::Write).await?;
    write(&chain, 6 * MIB, 3, 512).await?;
    chain.close().await
}

async fn kill_after_each(world: &World, kind: (u64, &[Step]), stride: u64) {
    let (cluster_bytes, steps) = kind;
    let seed = world.seed();
    let (mut unclosed, mut is_done) = (0, false);
    for operations in (1 + seed % stride..).step_by(usize::try_from(stride).unwrap()) {
        let world = World::new(seed * 1000 + operations);
        let about = format!("{kind:?}, killed after {operations}");
        let kept = Kept::new(&world, cluster_bytes, 4096).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        let before = kept.places(&chain).await;
        world.kill_after(operations);
        is_done |= until_power_cut(&world, kept.work(&chain, steps)).await.is_some();
        drop(chain);
        world.keep_power();
        let top = top(&world);
        if top != Plain::top() && unknown_bits(&world, &Plain::top()).await != 0 {
            unclosed += 1;
        }
        world.kill_after(1 + world.random_below(12));
        let _ = until_power_cut(&world, use_once(&kept, &top)).await;
        world.keep_power();
        let chain = kept.open(&top, Mode::Write).await.unwrap();
        if top != Plain::top() {
            kept.expect_settled(&Plain::top(), &about).await;
            kept.work(&chain, &[Step::Commit]).await.expect(&about);
        } else {
            kept.work(&chain, &[]).await.expect(&about);
        }
        drop(chain);
        kept.expect_settled(&top, &about).await;
        kept.expect_settled(&Plain::top(), &about).await;
        kept.expect_true(&top, &before, &about).await;
        kept.image.expect_uncorrupted(&about).await;
        if is_done {
            break;
        }
    }
    assert!(unclosed > 0, "{kind:?}: no kill left a frozen layer unclosed");
}

#[test]
fn frozen_layer_is_closed_after_a_kill_at_any_step_of_a_snapshot() {
    scenario(2, |world| async move { kill_after_each(&world, (4096, &PUSHED), 3).await });
}

#[test]
fn base_of_a_merge_is_closed_after_a_kill_at_any_step() {
    scenario(2, |world| async move { kill_after_each(&world, (65536, &MERGED), 4).await });
}

/// The power goes while a layer is frozen and closed, and again while the next process closes it.
async fn cut_after_each(seed: u64, loss: Loss, stride: u64) {
    let mut unclosed = 0;
    for operations in (1 + seed % stride..).step_by(usize::try_from(stride).unwrap()) {
        let world = World::new(seed * 1000 + operations);
        let about = format!("cut after {operations}, losing {loss:?}");
        let kept = Kept::new(&world, 4096, 4096).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        let before = kept.places(&chain).await;
        world.cut_power_after(operations, loss);
        let ended = until_power_cut(&world, kept.work(&chain, &PUSHED)).await;
        drop(chain);
        world.keep_power();
        let top = top(&world);
        if top != Plain::top() && unknown_bits(&world, &Plain::top()).await != 0 {
            unclosed += 1;
        }
        kept.expect_true(&top, &before, &about).await;
        for _ in 0..2 {
            world.cut_power_after(1 + world.random_below(16), loss_at_random(&world));
            let _ = until_power_cut(&world, use_once(&kept, &top)).await;
            world.keep_power();
            kept.expect_true(&top, &before, &about).await;
        }
        use_once(&kept, &top).await.expect(&about);
        kept.expect_settled(&top, &about).await;
        kept.expect_settled(&Plain::top(), &about).await;
        kept.expect_true(&top, &before, &about).await;
        kept.image.expect_uncorrupted(&about).await;
        if ended.is_some() {
            break;
        }
    }
    assert!(unclosed > 0, "no cut left a frozen layer unclosed, losing {loss:?}");
}

#[test]
fn frozen_layer_is_closed_after_power_cuts_at_any_step_of_a_snapshot() {
    for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
        scenario(1, |world| async move { cut_after_each(world.seed(), loss, 5).await });
    }
}

/// A snapshot whose process dies before it closes the frozen layer.
async fn left_unclosed(world: &World) -> Kept {
    for operations in 1.. {
        let world = World::new(world.seed());
        let kept = Kept::new(&world, 4096, 4096).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        world.kill_after(operations);
        let ended = until_power_cut(&world, kept.work(&chain, &[Step::Write(5 * MIB), Step::Push]));
        assert!(ended.await.is_none(), "it is killed before the layer is closed");
        drop(chain);
        world.keep_power();
        if top(&world) != Plain::top() && unknown_bits(&world, &Plain::top()).await != 0 {
            return kept;
        }
    }
    unreachable!("the loop has no end")
}

#[test]
fn two_chains_that_are_opened_at_once_over_an_unclosed_layer_both_open() {
    scenario(4, |world| async move {
        let kept = left_unclosed(&world).await;
        let world = kept.image.world.clone();
        let other = Kept::above().with_file_name("other.qcow2");
        make_overlay(&world, &other, &Plain::top(), DISK).await.unwrap();
        let of = |path: PathBuf| -> LocalFuture<'_, Result<()>> {
            let kept = &kept;
            Box::pin(async move { use_once(kept, &path).await })
        };
        let both = mica_rt::join_all([of(Kept::above()), of(other)]).await;
        both.into_iter().collect::<Result<()>>().unwrap();
        kept.expect_settled(&Plain::top(), "two chains").await;
    });
}

#[test]
fn who_only_reads_leaves_a_frozen_layer_as_it_is() {
    scenario(1, |world| async move {
        let kept = left_unclosed(&world).await;
        let world = &kept.image.world;
        let bits = unknown_bits(world, &Plain::top()).await;
        drop(kept.open(&Kept::above(), Mode::Read).await.unwrap());
        assert_eq!(unknown_bits(world, &Plain::top()).await, bits);
    });
}

#[test]
fn layer_that_somebody_else_has_open_stays_unclosed_and_its_chain_opens() {
    scenario(1, |world| async move {
        let kept = left_unclosed(&world).await;
        let world = &kept.image.world;
        let bits = unknown_bits(world, &Plain::top()).await;
        let held = world.open_writable(&Plain::top()).unwrap();
        use_once(&kept, &Kept::above()).await.unwrap();
        assert_eq!(unknown_bits(world, &Plain::top()).await, bits);
        drop(held);
        use_once(&kept, &Kept::above()).await.unwrap();
        kept.expect_settled(&Plain::top(), "later").await;
    });
}

#[test]
fn bitmaps_stay_inconsistent_if_another_program_wrote_after_the_kill() {
    scenario(1, |world| async move {
        let kept = left_unclosed(&world).await;
        kept.image.put(AUTOCLEAR_AT, 1);
        use_once(&kept, &Kept::above()).await.unwrap();
        let chain = kept.open(&Kept::above(), Mode::Read).await.unwrap();
        let whole = GuestRange::new(GuestOffset::ZERO, DISK).unwrap();
        let error = chain.dirty("fine", whole).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    });
}

/// An overlay was made on an image whose writer had died with writes in its log: it shows the image
/// without them, and always will.
#[test]
fn layer_whose_log_has_more_than_its_file_stays_as_it_is() {
    scenario(4, |world| async move {
        let kept = Kept::new(&world, 4096, 4096).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        write(&chain, 5 * MIB, 9, 512).await.unwrap();
        chain.flush().await.unwrap();
        write(&chain, 20 * MIB, 9, 8192).await.unwrap();
        drop(chain);
        world.kill();
        make_overlay(&world, &Kept::above(), &Plain::top(), DISK).await.unwrap();
        let bits = unknown_bits(&world, &Plain::top()).await;
        assert_ne!(bits, 0);
        let chain = kept.open(&Kept::above(), Mode::Write).await.unwrap();
        assert_eq!(unknown_bits(&world, &Plain::top()).await, bits);
        let error = kept.work(&chain, &[Step::Commit]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert_eq!(unknown_bits(&world, &Plain::top()).await, bits);
    });
}

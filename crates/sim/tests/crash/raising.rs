//! Frozen layers go up into the one above them, and the power goes after any operation: every layer
//! shows what it showed, also if they differ in length, and what was changed is dirty.

use crate::chain::FOLDER;
use crate::plain::{Plain, read, write};
use crate::pushing::{Marks, make_overlay};
use mica_block::{
    Disk as _, LocalFuture, Manage as _, ManageBitmaps as _, ManageChain as _, MergeControl,
    MergeProgress, Merged, RaiseLayers, Zeroes,
};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::recover::repair_for_opening;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{Loss, World, scenario};
use mica_units::{GuestOffset, GuestRange};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const DISK: u64 = 1 << 20;
/// A bitmap that the base has had since it was empty.
const BITMAP: &str = "changed";

/// Goes on to its end.
struct Steady;

impl MergeControl for Steady {
    fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        Box::pin(std::future::ready(ControlFlow::Continue(())))
    }
}

fn layers() -> Vec<PathBuf> {
    let others = ["one", "two", "three"];
    let others = others.map(|name| Path::new(FOLDER).join(name).with_extension("qcow2"));
    [Plain::top()].into_iter().chain(others).collect()
}

async fn open(world: &World, path: &Path, mode: Mode) -> Chain {
    let options = ChainOptions {
        cache: MapCache::new(CACHE_BYTES_MIN),
        writable: mode == Mode::Write,
        repair: Some(repair_for_opening),
        ..ChainOptions::default()
    };
    Chain::open(Arc::new(world.clone()), path, &options).await.unwrap()
}

async fn everything(chain: &Chain) -> Vec<u8> {
    read(chain, 0, chain.geometry().len).await.unwrap()
}

/// Whatever has been written is dirty, if the chain has the bitmap.
async fn expect_dirty(chain: &Chain, about: &str) {
    let (shown, len) = (everything(chain).await, chain.geometry().len);
    let mut at = 0;
    while at < len {
        let range = GuestRange::new(GuestOffset::new(at), len - at).unwrap();
        for (len, is_dirty) in chain.dirty(BITMAP, range).await.unwrap() {
            let [from, to] = [at, at + len].map(|at| usize::try_from(at).unwrap());
            let is_zero = shown[from..to].iter().all(|byte| *byte == 0);
            assert!(is_dirty || is_zero, "{about}: {from} to {to} has changed");
            at += len;
        }
    }
}

/// Data, zeros, and what is given back, in parts of clusters and across them.
async fn change(world: &World, chain: &Chain) {
    let sectors = chain.geometry().len / 512;
    for _ in 0..8 {
        let sector = world.random_below(sectors);
        let count = (1 + world.random_below(200)).min(sectors - sector);
        let range = GuestRange::new(GuestOffset::new(sector * 512), count * 512).unwrap();
        match world.random_below(5) {
            0 => {
                let how = Zeroes { may_unmap: true, fast: false };
                chain.write_zeroes(range, how).await.unwrap();
            }
            1 => chain.discard(range).await.unwrap(),
            _ => {
                let byte = u8::try_from(1 + world.random_below(255)).unwrap();
                let len = usize::try_from(range.len()).unwrap();
                write(chain, sector * 512, byte, len).await.unwrap();
            }
        }
    }
    chain.flush().await.unwrap();
}

/// A chain of four layers, which may have a bitmap, and differ in length, and what each of them
/// shows.
async fn chain(world: &World, (has_bitmap, grows): (bool, bool)) -> (Chain, Vec<Vec<u8>>) {
    let cluster_bytes = 512 << world.random_below(8);
    let wish = ImageWish { cluster_bytes: Some(cluster_bytes), ..ImageWish::default() };
    Plain::new(world, &wish, DISK).await;
    let layers = layers();
    if has_bitmap {
        let add = BitmapAction::Add(Some(4096));
        edit_bitmap(world, &layers[0], BITMAP, vec![add]).await.unwrap();
    }
    let chain = open(world, &layers[0], Mode::Write).await;
    let mut shown = Vec::new();
    for pair in layers.windows(2) {
        change(world, &chain).await;
        shown.push(everything(&chain).await);
        make_overlay(world, &pair[1], &pair[0], chain.geometry().len).await.unwrap();
        chain.push(&pair[1], &Marks::of(world, &pair[0]), None).await.unwrap();
        if grows {
            let more = 512 * world.random_below(400);
            chain.resize(chain.geometry().len + more).await.unwrap();
        }
    }
    change(world, &chain).await;
    shown.push(everything(&chain).await);
    (chain, shown)
}

async fn cut_after_each(seed: u64, loss: Loss, stride: u64) {
    let layers = layers();
    for operations in (1 + seed % stride..).step_by(usize::try_from(stride).unwrap()) {
        let world = World::new(seed * 1000 + operations);
        let base = [None, Some(&*layers[0])][usize::try_from(world.random_below(2)).unwrap()];
        let kind = (world.random_below(2) == 0, world.random_below(2) == 0);
        let about = format!("down to {base:?}, {kind:?}, cut after {operations}, losing {loss:?}");
        let (chain, shown) = chain(&world, kind).await;
        world.cut_power_after(operations, loss);
        let wanted = RaiseLayers { into: &layers[2], base };
        let ended = until_power_cut(&world, chain.raise(wanted, &Steady)).await;
        if let Some(raised) = &ended {
            let Ok(Merged::Done { dropped, .. }) = raised else { panic!("{about}: {raised:?}") };
            let from = usize::from(base.is_some());
            assert_eq!(*dropped, layers[from..2], "{about}");
            assert_eq!(chain.layer_paths().len(), 4 - dropped.len(), "{about}");
            assert!(everything(&chain).await == shown[3], "{about}");
            if kind.0 {
                expect_dirty(&chain, &about).await;
            }
        }
        drop(chain);
        world.keep_power();
        for (layer, shown) in layers.iter().zip(&shown) {
            let chain = open(&world, layer, Mode::Read).await;
            assert!(everything(&chain).await == *shown, "{about}: {}", layer.display());
        }
        if ended.is_some() {
            return;
        }
        // The next process raises them again.
        let chain = open(&world, &layers[3], Mode::Write).await;
        chain.raise(wanted, &Steady).await.unwrap();
        change(&world, &chain).await;
        let top = everything(&chain).await;
        chain.close().await.unwrap();
        drop(chain);
        if kind.0 {
            expect_dirty(&open(&world, &layers[3], Mode::Read).await, &about).await;
        }
        for (layer, shown) in layers[2..].iter().zip([&shown[2], &top]) {
            let chain = open(&world, layer, Mode::Read).await;
            assert!(everything(&chain).await == *shown, "{about}, again: {}", layer.display());
        }
    }
}

#[test]
fn layers_show_what_they_did_whenever_the_power_goes() {
    for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
        scenario(3, |world| async move {
            cut_after_each(world.seed(), loss, 3).await;
        });
    }
}

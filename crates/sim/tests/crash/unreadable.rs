//! Clusters that cannot be read, as what is in them was damaged: an error of the requests that need
//! them, and of nothing else.

use crate::chain::FOLDER;
use crate::plain::{Plain, read, write};
use mica_block::{
    Images as _, LocalFuture, Manage as _, ManageChain as _, MergeControl, MergeProgress,
    RaiseLayers,
};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_sim::{World, scenario};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CLUSTER: u64 = 64 << 10;
const CLUSTERS: usize = 16;
const DISK: u64 = CLUSTER * CLUSTERS as u64;
/// The byte that the base has, where it is not damaged.
const SOUND: u8 = 0x41;

/// An image of compressed clusters, the first of which is damaged.
async fn damaged(world: &World) -> Plain {
    let wish = ImageWish { cluster_bytes: Some(CLUSTER), ..ImageWish::default() };
    let image = Plain::packed(world, &wish, CLUSTERS, SOUND).await;
    // The address of a compressed cluster of 64 KiB has 54 bits.
    let at = usize::try_from(image.word(image.l2()) & ((1 << 54) - 1)).unwrap();
    // No block of a compressed stream begins so.
    world.change(Plain::top(), |file| file[at] = u8::MAX);
    image
}

/// Makes an overlay of the image at `beneath`; returns where it is.
async fn overlay(world: &World, name: &str, beneath: &Path, cluster_bytes: u64) -> PathBuf {
    let path = Path::new(FOLDER).join(name);
    let wish = ImageWish {
        extended_l2: Some(false),
        cluster_bytes: Some(cluster_bytes),
        backing_name: Some(beneath.file_name().unwrap().to_owned()),
        backing_format: Some("qcow2".to_owned()),
        ..ImageWish::default()
    };
    world.put(&path, Vec::new());
    let image = world.open_writable(&path).unwrap().store;
    create(wish.plan(DISK).unwrap(), Stores { image: &*image, data: None }).await.unwrap();
    path
}

async fn open(world: &World, path: &Path) -> Chain {
    let options = ChainOptions {
        cache: MapCache::new(CACHE_BYTES_MIN),
        writable: true,
        ..ChainOptions::default()
    };
    Chain::open(Arc::new(world.clone()), path, &options).await.unwrap()
}

/// Whether the image at `path` says that it is corrupt.
fn is_marked_corrupt(world: &World, path: &Path) -> bool {
    world.inspect(path, |file| file[79] & 2 != 0)
}

/// Checks that the disk of `chain`, whose uppermost layer is at `path`, goes on, also after the
/// process dies, which has not flushed.
async fn goes_on(world: &World, chain: Chain, path: &Path) {
    assert!(chain.latch().is_none(), "{:?}", chain.latch());
    write(&chain, 2 * CLUSTER, 9, 4096).await.unwrap();
    assert_eq!(chain.weakness(), None);
    assert!(!is_marked_corrupt(world, path));
    drop(chain);
    world.kill();
    let chain = open(world, path).await;
    for (at, byte) in [(CLUSTER, 7), (2 * CLUSTER, 9), (2 * CLUSTER + 4096, SOUND)] {
        assert_eq!(read(&chain, at, 4096).await.unwrap(), [byte; 4096], "at {at:#x}");
    }
    chain.close().await.unwrap();
}

/// The story: the copy of what a write left of its cluster failed, as the base was damaged there.
/// The layer that was written was marked as corrupt, its log was removed, and the disk ended.
#[test]
fn write_beside_a_damaged_cluster_fails_alone() {
    for is_beneath in [true, false] {
        scenario(4, |world| async move {
            let image = damaged(&world).await;
            let path = match is_beneath {
                true => overlay(&world, "above.qcow2", &Plain::top(), CLUSTER).await,
                false => Plain::top(),
            };
            drop(image);
            let chain = open(&world, &path).await;
            write(&chain, CLUSTER, 7, 4096).await.unwrap();
            write(&chain, 4096, 8, 4096).await.unwrap_err();
            read(&chain, 0, 4096).await.unwrap_err();
            goes_on(&world, chain, &path).await;
        });
    }
}

/// What a write leaves of its cluster is read at once, with what it replaces in between: whether
/// that can be read does not matter.
#[test]
fn write_over_what_cannot_be_read_replaces_it() {
    scenario(4, |world| async move {
        let small = ImageWish { cluster_bytes: Some(4096), ..ImageWish::default() };
        let image = Plain::packed(&world, &small, 16 * CLUSTERS, SOUND).await;
        // The address of a compressed cluster of 4 KiB has 58 bits.
        let entry = image.word(image.l2() + 3 * 8);
        let at = usize::try_from(entry & ((1 << 58) - 1)).unwrap();
        world.change(Plain::top(), |file| file[at] = u8::MAX);
        drop(image);
        let path = overlay(&world, "above.qcow2", &Plain::top(), CLUSTER).await;
        let chain = open(&world, &path).await;
        read(&chain, 3 * 4096, 4096).await.unwrap_err();
        write(&chain, 2 * 4096, 8, 4096).await.unwrap_err();
        write(&chain, 3 * 4096, 8, 4096).await.unwrap();
        let mut wanted = read(&chain, CLUSTER, CLUSTER).await.unwrap();
        wanted[3 * 4096..4 * 4096].fill(8);
        assert_eq!(read(&chain, 0, CLUSTER).await.unwrap(), wanted);
        write(&chain, CLUSTER, 7, 4096).await.unwrap();
        goes_on(&world, chain, &path).await;
    });
}

struct Steadily;

impl MergeControl for Steadily {
    fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        Box::pin(std::future::ready(ControlFlow::Continue(())))
    }
}

/// A layer with smaller clusters goes up: the rest of the cluster that it becomes a part of is
/// copied, too.
#[test]
fn merge_over_a_damaged_cluster_fails_alone() {
    for is_raised in [true, false] {
        scenario(4, |world| async move {
            let image = damaged(&world).await;
            drop(image);
            let leaving = overlay(&world, "leaving.qcow2", &Plain::top(), 4096).await;
            let chain = open(&world, &leaving).await;
            write(&chain, 4096, 8, 4096).await.unwrap();
            chain.close().await.unwrap();
            drop(chain);
            let into = overlay(&world, "into.qcow2", &leaving, CLUSTER).await;
            let path = match is_raised {
                true => overlay(&world, "above.qcow2", &into, CLUSTER).await,
                false => into.clone(),
            };
            let (chain, base) = (open(&world, &path).await, Plain::top());
            write(&chain, CLUSTER, 7, 4096).await.unwrap();
            let layers = RaiseLayers { into: &into, base: Some(&base) };
            let merged = match is_raised {
                true => chain.raise(layers, &Steadily).await,
                false => chain.stream(Some(&base), &Steadily).await,
            };
            merged.unwrap_err();
            assert!(!is_marked_corrupt(&world, &into));
            goes_on(&world, chain, &path).await;
        });
    }
}

//! Generated chains of random shape in the simulated world, read by several tasks at once with the
//! smallest caches, while indexes are built and sidecars and disks fail: every byte is judged.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot continue")]
#![expect(clippy::cast_possible_truncation, reason = "disks of a few MiB")]

use mica_block::{Disk, Images, Result};
use mica_gen::owner::OwnerMap;
use mica_gen::{ChainSpec, Distribution, Feature, Features, generate};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, IndexUse, MapCache};
use mica_rt::join_all;
use mica_sim::{ReadFault, World, scenario};
use mica_units::{GuestOffset, GuestRange};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

const EIO: i32 = 5;

struct Generated {
    layers: Vec<PathBuf>,
    owners: OwnerMap,
}

/// A chain of random shape, put in the world long ago.
fn generated(world: &World) -> Generated {
    let folder = tempfile::tempdir().unwrap();
    let mut spec = ChainSpec::new(folder.path());
    spec.layers = 1 + world.random_below(12) as u32;
    spec.cluster_bytes = 512 << world.random_below(9);
    let sectors = (4 << 11) + world.random_below(12 << 11);
    // One in four is larger, with less in it.
    let times = if world.random_below(4) == 0 { 3 } else { 1 };
    spec.disk_bytes = sectors * times * 512;
    spec.fill = [0.02, 0.2, 0.6][world.random_below(3) as usize] / times as f64;
    spec.distribution = match world.random_below(2) {
        0 => Distribution::Uniform,
        _ => Distribution::NewestHeavy,
    };
    spec.seed = world.random_below(u64::MAX);
    spec.features = match world.random_below(2) {
        0 => Features::all(),
        _ => Feature::ALL.iter().copied().filter(|_| world.random_below(2) == 0).collect(),
    };
    let manifest = generate(&spec, |_| {}).unwrap();
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_owned();
        world.put(Path::new("/chain").join(name), std::fs::read(&path).unwrap());
    }
    world.pass_time(std::time::Duration::from_secs(3600));
    let layers = manifest.layer.iter().map(|layer| Path::new("/chain").join(&layer.file));
    Generated { layers: layers.collect(), owners: manifest.load_owners(folder.path()).unwrap() }
}

async fn open(world: &World, generated: &Generated) -> Arc<Chain> {
    let images: Arc<dyn Images> = Arc::new(world.clone());
    let cache_bytes = CACHE_BYTES_MIN << (4 * world.random_below(3));
    let options = ChainOptions {
        cache: MapCache::new(cache_bytes),
        index: IndexUse::Read,
        ..ChainOptions::default()
    };
    Arc::new(Chain::open(images, generated.layers.last().unwrap(), &options).await.unwrap())
}

async fn build(chain: &Chain) -> Result<usize> {
    chain.build_index(&mut |_| ControlFlow::Continue(())).await
}

async fn read(disk: &dyn Disk, start: u64, len: u64) -> Result<Vec<u8>> {
    let range = GuestRange::new(GuestOffset::new(start), len).unwrap();
    mica_sim::read(disk, range).await
}

/// Reads a range that starts and ends anywhere, and judges it together with the rest of the sectors
/// in which it starts and ends: content is known per sector.
async fn judge(disk: &dyn Disk, owners: &OwnerMap, start: u64, len: u64) -> Result<()> {
    const SECTOR: u64 = 512;
    let first = start - start % SECTOR;
    let end = (start + len).next_multiple_of(SECTOR);
    let mut bytes = read(disk, first, start - first).await?;
    bytes.extend(read(disk, start, len).await?);
    bytes.extend(read(disk, start + len, end - (start + len)).await?);
    owners.verify(&bytes, first).unwrap();
    Ok(())
}

/// Reads from several tasks at once; returns how many reads failed.
async fn read_at_random(world: &World, disk: &dyn Disk, owners: &OwnerMap) -> usize {
    let reader = async |_| {
        let mut failed = 0;
        for _ in 0..12 {
            let start = world.random_below(disk.geometry().len);
            let most = [600, 70_000, 3 << 20][world.random_below(3) as usize];
            let len = 1 + world.random_below(most.min(disk.geometry().len - start));
            failed += usize::from(judge(disk, owners, start, len).await.is_err());
        }
        failed
    };
    join_all((0..5).map(reader)).await.into_iter().sum()
}

/// Reads at random while `other` runs.
async fn read_meanwhile(
    world: &World,
    chain: &Chain,
    owners: &OwnerMap,
    other: impl Future<Output = ()>,
) {
    let reading = async { assert_eq!(read_at_random(world, chain, owners).await, 0) };
    let both: [Pin<Box<dyn Future<Output = ()> + '_>>; 2] = [Box::pin(reading), Box::pin(other)];
    join_all(both).await;
}

#[test]
fn random_chain_is_right_while_and_after_its_index_is_built() {
    scenario(15, |world| async move {
        let generated = generated(&world);
        let chain = open(&world, &generated).await;
        let building = async { assert!(build(&chain).await.is_ok()) };
        read_meanwhile(&world, &chain, &generated.owners, building).await;
        let reopened = open(&world, &generated).await;
        assert_eq!(reopened.indexed_layers(), generated.layers.len() - 1);
        assert_eq!(read_at_random(&world, &*reopened, &generated.owners).await, 0);
    });
}

/// Sidecars are damaged under a chain that uses them, while it is read and while they are repaired.
#[test]
fn random_chain_is_right_while_its_sidecars_are_damaged_and_repaired() {
    scenario(15, |world| async move {
        let generated = generated(&world);
        let chain = open(&world, &generated).await;
        build(&chain).await.unwrap();
        let frozen = &generated.layers[..generated.layers.len() - 1];
        let spoil = || {
            for layer in frozen.iter().filter(|_| world.random_below(3) == 0) {
                match world.random_below(4) {
                    0 => drop(world.flip_sidecar_bit(layer)),
                    1 => {
                        world.change_sidecar(layer, |bytes| bytes.truncate(bytes.len() / 2));
                    }
                    2 => {
                        let number = 1 + world.random_below(6);
                        world.inject_sidecar(layer, ReadFault::FailNth(number, EIO));
                    }
                    _ => {
                        let stale = world.sidecar(&frozen[0]).unwrap_or_default();
                        world.change_sidecar(layer, |bytes| *bytes = stale);
                    }
                }
            }
        };
        spoil();
        let chain = open(&world, &generated).await;
        let mending = async {
            for _ in 0..3 {
                build(&chain).await.unwrap();
                spoil();
            }
        };
        read_meanwhile(&world, &chain, &generated.owners, mending).await;
        build(&chain).await.unwrap();
        let reopened = open(&world, &generated).await;
        assert_eq!(read_at_random(&world, &*reopened, &generated.owners).await, 0);
    });
}

/// A failing disk gives errors, never wrong bytes, and the errors leave no trace.
#[test]
fn random_chain_on_a_failing_disk_is_right_or_fails_and_recovers() {
    scenario(15, |world| async move {
        let generated = generated(&world);
        let chain = open(&world, &generated).await;
        for layer in &generated.layers {
            let number = 1 + world.random_below(8);
            world.inject(layer, ReadFault::FailNth(number, EIO));
        }
        let building = async { drop(build(&chain).await) };
        let reading = async {
            read_at_random(&world, &*chain, &generated.owners).await;
        };
        let both: [Pin<Box<dyn Future<Output = ()> + '_>>; 2] =
            [Box::pin(reading), Box::pin(building)];
        join_all(both).await;
        for layer in &generated.layers {
            world.heal(layer);
        }
        assert_eq!(read_at_random(&world, &*chain, &generated.owners).await, 0);
        build(&chain).await.unwrap();
        let reopened = open(&world, &generated).await;
        assert_eq!(reopened.indexed_layers(), generated.layers.len() - 1);
        assert_eq!(read_at_random(&world, &*reopened, &generated.owners).await, 0);
    });
}

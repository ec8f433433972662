//! The read path of chains in the simulated world: every byte is judged, whatever the disks do,
//! whatever the sidecars say.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot continue")]

use mica_block::{Disk, Images, Result};
use mica_gen::owner::OwnerMap;
use mica_gen::{ChainSpec, Features, generate};
use mica_qcow2::{Chain, ChainOptions};
use mica_rt::join_all;
use mica_sim::{Latency, ReadFault, World, read, scenario};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

const DISK_BYTES: u64 = 4 << 20;
const LAYERS: u32 = 12;
const EIO: i32 = 5;

/// A generated chain, loaded from the real disk.
struct Generated {
    /// From the base; including data files of layers.
    files: Vec<(PathBuf, Vec<u8>)>,
    layers: Vec<PathBuf>,
    owners: OwnerMap,
}

impl Generated {
    fn new(seed: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut spec = ChainSpec::new(folder.path());
        spec.layers = LAYERS;
        spec.disk_bytes = DISK_BYTES;
        spec.cluster_bytes = 4096;
        spec.fill = 0.6;
        spec.seed = seed;
        spec.features = Features::all();
        let manifest = generate(&spec, |_| {}).unwrap();
        let owners = manifest.load_owners(folder.path()).unwrap();
        let in_world = |name: &str| Path::new("/chain").join(name);
        let layers = manifest.layer.iter().map(|layer| in_world(&layer.file)).collect();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            files.push((in_world(name), std::fs::read(&path).unwrap()));
        }
        Self { files, layers, owners }
    }

    fn put_in(&self, world: &World) {
        for (path, bytes) in &self.files {
            world.put(path, bytes.clone());
        }
        for layer in &self.layers {
            let latency = [Latency::Cached, Latency::Flash, Latency::Remote];
            let choice = usize::try_from(world.random_below(3)).unwrap();
            world.set_latency(layer, latency[choice]);
        }
        // What was written long ago may be sealed.
        world.pass_time(std::time::Duration::from_secs(3600));
    }

    fn top(&self) -> &Path {
        self.layers.last().unwrap()
    }

    async fn open(&self, world: &World) -> Result<Arc<Chain>> {
        let images: Arc<dyn Images> = Arc::new(world.clone());
        Chain::open(images, self.top(), &ChainOptions::default()).await.map(Arc::new)
    }

    /// A layer drawn at random, the active one excluded.
    fn frozen_layer(&self, world: &World) -> &Path {
        let frozen = self.layers.len() as u64 - 1;
        &self.layers[usize::try_from(world.random_below(frozen)).unwrap()]
    }
}

/// The same chain for all tests, and another one of the same shape.
fn chain() -> &'static Generated {
    static CHAIN: OnceLock<Generated> = OnceLock::new();
    CHAIN.get_or_init(|| Generated::new(1))
}

fn other_chain() -> &'static Generated {
    static CHAIN: OnceLock<Generated> = OnceLock::new();
    CHAIN.get_or_init(|| Generated::new(2))
}

fn random_range(world: &World, disk_bytes: u64) -> GuestRange {
    let sectors = disk_bytes / SECTOR_BYTES;
    let start = world.random_below(sectors);
    let len = 1 + world.random_below((sectors - start).min(200));
    GuestRange::new(GuestOffset::new(start * SECTOR_BYTES), len * SECTOR_BYTES).unwrap()
}

/// Reads from several tasks at once and judges every byte. Returns how many reads failed.
async fn read_at_random(world: &World, disk: &dyn Disk, owners: &OwnerMap) -> usize {
    let reader = async |_| {
        let mut failed = 0;
        for _ in 0..10 {
            let range = random_range(world, disk.geometry().len);
            match read(disk, range).await {
                Ok(bytes) => owners.verify(&bytes, range.start().bytes()).unwrap(),
                Err(_) => failed += 1,
            }
        }
        failed
    };
    join_all((0..8).map(reader)).await.into_iter().sum()
}

async fn read_all(disk: &dyn Disk, owners: &OwnerMap) {
    const STEP: u64 = 256 << 10;
    let len = disk.geometry().len;
    for start in (0..len).step_by(256 << 10) {
        let range = GuestRange::new(GuestOffset::new(start), STEP.min(len - start)).unwrap();
        owners.verify(&read(disk, range).await.unwrap(), start).unwrap();
    }
}

async fn build_index(chain: &Chain) -> Result<usize> {
    chain.build_index(&mut |_| ControlFlow::Continue(())).await
}

/// Without this the others would prove nothing.
#[test]
fn judge_finds_the_bytes_of_another_chain() {
    scenario(1, |world| async move {
        chain().put_in(&world);
        let opened = chain().open(&world).await.unwrap();
        let range = GuestRange::new(GuestOffset::ZERO, 1 << 20).unwrap();
        let bytes = read(&*opened, range).await.unwrap();
        chain().owners.verify(&bytes, 0).unwrap();
        other_chain().owners.verify(&bytes, 0).unwrap_err();
    });
}

#[test]
fn every_byte_is_right_while_the_index_is_built() {
    scenario(60, |world| async move {
        chain().put_in(&world);
        let opened = chain().open(&world).await.unwrap();
        let builder = async {
            build_index(&opened).await.unwrap();
            0
        };
        let reader = read_at_random(&world, &*opened, &chain().owners);
        let both: [std::pin::Pin<Box<dyn Future<Output = usize>>>; 2] =
            [Box::pin(builder), Box::pin(reader)];
        assert_eq!(join_all(both).await, [0, 0]);
        let reopened = chain().open(&world).await.unwrap();
        assert_eq!(reopened.indexed_layers(), chain().layers.len() - 1);
        read_all(&*reopened, &chain().owners).await;
    });
}

/// A flipped bit in a sidecar, a truncated one, another layer's sidecar in its place, none at all:
/// all of these cost only time.
#[test]
fn damaged_sidecar_is_never_trusted_and_never_an_error() {
    scenario(150, |world| async move {
        chain().put_in(&world);
        build_index(&chain().open(&world).await.unwrap()).await.unwrap();
        for _ in 0..=world.random_below(4) {
            let layer = chain().frozen_layer(&world);
            match world.random_below(5) {
                0 => drop(world.flip_sidecar_bit(layer)),
                1 => {
                    let len = world.sidecar(layer).map_or(0, |bytes| bytes.len());
                    let kept = usize::try_from(world.random_below(len as u64 + 1)).unwrap();
                    world.change_sidecar(layer, |bytes| bytes.truncate(kept));
                }
                2 => {
                    let twin = world.sidecar(chain().frozen_layer(&world)).unwrap_or_default();
                    world.change_sidecar(layer, |bytes| *bytes = twin);
                }
                3 => world.sidecars().remove(layer).unwrap(),
                _ => drop(world.inject_sidecar(layer, ReadFault::FailAll(EIO))),
            }
        }
        let opened = chain().open(&world).await.unwrap();
        assert_eq!(read_at_random(&world, &*opened, &chain().owners).await, 0);
        read_all(&*opened, &chain().owners).await;
    });
}

/// Bits flip under a chain that has its sidecars open already.
#[test]
fn sidecar_damaged_while_in_use_is_never_trusted_and_never_an_error() {
    scenario(100, |world| async move {
        chain().put_in(&world);
        build_index(&chain().open(&world).await.unwrap()).await.unwrap();
        let opened = chain().open(&world).await.unwrap();
        for _ in 0..30 {
            world.flip_sidecar_bit(chain().frozen_layer(&world));
        }
        read_all(&*opened, &chain().owners).await;
    });
}

/// Layers written since their index was built, with every way in which file times can lie.
#[test]
fn index_of_layers_that_changed_is_never_trusted() {
    scenario(60, |world| async move {
        chain().put_in(&world);
        build_index(&chain().open(&world).await.unwrap()).await.unwrap();
        let keep_mtime = world.random_below(2) == 0;
        for (path, bytes) in &other_chain().files {
            let bytes = bytes.clone();
            match (chain().files.iter().any(|(old, _)| old == path), keep_mtime) {
                (true, true) => world.change_keeping_mtime(path, |old| *old = bytes),
                (true, false) => world.change(path, |old| *old = bytes),
                (false, _) => world.put(path, bytes),
            }
        }
        let opened = other_chain().open(&world).await.unwrap();
        read_all(&*opened, &other_chain().owners).await;
    });
}

#[test]
fn failing_disk_gives_errors_and_never_wrong_bytes() {
    scenario(150, |world| async move {
        chain().put_in(&world);
        if world.random_below(2) == 0 {
            build_index(&chain().open(&world).await.unwrap()).await.unwrap();
        }
        let opened = chain().open(&world).await.unwrap();
        for layer in &chain().layers {
            world.inject(layer, ReadFault::SpikeOneIn(10));
            if world.random_below(2) == 0 {
                let number = 1 + world.random_below(20);
                world.inject(layer, ReadFault::FailNth(number, EIO));
            }
        }
        read_at_random(&world, &*opened, &chain().owners).await;
        for layer in &chain().layers {
            world.heal(layer);
        }
        // An error must not stay in a cache.
        assert_eq!(read_at_random(&world, &*opened, &chain().owners).await, 0);
        read_all(&*opened, &chain().owners).await;
    });
}

/// A reader that goes away in the middle of a walk must not take the map's slices with it.
#[test]
fn reader_that_gives_up_does_not_affect_the_others() {
    scenario(100, |world| async move {
        chain().put_in(&world);
        let opened = chain().open(&world).await.unwrap();
        let hasty = async |_| {
            for _ in 0..10 {
                let range = random_range(&world, DISK_BYTES);
                let patience = std::time::Duration::from_micros(world.random_below(3000));
                if let Ok(bytes) = mica_rt::timeout(patience, read(&*opened, range)).await {
                    chain().owners.verify(&bytes.unwrap(), range.start().bytes()).unwrap();
                }
            }
        };
        let patient = read_at_random(&world, &*opened, &chain().owners);
        let hasty = async {
            join_all((0..8).map(hasty)).await;
            0
        };
        let both: [std::pin::Pin<Box<dyn Future<Output = usize>>>; 2] =
            [Box::pin(hasty), Box::pin(patient)];
        assert_eq!(join_all(both).await, [0, 0]);
    });
}

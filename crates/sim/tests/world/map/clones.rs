//! Chains that have their frozen layers in common, with one cache.

use super::model::{ModelLayer, build, compare, path, put};
use super::random::{random_chain, random_layer};
use mica_block::{Images, Manage};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache, Sharing};
use mica_sim::{World, scenario};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const CLONES: usize = 3;

async fn open(world: &World, path: &Path, options: &ChainOptions) -> Chain {
    let images: Arc<dyn Images> = Arc::new(world.clone());
    Chain::open(images, path, options).await.unwrap()
}

fn options(world: &World) -> ChainOptions {
    let cache = MapCache::new(CACHE_BYTES_MIN << (4 * world.random_below(3)));
    ChainOptions { cache, ..ChainOptions::default() }
}

/// Clones of one base, with whatever active layers.
struct Clones {
    world: World,
    /// The frozen layers; while a clone is judged, its active one, too.
    layers: Vec<ModelLayer>,
    actives: Vec<Option<ModelLayer>>,
}

impl Clones {
    fn new(world: World, frozen: usize) -> Self {
        let layers = random_chain(&world, frozen);
        put(&world, &layers);
        let below = layers.last().unwrap();
        let name = path(frozen - 1, below).file_name().unwrap().to_str().unwrap().to_owned();
        let format = if name.ends_with("raw") { "raw" } else { "qcow2" };
        let active = |clone: usize| {
            let backing = Some((name.clone(), format));
            let layer = random_layer(&world, below.len.max(1 << 20), backing);
            world.put(Self::path(clone), layer.image.bytes().to_vec());
            Some(layer)
        };
        let actives = (0..CLONES).map(active).collect();
        world.pass_time(Duration::from_secs(60));
        Self { world, layers, actives }
    }

    fn path(clone: usize) -> String {
        format!("/chain/clone{clone}.qcow2")
    }

    async fn open(&self, clone: usize, options: &ChainOptions) -> Chain {
        open(&self.world, Path::new(&Self::path(clone)), options).await
    }

    async fn compare(&mut self, clone: usize, chain: &Chain) {
        self.layers.push(self.actives[clone].take().unwrap());
        compare(chain, &self.layers).await;
        self.actives[clone] = self.layers.pop();
    }
}

#[test]
fn map_of_each_clone_is_what_a_naive_walk_of_it_finds() {
    scenario(120, |world| async move {
        let frozen = 1 + world.random_below(14) as usize;
        let (options, is_indexed) = (options(&world), world.random_below(2) == 0);
        let mut clones = Clones::new(world, frozen);
        let mut chains = Vec::new();
        for clone in 0..CLONES {
            chains.push(clones.open(clone, &options).await);
        }
        if is_indexed {
            // A table that is named twice gets no index; the map must still be right.
            drop(build(&chains[0], usize::MAX).await);
        }
        for _ in 0..2 {
            for (clone, chain) in chains.iter().enumerate() {
                clones.compare(clone, chain).await;
            }
        }
        // One goes, and comes back while the others stay.
        drop(chains.remove(0));
        let again = clones.open(0, &options).await;
        clones.compare(0, &again).await;
        clones.compare(1, &chains[0]).await;
    });
}

/// How many walks the first and the second of two clones of one base make, of which the second is
/// opened with this `sharing`.
async fn walks_of_two(world: World, sharing: Sharing) -> [u64; 2] {
    let cache = MapCache::new(16 << 20);
    let options = ChainOptions { cache, ..ChainOptions::default() };
    let of_second = ChainOptions { sharing, ..options.clone() };
    let mut clones = Clones::new(world, 20);
    // The one that ends last sees all slices that the other one has.
    let mut order = [0, 1];
    order.sort_by_key(|clone| std::cmp::Reverse(clones.actives[*clone].as_ref().unwrap().len));
    let both = [
        (order[0], clones.open(order[0], &options).await),
        (order[1], clones.open(order[1], &of_second).await),
    ];
    for (clone, chain) in &both {
        clones.compare(*clone, chain).await;
    }
    both.map(|(_, chain)| chain.map_stats().walks)
}

#[test]
fn second_clone_walks_no_layer_that_the_first_has_walked() {
    scenario(20, |world| async move {
        let walks = walks_of_two(world, Sharing::WithClones).await;
        assert!(walks[0] > 0 && walks[1] == 0, "{walks:?}");
    });
}

/// One that trusts no sidecars, or does not lock its files, believes nothing that others found.
#[test]
fn clone_that_is_alone_walks_its_layers_itself() {
    scenario(20, |world| async move {
        let walks = walks_of_two(world, Sharing::Alone).await;
        assert!(walks[0] > 0 && walks[1] > 0, "{walks:?}");
    });
}

/// What the first knows of the base may not be true of the one that the second sees.
#[test]
fn clone_that_is_opened_after_its_base_changed_shares_nothing() {
    scenario(100, |world| async move {
        let options = options(&world);
        let mut clones = Clones::new(world.clone(), 1 + world.random_below(10) as usize);
        let first = clones.open(0, &options).await;
        clones.compare(0, &first).await;
        let other = Clones::new(world, clones.layers.len());
        let Clones { layers, actives, .. } = other;
        (clones.layers, clones.actives) = (layers, actives);
        let second = clones.open(1, &options).await;
        clones.compare(1, &second).await;
    });
}

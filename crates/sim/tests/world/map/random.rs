//! Chains drawn at random.

use super::model::{Image, ModelLayer, SECTOR, build, compare, open, path, put, put_now, u64_at};
use mica_qcow2::IndexUse;
use mica_qcow2_format::{L1Entry, L2Entry, Version};
use mica_sim::{TinyImage, TinySpec, World, scenario};
use mica_units::HostOffset;

fn random_entry(world: &World, image: &mut TinyImage) -> L2Entry {
    let extended = image.l2().extended;
    match world.random_below(if extended { 6 } else { 4 }) {
        0 if image.l2().version == Version::V3 => L2Entry::Zero,
        1 if image.l2().version == Version::V3 => L2Entry::ZeroAllocated(image.allocate()),
        4.. => {
            let allocated = world.random_below(1 << 32) as u32;
            let zero = world.random_below(1 << 32) as u32 & !allocated;
            let host = Some(image.allocate());
            match world.random_below(3) {
                0 => L2Entry::Subclusters { host: None, allocated: 0, zero },
                _ => L2Entry::Subclusters { host, allocated, zero },
            }
        }
        _ => {
            let host = image.allocate();
            let bytes = image.l2().cluster_bits.bytes();
            let mark = [world.random_below(255) as u8 + 1];
            for at in (host.bytes()..host.bytes() + bytes).step_by(64) {
                image.put(at as usize, &mark);
            }
            L2Entry::Data(host)
        }
    }
}

/// Flips bits of tables, and puts random words in their place.
fn mutate(world: &World, image: &mut TinyImage, entries: &[usize]) {
    for _ in 0..world.random_below(4) {
        let l1_at = image.l1_at(world.random_below(image.l1_entries().max(1)));
        let at = match world.random_below(3) {
            0 if image.l1_entries() > 0 => l1_at,
            _ if !entries.is_empty() => {
                let second = if image.l2().extended { world.random_below(2) * 8 } else { 0 };
                entries[world.random_below(entries.len() as u64) as usize] + second as usize
            }
            _ => continue,
        };
        let old = u64_at(image.bytes(), at as u64);
        let new = match world.random_below(4) {
            0 => world.random_below(u64::MAX),
            1 => world.random_below(image.bytes().len() as u64),
            _ => old ^ 1 << world.random_below(64),
        };
        image.put(at, &new.to_be_bytes());
    }
}

pub(crate) fn random_layer(
    world: &World,
    disk_bytes: u64,
    backing: Option<(String, &'static str)>,
) -> ModelLayer {
    let version = if world.random_below(4) == 0 { Version::V2 } else { Version::V3 };
    let extended = version == Version::V3 && world.random_below(3) == 0;
    let cluster_bits =
        if extended { 14 + world.random_below(3) } else { 9 + world.random_below(9) };
    // Most layers have the same length; the others end anywhere.
    let len = match world.random_below(4) {
        0 => world.random_below(disk_bytes / SECTOR + 1) * SECTOR,
        1 => disk_bytes + world.random_below(64) * SECTOR,
        _ => disk_bytes,
    };
    let cluster_bits = cluster_bits as u32;
    let spec = TinySpec { cluster_bits, version, extended, disk_bytes: len, backing };
    let mut image = TinyImage::new(&spec);
    let clusters = len.div_ceil(1 << cluster_bits);
    let mut entries = Vec::new();
    for _ in 0..world.random_below(12) {
        if clusters == 0 {
            break;
        }
        let first = world.random_below(clusters);
        for cluster in first..clusters.min(first + 1 + world.random_below(7)) {
            if image.bytes().len() < 1 << 20 {
                let entry = random_entry(world, &mut image);
                entries.push(image.set(cluster, entry));
            }
        }
    }
    if world.random_below(2) == 0 {
        mutate(world, &mut image, &entries);
    }
    if world.random_below(16) == 0 {
        let kept = world.random_below(image.bytes().len() as u64).max(image.l1_at(0) as u64);
        image.bytes_mut().truncate(kept as usize);
    }
    ModelLayer { len, image: Image::Qcow2(image) }
}

pub(crate) fn random_chain(world: &World, layers: usize) -> Vec<ModelLayer> {
    let disk_bytes = (1 + world.random_below(20_000)) * SECTOR;
    let mut chain: Vec<ModelLayer> = Vec::new();
    for number in 0..layers {
        if number == 0 && layers > 1 && world.random_below(3) == 0 {
            let len = world.random_below(disk_bytes / SECTOR) * SECTOR;
            let bytes = (0..len).map(|at| (at / 64) as u8 | 1).collect();
            chain.push(ModelLayer { len, image: Image::Raw(bytes) });
            continue;
        }
        let backing = chain.last().map(|below| {
            let name = path(number - 1, below).file_name().unwrap().to_str().unwrap().to_owned();
            (name, if matches!(below.image, Image::Raw(_)) { "raw" } else { "qcow2" })
        });
        chain.push(random_layer(world, disk_bytes, backing));
    }
    chain
}

async fn judge(world: World, layers: usize) {
    let layers = random_chain(&world, layers);
    put(&world, &layers);
    let chain = open(&world, &layers, IndexUse::Read).await;
    if world.random_below(2) == 0 {
        compare(&chain, &layers).await;
    }
    let part = world.random_below(layers.len() as u64) as usize;
    // A table that is named twice gets no index; the map must still be right.
    drop(build(&chain, part).await);
    let reopened = open(&world, &layers, IndexUse::Read).await;
    compare(&reopened, &layers).await;
    drop(build(&chain, usize::MAX).await);
    let indexed = open(&world, &layers, IndexUse::Read).await;
    compare(&indexed, &layers).await;
    let unindexed = open(&world, &layers, IndexUse::Ignore).await;
    compare(&unindexed, &layers).await;
}

#[test]
fn map_of_a_chain_is_what_a_naive_walk_finds() {
    scenario(150, |world| async move {
        let layers = 1 + world.random_below(12) as usize;
        judge(world, layers).await;
    });
}

#[test]
fn map_of_a_long_chain_is_what_a_naive_walk_finds() {
    scenario(20, |world| async move {
        let layers = 66 + world.random_below(80) as usize;
        judge(world, layers).await;
    });
}

/// Gives a layer other entries, in place and in a file of the same length.
fn rewrite(world: &World, layer: &mut ModelLayer) {
    let Image::Qcow2(image) = &mut layer.image else { return };
    let clusters = layer.len.div_ceil(image.l2().cluster_bits.bytes());
    for _ in 0..5 {
        let cluster = world.random_below(clusters.max(1)).min(clusters.saturating_sub(1));
        let l1_at = image.l1_at(cluster >> image.l2().entries_bits());
        let bits = image.l2().cluster_bits;
        // Only where there is a table: a new one would make the file longer.
        let table = L1Entry(u64_at(image.bytes(), l1_at as u64)).decode(bits);
        let in_file = |at: HostOffset| at.bytes() + bits.bytes() <= image.bytes().len() as u64;
        if clusters == 0 || !table.is_ok_and(|table| table.is_some_and(in_file)) {
            continue;
        }
        let entry = match world.random_below(3) {
            0 => L2Entry::Unallocated,
            1 if image.l2().version == Version::V3 => L2Entry::Zero,
            _ => L2Entry::Data(HostOffset::new(bits.bytes() * world.random_below(8))),
        };
        image.set(cluster, entry);
    }
}

/// Layers that were changed between two openings, with every way in which file times can lie.
#[test]
fn index_of_a_layer_that_changed_is_never_trusted() {
    scenario(100, |world| async move {
        let count = 2 + world.random_below(8) as usize;
        let mut layers = random_chain(&world, count);
        put_now(&world, &layers);
        let is_long_ago = world.random_below(2) == 0;
        if is_long_ago {
            world.pass_time(std::time::Duration::from_secs(60));
        }
        let chain = open(&world, &layers, IndexUse::Read).await;
        drop(build(&chain, usize::MAX).await);
        for _ in 0..=world.random_below(2) {
            let number = world.random_below(count as u64) as usize;
            rewrite(&world, &mut layers[number]);
            let (name, bytes) = (path(number, &layers[number]), layers[number].image.bytes());
            match world.random_below(4) {
                0 => world.put(name, bytes.to_vec()),
                1 => world.change(name, |old| *old = bytes.to_vec()),
                // After a long time no file system gives the same time again.
                2 if !is_long_ago => world.change_within_tick(name, |old| *old = bytes.to_vec()),
                _ => world.change_keeping_mtime(name, |old| *old = bytes.to_vec()),
            }
        }
        let changed = open(&world, &layers, IndexUse::Read).await;
        compare(&changed, &layers).await;
        drop(build(&changed, usize::MAX).await);
        world.pass_time(std::time::Duration::from_secs(60));
        let indexed = open(&world, &layers, IndexUse::Read).await;
        compare(&indexed, &layers).await;
    });
}

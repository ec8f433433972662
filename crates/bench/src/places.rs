//! Places on a chain's disk that are written, in random order.

use crate::chains::Chain;
use anyhow::Result;
use mica_gen::Rng;
use mica_gen::owner::{Owner, OwnerMap};
use std::fs::{self, File};
use std::hint;
use std::path::Path;
use std::thread;

/// Bytes of a write.
const BLOCK_BYTES: usize = 4 << 10;
/// Each allocating write has its own stretch of this size: the largest cluster used.
const STRETCH_BYTES: u64 = 128 << 10;
/// Memory that is used before an allocating load: more than it writes to.
const TOUCHED_BYTES_MAX: usize = 6 << 30;
/// Places that are written repeatedly: 64 MiB, which the page cache holds.
const REWRITTEN_MAX: usize = 16 << 10;

/// Places where the active layer has data already: nothing is allocated.
pub(super) fn to_rewrite(chain: &Chain) -> Vec<u64> {
    let mut places = owned_by_active(&chain.owners, chain.layers);
    shuffle(&mut places, &mut Rng::new(1));
    places.truncate(REWRITTEN_MAX);
    places
}

/// Places of the active layer's own data.
pub(super) fn owned_by_active(owners: &OwnerMap, layers: u32) -> Vec<u64> {
    let is_active = |at: &u64| match owners.at(*at) {
        Owner::Data(layer) => u32::from(layer.as_u16()) + 1 == layers,
        _ => false,
    };
    let blocks = |unit: u64| (unit..unit + owners.unit_bytes()).step_by(BLOCK_BYTES);
    owners.data_units().filter(is_active).flat_map(blocks).collect()
}

/// One block in each stretch of the disk, in random order.
pub(super) fn one_in_each_stretch(disk_bytes: u64, seed: u32) -> Vec<u64> {
    let mut rng = Rng::new(u64::from(seed));
    let blocks = STRETCH_BYTES / BLOCK_BYTES as u64;
    let mut places: Vec<_> = (0..disk_bytes / STRETCH_BYTES)
        .map(|stretch| stretch * STRETCH_BYTES + rng.below(blocks) * BLOCK_BYTES as u64)
        .collect();
    shuffle(&mut places, &mut rng);
    places
}

fn shuffle(places: &mut [u64], rng: &mut Rng) {
    for last in (1..places.len()).rev() {
        let other = usize::try_from(rng.below(last as u64 + 1)).unwrap_or(last);
        places.swap(last, other);
    }
}

/// Makes a load that allocates independent of the ones before it. Writes out what they left in the
/// page cache, on the file system of `path`: otherwise a faster server has more of it in the later
/// ones, up to where the kernel makes every writer sleep (`vm.dirty_background_ratio`), and loses
/// by what it did before. And uses free memory once: a virtual machine may give it back to its host
/// (free page reporting of virtio-balloon), and then the first use of a page of a file costs 4.5
/// and not 0.75 µs (seen on Linux 6.18).
///
/// # Errors
/// If it cannot be opened, or not all is written.
pub(super) fn settle(path: &Path) -> Result<()> {
    rustix::fs::syncfs(File::open(path)?)?;
    let half = available_bytes().map_or(0, |bytes| bytes / 2).min(TOUCHED_BYTES_MAX);
    // Two threads: one takes seconds.
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| hint::black_box(vec![1_u8; half / 2]));
        }
    });
    Ok(())
}

/// Memory that programs can have without swapping.
fn available_bytes() -> Option<usize> {
    let all = fs::read_to_string("/proc/meminfo").ok()?;
    let line = all.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<usize>().ok()? << 10)
}

/// Drops `file` from the page cache. Made by long writes, it is cached in pieces of up to 2 MiB,
/// and for each write the kernel (ext4, Linux 6.18) examines every block of a piece: that would be
/// most of what is measured, for any server. A guest that fills its disk by small writes has small
/// ones.
///
/// # Errors
/// If it cannot be opened.
pub(super) fn forget_pages(file: &Path) -> Result<()> {
    let file = File::open(file)?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}

#[cfg(test)]
mod tests {
    use super::{STRETCH_BYTES, one_in_each_stretch};

    #[test]
    fn every_stretch_is_written_once_in_random_order() {
        let places = one_in_each_stretch(64 << 20, 3);
        let mut stretches: Vec<_> = places.iter().map(|place| place / STRETCH_BYTES).collect();
        assert!(!stretches.is_sorted());
        stretches.sort_unstable();
        assert_eq!(stretches, (0..512).collect::<Vec<_>>());
        assert!(places.iter().all(|place| place % 4096 == 0));
    }
}

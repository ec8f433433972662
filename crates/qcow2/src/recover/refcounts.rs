//! Refcounts that are mended where they stand.
//!
//! Nothing is allocated for it, so the order of writes does not matter: a refcount is set to the
//! number of references that durable tables have.

use super::{RepairMode, Repaired};
use crate::check::{Block, Counted};
use mica_block::{Result, Store, read_exact, write_all};
use mica_rt::Buf;
use mica_units::{HostOffset, SECTOR_BYTES};

/// How many refcounts are too high, and how many too low.
pub(super) async fn differences(store: &dyn Store, counted: &Counted) -> Result<Repaired> {
    let mut all = Repaired::default();
    let mut index = 0;
    while let Some(clusters) = clusters_of(counted, index) {
        let Repaired { leaks, corruptions } = match block_at(counted, index) {
            None => compare(counted, &[], clusters),
            Some(at) => compare(counted, &read_block(store, counted, at).await?, clusters),
        };
        all.leaks += leaks;
        all.corruptions += corruptions;
        index += 1;
    }
    Ok(all)
}

/// Sets the refcounts that differ, as far as `mode` goes and there are blocks for them.
pub(super) async fn correct(
    store: &dyn Store,
    counted: &Counted,
    mode: RepairMode,
) -> Result<Repaired> {
    let mut all = Repaired::default();
    let mut index = 0;
    while let Some(clusters) = clusters_of(counted, index) {
        if let Some(at) = block_at(counted, index) {
            let mut block = read_block(store, counted, at).await?;
            let (done, changed) = set(counted, &mut block, clusters, mode);
            if let Some((start, end)) = changed {
                let piece = Buf::from_slice(block.get(start..end).unwrap_or_default());
                write_all(store, piece, HostOffset::new(at + start as u64)).await?;
            }
            all.leaks += done.leaks;
            all.corruptions += done.corruptions;
        }
        index += 1;
    }
    Ok(all)
}

/// The clusters, first and end, that block `index` speaks of; `None` beyond the last cluster.
pub(super) fn clusters_of(counted: &Counted, index: u64) -> Option<(u64, u64)> {
    let bits = counted.refcounts.block_entries_bits();
    let count = counted.references.cluster_count();
    let first = index << bits;
    (first < count).then(|| (first, count.min((index + 1) << bits)))
}

/// Where block `index` is, if it is one in the file.
pub(super) fn block_at(counted: &Counted, index: u64) -> Option<u64> {
    match counted.refcounts.block(index) {
        Block::At(at) if at < counted.file_bytes => Some(at),
        _ => None,
    }
}

/// The first cluster from `first` on, before `end`, that has references.
pub(super) fn next_in_use(counted: &Counted, first: u64, end: u64) -> Option<u64> {
    let mut cluster = first;
    loop {
        cluster = counted.references.next_counted(cluster).filter(|&next| next < end)?;
        if counted.references.get(cluster) > 0 {
            return Some(cluster);
        }
        cluster += 1;
    }
}

async fn read_block(store: &dyn Store, counted: &Counted, at: u64) -> Result<Buf> {
    let bits = counted.refcounts.block_entries_bits() + counted.refcounts.width().order();
    // A cluster, at most 2^21 bytes.
    read_exact(store, HostOffset::new(at), 1 << (bits - 3)).await
}

fn compare(counted: &Counted, block: &[u8], (first, end): (u64, u64)) -> Repaired {
    let mut found = Repaired::default();
    for (number, cluster) in (first..end).enumerate() {
        let refcount = counted.refcounts.width().get(block, number).unwrap_or(0);
        let references = counted.references.get(cluster);
        found.leaks += u64::from(refcount > references);
        found.corruptions += u64::from(refcount < references);
    }
    found
}

/// Changes `block`; returns how much, and the bytes that changed in whole sectors.
fn set(
    counted: &Counted,
    block: &mut [u8],
    (first, end): (u64, u64),
    mode: RepairMode,
) -> (Repaired, Option<(usize, usize)>) {
    let width = counted.refcounts.width();
    let mut done = Repaired::default();
    let mut changed: Option<(usize, usize)> = None;
    for (number, cluster) in (first..end).enumerate() {
        let refcount = width.get(block, number).unwrap_or(0);
        let references = counted.references.get(cluster);
        let wanted = match mode {
            RepairMode::Leaks => refcount > references,
            RepairMode::All => refcount != references,
        };
        // References are counted as narrow as refcounts: they always fit.
        if !wanted || width.set(block, number, references).is_none() {
            continue;
        }
        done.leaks += u64::from(refcount > references);
        done.corruptions += u64::from(refcount < references);
        let byte = (number << width.order()) >> 3;
        changed = Some((changed.map_or(byte, |(start, _)| start), byte));
    }
    let sector = usize::try_from(SECTOR_BYTES).unwrap_or(usize::MAX);
    let sectors =
        changed.map(|(start, last)| (start - start % sector, last - last % sector + sector));
    (done, sectors)
}

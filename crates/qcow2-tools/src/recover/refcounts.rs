//! Refcounts that are corrected in place.
//!
//! This allocates nothing, so the order of writes does not matter: a refcount is set to the number
//! of references that durable tables hold.

use super::{RepairMode, Repaired};
use crate::check::{Block, Counted};
use mica_block::{Result, Store, read_exact, write_all};
use mica_rt::Buf;
use mica_units::{ClusterBits, HostCluster, HostOffset, SECTOR_BYTES};
use std::ops::Range;

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

/// Corrects the refcounts that differ, as far as `mode` permits and blocks exist.
pub(super) async fn correct(
    store: &dyn Store,
    counted: &Counted,
    mode: RepairMode,
) -> Result<Repaired> {
    let which = match mode {
        RepairMode::Leaks => Which::TooHigh,
        RepairMode::All => Which::Wrong,
    };
    rewrite(store, counted, which, &mut |_| {}).await
}

/// Which refcounts are changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    TooHigh,
    TooLow,
    /// All that differ, also of what nothing names beyond the end of the file.
    Wrong,
}

/// Changes refcounts to what was counted, as far as blocks exist; `freed` is called with each
/// cluster of the file that had a refcount and has none any more. Nothing is synced.
pub(crate) async fn rewrite(
    store: &dyn Store,
    counted: &Counted,
    which: Which,
    freed: &mut impl FnMut(HostCluster),
) -> Result<Repaired> {
    let mut all = Repaired::default();
    for index in 0..counted.refcounts.table_entries() {
        let in_file = clusters_of(counted, index);
        if in_file.is_none() && which != Which::Wrong {
            break;
        }
        let Some(at) = block_at(counted, index) else { continue };
        let mut block = read_block(store, counted, at).await?;
        let mut changed = None;
        if let Some(clusters) = in_file {
            let note = (&mut changed, &mut *freed);
            let done = set(counted, block.own_bytes(), clusters, which, note);
            all.leaks += done.leaks;
            all.corruptions += done.corruptions;
        }
        if which == Which::Wrong {
            clear_beyond(counted, block.own_bytes(), index, &mut changed);
        }
        if let Some((start, end)) = sectors(counted, changed) {
            let piece = Buf::from_slice(block.get(start..end).unwrap_or_default());
            write_all(store, piece, HostOffset::new(at + start as u64)).await?;
        }
    }
    Ok(all)
}

/// The clusters that block `index` covers; `None` beyond the last cluster.
pub(super) fn clusters_of(counted: &Counted, index: u64) -> Option<Range<HostCluster>> {
    let clusters = counted.refcounts.clusters_of(index);
    let last_end = counted.references.end();
    (clusters.start < last_end).then(|| clusters.start..last_end.min(clusters.end))
}

/// The place of block `index`, if it is valid and in the file.
pub(super) fn block_at(counted: &Counted, index: u64) -> Option<u64> {
    match counted.refcounts.block(index) {
        Block::At(at) if at < counted.file_bytes => Some(at),
        _ => None,
    }
}

/// The first cluster of these that has references.
pub(super) fn next_in_use(counted: &Counted, among: Range<HostCluster>) -> Option<HostCluster> {
    let mut cluster = among.start;
    loop {
        cluster = counted.references.next_counted(cluster).filter(|&next| next < among.end)?;
        if counted.references.get(cluster) > 0 {
            return Some(cluster);
        }
        cluster = cluster.saturating_add(1);
    }
}

/// Bytes in a cluster, at most 2^21.
pub(super) fn cluster_len(bits: ClusterBits) -> usize {
    1 << bits.bits()
}

async fn read_block(store: &dyn Store, counted: &Counted, at: u64) -> Result<Buf> {
    let len = cluster_len(counted.refcounts.cluster_bits());
    read_exact(store, HostOffset::new(at), len).await
}

fn compare(counted: &Counted, block: &[u8], clusters: Range<HostCluster>) -> Repaired {
    let mut found = Repaired::default();
    for (number, cluster) in clusters.start.up_to(clusters.end).enumerate() {
        let refcount = counted.refcounts.width().get(block, number).unwrap_or(0);
        let references = counted.references.get(cluster);
        found.leaks += u64::from(refcount > references);
        found.corruptions += u64::from(refcount < references);
    }
    found
}

/// The first and the last refcount of a block that changed.
type Changed = Option<(usize, usize)>;

/// Changes refcounts in `block`; returns how many. Notes which changed, and which clusters are free
/// now.
fn set(
    counted: &Counted,
    block: &mut [u8],
    clusters: Range<HostCluster>,
    which: Which,
    (changed, freed): (&mut Changed, &mut impl FnMut(HostCluster)),
) -> Repaired {
    let width = counted.refcounts.width();
    let mut done = Repaired::default();
    for (number, cluster) in clusters.start.up_to(clusters.end).enumerate() {
        let refcount = width.get(block, number).unwrap_or(0);
        let references = counted.references.get(cluster);
        let wanted = match which {
            Which::TooHigh => refcount > references,
            Which::TooLow => refcount < references,
            Which::Wrong => refcount != references,
        };
        // References are counted in the same width as refcounts: they always fit.
        if wanted && width.set(block, number, references).is_some() {
            done.leaks += u64::from(refcount > references);
            done.corruptions += u64::from(refcount < references);
            *changed = Some((changed.map_or(number, |(first, _)| first), number));
            if references == 0 {
                freed(cluster);
            }
        }
    }
    done
}

/// Clears the refcounts of clusters beyond the end of the file that nothing names: no check counts
/// them, but they would become leaks as soon as the file grows.
fn clear_beyond(counted: &Counted, block: &mut [u8], index: u64, changed: &mut Changed) {
    let width = counted.refcounts.width();
    let Range { start: block_first, end } = counted.refcounts.clusters_of(index);
    for cluster in counted.references.end().max(block_first).up_to(end) {
        // At most 2^24 refcounts.
        let number = usize::try_from(cluster.saturating_since(block_first)).unwrap_or(usize::MAX);
        let named =
            || counted.kept.beyond.at_or_after(cluster).is_some_and(|(at, _)| at <= cluster);
        if width.get(block, number).unwrap_or(0) > 0
            && !named()
            && width.set(block, number, 0).is_some()
        {
            *changed = Some((changed.map_or(number, |(first, _)| first.min(number)), number));
        }
    }
}

/// The bytes of a block, in whole sectors, that changed.
fn sectors(counted: &Counted, changed: Changed) -> Changed {
    let order = counted.refcounts.width().order();
    let sector = usize::try_from(SECTOR_BYTES).unwrap_or(usize::MAX);
    changed.map(|(first, last)| {
        let (start, last) = ((first << order) >> 3, (last << order) >> 3);
        (start - start % sector, last - last % sector + sector)
    })
}

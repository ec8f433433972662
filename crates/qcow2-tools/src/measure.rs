//! The length that a new image will have, counted as `qemu-img measure` does: never too small.

use crate::create::{ImagePlan, Preallocation};
use crate::layout::refcount_area;
use mica_block::{Disk, Result, Survey};
use mica_qcow2_format::{
    BITMAP_TABLE_ENTRY_BYTES, BitmapEntry, L1Entry, bitmap_bytes, bitmap_table_entries,
};
use mica_units::{ClusterBits, GuestOffset, GuestRange};

/// Fixed fields of an entry of the bitmap directory.
const BITMAP_ENTRY_BYTES: u64 = 24;

/// Lengths of a file that does not exist yet, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Measure {
    /// Needed for the content.
    pub required: u64,
    /// Needed once every cluster is written.
    pub fully_allocated: u64,
}

/// The length of an image of `plan` into which `data_bytes` of clusters are written.
pub fn measure(plan: &ImagePlan, data_bytes: u64) -> Measure {
    measure_besides(plan, data_bytes, 0)
}

/// The same, if the image gets `bitmaps` when it is complete, one after the other: with what counts
/// their clusters, and with the directories of those before. Each is there until the next one
/// counts, so that those of one length have two places by turns, and a longer one finds no room in
/// the places of shorter ones.
pub fn measure_with_bitmaps(plan: &ImagePlan, data_bytes: u64, bitmaps: &[BitmapEntry]) -> Measure {
    let bits = plan.l2.cluster_bits;
    let before = bitmaps.split_last().map_or(0, |(_, before)| directory_bytes(before));
    let before = bits.clusters_for(before);
    let all = bits.clusters_for(bitmaps_bytes(bitmaps, plan.size, bits));
    measure_besides(plan, data_bytes, all + before * before)
}

/// As [`measure`], for an image that gets `later` clusters when it is complete. What counts them
/// may be a longer table, which is written before the old one is freed.
fn measure_besides(plan: &ImagePlan, data_bytes: u64, later: u64) -> Measure {
    let bits = plan.l2.cluster_bits;
    let disk = plan.clusters();
    let l2_tables = disk.div_ceil(plan.l2.entries());
    let l1 = bits.clusters_for(l2_tables * L1Entry::BYTES as u64);
    let luks = plan.luks_place().map_or(0, |(_, len)| bits.clusters_for(len));
    let besides = 1 + l1 + luks + l2_tables + disk;
    let area_of = |clusters| refcount_area(plan.refcount_width, bits, clusters);
    let area = area_of(besides + later);
    let old = Some(area_of(besides).table).filter(|old| *old < area.table).unwrap_or(0);
    let all = besides + later + area.clusters() + old;
    let fully_allocated = bits.bytes_of(all);
    let disk_bytes = bits.bytes_of(disk);
    let data_bytes = match plan.preallocation {
        Preallocation::Off | Preallocation::Metadata => data_bytes,
        Preallocation::Falloc | Preallocation::Full => disk_bytes,
    };
    Measure { required: fully_allocated - disk_bytes + data_bytes, fully_allocated }
}

/// Bytes of the clusters of `bits` that hold something of `disk` other than zeros.
///
/// # Errors
/// Any failure to read the disk's map.
pub async fn data_bytes(disk: &dyn Disk, bits: ClusterBits) -> Result<u64> {
    let len = disk.geometry().len;
    let (mut total, mut counted_to) = (0, 0);
    let whole = GuestRange::new(GuestOffset::ZERO, len).expect("a disk");
    let mut survey = Survey::new(disk, whole);
    while let Some(extents) = survey.next().await? {
        for extent in extents.iter().filter(|extent| !extent.kind.reads_as_zero()) {
            let end = (extent.start.bytes() + extent.len).next_multiple_of(bits.bytes());
            let start = extent.start.bytes() - bits.offset_within(extent.start.bytes());
            total += end.saturating_sub(start.max(counted_to));
            counted_to = counted_to.max(end);
        }
    }
    Ok(total)
}

/// Bytes that a copy of the bitmaps of a disk of `disk_bytes` takes.
pub fn bitmaps_bytes(bitmaps: &[BitmapEntry], disk_bytes: u64, bits: ClusterBits) -> u64 {
    let whole = |bytes: u64| bits.bytes_of(bits.clusters_for(bytes));
    let tables = bitmaps.iter().map(|bitmap| {
        let data = bitmap_bytes(bitmap.granularity_bits, disk_bytes);
        let entries = bitmap_table_entries(bitmap.granularity_bits, disk_bytes, bits).get();
        whole(data) + whole(entries * BITMAP_TABLE_ENTRY_BYTES)
    });
    tables.sum::<u64>() + whole(directory_bytes(bitmaps))
}

fn directory_bytes(bitmaps: &[BitmapEntry]) -> u64 {
    let entries = bitmaps.iter();
    let entries = entries.map(|bitmap| BITMAP_ENTRY_BYTES + bitmap.name.len() as u64);
    entries.map(|bytes| bytes.next_multiple_of(8)).sum()
}

//! The length that a new image will have, counted as `qemu-img measure` does: never too small.

use crate::create::{ImagePlan, Preallocation};
use crate::layout::refcount_area;
use mica_block::{Disk, Result, Survey};
use mica_qcow2_format::{BitmapEntry, L1Entry};
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
    let bits = plan.l2.cluster_bits;
    let disk = plan.clusters();
    let l2_tables = disk.div_ceil(plan.l2.entries());
    let l1 = bits.clusters_for(l2_tables * L1Entry::BYTES as u64);
    let luks = plan.luks_place().map_or(0, |(_, len)| bits.clusters_for(len));
    let besides = 1 + l1 + luks + l2_tables + disk;
    let all = besides + refcount_area(plan.refcount_width, bits, besides).clusters();
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
    let cluster = bits.bytes();
    let mut directory = 0;
    let mut total = 0;
    for bitmap in bitmaps {
        let bytes = disk_bytes.div_ceil(1 << bitmap.granularity_bits).div_ceil(8);
        let clusters = bits.clusters_for(bytes);
        total += clusters * cluster + (clusters * 8).next_multiple_of(cluster);
        directory += (BITMAP_ENTRY_BYTES + bitmap.name.len() as u64).next_multiple_of(8);
    }
    total + directory.next_multiple_of(cluster)
}

//! How many clusters the refcounts of a file take, including the counts of these clusters.

use mica_qcow2_format::{RefcountTableEntry, RefcountWidth};
use mica_units::ClusterBits;

/// Clusters that hold refcounts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RefcountArea {
    /// Refcount blocks.
    pub blocks: u64,
    /// Clusters of the table that names them.
    pub table: u64,
}

impl RefcountArea {
    /// The total.
    pub fn clusters(self) -> u64 {
        self.blocks + self.table
    }
}

/// The needs of a file that has `clusters` other clusters.
pub fn refcount_area(width: RefcountWidth, bits: ClusterBits, clusters: u64) -> RefcountArea {
    let mut area = RefcountArea { blocks: 0, table: 0 };
    loop {
        let blocks = (clusters + area.clusters()).div_ceil(width.block_entries(bits));
        let table = bits.clusters_for(blocks * RefcountTableEntry::BYTES as u64);
        let next = RefcountArea { blocks, table };
        if next == area {
            return area;
        }
        area = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_is_counted_and_none_is_left_out() {
        for order in 0..=6 {
            let width = RefcountWidth::from_order(order).expect("valid");
            for bits in [9, 16, 21] {
                let bits = ClusterBits::new(bits).expect("valid");
                for clusters in [1, 2, 511, 512, 513, 100_000, 1 << 30] {
                    let area = refcount_area(width, bits, clusters);
                    let all = clusters + area.clusters();
                    assert!(area.blocks * width.block_entries(bits) >= all);
                    assert!((area.blocks - 1) * width.block_entries(bits) < all);
                    assert!(area.table * bits.bytes() >= area.blocks * 8);
                }
            }
        }
    }
}

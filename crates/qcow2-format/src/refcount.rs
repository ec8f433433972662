//! Refcounts: how wide they are, how they are stored in a block, and where the blocks are.

use super::corrupt;
use mica_block::Result;
use mica_units::{ClusterBits, HostCluster, HostOffset};

const OFFSET_MASK: u64 = 0xffff_ffff_ffff_fe00;
const RESERVED: u64 = 0x1ff;

/// The width of a refcount: 1, 2, 4, 8, 16, 32 or 64 bits. Kept as the exponent (`refcount_order`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RefcountWidth(u8);

impl RefcountWidth {
    /// 16 bits: what version 2 has, and the default of version 3.
    pub const DEFAULT: Self = Self(4);

    /// A width of `2^order` bits; `None` above 64.
    pub fn from_order(order: u32) -> Option<Self> {
        u8::try_from(order).ok().filter(|&order| order <= 6).map(Self)
    }

    /// The exponent.
    pub fn order(self) -> u32 {
        u32::from(self.0)
    }

    /// Bits of a refcount.
    pub fn bits(self) -> u32 {
        1 << self.0
    }

    /// The highest refcount.
    pub fn max(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// Refcounts in a block, which is one cluster, as a power of two.
    pub fn block_entries_bits(self, cluster_bits: ClusterBits) -> u32 {
        cluster_bits.bits() + 3 - self.order()
    }

    /// Refcounts in a block, which is one cluster.
    pub fn block_entries(self, cluster_bits: ClusterBits) -> u64 {
        1 << self.block_entries_bits(cluster_bits)
    }

    /// Index in the refcount table of the block that counts `cluster`.
    #[inline]
    pub fn block_of(self, cluster_bits: ClusterBits, cluster: HostCluster) -> u64 {
        cluster.number() >> self.block_entries_bits(cluster_bits)
    }

    /// Index in its block of the refcount of `cluster`.
    #[inline]
    pub fn index_of(self, cluster_bits: ClusterBits, cluster: HostCluster) -> u64 {
        cluster.number() & (self.block_entries(cluster_bits) - 1)
    }

    /// The first cluster that block `index` counts; the highest number where that leaves 64 bits.
    #[inline]
    pub fn first_of_block(self, cluster_bits: ClusterBits, index: u64) -> HostCluster {
        HostCluster::new(index.saturating_mul(self.block_entries(cluster_bits)))
    }

    /// Refcount number `index` of a block, or `None` beyond its end.
    pub fn get(self, block: &[u8], index: usize) -> Option<u64> {
        if self.0 < 3 {
            let (byte, shift) = self.place(index);
            let mask = (1 << self.bits()) - 1;
            return block.get(byte).map(|byte| u64::from(byte >> shift & mask));
        }
        let bytes = 1 << (self.0 - 3);
        let at = index.checked_mul(bytes)?;
        let entry = block.get(at..at.checked_add(bytes)?)?;
        Some(entry.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    /// Sets refcount number `index` of a block. `None`, and nothing is changed, beyond its end or
    /// if `value` is higher than [`Self::max`].
    #[must_use]
    pub fn set(self, block: &mut [u8], index: usize, value: u64) -> Option<()> {
        if value > self.max() {
            return None;
        }
        if self.0 < 3 {
            let (byte, shift) = self.place(index);
            let mask = ((1 << self.bits()) - 1) << shift;
            let to = block.get_mut(byte)?;
            *to = *to & !mask | u8::try_from(value).ok()? << shift;
            return Some(());
        }
        let bytes = 1 << (self.0 - 3);
        let at = index.checked_mul(bytes)?;
        let to = block.get_mut(at..at.checked_add(bytes)?)?;
        to.copy_from_slice(value.to_be_bytes().get(8 - bytes..)?);
        Some(())
    }

    /// Byte and shift of a refcount narrower than a byte; the first is in the lowest bits.
    fn place(self, index: usize) -> (usize, usize) {
        let in_byte_bits = 3 - self.0;
        (index >> in_byte_bits, (index & ((1 << in_byte_bits) - 1)) << self.0)
    }
}

/// An entry of the refcount table as it is stored in the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct RefcountTableEntry(pub u64);

impl RefcountTableEntry {
    /// Bytes of an entry.
    pub const BYTES: usize = 8;

    /// The entry for a refcount block at `block`.
    pub fn encode(block: HostOffset) -> Self {
        Self(block.bytes() & OFFSET_MASK)
    }

    /// Where the refcount block is, or `None` if there is none: all its refcounts are 0.
    ///
    /// # Errors
    /// `Corrupt` if the address is not a multiple of the cluster size.
    pub fn decode(self, cluster_bits: ClusterBits) -> Result<Option<HostOffset>> {
        let block = self.offset();
        if !block.is_aligned(cluster_bits.bytes()) {
            return Err(corrupt(format!(
                "refcount table entry {:#018x}: block offset {block} is not a multiple of the \
                 cluster size {}",
                self.0,
                cluster_bits.bytes()
            )));
        }
        Ok((block != HostOffset::ZERO).then_some(block))
    }

    /// The address in the entry, aligned or not.
    pub fn offset(self) -> HostOffset {
        HostOffset::new(self.0 & OFFSET_MASK)
    }

    /// Whether a bit that must be zero is set.
    pub fn has_reserved_bits(self) -> bool {
        self.0 & RESERVED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_gives_back_what_was_set_and_leaves_its_neighbours() {
        for order in 0..=6 {
            let width = RefcountWidth::from_order(order).expect("valid");
            let mut block = [0xffu8; 64];
            let count = 512 >> order;
            for index in 0..count {
                width.set(&mut block, index, 0).expect("in the block");
                assert_eq!(width.get(&block, index), Some(0));
                if index + 1 < count {
                    assert_eq!(width.get(&block, index + 1), Some(width.max()));
                }
            }
            width.set(&mut block, 1, 1).expect("in the block");
            assert_eq!(width.get(&block, 1), Some(1));
            assert_eq!(width.get(&block, 0), Some(0));
            assert_eq!(width.get(&block, count), None);
            assert_eq!(width.set(&mut block, count, 0), None);
        }
    }

    #[test]
    fn narrow_refcounts_start_in_the_lowest_bits() {
        let block = [0b1110_0100];
        let width = RefcountWidth::from_order(1).expect("valid");
        let all: Vec<_> = (0..4).filter_map(|index| width.get(&block, index)).collect();
        assert_eq!(all, [0, 1, 2, 3]);
    }

    #[test]
    fn refcount_above_the_maximum_is_refused() {
        let width = RefcountWidth::from_order(0).expect("valid");
        assert_eq!(width.set(&mut [0], 0, 2), None);
        assert_eq!(RefcountWidth::from_order(6).map(RefcountWidth::max), Some(u64::MAX));
        assert_eq!(RefcountWidth::from_order(7), None);
    }

    #[test]
    fn each_cluster_is_counted_by_the_block_of_its_region() {
        let bits = ClusterBits::new(16).expect("valid");
        let width = RefcountWidth::DEFAULT;
        let entries = width.block_entries(bits);
        for (number, block, index) in
            [(0, 0, 0), (entries - 1, 0, entries - 1), (entries, 1, 0), (3 * entries + 5, 3, 5)]
        {
            let cluster = HostCluster::new(number);
            assert_eq!(width.block_of(bits, cluster), block);
            assert_eq!(width.index_of(bits, cluster), index);
            assert_eq!(width.first_of_block(bits, block).saturating_add(index), cluster);
        }
        assert_eq!(width.first_of_block(bits, u64::MAX), HostCluster::new(u64::MAX));
    }

    #[test]
    fn unaligned_refcount_block_is_corrupt() {
        let bits = ClusterBits::new(16).expect("valid");
        assert!(RefcountTableEntry(0x7fff_fe00).decode(bits).is_err());
        assert_eq!(RefcountTableEntry(0).decode(bits).expect("none"), None);
        // QEMU masks the reserved bits when it reads.
        let entry = RefcountTableEntry(0x10001);
        assert_eq!(entry.decode(bits).expect("some"), Some(HostOffset::new(0x10000)));
        assert!(entry.has_reserved_bits());
    }
}

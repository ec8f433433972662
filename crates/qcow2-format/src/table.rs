//! Entries of L1 and L2 tables: what QEMU's `qcow2_get_cluster_type` and
//! `qcow2_get_subcluster_type` make of them.
//!
//! - I1. Reserved bits are ignored when an entry is read (QEMU masks them); only the check reports
//!   them.
//! - I2. Bit 62 (compressed) is tested before bit 0 (zeros): in a compressed entry bit 0 is part of
//!   the offset.
//! - I3. An address that is not a multiple of the cluster size never leaves this file.

use super::bits::COPIED;
use super::compressed::CompressedCluster;
use super::corrupt;
use super::header::Version;
use mica_block::{Error, ErrorKind, Result};
use mica_units::{ClusterBits, GuestCluster, GuestOffset, HostOffset};

/// Largest active L1 table.
pub const L1_BYTES_MAX: u64 = 32 << 20;

const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// Subclusters in a cluster of an image with extended L2 entries.
pub const SUBCLUSTER_COUNT: u32 = 32;

/// An entry of an L1 table as it is stored in the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct L1Entry(pub u64);

impl L1Entry {
    /// Bytes of an entry.
    pub const BYTES: usize = 8;

    /// The entry for an L2 table at `table`; `copied` says that its refcount is exactly one.
    pub fn encode(table: HostOffset, copied: bool) -> Self {
        Self(table.bytes() & OFFSET_MASK | if copied { COPIED } else { 0 })
    }

    /// Where the L2 table is, or `None` if there is none.
    ///
    /// # Errors
    /// `Corrupt` if the address is not a multiple of the cluster size.
    pub fn decode(self, cluster_bits: ClusterBits) -> Result<Option<HostOffset>> {
        let table = self.offset();
        if !table.is_aligned(cluster_bits.bytes()) {
            return Err(corrupt(format!(
                "L1 entry {:#018x}: L2 table offset {table} is not a multiple of the cluster size {}",
                self.0,
                cluster_bits.bytes()
            )));
        }
        Ok((table != HostOffset::ZERO).then_some(table))
    }

    /// The address in the entry, aligned or not.
    pub fn offset(self) -> HostOffset {
        HostOffset::new(self.0 & OFFSET_MASK)
    }

    /// Whether the entry says that the L2 table's refcount is exactly one.
    pub fn copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// Whether a bit that must be zero is set.
    pub fn has_reserved_bits(self) -> bool {
        self.0 & L1_RESERVED != 0
    }
}

/// An entry of an L2 table as it is stored in the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct RawL2Entry {
    /// The cluster descriptor.
    pub entry: u64,
    /// The subclusters, in an image with extended L2 entries; else 0 and meaningless.
    pub bitmap: u64,
}

impl RawL2Entry {
    /// The address in the entry of a cluster that is not compressed, aligned or not.
    pub fn offset(self) -> HostOffset {
        HostOffset::new(self.entry & OFFSET_MASK)
    }

    /// Whether the entry says that the cluster's refcount is exactly one.
    pub fn copied(self) -> bool {
        self.entry & COPIED != 0
    }

    /// Whether the entry names a compressed cluster.
    pub fn compressed(self) -> bool {
        self.entry & COMPRESSED != 0
    }

    /// Bit 0, the zero flag of entries that are not extended.
    pub fn zero_flag(self) -> bool {
        self.entry & ZERO != 0
    }

    /// Whether a bit that must be zero is set in the entry of a cluster that is not compressed.
    pub fn has_reserved_bits(self) -> bool {
        self.entry & L2_RESERVED != 0
    }

    /// Subclusters that have data of their own.
    #[expect(clippy::cast_possible_truncation, reason = "the low half is what is asked for")]
    pub fn allocated(self) -> u32 {
        self.bitmap as u32
    }

    /// Subclusters that read as zeros.
    pub fn zero(self) -> u32 {
        (self.bitmap >> 32) as u32
    }
}

/// What an L2 entry says about its cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum L2Entry {
    /// Nothing: look in the layer below.
    Unallocated,
    /// Reads as zeros; has no cluster in the file.
    Zero,
    /// Reads as zeros; keeps a cluster in the file.
    ZeroAllocated(HostOffset),
    /// Stored in the file.
    Data(HostOffset),
    /// Stored in the file, compressed.
    Compressed(CompressedCluster),
    /// Its subclusters differ. Bit n is for subcluster n; a subcluster in neither set is
    /// unallocated. `host` is present if any bit of `allocated` is set.
    Subclusters {
        /// The cluster's place in the file, if it has one.
        host: Option<HostOffset>,
        /// Subclusters that are stored in the file.
        allocated: u32,
        /// Subclusters that read as zeros.
        zero: u32,
    },
}

/// What must be known of an image to read its L2 tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct L2Format {
    /// Size of a cluster.
    pub cluster_bits: ClusterBits,
    /// Version of the image.
    pub version: Version,
    /// Whether entries are extended with a bitmap of subclusters.
    pub extended: bool,
    /// Whether the guest's data is in a separate file.
    pub data_file: bool,
}

impl L2Format {
    /// Bytes of an entry: 8, or 16 if extended.
    #[inline]
    pub fn entry_bytes(self) -> usize {
        if self.extended { 16 } else { 8 }
    }

    /// Log2 of the number of entries in a table, which is one cluster.
    #[inline]
    pub fn entries_bits(self) -> u32 {
        self.cluster_bits.bits() - if self.extended { 4 } else { 3 }
    }

    /// Number of entries in a table.
    #[inline]
    pub fn entries(self) -> u64 {
        1 << self.entries_bits()
    }

    /// Bytes of the disk covered by one table, and so by one L1 entry, as a power of two.
    #[inline]
    pub fn table_bits(self) -> u32 {
        self.cluster_bits.bits() + self.entries_bits()
    }

    /// Bytes of the disk that one table covers.
    #[inline]
    pub fn table_bytes(self) -> u64 {
        1 << self.table_bits()
    }

    /// # Errors
    /// `Invalid` if a disk of `size` bytes needs a longer L1 table than an image may have.
    pub fn check_disk_bytes(self, size: u64) -> Result<()> {
        // With the largest clusters it covers 2 EiB.
        let most = (L1_BYTES_MAX / L1Entry::BYTES as u64) << self.table_bits();
        if size <= most {
            return Ok(());
        }
        let kind = if self.extended { " with subclusters" } else { "" };
        let what = format!(
            "The image size is too large for file format 'qcow2' (try using a larger cluster \
             size): with clusters of {} bytes{kind} it has at most {most} bytes",
            self.cluster_bits.bytes()
        );
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// Size of a subcluster as a power of two; that of a cluster if entries are not extended.
    #[inline]
    pub fn subcluster_bits(self) -> u32 {
        self.cluster_bits.bits() - if self.extended { 5 } else { 0 }
    }

    /// Bytes in a subcluster, or in a cluster if entries are not extended.
    #[inline]
    pub fn subcluster_bytes(self) -> u64 {
        1 << self.subcluster_bits()
    }

    /// Index in the L1 table of the entry that covers `guest`.
    #[inline]
    pub fn l1_index(self, guest: GuestOffset) -> u64 {
        guest.bytes() >> self.table_bits()
    }

    /// Index in the L2 table of the entry that covers `guest`.
    #[inline]
    pub fn l2_index(self, guest: GuestOffset) -> u64 {
        self.index_of(self.cluster_bits.guest_cluster(guest))
    }

    /// Index in the L1 table of the L2 table that has the entry of `cluster`.
    #[inline]
    pub fn table_of(self, cluster: GuestCluster) -> u64 {
        cluster.number() >> self.entries_bits()
    }

    /// Index in its L2 table of the entry of `cluster`.
    #[inline]
    pub fn index_of(self, cluster: GuestCluster) -> u64 {
        cluster.number() & (self.entries() - 1)
    }

    /// The first cluster that the L2 table of L1 entry `index` covers; the highest number where
    /// that leaves 64 bits.
    #[inline]
    pub fn first_of_table(self, index: u64) -> GuestCluster {
        GuestCluster::new(index.saturating_mul(self.entries()))
    }

    /// The first byte that the L2 table of L1 entry `index` covers, as
    /// [`ClusterBits::start_of`] its first cluster.
    #[inline]
    pub fn table_start(self, index: u64) -> GuestOffset {
        self.cluster_bits.start_of(self.first_of_table(index))
    }

    /// Entry number `index` of a table or of a slice of it; `None` beyond its end.
    #[inline]
    pub fn raw(self, table: &[u8], index: usize) -> Option<RawL2Entry> {
        let at = index.checked_mul(self.entry_bytes())?;
        let entry = u64::from_be_bytes(*table.get(at..)?.first_chunk()?);
        let bitmap = match self.extended {
            true => u64::from_be_bytes(*table.get(at + 8..)?.first_chunk()?),
            false => 0,
        };
        Some(RawL2Entry { entry, bitmap })
    }

    /// Writes an entry into a table or a slice of it. Nothing happens beyond its end.
    pub fn put_raw(self, table: &mut [u8], index: usize, raw: RawL2Entry) {
        let bytes = self.entry_bytes();
        let Some(at) = index.checked_mul(bytes) else { return };
        let Some(to) = table.get_mut(at..).and_then(|rest| rest.get_mut(..bytes)) else { return };
        let (entry, bitmap) = to.split_at_mut(8);
        entry.copy_from_slice(&raw.entry.to_be_bytes());
        if self.extended {
            bitmap.copy_from_slice(&raw.bitmap.to_be_bytes());
        }
    }

    /// What the entry of 8 or 16 bytes at the start of `bytes` says.
    ///
    /// # Errors
    /// As [`Self::interpret`]; `Corrupt` too if bytes are missing.
    pub fn decode(self, bytes: &[u8]) -> Result<L2Entry> {
        let raw = self.raw(bytes, 0).ok_or_else(|| corrupt("L2 entry is truncated"))?;
        self.interpret(raw)
    }

    /// What an entry says.
    ///
    /// # Errors
    /// `Corrupt` if QEMU answers a read with an I/O error: a zero flag in version 2, an address
    /// that is not a multiple of the cluster size, a subcluster both allocated and zero or
    /// allocated in a cluster without a place, a compressed cluster in an image with a data file.
    #[inline]
    pub fn interpret(self, raw: RawL2Entry) -> Result<L2Entry> {
        if raw.compressed() {
            if self.data_file {
                return Err(corrupt(format!(
                    "L2 entry {:#018x}: compressed cluster in an image with an external data file",
                    raw.entry
                )));
            }
            let compressed = CompressedCluster::from_entry(raw.entry, self.cluster_bits);
            return Ok(L2Entry::Compressed(compressed));
        }
        let host = raw.offset();
        if !host.is_aligned(self.cluster_bits.bytes()) {
            return Err(self.unaligned(raw));
        }
        // Offset 0 is a valid place only in a data file, where COPIED distinguishes it from
        // "nowhere".
        let placed = host != HostOffset::ZERO || (self.data_file && raw.copied());
        if self.extended {
            return Self::subclusters(raw, placed.then_some(host));
        }
        if !raw.zero_flag() {
            return Ok(if placed { L2Entry::Data(host) } else { L2Entry::Unallocated });
        }
        if self.version == Version::V2 {
            return Err(corrupt(format!(
                "L2 entry {:#018x}: zero cluster in an image of version 2",
                raw.entry
            )));
        }
        // Here QEMU looks at the offset alone, even with a data file.
        let placed = host != HostOffset::ZERO;
        Ok(if placed { L2Entry::ZeroAllocated(host) } else { L2Entry::Zero })
    }

    /// What the entry for the cluster at `guest` says. With a data file, its offset there must be
    /// its offset on the disk.
    ///
    /// # Errors
    /// As [`Self::interpret`]; `Corrupt` too if the place in a data file differs.
    pub fn interpret_at(self, raw: RawL2Entry, guest: GuestOffset) -> Result<L2Entry> {
        let entry = self.interpret(raw)?;
        match entry.host() {
            Some(host) if self.data_file && host.bytes() != guest.bytes() => Err(corrupt(format!(
                "L2 entry {:#018x}: cluster {guest} of the disk is at {host} in the external \
                 data file, which must be the same",
                raw.entry
            ))),
            _ => Ok(entry),
        }
    }

    /// Encodes `entry`. `copied` says that the cluster's refcount is exactly one; it is ignored for
    /// clusters that are compressed or have no place.
    pub fn encode(self, entry: L2Entry, copied: bool) -> RawL2Entry {
        let at = |host: HostOffset| host.bytes() & OFFSET_MASK | if copied { COPIED } else { 0 };
        let bitmap = |allocated: u32, zero: u32| {
            if self.extended { u64::from(allocated) | u64::from(zero) << 32 } else { 0 }
        };
        let zero_flag = if self.extended { 0 } else { ZERO };
        match entry {
            L2Entry::Unallocated => RawL2Entry::default(),
            L2Entry::Zero => RawL2Entry { entry: zero_flag, bitmap: bitmap(0, u32::MAX) },
            L2Entry::ZeroAllocated(host) => {
                RawL2Entry { entry: at(host) | zero_flag, bitmap: bitmap(0, u32::MAX) }
            }
            L2Entry::Data(host) => RawL2Entry { entry: at(host), bitmap: bitmap(u32::MAX, 0) },
            L2Entry::Compressed(compressed) => {
                RawL2Entry { entry: COMPRESSED | compressed.to_entry(self.cluster_bits), bitmap: 0 }
            }
            L2Entry::Subclusters { host, allocated, zero } => {
                RawL2Entry { entry: host.map_or(0, at), bitmap: bitmap(allocated, zero) }
            }
        }
    }

    fn subclusters(raw: RawL2Entry, host: Option<HostOffset>) -> Result<L2Entry> {
        let (allocated, zero) = (raw.allocated(), raw.zero());
        let invalid = match host {
            Some(_) => allocated & zero != 0,
            None => allocated != 0,
        };
        if invalid {
            return Err(corrupt(format!(
                "L2 entry {:#018x} with subclusters {:#018x}: subclusters both allocated and zero, \
                 or allocated in a cluster that has no place",
                raw.entry, raw.bitmap
            )));
        }
        Ok(match (host, allocated, zero) {
            (None, 0, 0) => L2Entry::Unallocated,
            (None, 0, u32::MAX) => L2Entry::Zero,
            (Some(host), 0, u32::MAX) => L2Entry::ZeroAllocated(host),
            (Some(host), u32::MAX, 0) => L2Entry::Data(host),
            _ => L2Entry::Subclusters { host, allocated, zero },
        })
    }

    #[cold]
    fn unaligned(self, raw: RawL2Entry) -> mica_block::Error {
        corrupt(format!(
            "L2 entry {:#018x}: cluster offset {} is not a multiple of the cluster size {}",
            raw.entry,
            raw.offset(),
            self.cluster_bits.bytes()
        ))
    }
}

impl L2Entry {
    /// The cluster's place in the file, if it has one and is not compressed.
    pub fn host(self) -> Option<HostOffset> {
        match self {
            Self::Unallocated | Self::Zero | Self::Compressed(_) => None,
            Self::ZeroAllocated(host) | Self::Data(host) => Some(host),
            Self::Subclusters { host, .. } => host,
        }
    }
}

#[cfg(test)]
mod tests;

//! What a check can find, in QEMU's words.

use mica_units::{HostCluster, HostOffset};
use std::fmt;

/// A fault in the image. `Display` words it as `qemu-img check` does, so that scripts that parse
/// those lines can parse these.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Finding {
    /// A leak: a refcount higher than the references.
    Leak {
        /// The cluster.
        cluster: HostCluster,
        /// Its refcount.
        refcount: u64,
        /// The references to it.
        references: u64,
    },
    /// A refcount lower than the references.
    RefcountTooLow {
        /// The cluster.
        cluster: HostCluster,
        /// Its refcount.
        refcount: u64,
        /// The references to it.
        references: u64,
    },
    /// The refcounts from this cluster on, of one block, cannot be read.
    RefcountUnreadable {
        /// The first cluster.
        cluster: HostCluster,
    },
    /// More references than a refcount can hold.
    TooManyReferences {
        /// The cluster.
        offset: u64,
    },
    /// A mention of something beyond the end of the file.
    BeyondEnd {
        /// Its start.
        offset: u64,
        /// Its length.
        len: u64,
    },
    /// Reserved bits set in an L1 entry.
    L1ReservedBits {
        /// The entry.
        entry: u64,
    },
    /// An L2 table that is not at a cluster.
    L2TableUnaligned {
        /// Its place.
        offset: HostOffset,
    },
    /// Reserved bits set in an L2 entry.
    L2ReservedBits {
        /// The entry.
        entry: u64,
    },
    /// A compressed cluster with the flag that marks it as safe to overwrite.
    CompressedCopied {
        /// Its place.
        offset: HostOffset,
    },
    /// A compressed cluster in an image with an external data file.
    CompressedWithDataFile {
        /// Index of its entry in the L2 table.
        index: u64,
        /// Its entry.
        entry: u64,
    },
    /// A compressed cluster with subclusters.
    CompressedWithSubclusters {
        /// Index of its entry in the L2 table.
        index: u64,
        /// Its entry.
        entry: u64,
    },
    /// A subcluster that is both allocated and zero.
    SubclustersContradict {
        /// Its cluster.
        offset: HostOffset,
    },
    /// A subcluster that is allocated in a cluster without a place.
    UnallocatedSubclusters,
    /// A cluster that is not at a multiple of the cluster size.
    ClusterUnaligned {
        /// Its place.
        offset: HostOffset,
        /// Whether there is data in it.
        has_data: bool,
    },
    /// The flag "refcount is one" of an L1 entry is wrong.
    CopiedL2 {
        /// Index of the entry.
        index: u64,
        /// The entry.
        entry: u64,
        /// The table's refcount.
        refcount: u64,
    },
    /// The flag "refcount is one" of an L2 entry is wrong.
    CopiedData {
        /// The entry.
        entry: u64,
        /// The cluster's refcount.
        refcount: u64,
    },
    /// Internal snapshots in an image with an external data file.
    SnapshotsWithDataFile {
        /// Their number.
        count: u32,
    },
    /// A snapshot without the extra data of version 3.
    SnapshotIncomplete {
        /// Its place in the table.
        index: u32,
    },
    /// A snapshot's L1 table that is not at a cluster.
    SnapshotL1Unaligned {
        /// Its number.
        id: String,
        /// Its name.
        name: String,
        /// The table's place.
        offset: HostOffset,
    },
    /// A snapshot's L1 table that is larger than any may be.
    SnapshotL1TooLarge {
        /// Its number.
        id: String,
        /// Its name.
        name: String,
        /// The table's entries.
        entries: u32,
    },
    /// Reserved bits set in an entry of the refcount table.
    RefcountTableReservedBits {
        /// Index of the entry.
        index: u64,
    },
    /// A refcount block that is not at a cluster.
    RefcountBlockUnaligned {
        /// Index in the refcount table.
        index: u64,
    },
    /// A refcount block beyond the end of the file.
    RefcountBlockOutside {
        /// Index in the refcount table.
        index: u64,
    },
    /// A refcount block that something else mentions too.
    RefcountBlockShared {
        /// Index in the refcount table.
        index: u64,
        /// The references to it.
        references: u64,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leak { cluster, refcount, references } => {
                write!(f, "Leaked cluster {cluster} refcount={refcount} reference={references}")
            }
            Self::RefcountTooLow { cluster, refcount, references } => {
                write!(f, "ERROR cluster {cluster} refcount={refcount} reference={references}")
            }
            Self::RefcountUnreadable { cluster } => {
                write!(f, "Can't get refcount for cluster {cluster}: Input/output error")
            }
            Self::TooManyReferences { offset } => {
                write!(f, "ERROR: overflow cluster offset={offset:#x}")
            }
            Self::BeyondEnd { offset, len } => write!(
                f,
                "ERROR: counting reference for region exceeding the end of the file by one cluster \
                 or more: offset {offset:#x} size {len:#x}"
            ),
            Self::L1ReservedBits { entry } => {
                write!(f, "ERROR found L1 entry with reserved bits set: {entry:x}")
            }
            Self::L2TableUnaligned { offset } => write!(
                f,
                "ERROR l2_offset={:x}: Table is not cluster aligned; L1 entry corrupted",
                offset.bytes()
            ),
            Self::L2ReservedBits { entry } => {
                write!(f, "ERROR found l2 entry with reserved bits set: {entry:x}")
            }
            Self::CompressedCopied { offset } => write!(
                f,
                "ERROR: coffset={offset}: copied flag must never be set for compressed clusters"
            ),
            Self::CompressedWithDataFile { index, entry } => {
                write!(f, "ERROR compressed cluster {index} with data file, entry={entry:#x}")
            }
            Self::CompressedWithSubclusters { index, entry } => write!(
                f,
                "ERROR compressed cluster {index} with non-zero subcluster allocation bitmap, \
                 entry={entry:#x}"
            ),
            Self::SubclustersContradict { offset } => write!(
                f,
                "ERROR offset={:x}: Allocated cluster has corrupted subcluster allocation bitmap",
                offset.bytes()
            ),
            Self::UnallocatedSubclusters => {
                f.write_str("ERROR: Unallocated cluster has non-zero subcluster allocation map")
            }
            Self::ClusterUnaligned { offset, has_data } => write!(
                f,
                "ERROR offset={:x}: {} cluster is not properly aligned; L2 entry corrupted.",
                offset.bytes(),
                if *has_data { "Data" } else { "Preallocated" }
            ),
            Self::CopiedL2 { index, entry, refcount } => write!(
                f,
                "ERROR OFLAG_COPIED L2 cluster: l1_index={index} l1_entry={entry:x} \
                 refcount={refcount}"
            ),
            Self::CopiedData { entry, refcount } => {
                write!(f, "ERROR OFLAG_COPIED data cluster: l2_entry={entry:x} refcount={refcount}")
            }
            Self::SnapshotsWithDataFile { count } => {
                write!(f, "ERROR {count} snapshots in image with data file")
            }
            Self::SnapshotIncomplete { index } => {
                write!(f, "ERROR snapshot table entry {index} is incomplete")
            }
            Self::SnapshotL1Unaligned { id, name, offset } => write!(
                f,
                "ERROR snapshot {id} ({name}) l1_offset={offset}: L1 table is not cluster aligned; \
                 snapshot table entry corrupted"
            ),
            Self::SnapshotL1TooLarge { id, name, entries } => write!(
                f,
                "ERROR snapshot {id} ({name}) l1_size={entries:#x}: L1 table is too large; snapshot \
                 table entry corrupted"
            ),
            Self::RefcountTableReservedBits { index } => {
                write!(f, "ERROR refcount table entry {index} has reserved bits set")
            }
            Self::RefcountBlockUnaligned { index } => write!(
                f,
                "ERROR refcount block {index} is not cluster aligned; refcount table entry corrupted"
            ),
            Self::RefcountBlockOutside { index } => {
                write!(f, "ERROR refcount block {index} is outside image")
            }
            Self::RefcountBlockShared { index, references } => {
                write!(f, "ERROR refcount block {index} refcount={references}")
            }
        }
    }
}

//! Version, feature bits and encryption: what an image requires of its reader.

use crate::{Compression, unsupported};
use mica_block::Result;
use mica_units::HostOffset;

/// Version of the format.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Version {
    /// `compat=0.10`.
    V2,
    /// `compat=1.1`.
    V3,
}

/// What a reader must understand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Incompatible {
    /// Refcounts may be wrong: the last writer did not close the image.
    pub dirty: bool,
    /// A writer found contradictions: the image must not be written.
    pub corrupt: bool,
    /// The guest's data is in a separate file.
    pub external_data_file: bool,
    /// The compression is not deflate.
    pub compression: bool,
    /// L2 entries have 16 bytes with a bitmap of subclusters.
    pub extended_l2: bool,
}

/// What a reader may ignore.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Compatible {
    /// A writer may defer refcount updates, under the dirty bit.
    pub lazy_refcounts: bool,
    /// Bits that mica does not know, in their positions.
    pub unknown: u64,
}

/// What a writer that does not know it must clear.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Autoclear {
    /// The bitmaps match the data.
    pub bitmaps_consistent: bool,
    /// The data file by itself is a raw disk.
    pub raw_external: bool,
    /// Bits that mica does not know, in their positions.
    pub unknown: u64,
}

/// How the guest's data is encrypted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Encryption {
    /// It is not.
    #[default]
    None,
    /// The old AES-CBC.
    Aes,
    /// LUKS.
    Luks {
        /// Where its header is, if the image says so.
        header: Option<(HostOffset, u64)>,
    },
}

impl Version {
    /// The number in the header.
    pub fn number(self) -> u32 {
        match self {
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }

    pub(super) fn from_number(number: u32) -> Result<Self> {
        match number {
            2 => Ok(Self::V2),
            3 => Ok(Self::V3),
            1 => Err(unsupported(
                "qcow version 1 is not supported; qemu-img convert -f qcow -O qcow2 makes it qcow2",
            )),
            other => {
                Err(unsupported(format!("qcow2 version {other} is not supported: 2 and 3 are")))
            }
        }
    }
}

impl Compression {
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Deflate => 0,
            Self::Zstd => 1,
        }
    }
}

impl Encryption {
    pub(super) fn number(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Aes => 1,
            Self::Luks { .. } => 2,
        }
    }
}

impl Incompatible {
    pub(super) fn decode(bits: u64) -> Self {
        Self {
            dirty: bits & DIRTY != 0,
            corrupt: bits & CORRUPT != 0,
            external_data_file: bits & DATA_FILE != 0,
            compression: bits & COMPRESSION != 0,
            extended_l2: bits & EXTENDED_L2 != 0,
        }
    }

    pub(super) fn encode(self) -> u64 {
        flag(self.dirty, DIRTY)
            | flag(self.corrupt, CORRUPT)
            | flag(self.external_data_file, DATA_FILE)
            | flag(self.compression, COMPRESSION)
            | flag(self.extended_l2, EXTENDED_L2)
    }
}

impl Compatible {
    pub(super) fn decode(bits: u64) -> Self {
        Self { lazy_refcounts: bits & LAZY_REFCOUNTS != 0, unknown: bits & !LAZY_REFCOUNTS }
    }

    pub(super) fn encode(self) -> u64 {
        flag(self.lazy_refcounts, LAZY_REFCOUNTS) | self.unknown
    }
}

impl Autoclear {
    pub(super) fn decode(bits: u64) -> Self {
        Self {
            bitmaps_consistent: bits & BITMAPS_CONSISTENT != 0,
            raw_external: bits & RAW_EXTERNAL != 0,
            unknown: bits & !(BITMAPS_CONSISTENT | RAW_EXTERNAL),
        }
    }

    pub(super) fn encode(self) -> u64 {
        flag(self.bitmaps_consistent, BITMAPS_CONSISTENT)
            | flag(self.raw_external, RAW_EXTERNAL)
            | self.unknown
    }
}

fn flag(set: bool, bit: u64) -> u64 {
    if set { bit } else { 0 }
}

const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
pub(super) const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
pub(super) const INCOMPATIBLE_KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2;
const LAZY_REFCOUNTS: u64 = 1 << 0;
const BITMAPS_CONSISTENT: u64 = 1 << 0;
const RAW_EXTERNAL: u64 = 1 << 1;

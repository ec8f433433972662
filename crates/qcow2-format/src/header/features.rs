//! Version, feature bits and encryption: what an image requires of its reader.

use crate::bits::{BITMAPS_CONSISTENT, CORRUPT, DIRTY, RAW_EXTERNAL};
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
    /// Bits that the specification does not define, in their positions. Some have a meaning for
    /// mica: [`Self::keeps_bitmap`], and the name of a log.
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

    /// The bits that say of which bitmaps, by their index in the directory, the file has
    /// everything that was changed, and perhaps more, although they are flagged as in use: a writer
    /// sees to that, and any other program that writes the image clears the bits.
    pub const KEPT_BITMAPS: u64 = ((1 << Self::KEPT_BITMAPS_MAX) - 1) << KEPT_BITMAPS_SHIFT;

    /// Bitmaps beyond so many have no such bit.
    pub const KEPT_BITMAPS_MAX: usize = 24;

    /// The one of [`Self::KEPT_BITMAPS`] for the bitmap at `index` of the directory; 0 if it has
    /// none.
    pub fn kept_bitmap(index: usize) -> u64 {
        if index < Self::KEPT_BITMAPS_MAX { 1 << (index + KEPT_BITMAPS_SHIFT) } else { 0 }
    }

    /// Whether the file has everything that the bitmap at `index` of the directory has to say.
    pub fn keeps_bitmap(&self, index: usize) -> bool {
        self.unknown & Self::kept_bitmap(index) != 0
    }
}

fn flag(set: bool, bit: u64) -> u64 {
    if set { bit } else { 0 }
}

const DATA_FILE: u64 = 1 << 2;
pub(super) const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
pub(super) const INCOMPATIBLE_KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2;
const LAZY_REFCOUNTS: u64 = 1 << 0;
const KEPT_BITMAPS_SHIFT: usize = 8;

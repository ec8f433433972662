//! The header of an image: fixed fields, extensions, names.
//!
//! Decoding follows QEMU's `qcow2_do_open`: the same limits, in the same words where they help.

mod encode;
mod features;
pub mod field;
mod frame;
mod rename;
mod replace;

pub use features::{Autoclear, Compatible, Encryption, Incompatible, Version};
pub use rename::BackingChange;
pub use replace::HeaderChange;

use super::extension::{self, BitmapsExtension, Extension, FeatureName, Walk};
use super::refcount::RefcountWidth;
use super::snapshot::SNAPSHOT_COUNT_MAX;
use super::table::{L1_BYTES_MAX, L2Format};
use super::{Compression, corrupt, unsupported, until_nul};
use frame::{Frame, RAW_BYTES};
use mica_block::{Error, ErrorKind, Result};
use mica_units::{ClusterBits, HostOffset, SECTOR_BYTES};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

/// The first bytes of an image.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// A first read of this many bytes has all that [`Header::decode`] needs of nearly every image;
/// [`Header::bytes_needed`] reports when it does not.
pub const HEADER_READ_BYTES: usize = 4096;
/// Largest refcount table.
pub const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;

/// Longest LUKS header with its key material: twice as long as eight slots of the longest keys.
const LUKS_BYTES_MAX: u64 = 4 << 20;
/// QEMU keeps the name of the backing format in 16 bytes with the NUL.
const BACKING_FORMAT_BYTES_MAX: usize = 15;
/// Highest L1 index that QEMU counts to.
const L1_INDEX_MAX: u64 = i32::MAX as u64;

/// The backing file as the image names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingName {
    /// Its name, never empty; see [`parse_image_name`](super::parse_image_name).
    pub name: OsString,
    /// Its format, if the image says so.
    pub format: Option<String>,
}

/// The header of an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// Version of the format.
    pub version: Version,
    /// Size of a cluster.
    pub cluster_bits: ClusterBits,
    /// Length of the disk as stored; see [`Self::disk_bytes`].
    pub size: u64,
    /// Number of entries in the active L1 table.
    pub l1_entries: u32,
    /// Where the active L1 table starts.
    pub l1_offset: HostOffset,
    /// Where the refcount table starts.
    pub refcount_table_offset: HostOffset,
    /// Length of the refcount table in clusters.
    pub refcount_table_clusters: u32,
    /// Width of a refcount.
    pub refcount_width: RefcountWidth,
    /// Number of internal snapshots.
    pub snapshot_count: u32,
    /// Where the snapshot table starts.
    pub snapshots_offset: HostOffset,
    /// Feature bits that must be understood. Unknown ones are refused.
    pub incompatible: Incompatible,
    /// Feature bits that may be ignored.
    pub compatible: Compatible,
    /// Feature bits that a writer clears.
    pub autoclear: Autoclear,
    /// How clusters are compressed.
    pub compression: Compression,
    /// How data is encrypted.
    pub encryption: Encryption,
    /// The backing file.
    pub backing: Option<BackingName>,
    /// The external data file as the image names it.
    pub data_file_name: Option<OsString>,
    /// The bitmaps, if they match the data.
    pub bitmaps: Option<BitmapsExtension>,
    /// Whether there are bitmaps that do not match the data: a program that does not know bitmaps
    /// wrote to the image. Not encoded again.
    pub stale_bitmaps: bool,
    /// Names of feature bits.
    pub feature_names: Vec<FeatureName>,
    /// Extensions that mica does not know, in their order.
    pub unknown_extensions: Vec<Extension>,
    /// Header bytes after the fields that mica knows.
    pub unknown_tail: Vec<u8>,
}

/// What a header is decoded for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Serve,
    Check,
}

impl Header {
    /// A header that says how clusters and entries look, and nothing else: no disk, no tables, and
    /// no names except those of the feature bits.
    pub fn new(l2: L2Format, compression: Compression) -> Self {
        Self {
            version: l2.version,
            cluster_bits: l2.cluster_bits,
            size: 0,
            l1_entries: 0,
            l1_offset: HostOffset::ZERO,
            refcount_table_offset: HostOffset::ZERO,
            refcount_table_clusters: 0,
            refcount_width: RefcountWidth::DEFAULT,
            snapshot_count: 0,
            snapshots_offset: HostOffset::ZERO,
            incompatible: Incompatible {
                external_data_file: l2.data_file,
                compression: compression != Compression::Deflate,
                extended_l2: l2.extended,
                ..Incompatible::default()
            },
            compatible: Compatible::default(),
            autoclear: Autoclear::default(),
            compression,
            encryption: Encryption::None,
            backing: None,
            data_file_name: None,
            bitmaps: None,
            stale_bitmaps: false,
            feature_names: match l2.version {
                Version::V2 => Vec::new(),
                Version::V3 => FeatureName::known(),
            },
            unknown_extensions: Vec::new(),
            unknown_tail: Vec::new(),
        }
    }

    /// Decodes the header of a file of `file_len` bytes that begins with `first_bytes`, at least
    /// [`Self::bytes_needed`] of them unless the file ends before.
    ///
    /// # Errors
    /// `Corrupt` if QEMU refuses the image as invalid, `Unsupported` if QEMU or mica does not
    /// support what the image asks for, `Invalid` if bytes are missing.
    pub fn decode(first_bytes: &[u8], file_len: u64) -> Result<Self> {
        Self::decode_for(first_bytes, file_len, Purpose::Serve)
    }

    /// As [`Self::decode`], but accepts what a check reports itself: a missing refcount table, a
    /// snapshot table at an impossible place, encryption.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn decode_for_check(first_bytes: &[u8], file_len: u64) -> Result<Self> {
        Self::decode_for(first_bytes, file_len, Purpose::Check)
    }

    /// How many bytes from the file's start [`Self::decode`] needs, judging by the first of them:
    /// at least 112 unless the file is shorter. Never more than a cluster.
    ///
    /// # Errors
    /// As [`Self::decode`], for the fields that say where the header ends.
    pub fn bytes_needed(first_bytes: &[u8]) -> Result<usize> {
        let frame = Frame::decode(first_bytes)?;
        let extensions = Walk::bytes_needed(first_bytes, frame.header_len, frame.extensions_end);
        let backing = match frame.backing_at {
            0 => 0,
            at => at + frame.backing_len,
        };
        Ok(RAW_BYTES.max(frame.header_len).max(extensions).max(backing))
    }

    fn decode_for(first_bytes: &[u8], file_len: u64, purpose: Purpose) -> Result<Self> {
        let there = first_bytes.len() as u64;
        if there < file_len && there < RAW_BYTES as u64 {
            return Err(missing(RAW_BYTES, there));
        }
        let needed = Self::bytes_needed(first_bytes)?;
        if there < file_len && there < needed as u64 {
            return Err(missing(needed, there));
        }
        let frame = Frame::decode(first_bytes)?;
        let raw = &frame.raw;
        let compression = frame.compression()?;
        let incompatible = frame.incompatible(first_bytes)?;
        let mut header = Self {
            version: frame.version,
            cluster_bits: frame.cluster_bits,
            size: raw.size.get(),
            l1_entries: raw.l1_entries.get(),
            l1_offset: HostOffset::new(raw.l1_offset.get()),
            refcount_table_offset: HostOffset::new(raw.refcount_table_offset.get()),
            refcount_table_clusters: raw.refcount_table_clusters.get(),
            refcount_width: frame.refcount_width()?,
            snapshot_count: raw.snapshot_count.get(),
            snapshots_offset: HostOffset::new(raw.snapshots_offset.get()),
            incompatible,
            compatible: Compatible::decode(raw.compatible.get()),
            autoclear: Autoclear::decode(raw.autoclear.get()),
            compression,
            encryption: frame.encryption()?,
            backing: None,
            data_file_name: None,
            bitmaps: None,
            stale_bitmaps: false,
            feature_names: Vec::new(),
            unknown_extensions: Vec::new(),
            unknown_tail: tail(first_bytes, frame.header_len),
        };
        header.check_geometry(purpose)?;
        let backing_format = header.read_extensions(first_bytes, &frame)?;
        header.backing = frame.backing(first_bytes, backing_format)?;
        if header.autoclear.raw_external && !incompatible.external_data_file {
            return Err(corrupt(
                "the header says that the external data file is raw (autoclear bit 1), but there is \
                 no external data file (incompatible bit 2)",
            ));
        }
        if purpose == Purpose::Serve {
            header.check_encryption()?;
        }
        Ok(header)
    }

    fn check_encryption(&self) -> Result<()> {
        if self.encryption != Encryption::None && self.autoclear.raw_external {
            return Err(unsupported(
                "the image is encrypted, and says that its data file is a raw disk by itself \
                 (autoclear bit 1)",
            ));
        }
        match self.encryption {
            Encryption::None | Encryption::Aes => Ok(()),
            Encryption::Luks { header: None } => Err(corrupt(
                "the image is encrypted with LUKS (header byte 32) and does not say where its LUKS \
                 header is",
            )),
            Encryption::Luks { header: Some((at, len)) } => {
                self.check_table("LUKS header (extension 0x0537be77)", at, len, LUKS_BYTES_MAX)
            }
        }
    }

    fn check_geometry(&self, purpose: Purpose) -> Result<()> {
        if self.incompatible.extended_l2 && self.cluster_bits.bits() < 14 {
            return Err(corrupt(format!(
                "clusters of {} bytes are too small for extended L2 entries, which need 16384",
                self.cluster_bits.bytes()
            )));
        }
        if self.refcount_table_clusters == 0 && purpose == Purpose::Serve {
            return Err(corrupt(
                "the image has no refcount table (header byte 56); qemu-img check -r all builds one",
            ));
        }
        self.check_table(
            "refcount table (header byte 48)",
            self.refcount_table_offset,
            u64::from(self.refcount_table_clusters) * self.cluster_bits.bytes(),
            REFCOUNT_TABLE_BYTES_MAX,
        )?;
        if purpose == Purpose::Serve {
            self.check_snapshot_table()?;
        }
        self.check_active_l1()
    }

    /// Checks that the active L1 table is where a table may be and is long enough for the disk.
    pub fn check_active_l1(&self) -> Result<()> {
        self.check_table(
            "active L1 table (header byte 40)",
            self.l1_offset,
            u64::from(self.l1_entries) * 8,
            L1_BYTES_MAX,
        )?;
        let l1_needed = self.l1_entries_needed();
        if self.size > i64::MAX as u64 || l1_needed > L1_INDEX_MAX {
            return Err(corrupt(format!("the disk of {} bytes is too big", self.size)));
        }
        if u64::from(self.l1_entries) < l1_needed {
            return Err(corrupt(format!(
                "L1 table is too small: {} entries (header byte 36), and a disk of {} bytes needs \
                 {l1_needed}",
                self.l1_entries, self.size
            )));
        }
        Ok(())
    }

    /// Checks that the snapshot table is where a table may be.
    pub fn check_snapshot_table(&self) -> Result<()> {
        if self.snapshot_count > SNAPSHOT_COUNT_MAX {
            return Err(corrupt(format!(
                "{} internal snapshots (header byte 60), more than the maximum of \
                 {SNAPSHOT_COUNT_MAX}",
                self.snapshot_count
            )));
        }
        self.check_table(
            "snapshot table (header byte 64)",
            self.snapshots_offset,
            u64::from(self.snapshot_count) * 40,
            u64::MAX,
        )
    }

    fn check_table(&self, what: &str, at: HostOffset, bytes: u64, bytes_max: u64) -> Result<()> {
        if bytes > bytes_max {
            return Err(corrupt(format!(
                "{what} too large: {bytes} bytes, the maximum is {bytes_max}"
            )));
        }
        let fits = at.checked_add(bytes).is_some_and(|end| end.bytes() <= i64::MAX as u64);
        if !fits || !at.is_aligned(self.cluster_bits.bytes()) {
            return Err(corrupt(format!(
                "{what} offset {at} invalid: it must be a multiple of the cluster size {} below 2^63",
                self.cluster_bits.bytes()
            )));
        }
        Ok(())
    }

    /// Applies what the extensions say; returns the format of the backing file.
    fn read_extensions(&mut self, bytes: &[u8], frame: &Frame) -> Result<Option<String>> {
        let mut backing_format = None;
        let mut walk = Walk::new(bytes, frame.header_len, frame.extensions_end);
        while let Some(step) = walk.next()? {
            match step.magic {
                extension::BACKING_FORMAT => {
                    if step.data.len() > BACKING_FORMAT_BYTES_MAX {
                        return Err(corrupt(format!(
                            "name of the backing format at byte {} has {} bytes, the maximum is \
                             {BACKING_FORMAT_BYTES_MAX}",
                            step.offset,
                            step.data.len()
                        )));
                    }
                    let name = String::from_utf8_lossy(until_nul(&step.data)).into_owned();
                    backing_format = (!name.is_empty()).then_some(name);
                }
                extension::FEATURE_NAMES => {
                    self.feature_names = FeatureName::decode_table(&step.data);
                }
                extension::LUKS_HEADER => {
                    let Encryption::Luks { header } = &mut self.encryption else {
                        return Err(corrupt(format!(
                            "encryption header extension at byte {} in an image that is not \
                             encrypted with LUKS",
                            step.offset
                        )));
                    };
                    *header = Some(extension::decode_luks_header(&step, self.cluster_bits)?);
                }
                extension::BITMAPS if !self.autoclear.bitmaps_consistent => {
                    BitmapsExtension::check_len(&step)?;
                    self.stale_bitmaps = true;
                }
                extension::BITMAPS => {
                    self.bitmaps = Some(BitmapsExtension::decode(&step, self.cluster_bits)?);
                }
                extension::DATA_FILE_NAME => {
                    self.data_file_name = Some(OsString::from_vec(until_nul(&step.data).to_vec()));
                }
                magic => {
                    let data = step.data.into_owned();
                    self.unknown_extensions.push(Extension { magic, data });
                }
            }
        }
        Ok(backing_format)
    }

    /// Length of the disk: whole sectors, as QEMU counts.
    pub fn disk_bytes(&self) -> u64 {
        self.size - self.size % SECTOR_BYTES
    }

    /// How to read the L2 tables.
    pub fn l2_format(&self) -> L2Format {
        L2Format {
            cluster_bits: self.cluster_bits,
            version: self.version,
            extended: self.incompatible.extended_l2,
            data_file: self.incompatible.external_data_file,
        }
    }

    /// How many L1 entries a disk of `size` bytes needs.
    ///
    /// # Errors
    /// `Invalid` if that is more than a table may have.
    pub fn l1_entries_for(&self, size: u64) -> Result<u32> {
        self.l2_format().check_disk_bytes(size)?;
        let wanted = Self { size, ..self.clone() };
        Ok(u32::try_from(wanted.l1_entries_needed()).expect("32 MiB of entries"))
    }

    /// L1 entries that a disk of this size needs; QEMU keeps the state of machines after them.
    pub fn l1_entries_needed(&self) -> u64 {
        self.size.div_ceil(1 << self.l2_format().table_bits())
    }
}

/// The header's bytes after the fields that mica knows.
fn tail(bytes: &[u8], header_len: usize) -> Vec<u8> {
    let Some(len) = header_len.checked_sub(RAW_BYTES) else { return Vec::new() };
    let there = bytes.get(RAW_BYTES..).unwrap_or_default();
    let mut tail = there.get(..len).unwrap_or(there).to_vec();
    tail.resize(len, 0);
    tail
}

fn missing(needed: usize, there: u64) -> Error {
    let context = format!("decoding a header needs {needed} bytes of the file, got {there}");
    Error::new(ErrorKind::Invalid, context)
}

#[cfg(test)]
mod tests;

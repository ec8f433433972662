//! The fixed fields of a header, and the checks on them that need no extensions.

use super::features::{COMPRESSION, INCOMPATIBLE_KNOWN};
use super::{BackingName, Encryption, Incompatible, Version};
use crate::extension::{self, FeatureKind, FeatureName, Walk};
use crate::refcount::RefcountWidth;
use crate::{Compression, corrupt, foreign, unsupported, until_nul};
use mica_block::Result;
use mica_units::ClusterBits;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(super) const MAGIC: u32 = u32::from_be_bytes(super::MAGIC);
pub(super) const V2_BYTES: usize = 72;
const V3_BYTES_MIN: usize = 104;
const COMPRESSION_TYPE_AT: usize = 104;
pub(super) const BACKING_NAME_BYTES_MAX: usize = 1023;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
pub(super) struct RawHeader {
    pub(super) magic: U32,
    pub(super) version: U32,
    pub(super) backing_name_offset: U64,
    pub(super) backing_name_len: U32,
    pub(super) cluster_bits: U32,
    pub(super) size: U64,
    pub(super) crypt_method: U32,
    pub(super) l1_entries: U32,
    pub(super) l1_offset: U64,
    pub(super) refcount_table_offset: U64,
    pub(super) refcount_table_clusters: U32,
    pub(super) snapshot_count: U32,
    pub(super) snapshots_offset: U64,
    // From here on version 3 only.
    pub(super) incompatible: U64,
    pub(super) compatible: U64,
    pub(super) autoclear: U64,
    pub(super) refcount_order: U32,
    pub(super) header_len: U32,
    // From here on only if the header is long enough.
    pub(super) compression_type: u8,
    pub(super) padding: [u8; 7],
}

pub(super) const RAW_BYTES: usize = size_of::<RawHeader>();
const _: () = assert!(RAW_BYTES == 112);
const _: () = assert!(std::mem::offset_of!(RawHeader, incompatible) == V2_BYTES);
const _: () = assert!(std::mem::offset_of!(RawHeader, compression_type) == COMPRESSION_TYPE_AT);

/// Fixed fields that say where the rest of the header is.
pub(super) struct Frame {
    pub(super) raw: RawHeader,
    pub(super) version: Version,
    pub(super) cluster_bits: ClusterBits,
    pub(super) header_len: usize,
    /// Start of the backing file's name, 0 if there is none.
    pub(super) backing_at: usize,
    pub(super) backing_len: usize,
    pub(super) extensions_end: usize,
}

impl Frame {
    pub(super) fn decode(first_bytes: &[u8]) -> Result<Self> {
        // A shorter file reads as zeros beyond its end.
        let mut fixed = [0; RAW_BYTES];
        for (to, from) in fixed.iter_mut().zip(first_bytes) {
            *to = *from;
        }
        let raw: RawHeader = zerocopy::transmute!(fixed);
        if raw.magic.get() != MAGIC {
            return Err(corrupt(format!("not a qcow2 image: {}", foreign::describe(first_bytes))));
        }
        let version = Version::from_number(raw.version.get())?;
        let cluster_bits = ClusterBits::new(raw.cluster_bits.get()).ok_or_else(|| {
            corrupt(format!(
                "cluster size 2^{} (header byte 20) is not supported: 2^{} to 2^{} are",
                raw.cluster_bits.get(),
                ClusterBits::MIN,
                ClusterBits::MAX
            ))
        })?;
        // At most 2^21, as cluster_bits is checked.
        let cluster_bytes = 1_usize << cluster_bits.bits();
        let header_len = match version {
            Version::V2 => V2_BYTES,
            Version::V3 => raw.header_len.get() as usize,
        };
        if version == Version::V3 && !(V3_BYTES_MIN..=cluster_bytes).contains(&header_len) {
            return Err(corrupt(format!(
                "header length {header_len} (header byte 100) must be between {V3_BYTES_MIN} and \
                 the cluster size {cluster_bytes}"
            )));
        }
        let backing_offset = raw.backing_name_offset.get();
        let backing_at = usize::try_from(backing_offset)
            .ok()
            .filter(|&at| at <= cluster_bytes)
            .ok_or_else(|| {
                corrupt(format!(
                    "the backing file's name at {backing_offset:#x} (header byte 8) must be in \
                     the first {cluster_bytes} bytes"
                ))
            })?;
        let backing_len = raw.backing_name_len.get() as usize;
        if backing_at != 0 && backing_len > BACKING_NAME_BYTES_MAX.min(cluster_bytes - backing_at) {
            return Err(corrupt(format!(
                "backing file name too long: {backing_len} bytes (header byte 16) at {backing_at}; \
                 at most {BACKING_NAME_BYTES_MAX}, inside the first {cluster_bytes} bytes"
            )));
        }
        let extensions_end = if backing_at == 0 { cluster_bytes } else { backing_at };
        let frame = Self {
            raw,
            version,
            cluster_bits,
            header_len,
            backing_at,
            backing_len,
            extensions_end,
        };
        Ok(frame.without_v3_fields())
    }

    /// Version 2 has other content where version 3 has its fields.
    fn without_v3_fields(mut self) -> Self {
        if self.version == Version::V2 {
            self.raw.incompatible = 0.into();
            self.raw.compatible = 0.into();
            self.raw.autoclear = 0.into();
            self.raw.refcount_order = RefcountWidth::DEFAULT.order().into();
        }
        if self.header_len <= COMPRESSION_TYPE_AT {
            self.raw.compression_type = 0;
        }
        self
    }

    pub(super) fn compression(&self) -> Result<Compression> {
        let compression = match self.raw.compression_type {
            0 => Compression::Deflate,
            1 => Compression::Zstd,
            other => {
                return Err(unsupported(format!(
                    "compression type {other} (header byte {COMPRESSION_TYPE_AT}) is unknown"
                )));
            }
        };
        let flagged = self.raw.incompatible.get() & COMPRESSION != 0;
        if flagged == (compression == Compression::Deflate) {
            return Err(corrupt(format!(
                "compression type {} (header byte {COMPRESSION_TYPE_AT}) and incompatible bit 3 \
                 contradict each other",
                self.raw.compression_type
            )));
        }
        Ok(compression)
    }

    pub(super) fn incompatible(&self, bytes: &[u8]) -> Result<Incompatible> {
        let bits = self.raw.incompatible.get();
        let unknown = bits & !INCOMPATIBLE_KNOWN;
        if unknown == 0 {
            return Ok(Incompatible::decode(bits));
        }
        let mut names = Vec::new();
        let mut walk = Walk::new(bytes, self.header_len, self.extensions_end);
        // A broken extension ends the search for names; the image is refused anyway.
        while let Ok(Some(step)) = walk.next() {
            if step.magic == extension::FEATURE_NAMES {
                names = FeatureName::decode_table(&step.data);
            }
        }
        let list: Vec<_> = (0..64)
            .filter(|bit| unknown & (1 << bit) != 0)
            .map(|bit: u8| {
                let named = names
                    .iter()
                    .find(|name| name.kind == FeatureKind::Incompatible && name.bit == bit);
                match named {
                    Some(name) => format!("{:?} (bit {bit})", name.name),
                    None => format!("bit {bit}"),
                }
            })
            .collect();
        Err(unsupported(format!(
            "the image needs features that mica does not know: incompatible {}",
            list.join(", ")
        )))
    }

    pub(super) fn refcount_width(&self) -> Result<RefcountWidth> {
        let order = self.raw.refcount_order.get();
        RefcountWidth::from_order(order).ok_or_else(|| {
            corrupt(format!(
                "refcounts of 2^{order} bits (header byte 96) are too wide: at most 64 bits"
            ))
        })
    }

    pub(super) fn encryption(&self) -> Result<Encryption> {
        match self.raw.crypt_method.get() {
            0 => Ok(Encryption::None),
            1 => Ok(Encryption::Aes),
            2 => Ok(Encryption::Luks { header: None }),
            other => {
                Err(unsupported(format!("encryption method {other} (header byte 32) is unknown")))
            }
        }
    }

    pub(super) fn backing(
        &self,
        bytes: &[u8],
        format: Option<String>,
    ) -> Result<Option<BackingName>> {
        if self.backing_at == 0 {
            return Ok(None);
        }
        let there = bytes.get(self.backing_at..).unwrap_or_default();
        let name = until_nul(there.get(..self.backing_len).unwrap_or(there));
        if name.is_empty() {
            return Ok(None);
        }
        Ok(Some(BackingName { name: OsStr::from_bytes(name).to_owned(), format }))
    }
}

//! Encoding of the header.

use super::frame::{BACKING_NAME_BYTES_MAX, MAGIC, RAW_BYTES, RawHeader, V2_BYTES};
use super::{Autoclear, Compatible, Encryption, Header, Incompatible, Version};
use crate::Compression;
use crate::extension::{self, FeatureName};
use crate::refcount::RefcountWidth;
use mica_block::{Error, ErrorKind, Result};
use std::os::unix::ffi::OsStrExt;
use zerocopy::IntoBytes;

impl Header {
    /// The header as it is stored at the start of the file: fixed fields, extensions, backing name.
    /// If the cluster is too small for all of it, the names of the feature bits are left out.
    ///
    /// # Errors
    /// `Limit` if it does not fit the first cluster or a name exceeds its maximum, `Invalid` if it
    /// is version 2 and uses what only version 3 has.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let limit = |what: String| Error::new(ErrorKind::Limit, what);
        let cluster_bytes = usize::try_from(self.cluster_bits.bytes())
            .map_err(|_| limit("cluster size does not fit this machine".to_owned()))?;
        let mut out = self.encode_fixed(0, 0)?;
        self.encode_extensions(&mut out, &self.feature_names);
        let name = self.backing.as_ref().map_or(&[][..], |backing| backing.name.as_bytes());
        if name.len() > BACKING_NAME_BYTES_MAX {
            return Err(limit(format!(
                "the backing file's name has {} bytes, the maximum is {BACKING_NAME_BYTES_MAX}",
                name.len()
            )));
        }
        if out.len() + name.len() > cluster_bytes {
            out = self.encode_fixed(0, 0)?;
            self.encode_extensions(&mut out, &[]);
        }
        let backing_at = out.len();
        out.extend_from_slice(name);
        if out.len() > cluster_bytes {
            return Err(limit(format!(
                "the header of {} bytes does not fit a cluster of {cluster_bytes}",
                out.len()
            )));
        }
        if !name.is_empty() {
            let fixed = self.encode_fixed(backing_at, name.len())?;
            for (to, from) in out.iter_mut().zip(fixed) {
                *to = from;
            }
        }
        Ok(out)
    }

    fn encode_fixed(&self, backing_at: usize, backing_len: usize) -> Result<Vec<u8>> {
        let header_len = match self.version {
            Version::V2 => V2_BYTES,
            Version::V3 => (RAW_BYTES + self.unknown_tail.len()).next_multiple_of(8),
        };
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let raw = RawHeader {
            magic: MAGIC.into(),
            version: self.version.number().into(),
            backing_name_offset: (backing_at as u64).into(),
            backing_name_len: number(backing_len).into(),
            cluster_bits: self.cluster_bits.bits().into(),
            size: self.size.into(),
            crypt_method: self.encryption.number().into(),
            l1_entries: self.l1_entries.into(),
            l1_offset: self.l1_offset.bytes().into(),
            refcount_table_offset: self.refcount_table_offset.bytes().into(),
            refcount_table_clusters: self.refcount_table_clusters.into(),
            snapshot_count: self.snapshot_count.into(),
            snapshots_offset: self.snapshots_offset.bytes().into(),
            incompatible: self.incompatible.encode().into(),
            compatible: self.compatible.encode().into(),
            autoclear: self.autoclear.encode().into(),
            refcount_order: self.refcount_width.order().into(),
            header_len: number(header_len).into(),
            compression_type: self.compression.number(),
            padding: [0; 7],
        };
        let plain_v2 = self.incompatible == Incompatible::default()
            && self.compatible == Compatible::default()
            && self.autoclear == Autoclear::default()
            && self.compression == Compression::Deflate
            && self.refcount_width == RefcountWidth::DEFAULT;
        if self.version == Version::V2 && !plain_v2 {
            return Err(Error::new(
                ErrorKind::Invalid,
                "version 2 has no feature bits, 16-bit refcounts and deflate only",
            ));
        }
        let mut out = raw.as_bytes().to_vec();
        out.extend_from_slice(&self.unknown_tail);
        out.resize(header_len, 0);
        Ok(out)
    }

    fn encode_extensions(&self, out: &mut Vec<u8>, feature_names: &[FeatureName]) {
        if let Some(format) = self.backing.as_ref().and_then(|backing| backing.format.as_ref()) {
            extension::append(out, extension::BACKING_FORMAT, format.as_bytes());
        }
        if let Some(name) = &self.data_file_name {
            extension::append(out, extension::DATA_FILE_NAME, name.as_bytes());
        }
        if let Encryption::Luks { header: Some((offset, len)) } = self.encryption {
            let data = extension::encode_luks_header(offset, len);
            extension::append(out, extension::LUKS_HEADER, &data);
        }
        if !feature_names.is_empty() {
            let data = FeatureName::encode_table(feature_names);
            extension::append(out, extension::FEATURE_NAMES, &data);
        }
        if let Some(bitmaps) = &self.bitmaps {
            extension::append(out, extension::BITMAPS, &bitmaps.encode());
        }
        for unknown in &self.unknown_extensions {
            extension::append(out, unknown.magic, &unknown.data);
        }
        extension::append(out, extension::END, &[]);
    }
}

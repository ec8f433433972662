//! Header extensions: what is between the header and the backing file's name.
//!
//! Each is `magic: u32, length: u32, data`, padded to eight bytes. The walk ends at magic 0, at the
//! backing file's name, or at the end of the first cluster.

use super::{corrupt, until_nul};
use mica_block::Result;
use mica_units::{ClusterBits, HostOffset};
use std::borrow::Cow;
use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(super) const END: u32 = 0;
pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
pub(super) const FEATURE_NAMES: u32 = 0x6803_f857;
pub(super) const BITMAPS: u32 = 0x2385_2875;
pub(super) const LUKS_HEADER: u32 = 0x0537_be77;
pub(super) const DATA_FILE_NAME: u32 = 0x4441_5441;

/// Maximum number of bitmaps that QEMU and mica accept in an image.
const BITMAP_COUNT_MAX: u32 = 65535;
/// Longest bitmap directory that QEMU and mica accept.
const BITMAP_DIRECTORY_BYTES_MAX: u64 = 1024 * 65535;

/// An extension that mica does not know, kept as it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Extension {
    /// What it is.
    pub magic: u32,
    /// Its bytes, without the padding.
    pub data: Vec<u8>,
}

/// Where the persistent bitmaps are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BitmapsExtension {
    /// Number of bitmaps.
    pub count: u32,
    /// Length of the directory in bytes.
    pub directory_bytes: u64,
    /// Where the directory starts.
    pub directory_offset: HostOffset,
}

/// Which set of feature bits a [`FeatureName`] belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FeatureKind {
    /// A reader that does not know the bit must refuse the image.
    Incompatible,
    /// The bit may be ignored.
    Compatible,
    /// A writer that does not know the bit must clear it.
    Autoclear,
    /// A number that the specification does not define.
    Other(u8),
}

/// What a feature bit is called.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FeatureName {
    /// Its set.
    pub kind: FeatureKind,
    /// Number of the bit, from 0.
    pub bit: u8,
    /// Its name; at most 46 bytes are stored.
    pub name: String,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawExtension {
    magic: U32,
    len: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawBitmaps {
    count: U32,
    reserved: U32,
    directory_bytes: U64,
    directory_offset: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawFeature {
    kind: u8,
    bit: u8,
    name: [u8; 46],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawLuksHeader {
    offset: U64,
    len: U64,
}

const _: () = assert!(size_of::<RawExtension>() == 8);
const _: () = assert!(size_of::<RawBitmaps>() == 24);
const _: () = assert!(size_of::<RawFeature>() == 48);
const _: () = assert!(size_of::<RawLuksHeader>() == 16);

/// One step of a walk.
pub(super) struct Step<'a> {
    pub(super) magic: u32,
    /// Where the data starts in the file.
    pub(super) offset: usize,
    pub(super) data: Cow<'a, [u8]>,
}

/// Walks the extensions in `start..end` of the file whose first bytes are `bytes`. Whatever is
/// missing from `bytes` is beyond the file's end and so reads as zeros.
pub(super) struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    end: usize,
}

impl<'a> Walk<'a> {
    pub(super) fn new(bytes: &'a [u8], start: usize, end: usize) -> Self {
        Self { bytes, at: start, end }
    }

    /// The next extension before the end mark.
    pub(super) fn next(&mut self) -> Result<Option<Step<'a>>> {
        if self.at >= self.end {
            return Ok(None);
        }
        let head = zero_padded(self.bytes, self.at, size_of::<RawExtension>());
        let Ok((raw, _)) = RawExtension::read_from_prefix(&head) else { return Ok(None) };
        let (magic, len) = (raw.magic.get(), raw.len.get() as usize);
        let start = self.at + size_of::<RawExtension>();
        if start > self.end || len > self.end - start {
            return Err(corrupt(format!(
                "header extension {magic:#010x} at byte {} is too large: {len} bytes, and the \
                 extensions end at byte {}",
                self.at, self.end
            )));
        }
        if magic == END {
            self.at = self.end;
            return Ok(None);
        }
        self.at = start + len.next_multiple_of(8);
        Ok(Some(Step { magic, offset: start, data: zero_padded(self.bytes, start, len) }))
    }

    /// How many bytes of the file hold all extensions in `start..end`, judging by the bytes at
    /// hand: a walk that leaves them may need everything up to `end`.
    pub(super) fn bytes_needed(bytes: &[u8], start: usize, end: usize) -> usize {
        let mut at = start;
        while at < end {
            let Some(Ok((raw, _))) = bytes.get(at..).map(RawExtension::read_from_prefix) else {
                return end;
            };
            let next = at + size_of::<RawExtension>();
            if raw.magic.get() == END {
                return next;
            }
            match next.checked_add((raw.len.get() as usize).next_multiple_of(8)) {
                Some(after) if after <= end => at = after,
                _ => return end,
            }
        }
        end
    }
}

/// `len` bytes of `bytes` from `at` on, with zeros for those that are not there. The caller bounds
/// `len` by the first cluster.
fn zero_padded(bytes: &[u8], at: usize, len: usize) -> Cow<'_, [u8]> {
    let there = bytes.get(at..).unwrap_or_default();
    match there.get(..len) {
        Some(all) => Cow::Borrowed(all),
        None => {
            let mut padded = there.to_vec();
            padded.resize(len, 0);
            Cow::Owned(padded)
        }
    }
}

/// Appends an extension with its padding.
pub(super) fn append(out: &mut Vec<u8>, magic: u32, data: &[u8]) {
    out.extend_from_slice(&magic.to_be_bytes());
    // The caller bounds the whole header by a cluster, so a cut length never reaches a file.
    out.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(8), 0);
}

impl BitmapsExtension {
    pub(super) fn check_len(step: &Step<'_>) -> Result<()> {
        if step.data.len() == size_of::<RawBitmaps>() {
            return Ok(());
        }
        Err(corrupt(format!(
            "bitmaps extension at byte {} has {} bytes instead of {}",
            step.offset,
            step.data.len(),
            size_of::<RawBitmaps>()
        )))
    }

    pub(super) fn decode(step: &Step<'_>, cluster_bits: ClusterBits) -> Result<Self> {
        Self::check_len(step)?;
        let Ok(raw) = RawBitmaps::read_from_bytes(&step.data) else {
            return Err(corrupt(format!("bitmaps extension at byte {} is truncated", step.offset)));
        };
        let at = step.offset;
        let count = raw.count.get();
        let directory_bytes = raw.directory_bytes.get();
        let directory_offset = HostOffset::new(raw.directory_offset.get());
        if raw.reserved.get() != 0 {
            return Err(corrupt(format!(
                "bitmaps extension at byte {at}: reserved field is not zero"
            )));
        }
        if count == 0 || count > BITMAP_COUNT_MAX {
            return Err(corrupt(format!(
                "bitmaps extension at byte {at}: {count} bitmaps, must be 1 to {BITMAP_COUNT_MAX}"
            )));
        }
        if !directory_offset.is_aligned(cluster_bits.bytes()) {
            return Err(corrupt(format!(
                "bitmaps extension at byte {at}: directory offset {directory_offset} is not a \
                 multiple of the cluster size {}",
                cluster_bits.bytes()
            )));
        }
        if directory_bytes > BITMAP_DIRECTORY_BYTES_MAX {
            return Err(corrupt(format!(
                "bitmaps extension at byte {at}: directory of {directory_bytes} bytes exceeds the \
                 maximum of {BITMAP_DIRECTORY_BYTES_MAX}"
            )));
        }
        Ok(Self { count, directory_bytes, directory_offset })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        RawBitmaps {
            count: self.count.into(),
            reserved: 0.into(),
            directory_bytes: self.directory_bytes.into(),
            directory_offset: self.directory_offset.bytes().into(),
        }
        .as_bytes()
        .to_vec()
    }
}

impl FeatureKind {
    fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Incompatible,
            1 => Self::Compatible,
            2 => Self::Autoclear,
            other => Self::Other(other),
        }
    }

    fn to_byte(self) -> u8 {
        match self {
            Self::Incompatible => 0,
            Self::Compatible => 1,
            Self::Autoclear => 2,
            Self::Other(byte) => byte,
        }
    }
}

impl FeatureName {
    /// The table of names up to its first nameless entry, as QEMU reads it.
    pub(super) fn decode_table(data: &[u8]) -> Vec<Self> {
        let mut names = Vec::new();
        for entry in data.chunks_exact(size_of::<RawFeature>()) {
            let Ok(raw) = RawFeature::read_from_bytes(entry) else { break };
            let name = until_nul(&raw.name);
            if name.is_empty() {
                break;
            }
            names.push(Self {
                kind: FeatureKind::from_byte(raw.kind),
                bit: raw.bit,
                name: String::from_utf8_lossy(name).into_owned(),
            });
        }
        names
    }

    pub(super) fn encode_table(names: &[Self]) -> Vec<u8> {
        let mut out = Vec::with_capacity(names.len() * size_of::<RawFeature>());
        for name in names {
            let mut raw = RawFeature { kind: name.kind.to_byte(), bit: name.bit, name: [0; 46] };
            for (to, from) in raw.name.iter_mut().zip(name.name.bytes()) {
                *to = from;
            }
            out.extend_from_slice(raw.as_bytes());
        }
        out
    }

    /// The names of all bits that mica knows, as an image of version 3 carries them.
    pub fn known() -> Vec<Self> {
        let name = |kind, bit, name: &str| Self { kind, bit, name: name.to_owned() };
        vec![
            name(FeatureKind::Incompatible, 0, "dirty bit"),
            name(FeatureKind::Incompatible, 1, "corrupt bit"),
            name(FeatureKind::Incompatible, 2, "external data file"),
            name(FeatureKind::Incompatible, 3, "compression type"),
            name(FeatureKind::Incompatible, 4, "extended L2 entries"),
            name(FeatureKind::Compatible, 0, "lazy refcounts"),
            name(FeatureKind::Autoclear, 0, "bitmaps"),
            name(FeatureKind::Autoclear, 1, "raw external data"),
        ]
    }
}

/// Where the LUKS header is: offset and length.
pub(super) fn decode_luks_header(
    step: &Step<'_>,
    cluster_bits: ClusterBits,
) -> Result<(HostOffset, u64)> {
    let Ok(raw) = RawLuksHeader::read_from_bytes(&step.data) else {
        return Err(corrupt(format!(
            "encryption header extension at byte {} has {} bytes instead of {}",
            step.offset,
            step.data.len(),
            size_of::<RawLuksHeader>()
        )));
    };
    let offset = HostOffset::new(raw.offset.get());
    if !offset.is_aligned(cluster_bits.bytes()) {
        return Err(corrupt(format!(
            "encryption header offset {offset} is not a multiple of the cluster size {}",
            cluster_bits.bytes()
        )));
    }
    Ok((offset, raw.len.get()))
}

pub(super) fn encode_luks_header(offset: HostOffset, len: u64) -> Vec<u8> {
    RawLuksHeader { offset: offset.bytes().into(), len: len.into() }.as_bytes().to_vec()
}

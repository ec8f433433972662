//! An extent: blocks of data, the nodes that name them, and what was done, in one object.
//!
//! ```text
//! 0         4096                                                        len
//! +--------+--------+- - -+-------+- - -+-------+-------+- - -+---------+
//! | header | block  |     | frame |     | node  | node  |     | table   |
//! +--------+--------+- - -+-------+- - -+-------+-------+- - -+---------+
//! ```
//!
//! docs/formats/extent.md specifies it.
//!
//! Invariants
//! - I1 An extent is a transaction: its header has the state after everything in its table, which
//!   is the state of the extent before it with the table applied.
//! - I2 The map that the state names lies in this extent and in older ones.
//! - I3 A fence is a header alone. It ends its writer: no extent with a larger number counts.

use super::Id;
use super::frame::{Frame, Malformed};
use crate::place::{
    BLOCK_BYTES, ExtentId, FRAME_BLOCKS_MAX, FRAME_LENS, FRAME_UNIT_BYTES, FramePart, Place, Writer,
};
use crate::state::{RawState, State};
use mica_map::crc32c;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes before the first block: a header, and zeros, so that blocks are aligned as devices are.
pub(crate) const HEADER_BYTES: usize = 4096;
/// Bytes of the header that mean something.
const RAW_BYTES: usize = 512;
/// Longest extent. Far below what a place can name.
pub(crate) const LEN_MAX: usize = 64 << 20;

pub(crate) const MAGIC: [u8; 8] = *b"MICAEXT\n";
pub(crate) const VERSION: u32 = 1;
/// That of an extent with frames.
pub(crate) const VERSION_WITH_FRAMES: u32 = VERSION + 1;
const FRAME: Frame = Frame { magic: MAGIC, version: VERSION, len: RAW_BYTES };

/// What an object with the name of an extent is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// An extent.
    Extent,
    /// The end of a writer.
    Fence,
}

/// The header of an extent or a fence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) id: ExtentId,
    pub(crate) store: Id,
    pub(crate) volume: Id,
    /// Differs from put to put, so that a put whose answer was lost can be recognised.
    pub(crate) nonce: Id,
    /// Of an extent: the state with everything in it.
    pub(crate) state: State,
    /// Who put it: the writer itself, or the one that fenced it.
    pub(crate) by: Writer,
    /// Blocks of data, but for those in frames.
    pub(crate) blocks: usize,
    /// Bytes of frames, which follow them.
    pub(crate) frames_len: usize,
    /// Bytes of nodes, which follow them.
    pub(crate) nodes_len: usize,
    /// Entries of the table, which follows the nodes.
    pub(crate) entries: usize,
    /// The CRC32C of the table.
    pub(crate) table_sum: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawHeader {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) kind: u8,
    pub(super) reserved: [u8; 3],
    pub(super) store: Id,
    pub(super) volume: Id,
    pub(super) nonce: Id,
    pub(super) writer: U64,
    pub(super) by: U64,
    pub(super) sequence: U32,
    pub(super) blocks: U32,
    pub(super) nodes_len: U32,
    pub(super) entries: U32,
    pub(super) table_sum: U32,
    pub(super) frames_len: U32,
    pub(super) state: RawState,
    pub(super) padding: [u8; 332],
    /// CRC-32C of all bytes before this field.
    pub(super) checksum: U32,
}

const _: () = assert!(size_of::<RawHeader>() == RAW_BYTES);

impl Header {
    /// Where the frames are.
    pub(crate) fn frames_at(&self) -> usize {
        HEADER_BYTES + self.blocks * BLOCK_BYTES
    }

    /// Where the nodes are.
    pub(crate) fn nodes_at(&self) -> usize {
        self.frames_at() + self.frames_len
    }

    /// Where the table is.
    pub(crate) fn table_at(&self) -> usize {
        self.nodes_at() + self.nodes_len
    }

    /// Length of the whole extent.
    pub(crate) fn len(&self) -> usize {
        match self.kind {
            Kind::Extent => self.table_at() + self.entries * ENTRY_BYTES,
            Kind::Fence => HEADER_BYTES,
        }
    }

    /// The first [`HEADER_BYTES`] of the object.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let count = |count: usize| U32::new(u32::try_from(count).expect("extents are small"));
        let raw = RawHeader {
            magic: MAGIC,
            version: if self.frames_len == 0 { VERSION } else { VERSION_WITH_FRAMES }.into(),
            kind: match self.kind {
                Kind::Extent => 0,
                Kind::Fence => 1,
            },
            reserved: [0; 3],
            store: self.store,
            volume: self.volume,
            nonce: self.nonce,
            writer: self.id.writer.number().into(),
            by: self.by.number().into(),
            sequence: self.id.sequence.into(),
            blocks: count(self.blocks),
            nodes_len: count(self.nodes_len),
            entries: count(self.entries),
            table_sum: self.table_sum.into(),
            frames_len: count(self.frames_len),
            state: RawState::encode(&self.state),
            padding: [0; 332],
            checksum: 0.into(),
        };
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..RAW_BYTES].copy_from_slice(raw.as_bytes());
        FRAME.seal(&mut bytes);
        bytes
    }

    /// The header that `bytes` begin with.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (framed, version) = FRAME.open_with_next(bytes)?;
        let raw = RawHeader::read_from_bytes(framed).map_err(|_| Malformed::Truncated)?;
        let header = Self::of_raw(&raw).filter(Self::is_consistent).ok_or(Malformed::Content)?;
        let has_frames = version == VERSION_WITH_FRAMES;
        if has_frames == (header.frames_len > 0) { Ok(header) } else { Err(Malformed::Content) }
    }

    fn of_raw(raw: &RawHeader) -> Option<Self> {
        let count = |count: U32| usize::try_from(count.get()).ok();
        Some(Self {
            kind: match raw.kind {
                0 => Kind::Extent,
                1 => Kind::Fence,
                _ => return None,
            },
            id: ExtentId { writer: Writer::new(raw.writer.get())?, sequence: raw.sequence.get() },
            store: raw.store,
            volume: raw.volume,
            nonce: raw.nonce,
            state: raw.state.decode()?,
            by: Writer::new(raw.by.get())?,
            blocks: count(raw.blocks)?,
            frames_len: count(raw.frames_len)?,
            nodes_len: count(raw.nodes_len)?,
            entries: count(raw.entries)?,
            table_sum: raw.table_sum.get(),
        })
    }

    /// Whether its lengths are those of an extent, and its roots are not in later ones.
    fn is_consistent(&self) -> bool {
        // Each is checked on its own first, so that nothing overflows.
        let is_small =
            [self.blocks, self.nodes_len, self.entries].iter().all(|count| *count <= LEN_MAX)
                && self.frames_len <= FramePart::FRAMES_LEN_END
                && self.frames_len.is_multiple_of(FRAME_UNIT_BYTES);
        let roots = [self.state.map.node, self.state.snapshots.node];
        let is_past = |place: Place| place.extent() <= self.id;
        is_small && self.len() <= LEN_MAX && roots.into_iter().flatten().all(is_past)
    }
}

/// Bytes of an entry of the table.
pub(crate) const ENTRY_BYTES: usize = 16;
const COUNT_BITS: u32 = 56;
/// Bits of a count that say how many blocks a frame has; the rest is its length.
const FRAME_LEN_SHIFT: u32 = 8;

/// What was done, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Entry {
    /// The next `count` blocks of this extent are guest blocks from `first` on.
    Data { first: u64, count: u64 },
    /// These guest blocks have nothing: they read as zeros.
    Nothing { first: u64, count: u64 },
    /// The disk has this many bytes now.
    Length { bytes: u64 },
    /// This snapshot was taken of everything before; its record is at this offset.
    Take { number: u64, record: u64 },
    /// This snapshot was dropped.
    Drop { number: u64 },
    /// This snapshot has another label; its new record is at this offset.
    Label { number: u64, record: u64 },
    /// The disk is again what this snapshot has.
    Rollback { number: u64 },
    /// The next frame of this extent has `count` guest blocks from `first` on, in `len` bytes.
    Frame { first: u64, count: u64, len: u64 },
    /// The table has so many entries, of which this is the last: what has frames ends with it, so
    /// that one read of the end finds the table.
    End { entries: u64 },
}

impl Entry {
    pub(crate) fn encode(self) -> [u8; ENTRY_BYTES] {
        let (kind, value, count) = match self {
            Self::Data { first, count } => (1, first, count),
            Self::Nothing { first, count } => (2, first, count),
            Self::Length { bytes } => (3, bytes, 0),
            Self::Take { number, record } => (4, number, record),
            Self::Drop { number } => (5, number, 0),
            Self::Label { number, record } => (6, number, record),
            Self::Rollback { number } => (7, number, 0),
            Self::Frame { first, count, len } => (8, first, len << FRAME_LEN_SHIFT | count),
            Self::End { entries } => (9, entries, 0),
        };
        assert!(count >> COUNT_BITS == 0, "more blocks than a disk can have");
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..8].copy_from_slice(&u64::to_le_bytes(value));
        bytes[8..].copy_from_slice(&(count | kind << COUNT_BITS).to_le_bytes());
        bytes
    }

    /// `None` if there is no such entry.
    pub(crate) fn decode(bytes: [u8; ENTRY_BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let [value, packed] = [words[0], words[1]].map(u64::from_le_bytes);
        let (kind, count) = (packed >> COUNT_BITS, packed & ((1 << COUNT_BITS) - 1));
        let range = |make: fn(u64, u64) -> Self| {
            let end = value.checked_add(count)?;
            let is_on_a_disk = count > 0 && end <= State::LEN_MAX / BLOCK_BYTES as u64;
            is_on_a_disk.then(|| make(value, count))
        };
        match (kind, count) {
            (1, _) => range(|first, count| Self::Data { first, count }),
            (2, _) => range(|first, count| Self::Nothing { first, count }),
            (3, 0) => State::is_len(value).then_some(Self::Length { bytes: value }),
            // No snapshot has the number 0.
            (4..=7, _) if value == 0 => None,
            (4, record) => Some(Self::Take { number: value, record }),
            (5, 0) => Some(Self::Drop { number: value }),
            (6, record) => Some(Self::Label { number: value, record }),
            (7, 0) => Some(Self::Rollback { number: value }),
            (8, packed) => {
                let (len, count) = (packed >> FRAME_LEN_SHIFT, packed & 0xff);
                let end = value.checked_add(count)?;
                let is_frame = (1..=FRAME_BLOCKS_MAX as u64).contains(&count)
                    && len > 0
                    && len <= FRAME_LENS[FRAME_LENS.len() - 1] as u64
                    && len.is_multiple_of(FRAME_UNIT_BYTES as u64)
                    && end <= State::LEN_MAX / BLOCK_BYTES as u64;
                is_frame.then_some(Self::Frame { first: value, count, len })
            }
            (9, 0) => {
                let is_count = (1..=(LEN_MAX / ENTRY_BYTES) as u64).contains(&value);
                is_count.then_some(Self::End { entries: value })
            }
            _ => None,
        }
    }
}

/// The table with these bytes, of the extent with this header.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn decode_table(header: &Header, bytes: &[u8]) -> Result<Vec<Entry>, Malformed> {
    if bytes.len() != header.entries * ENTRY_BYTES {
        return Err(Malformed::Truncated);
    }
    if crc32c(bytes) != header.table_sum {
        return Err(Malformed::Checksum);
    }
    let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
    let table: Option<Vec<_>> = entries.iter().map(|entry| Entry::decode(*entry)).collect();
    let table = table.ok_or(Malformed::Content)?;
    let nodes = header.nodes_at() as u64..header.table_at() as u64;
    let is_among_nodes = |entry: &Entry| match entry {
        Entry::Take { record, .. } | Entry::Label { record, .. } => nodes.contains(record),
        _ => true,
    };
    if !table.iter().all(is_among_nodes) {
        return Err(Malformed::Content);
    }
    let stored = table.iter().try_fold(0_u64, |sum, entry| match entry {
        Entry::Data { count, .. } => sum.checked_add(*count),
        _ => Some(sum),
    });
    let frames: u64 = frames_in(&table).map(|frame| frame.len).sum();
    if stored != Some(header.blocks as u64) || frames != header.frames_len as u64 {
        return Err(Malformed::Content);
    }
    let end = (frames > 0).then_some(Entry::End { entries: header.entries as u64 });
    let ends = table.iter().filter(|entry| matches!(entry, Entry::End { .. }));
    let is_ended = ends.count() == usize::from(end.is_some())
        && end.is_none_or(|end| table.last() == Some(&end));
    if is_ended { Ok(table) } else { Err(Malformed::Content) }
}

/// A frame as a table has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FrameOf {
    /// Where it begins.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) blocks: u64,
}

/// The frames of the extent with this table, in order.
pub(crate) fn frames_in(table: &[Entry]) -> impl Iterator<Item = FrameOf> {
    let plain: u64 = table
        .iter()
        .map(|entry| match entry {
            Entry::Data { count, .. } => *count,
            _ => 0,
        })
        .fold(0, u64::saturating_add);
    let first = (HEADER_BYTES as u64).saturating_add(plain.saturating_mul(BLOCK_BYTES as u64));
    let frames = table.iter().filter_map(|entry| match entry {
        Entry::Frame { count, len, .. } => Some((*count, *len)),
        _ => None,
    });
    frames.scan(first, |at, (blocks, len)| {
        let offset = *at;
        *at = at.saturating_add(len);
        Some(FrameOf { offset, len, blocks })
    })
}

/// The table that `end` ends with, the end of an extent with frames; or how many bytes of it are
/// needed, if these are not enough. Its sum is not looked at.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn table_at_end(end: &[u8]) -> Result<Result<Vec<Entry>, usize>, Malformed> {
    let last = end.last_chunk::<ENTRY_BYTES>().ok_or(Malformed::Truncated)?;
    let Some(Entry::End { entries }) = Entry::decode(*last) else {
        return Err(Malformed::Content);
    };
    let len = usize::try_from(entries).map_err(|_| Malformed::Content)? * ENTRY_BYTES;
    let Some(start) = end.len().checked_sub(len) else { return Ok(Err(len)) };
    let (entries, _) = end[start..].as_chunks::<ENTRY_BYTES>();
    let table: Option<Vec<_>> = entries.iter().map(|entry| Entry::decode(*entry)).collect();
    table.map(Ok).ok_or(Malformed::Content)
}

#[cfg(test)]
mod tests;

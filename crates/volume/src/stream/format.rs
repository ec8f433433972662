//! The bytes of a stream.
//!
//! docs/formats/stream.md specifies it. Nothing here is trusted: who decodes bounds what is asked
//! for before it is read.

use crate::format::Id;
use crate::format::frame::{Frame, Malformed};
use crate::format::snapshot::Origin;
use crate::place::BLOCK_BYTES;
use crate::state::State;
use mica_block::{LABEL_BYTES_MAX, check_label};
use mica_map::crc32c;
use mica_units::SECTOR_BYTES;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of what a step begins with.
pub(super) const BEGIN_BYTES: usize = 512;
/// Bytes of a part before its data.
pub(super) const PART_BYTES: usize = size_of::<RawPart>();
/// Bytes of data in a part, at most.
pub(super) const DATA_BYTES_MAX: u64 = 1 << 20;

pub(super) const MAGIC: [u8; 8] = *b"MICASTR\n";
pub(super) const VERSION: u32 = 1;
const FRAME: Frame = Frame { magic: MAGIC, version: VERSION, len: BEGIN_BYTES };

/// What a step makes of what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Begin {
    /// The snapshot that there is after it.
    pub(super) snapshot: Origin,
    /// The one that it goes on from; `None` if it is of all that the disk has.
    pub(super) base: Option<Origin>,
    /// When the snapshot was taken, in nanoseconds since 1970.
    pub(super) time_ns: u64,
    /// Length of the disk, in bytes.
    pub(super) len: u64,
    /// The snapshot's label where it was sent.
    pub(super) label: String,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawBegin {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) label_len: u8,
    pub(super) has_base: u8,
    pub(super) reserved: [u8; 2],
    pub(super) volume: Id,
    pub(super) number: U64,
    pub(super) base_volume: Id,
    pub(super) base_number: U64,
    pub(super) time_ns: U64,
    pub(super) len: U64,
    pub(super) label: [u8; 256],
    pub(super) padding: [u8; 172],
    /// CRC-32C of all bytes before this field.
    pub(super) checksum: U32,
}

const _: () = assert!(size_of::<RawBegin>() == BEGIN_BYTES && LABEL_BYTES_MAX <= 256);

impl Begin {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut label = [0; 256];
        label[..self.label.len()].copy_from_slice(self.label.as_bytes());
        let base = self.base.unwrap_or(Origin { volume: [0; 16], number: 0 });
        let raw = RawBegin {
            magic: MAGIC,
            version: VERSION.into(),
            label_len: u8::try_from(self.label.len()).expect("a label that was checked"),
            has_base: self.base.is_some().into(),
            reserved: [0; 2],
            volume: self.snapshot.volume,
            number: self.snapshot.number.into(),
            base_volume: base.volume,
            base_number: base.number.into(),
            time_ns: self.time_ns.into(),
            len: self.len.into(),
            label,
            padding: [0; 172],
            checksum: 0.into(),
        };
        let mut bytes = raw.as_bytes().to_vec();
        FRAME.seal(&mut bytes);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let framed = FRAME.open(bytes)?;
        let raw = RawBegin::read_from_bytes(framed).map_err(|_| Malformed::Truncated)?;
        Self::of_raw(&raw).ok_or(Malformed::Content)
    }

    fn of_raw(raw: &RawBegin) -> Option<Self> {
        let label = raw.label.get(..usize::from(raw.label_len))?;
        let label = std::str::from_utf8(label).ok().filter(|label| check_label(label).is_ok())?;
        let origin = |volume: Id, number: U64| {
            (number.get() != 0).then_some(Origin { volume, number: number.get() })
        };
        let base = match raw.has_base {
            0 => None,
            1 => Some(origin(raw.base_volume, raw.base_number)?),
            _ => return None,
        };
        let len = Some(raw.len.get()).filter(|len| *len > 0 && State::is_len(*len))?;
        Some(Self {
            snapshot: origin(raw.volume, raw.number)?,
            base,
            time_ns: raw.time_ns.get(),
            len,
            label: label.to_owned(),
        })
    }
}

/// A part of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    /// So many bytes follow, which the disk has from `start` on.
    Data { start: u64, len: u64 },
    /// The disk has nothing there.
    Nothing { start: u64, len: u64 },
    /// The step had this.
    End { data_bytes: u64, parts: u64 },
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawPart {
    pub(super) kind: U32,
    /// CRC-32C of the other fields and the data.
    pub(super) checksum: U32,
    pub(super) sequence: U64,
    pub(super) start: U64,
    pub(super) len: U64,
}

impl Part {
    /// Its bytes before `data`, as part number `sequence` of its step.
    pub(super) fn encode(self, sequence: u64, data: &[u8]) -> [u8; PART_BYTES] {
        let (kind, start, len) = match self {
            Self::Data { start, len } => (1, start, len),
            Self::Nothing { start, len } => (2, start, len),
            Self::End { data_bytes, parts } => (3, data_bytes, parts),
        };
        let mut raw = RawPart {
            kind: U32::new(kind),
            checksum: 0.into(),
            sequence: sequence.into(),
            start: start.into(),
            len: len.into(),
        };
        raw.checksum = sum(&raw, data).into();
        zerocopy::transmute!(raw)
    }

    /// What `bytes` announce as part number `sequence`, of a disk of `disk_len` bytes of which
    /// everything up to `from` was there: only then is anything read that follows.
    pub(super) fn announced(
        bytes: &[u8; PART_BYTES],
        sequence: u64,
        from: u64,
        disk_len: u64,
    ) -> Result<Self, Malformed> {
        let raw: &RawPart = zerocopy::transmute_ref!(bytes);
        let (start, len) = (raw.start.get(), raw.len.get());
        let is_within = start >= from
            && start.is_multiple_of(BLOCK_BYTES as u64)
            && len > 0
            && start.checked_add(len).is_some_and(|end| {
                end == disk_len || end < disk_len && end.is_multiple_of(BLOCK_BYTES as u64)
            });
        let part = match raw.kind.get() {
            1 if is_within && len <= DATA_BYTES_MAX => Self::Data { start, len },
            2 if is_within => Self::Nothing { start, len },
            3 => Self::End { data_bytes: start, parts: len },
            _ => return Err(Malformed::Content),
        };
        if raw.sequence.get() == sequence { Ok(part) } else { Err(Malformed::Content) }
    }

    /// Checks that `bytes` and the `data` that follows are as they were sent.
    pub(super) fn check(bytes: &[u8; PART_BYTES], data: &[u8]) -> Result<(), Malformed> {
        let raw: &RawPart = zerocopy::transmute_ref!(bytes);
        if raw.checksum.get() == sum(raw, data) { Ok(()) } else { Err(Malformed::Checksum) }
    }

    /// Bytes of data that follow.
    pub(super) fn data_len(self) -> u64 {
        match self {
            Self::Data { len, .. } => len,
            Self::Nothing { .. } | Self::End { .. } => 0,
        }
    }
}

/// Gives a stream the sums that it should have, as far as it is one.
pub(crate) fn mend(mut bytes: &mut [u8]) {
    while let Some((begin, mut rest)) = bytes.split_at_mut_checked(BEGIN_BYTES) {
        FRAME.seal(begin);
        loop {
            let Some((part, after)) = rest.split_at_mut_checked(PART_BYTES) else { return };
            let Ok(raw) = RawPart::mut_from_bytes(part) else { return };
            let announced = if raw.kind.get() == 1 { raw.len.get() } else { 0 };
            let len = usize::try_from(announced).unwrap_or(usize::MAX);
            let Some((data, after)) = after.split_at_mut_checked(len) else { return };
            raw.checksum = sum(raw, data).into();
            rest = after;
            if raw.kind.get() == 3 {
                break;
            }
        }
        bytes = rest;
    }
}

fn sum(raw: &RawPart, data: &[u8]) -> u32 {
    let RawPart { kind, sequence, start, len, .. } = raw;
    let fields = [kind.as_bytes(), sequence.as_bytes(), start.as_bytes(), len.as_bytes()];
    // The data's own sum stands for it, so that nothing is copied.
    let mut bytes = fields.concat();
    bytes.extend_from_slice(&crc32c(data).to_le_bytes());
    crc32c(&bytes)
}

const _: () = assert!(DATA_BYTES_MAX.is_multiple_of(SECTOR_BYTES));

//! The bytes of a log, except for its records: encode and decode, no I/O.
//!
//! docs/formats/log.md specifies them.

use crate::format::Id;
use crate::format::frame::{Frame, Malformed};
use crate::place::Writer;
use mica_map::RunningSum;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Everything that is written begins and ends at a multiple of this: what a device writes as a
/// whole is not larger, and a file that is opened past the page cache takes it.
pub(super) const BLOCK: usize = 4096;
/// The same, as a length in the file.
pub(super) const BLOCK_LEN: u64 = BLOCK as u64;
/// Most bytes of a group, its head and padding included.
pub(super) const GROUP_BYTES_MAX: usize = 1 << 20;
/// Fewest and most bytes of a segment.
pub(super) const SEGMENT_BYTES_MIN: u64 = 16 << 10;
pub(super) const SEGMENT_BYTES_MAX: u64 = 64 << 20;
/// Fewest and most segments. With three, one volume has a segment for its records.
pub(super) const SEGMENTS_MIN: u32 = 3;
pub(super) const SEGMENTS_MAX: u32 = 16 << 10;
/// Most writers that a log names: more than a process that starts again and again without winning
/// a head ever leaves.
pub(super) const WRITERS_MAX: usize = 32;

/// Most of what is counted: records, and segments. Nobody ever has so many, and a number that is
/// larger is not one.
pub(super) const NUMBER_MAX: u64 = 1 << 62;

/// Bytes of a header that mean something: one sector, which a device writes as a whole.
const RAW_BYTES: usize = 512;
pub(super) const MAGIC: [u8; 8] = *b"MICALOG\n";
pub(super) const SEGMENT_MAGIC: [u8; 8] = *b"MICASEG\n";
pub(super) const VERSION: u32 = 1;
/// That of a segment whose groups say what was durable: older versions, which would take them for
/// the end of the log, refuse it.
pub(super) const SEGMENT_VERSION: u32 = VERSION + 1;
const FRAME: Frame = Frame { magic: MAGIC, version: VERSION, len: RAW_BYTES };
pub(super) const SEGMENT_FRAME: Frame =
    Frame { magic: SEGMENT_MAGIC, version: VERSION, len: RAW_BYTES };

/// The header of the whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DeviceHeader {
    /// Random; part of every sum.
    pub(super) id: Id,
    pub(super) segment_bytes: u64,
    pub(super) segments: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawDevice {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) segments: U32,
    pub(super) segment_bytes: U64,
    pub(super) id: Id,
    pub(super) padding: [u8; 468],
    /// CRC-32C of all bytes before this field.
    pub(super) checksum: U32,
}

const _: () = assert!(size_of::<RawDevice>() == RAW_BYTES);

impl DeviceHeader {
    /// For a log in a file of `len` bytes: 256 segments, of at most 4 MiB unless there would be
    /// too many. `None` if it is too short.
    pub(super) fn for_len(id: Id, len: u64) -> Option<Self> {
        let room = len.checked_sub(BLOCK_LEN)?;
        let power_below = |bytes: u64| bytes.checked_ilog2().map_or(0, |bits| 1 << bits);
        let many = power_below(room / 256).min(4 << 20);
        let few = room.div_ceil(u64::from(SEGMENTS_MAX)).next_power_of_two();
        let segment_bytes = many.max(few).clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX);
        let segments = room / segment_bytes;
        let segments = u32::try_from(segments).unwrap_or(SEGMENTS_MAX).min(SEGMENTS_MAX);
        (segments >= SEGMENTS_MIN).then_some(Self { id, segment_bytes, segments })
    }

    /// Where segment `slot` begins.
    pub(super) fn at(&self, slot: usize) -> u64 {
        BLOCK_LEN + slot as u64 * self.segment_bytes
    }

    /// Length of everything.
    pub(super) fn len(&self) -> u64 {
        BLOCK_LEN + u64::from(self.segments) * self.segment_bytes
    }

    pub(super) fn encode(&self) -> [u8; BLOCK] {
        let raw = RawDevice {
            magic: MAGIC,
            version: VERSION.into(),
            segments: self.segments.into(),
            segment_bytes: self.segment_bytes.into(),
            id: self.id,
            padding: [0; 468],
            checksum: 0.into(),
        };
        block_of(raw.as_bytes(), FRAME)
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let framed = FRAME.open(bytes)?;
        let raw = RawDevice::read_from_bytes(framed).map_err(|_| Malformed::Truncated)?;
        let (segment_bytes, segments) = (raw.segment_bytes.get(), raw.segments.get());
        let sizes = SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX;
        let is_log = segment_bytes.is_multiple_of(BLOCK_LEN)
            && sizes.contains(&segment_bytes)
            && (SEGMENTS_MIN..=SEGMENTS_MAX).contains(&segments);
        if !is_log || raw.padding != [0; 468] {
            return Err(Malformed::Content);
        }
        Ok(Self { id: raw.id, segment_bytes, segments })
    }
}

fn block_of(raw: &[u8], frame: Frame) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    bytes[..RAW_BYTES].copy_from_slice(raw);
    frame.seal(&mut bytes);
    bytes
}

/// What a segment is to its log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// It has records.
    Records,
    /// The log is over: all of it is in the store.
    Ended,
    /// The log is over: nobody may replay it.
    SetAside,
}

/// The header of a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SegmentHeader {
    pub(super) kind: Kind,
    /// Of the device.
    pub(super) device: Id,
    /// Random, of the opening of the device that wrote this: what an earlier one wrote here, under
    /// whatever number, has other sums.
    pub(super) session: Id,
    pub(super) store: Id,
    pub(super) volume: Id,
    /// Counts the segments that were ever begun on the device.
    pub(super) number: u64,
    /// The number of the first segment of its log.
    pub(super) root: u64,
    /// The number of the oldest segment of its log that was needed when this one was begun: older
    /// ones are free.
    pub(super) oldest: u64,
    /// The number of the first record here. In older segments of the log, records from this one on
    /// do not count.
    pub(super) first: u64,
    /// Records below were not needed any more when this segment was begun.
    pub(super) freed: u64,
    /// Records below were durable, here or in the store, when this segment was begun.
    pub(super) durable: u64,
    /// Under whom the log may go on.
    pub(super) writers: Vec<Writer>,
}

/// What a damaged header seems to have been: any of it may be wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Remains {
    pub(super) volume: Id,
    pub(super) root: u64,
    pub(super) number: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawSegment {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) kind: u8,
    pub(super) reserved: [u8; 3],
    pub(super) device: Id,
    pub(super) session: Id,
    pub(super) store: Id,
    pub(super) volume: Id,
    pub(super) number: U64,
    pub(super) root: U64,
    pub(super) oldest: U64,
    pub(super) first: U64,
    pub(super) freed: U64,
    pub(super) durable: U64,
    pub(super) writers: [U64; WRITERS_MAX],
    pub(super) padding: [u8; 124],
    /// CRC-32C of all bytes before this field.
    pub(super) checksum: U32,
}

const _: () = assert!(size_of::<RawSegment>() == RAW_BYTES);

impl SegmentHeader {
    /// # Panics
    /// If it names too many writers.
    pub(super) fn encode(&self) -> [u8; BLOCK] {
        assert!((1..=WRITERS_MAX).contains(&self.writers.len()), "a log names some writers");
        let mut writers = [U64::new(0); WRITERS_MAX];
        for (place, writer) in writers.iter_mut().zip(&self.writers) {
            *place = writer.number().into();
        }
        let raw = RawSegment {
            magic: SEGMENT_MAGIC,
            version: SEGMENT_VERSION.into(),
            kind: match self.kind {
                Kind::Records => 0,
                Kind::Ended => 1,
                Kind::SetAside => 2,
            },
            reserved: [0; 3],
            device: self.device,
            session: self.session,
            store: self.store,
            volume: self.volume,
            number: self.number.into(),
            root: self.root.into(),
            oldest: self.oldest.into(),
            first: self.first.into(),
            freed: self.freed.into(),
            durable: self.durable.into(),
            writers,
            padding: [0; 124],
            checksum: 0.into(),
        };
        block_of(raw.as_bytes(), SEGMENT_FRAME)
    }

    /// What `bytes`, which are no header, were before they were damaged: `None` if they are zeros,
    /// or what was there before the log of `device` was made.
    pub(super) fn remains(bytes: &[u8], device: &Id) -> Option<Remains> {
        let (raw, _) = RawSegment::read_from_prefix(bytes).ok()?;
        let is_changed = SEGMENT_FRAME.open(bytes) == Err(Malformed::Checksum);
        let is_ours = raw.device == *device || is_changed;
        let is_something = bytes.iter().any(|byte| *byte != 0);
        let (volume, root, number) = (raw.volume, raw.root.get(), raw.number.get());
        (is_ours && is_something).then_some(Remains { volume, root, number })
    }

    /// Whether `bytes`, a header of any version, are of the log of `device`, and not of one that
    /// was there before.
    pub(super) fn is_of(bytes: &[u8], device: &Id) -> bool {
        RawSegment::read_from_prefix(bytes).is_ok_and(|(raw, _)| raw.device == *device)
    }

    /// The header that `bytes` begin with.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (framed, _) = SEGMENT_FRAME.open_with_next(bytes)?;
        let raw = RawSegment::read_from_bytes(framed).map_err(|_| Malformed::Truncated)?;
        Self::of_raw(&raw).ok_or(Malformed::Content)
    }

    fn of_raw(raw: &RawSegment) -> Option<Self> {
        let named = raw.writers.iter().take_while(|writer| writer.get() != 0);
        let writers: Vec<_> =
            named.map(|writer| Writer::new(writer.get())).collect::<Option<_>>()?;
        let header = Self {
            kind: match raw.kind {
                0 => Kind::Records,
                1 => Kind::Ended,
                2 => Kind::SetAside,
                _ => return None,
            },
            device: raw.device,
            session: raw.session,
            store: raw.store,
            volume: raw.volume,
            number: raw.number.get(),
            root: raw.root.get(),
            oldest: raw.oldest.get(),
            first: raw.first.get(),
            freed: raw.freed.get(),
            durable: raw.durable.get(),
            writers,
        };
        let rest_is_zeros = raw.writers[header.writers.len()..].iter().all(|rest| rest.get() == 0);
        let is_fine = !header.writers.is_empty()
            && rest_is_zeros
            && header.root <= header.oldest
            && header.oldest <= header.number
            && header.number <= NUMBER_MAX
            && header.freed <= header.first
            && header.durable <= header.first
            && header.first <= NUMBER_MAX
            && raw.reserved == [0; 3]
            && raw.padding == [0; 124];
        is_fine.then_some(header)
    }
}

/// Bytes of a group before its records.
pub(super) const GROUP_HEAD_BYTES: usize = 32;

/// The start of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GroupHead {
    /// Bytes of the records, which follow.
    pub(super) len: usize,
    pub(super) count: u32,
    /// The number of the segment.
    pub(super) segment: u64,
    /// The number of its first record.
    pub(super) first: u64,
    /// Records below were durable when it was written; `None` if it does not say that.
    pub(super) durable: Option<u64>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawGroup {
    pub(super) len: U32,
    pub(super) count: U32,
    pub(super) segment: U64,
    pub(super) first: U64,
    /// How many records before `first` may not have been durable, and one; 0 says nothing.
    pub(super) pending: U32,
    /// CRC-32C of the device, the session, the fields before, and the records.
    pub(super) sum: U32,
}

const _: () = assert!(size_of::<RawGroup>() == GROUP_HEAD_BYTES);
const SUMMED_BYTES: usize = GROUP_HEAD_BYTES - size_of::<U32>();

impl GroupHead {
    /// Bytes of the whole group in the file.
    pub(super) fn padded_len(&self) -> usize {
        (GROUP_HEAD_BYTES + self.len).next_multiple_of(BLOCK)
    }

    /// As it is in a segment of this device and session; `add` adds the records to the sum, which
    /// has all that is before them.
    pub(super) fn encode(
        &self,
        device: &Id,
        session: &Id,
        add: impl FnOnce(&mut RunningSum),
    ) -> [u8; GROUP_HEAD_BYTES] {
        let mut raw = RawGroup {
            len: u32::try_from(self.len).expect("groups are small").into(),
            count: self.count.into(),
            segment: self.segment.into(),
            first: self.first.into(),
            pending: self.pending().into(),
            sum: 0.into(),
        };
        let mut sum = sum_before(device, session, raw.as_bytes());
        add(&mut sum);
        raw.sum = sum.finish().into();
        let mut bytes = [0; GROUP_HEAD_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// The head that `bytes` begin with, if it can be one; nothing proves it yet.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (raw, _) = RawGroup::read_from_prefix(bytes).ok()?;
        let len = usize::try_from(raw.len.get()).ok()?;
        let head = Self {
            len,
            count: raw.count.get(),
            segment: raw.segment.get(),
            first: raw.first.get(),
            durable: match raw.pending.get().checked_sub(1) {
                Some(pending) => Some(raw.first.get().checked_sub(pending.into())?),
                None => None,
            },
        };
        let is_small = len <= GROUP_BYTES_MAX - GROUP_HEAD_BYTES;
        (is_small && head.count > 0).then_some(head)
    }

    /// What is not durable is in memory, too: there are never so many records that they cannot be
    /// counted here.
    fn pending(&self) -> u32 {
        let pending = self.durable.and_then(|durable| self.first.checked_sub(durable));
        pending.and_then(|pending| u32::try_from(pending + 1).ok()).unwrap_or(0)
    }

    /// The records of the group that `bytes` are; `None` if they are not those that were written
    /// by this device and session.
    pub(super) fn records<'a>(
        &self,
        device: &Id,
        session: &Id,
        bytes: &'a [u8],
    ) -> Option<&'a [u8]> {
        let (head, rest) = bytes.split_at_checked(GROUP_HEAD_BYTES)?;
        let records = rest.get(..self.len)?;
        let (_, there) = head.split_at(SUMMED_BYTES);
        let mut sum = sum_before(device, session, head);
        sum.add(records);
        (*there == sum.finish().to_le_bytes()).then_some(records)
    }
}

/// The sum of a group up to its records.
fn sum_before(device: &Id, session: &Id, head: &[u8]) -> RunningSum {
    let mut sum = RunningSum::default();
    [device, session, &head[..SUMMED_BYTES]].iter().for_each(|piece| sum.add(piece));
    sum
}

#[cfg(test)]
mod tests;

//! A boot record: what was read first of the volumes of an image.
//!
//! docs/formats/boot.md specifies it.
//!
//! Invariants
//! - I1 It is a hint. Whatever it says, what is read because of it was written by others and is
//!   checked as everything is.
//! - I2 Its ranges do not overlap, and are within bounds: who has one has no more to check.

use super::Id;
use super::frame::{Frame, Malformed};
use crate::place::BLOCK_BYTES;
use crate::state::State;
use mica_map::crc32c;
use std::mem::offset_of;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(crate) const MAGIC: [u8; 8] = *b"MICABOT\n";
pub(crate) const VERSION: u32 = 1;
/// Bytes before the ranges.
pub(crate) const HEADER_BYTES: usize = size_of::<RawHeader>();
/// Bytes of a range.
pub(crate) const RANGE_BYTES: usize = size_of::<RawRange>();
/// Ranges of a record at most.
pub(crate) const RANGES_MAX: usize = 1 << 14;
/// Blocks in all of them at most: 256 MiB.
pub(crate) const BLOCKS_MAX: u64 = 1 << 16;
/// A range leaves the record when so many boots, one after the other, did not read it.
pub(crate) const MISSED_MAX: u32 = 4;
/// Length of the object at most.
pub(crate) const BOOT_BYTES_MAX: usize = HEADER_BYTES + RANGES_MAX * RANGE_BYTES;

const FRAME: Frame = Frame { magic: MAGIC, version: VERSION, len: HEADER_BYTES };

/// A record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct BootRecord {
    pub(crate) store: Id,
    /// The image: the volume that all volumes which share the record come from.
    pub(crate) image: Id,
    /// Differs from put to put.
    pub(crate) nonce: Id,
    /// Boots that changed it.
    pub(crate) boots: u64,
    /// When it was put, in nanoseconds since 1970: for people.
    pub(crate) time_ns: u64,
    /// What is read, in this order.
    pub(crate) ranges: Vec<BootRange>,
}

/// Blocks that are read together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BootRange {
    /// The first.
    pub(crate) start: u64,
    /// How many.
    pub(crate) count: u32,
    /// Boots since the last one that read it.
    pub(crate) missed: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawHeader {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) ranges: U32,
    pub(super) store: Id,
    pub(super) image: Id,
    pub(super) nonce: Id,
    pub(super) boots: U64,
    pub(super) time_ns: U64,
    /// CRC-32C of the ranges.
    pub(super) ranges_sum: U32,
    pub(super) reserved: [u8; 8],
    /// CRC-32C of all bytes before this field.
    pub(super) checksum: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawRange {
    pub(super) start: U64,
    pub(super) count: U32,
    pub(super) missed: U32,
}

impl BootRecord {
    /// Bytes of disks that it names.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| u64::from(range.count)).sum::<u64>() * BLOCK_BYTES as u64
    }

    /// The object.
    ///
    /// # Panics
    /// If it has too many ranges.
    pub(crate) fn encode(&self) -> Vec<u8> {
        assert!(self.ranges.len() <= RANGES_MAX, "whoever merges keeps the bound");
        let mut ranges = Vec::with_capacity(self.ranges.len() * RANGE_BYTES);
        for BootRange { start, count, missed } in self.ranges.iter().copied() {
            let (start, count, missed) = (start.into(), count.into(), missed.into());
            ranges.extend_from_slice(RawRange { start, count, missed }.as_bytes());
        }
        let raw = RawHeader {
            magic: MAGIC,
            version: VERSION.into(),
            ranges: u32::try_from(self.ranges.len()).expect("few").into(),
            store: self.store,
            image: self.image,
            nonce: self.nonce,
            boots: self.boots.into(),
            time_ns: self.time_ns.into(),
            ranges_sum: crc32c(&ranges).into(),
            reserved: [0; 8],
            checksum: 0.into(),
        };
        let mut bytes = raw.as_bytes().to_vec();
        FRAME.seal(&mut bytes);
        bytes.extend_from_slice(&ranges);
        bytes
    }

    /// Gives `bytes` the sums that they should have, if there are enough of them.
    pub(crate) fn mend(bytes: &mut [u8]) {
        let Some(RawHeader { ranges, .. }) = RawHeader::read_from_prefix(bytes).ok().map(|it| it.0)
        else {
            return;
        };
        let len = usize::try_from(ranges.get()).unwrap_or(usize::MAX).saturating_mul(RANGE_BYTES);
        let Some(table) = bytes.get(HEADER_BYTES..HEADER_BYTES.saturating_add(len)) else { return };
        let sum = crc32c(table).to_le_bytes();
        let at = offset_of!(RawHeader, ranges_sum);
        bytes[at..at + sum.len()].copy_from_slice(&sum);
        FRAME.seal(bytes);
    }

    /// The record that `bytes` begin with.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let raw = RawHeader::read_from_bytes(FRAME.open(bytes)?).map_err(|_| Malformed::Content)?;
        let count = usize::try_from(raw.ranges.get()).ok().filter(|count| *count <= RANGES_MAX);
        let len = count.ok_or(Malformed::Content)? * RANGE_BYTES;
        let table = bytes.get(HEADER_BYTES..HEADER_BYTES + len).ok_or(Malformed::Truncated)?;
        if crc32c(table) != raw.ranges_sum.get() {
            return Err(Malformed::Checksum);
        }
        let ranges = table.chunks_exact(RANGE_BYTES).map(decode_range).collect::<Option<Vec<_>>>();
        let ranges = ranges.filter(|ranges| are_sound(ranges)).ok_or(Malformed::Content)?;
        Ok(Self {
            store: raw.store,
            image: raw.image,
            nonce: raw.nonce,
            boots: raw.boots.get(),
            time_ns: raw.time_ns.get(),
            ranges,
        })
    }
}

fn decode_range(bytes: &[u8]) -> Option<BootRange> {
    let raw = RawRange::read_from_bytes(bytes).ok()?;
    let (start, count, missed) = (raw.start.get(), raw.count.get(), raw.missed.get());
    let end = start.checked_add(count.into())?;
    let is_on_disk = end <= State::LEN_MAX / BLOCK_BYTES as u64;
    (count > 0 && is_on_disk && missed < MISSED_MAX).then_some(BootRange { start, count, missed })
}

/// Whether ranges, each of which is sound, are so together (I2).
fn are_sound(ranges: &[BootRange]) -> bool {
    let mut sorted: Vec<_> =
        ranges.iter().map(|r| (r.start, r.start + u64::from(r.count))).collect();
    sorted.sort_unstable();
    let are_apart = sorted.windows(2).all(|pair| pair[0].1 <= pair[1].0);
    are_apart && ranges.iter().map(|range| u64::from(range.count)).sum::<u64>() <= BLOCKS_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::Rng;

    fn record() -> BootRecord {
        let range = |start, count, missed| BootRange { start, count, missed };
        BootRecord {
            store: [1; 16],
            image: [2; 16],
            nonce: [3; 16],
            boots: 5,
            time_ns: 99,
            ranges: vec![range(7, 2, 0), range(0, 7, 3), range((1 << 36) - 1, 1, 1)],
        }
    }

    #[test]
    fn record_survives_with_and_without_zeros_after_it() {
        let none = BootRecord { ranges: Vec::new(), ..record() };
        let most = (0..1 << 14).map(|at| BootRange { start: at * 8, count: 4, missed: 0 });
        let most = BootRecord { ranges: most.collect(), ..record() };
        assert_eq!((most.encode().len(), most.bytes()), (BOOT_BYTES_MAX, 256 << 20));
        for record in [record(), none, most] {
            let mut bytes = record.encode();
            assert_eq!(BootRecord::decode(&bytes).as_ref(), Ok(&record));
            bytes.resize(bytes.len() + 100, 0);
            assert_eq!(BootRecord::decode(&bytes), Ok(record));
        }
    }

    #[test]
    fn record_with_a_flipped_bit_or_a_lost_end_is_refused() {
        let good = record().encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(BootRecord::decode(&bad).is_err(), "bit {bit}");
        }
        for len in 0..good.len() {
            assert!(BootRecord::decode(&good[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn record_that_contradicts_itself_is_refused() {
        let with = |ranges: &[(u64, u32, u32)]| {
            let range = |(start, count, missed)| BootRange { start, count, missed };
            let ranges = ranges.iter().copied().map(range).collect();
            BootRecord::decode(&BootRecord { ranges, ..record() }.encode())
        };
        for bad in [
            &[(0, 0, 0)][..],
            &[(0, 2, 0), (1, 1, 0)],
            &[(9, 1, 0), (9, 1, 0)],
            &[(1 << 36, 1, 0)],
            &[(u64::MAX, 1, 0)],
            &[(0, 1, MISSED_MAX)],
            &[(0, u32::MAX, 0)],
            &[(0, 1 << 15, 0), (1 << 15, 1 << 15, 0), (1 << 16, 1, 0)],
        ] {
            assert_eq!(with(bad), Err(Malformed::Content), "{bad:?}");
        }
        assert!(with(&[(1 << 15, 1 << 15, 3), (0, 1 << 15, 0)]).is_ok());
    }

    /// Bytes at random under good sums, as somebody would make them who wants to do harm.
    #[test]
    fn no_bytes_under_good_sums_are_more_than_a_sound_record() {
        for seed in 0..20_000 {
            let mut rng = Rng::new(seed);
            let mut bytes = record().encode();
            for _ in 0..=rng.below(6) {
                let at = rng.below(bytes.len() as u64);
                let at = usize::try_from(at).expect("small");
                bytes[at] = [0, 1, 0x7f, 0xff, 4][usize::try_from(rng.below(5)).expect("small")];
            }
            if rng.percent(30) {
                let len = usize::try_from(rng.below(bytes.len() as u64 + 1)).expect("small");
                bytes.truncate(len);
            }
            BootRecord::mend(&mut bytes);
            if let Ok(record) = BootRecord::decode(&bytes) {
                assert!(are_sound(&record.ranges), "seed {seed}");
                assert_eq!(BootRecord::decode(&record.encode()), Ok(record), "seed {seed}");
            }
        }
    }
}

//! The record of a snapshot: a leaf of the tree of snapshots.
//!
//! docs/formats/extent.md specifies it.
//!
//! Invariants
//! - I1 A record is framed and summed as a node is, and names a map that was written before it.
//! - I2 Its label is one that a snapshot may have: people are shown it.

use super::Id;
use super::frame::Malformed;
use crate::place::Place;
use crate::state::{Root, State};
use mica_block::{LABEL_BYTES_MAX, SnapshotInfo, check_label};
use mica_map::{HEIGHT_MAX, NODE_HEADER_BYTES, Reference};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a record before its label.
pub(super) const RECORD_BYTES: usize = size_of::<RawRecord>();
/// Bytes that a record takes in an extent at most, with the frame of a node.
pub(crate) const FRAMED_BYTES_MAX: usize =
    NODE_HEADER_BYTES + RECORD_BYTES + ORIGIN_BYTES + LABEL_BYTES_MAX;
const ORIGIN_BYTES: usize = size_of::<RawOrigin>();

/// A snapshot as it is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Record {
    /// What people see of it.
    pub(crate) info: SnapshotInfo,
    /// The map that the volume had.
    pub(crate) map: Root,
    /// Where it was taken, if it was received from another volume.
    pub(crate) origin: Option<Origin>,
}

/// What one snapshot is called in all stores: who has received it has the same disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Origin {
    /// Identity of the volume that it was taken of.
    pub(crate) volume: Id,
    /// Its number there, never 0.
    pub(crate) number: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawOrigin {
    volume: Id,
    number: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawRecord {
    pub(super) number: U64,
    pub(super) time_ns: U64,
    pub(super) records: U64,
    pub(super) len: U64,
    pub(super) map: [u8; Place::BYTES],
    pub(super) map_height: u8,
    pub(super) label_len: u8,
    pub(super) has_origin: u8,
    pub(super) reserved: [u8; 5],
}

impl Record {
    /// What it is called in all stores, as a snapshot of `volume`.
    pub(crate) fn identity(&self, volume: Id) -> Origin {
        self.origin.unwrap_or(Origin { volume, number: self.info.number })
    }

    /// The first state of a volume that begins with the snapshot.
    pub(crate) fn first_state(&self) -> State {
        let SnapshotInfo { len, time_ns, .. } = self.info;
        State { map: self.map, time_ns, ..State::empty(len) }
    }

    /// The payload of its node.
    ///
    /// # Panics
    /// If the label is too long.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let info = &self.info;
        let raw = RawRecord {
            number: info.number.into(),
            time_ns: info.time_ns.into(),
            records: info.records.into(),
            len: info.len.into(),
            map: Place::to_bytes_or_zeros(self.map.node),
            map_height: self.map.height,
            label_len: u8::try_from(info.label.len()).expect("a label that was checked"),
            has_origin: self.origin.is_some().into(),
            reserved: [0; 5],
        };
        let mut bytes = raw.as_bytes().to_vec();
        if let Some(Origin { volume, number }) = self.origin {
            bytes.extend_from_slice(RawOrigin { volume, number: number.into() }.as_bytes());
        }
        bytes.extend_from_slice(info.label.as_bytes());
        bytes
    }

    /// The record with this payload, which was read at `at`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(payload: &[u8], at: Place) -> Result<Self, Malformed> {
        let (raw, rest) = RawRecord::read_from_prefix(payload).map_err(|_| Malformed::Truncated)?;
        Self::of_raw(&raw, rest, at).ok_or(Malformed::Content)
    }

    fn of_raw(raw: &RawRecord, rest: &[u8], at: Place) -> Option<Self> {
        let (origin, label) = match raw.has_origin {
            0 => (None, rest),
            1 => {
                let (origin, label) = RawOrigin::read_from_prefix(rest).ok()?;
                let number = Some(origin.number.get()).filter(|number| *number != 0)?;
                (Some(Origin { volume: origin.volume, number }), label)
            }
            _ => return None,
        };
        let label = std::str::from_utf8(label).ok().filter(|label| check_label(label).is_ok())?;
        let node = Place::from_bytes_or_zeros(&raw.map)?;
        let names_older = node.is_none_or(|node| at.may_name(node));
        let len = Some(raw.len.get()).filter(|len| State::is_len(*len))?;
        let is_sound = names_older
            && raw.number.get() != 0
            && raw.map_height <= HEIGHT_MAX
            && usize::from(raw.label_len) == label.len()
            && raw.reserved == [0; 5];
        is_sound.then(|| Self {
            info: SnapshotInfo {
                number: raw.number.get(),
                label: label.to_owned(),
                time_ns: raw.time_ns.get(),
                len,
                records: raw.records.get(),
            },
            map: Root { node, height: raw.map_height },
            origin,
        })
    }
}

#[cfg(test)]
mod tests;

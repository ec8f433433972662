//! A state of a volume: everything that follows from its roots.

use crate::place::{BLOCK_BYTES, Place};
use mica_map::{HEIGHT_MAX, Reference};
use mica_units::SECTOR_BYTES;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The root of one of a volume's trees.
pub type Root = mica_map::Root<Place>;

/// A state. It is a value: what it names never changes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct State {
    /// The map: guest block to the block that has its bytes.
    pub map: Root,
    /// Length of the disk in bytes.
    pub len: u64,
    /// The snapshots by number.
    pub snapshots: Root,
    /// The number that the next snapshot gets; 0 if there never was one, which means 1.
    pub next_snapshot: u64,
    /// Up to which record of the write log everything is in it: all below, and nothing from it on.
    pub records: u64,
    /// Time of the last of these, in nanoseconds since 1970.
    pub time_ns: u64,
}

impl State {
    /// Longest disk: 256 TiB.
    pub const LEN_MAX: u64 = 1 << 48;
    /// Most of what is counted: records, and snapshots. Nobody ever has so many, and a number that
    /// is larger is not one: what is counted on from it does not overflow.
    pub(crate) const COUNT_MAX: u64 = 1 << 61;

    /// An empty disk of `len` bytes.
    pub fn empty(len: u64) -> Self {
        Self { len, ..Self::default() }
    }

    /// The number that the next snapshot gets.
    pub(crate) fn next_number(&self) -> u64 {
        self.next_snapshot.max(1)
    }

    /// Whether a disk may have `len` bytes.
    pub(crate) fn is_len(len: u64) -> bool {
        len <= Self::LEN_MAX && len.is_multiple_of(SECTOR_BYTES)
    }

    /// Number of the disk's blocks; the last may be cut by the end.
    pub fn blocks(&self) -> u64 {
        self.len.div_ceil(BLOCK_BYTES as u64)
    }
}

/// A state as extents and heads have it.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawState {
    pub(crate) map: [u8; Place::BYTES],
    pub(crate) snapshots: [u8; Place::BYTES],
    pub(crate) len: U64,
    pub(crate) next_snapshot: U64,
    pub(crate) records: U64,
    pub(crate) time_ns: U64,
    pub(crate) map_height: u8,
    pub(crate) snapshots_height: u8,
    pub(crate) reserved: [u8; 6],
}

impl RawState {
    pub(crate) fn encode(state: &State) -> Self {
        Self {
            map: Place::to_bytes_or_zeros(state.map.node),
            snapshots: Place::to_bytes_or_zeros(state.snapshots.node),
            len: state.len.into(),
            next_snapshot: state.next_snapshot.into(),
            records: state.records.into(),
            time_ns: state.time_ns.into(),
            map_height: state.map.height,
            snapshots_height: state.snapshots.height,
            reserved: [0; 6],
        }
    }

    /// `None` if these are not the bytes of a state.
    pub(crate) fn decode(&self) -> Option<State> {
        let root = |node: [u8; Place::BYTES], height| {
            let node = Place::from_bytes_or_zeros(&node)?;
            (height <= HEIGHT_MAX).then_some(Root { node, height })
        };
        let state = State {
            map: root(self.map, self.map_height)?,
            len: self.len.get(),
            snapshots: root(self.snapshots, self.snapshots_height)?,
            next_snapshot: self.next_snapshot.get(),
            records: self.records.get(),
            time_ns: self.time_ns.get(),
        };
        let are_counts =
            [state.next_snapshot, state.records].iter().all(|n| *n <= State::COUNT_MAX);
        (are_counts && State::is_len(state.len)).then_some(state)
    }
}

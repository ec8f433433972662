//! The bytes that a log takes away from the guest: the image has them in a place of their own, and
//! its tables no longer name them once the log is applied.
//!
//! A program that writes the image in the meantime and leaves the tables as they are may have
//! written to exactly these bytes: to clusters whose entry marks them as the image's alone
//! ("copied"). Anything else that such a program does changes a table or a count, which the log's
//! sums reveal. A writer zeroes the bytes it drops in the file before its log records that
//! (`write/zero.rs`); so if these bytes are still zeros, nobody wrote there, and if they are not,
//! somebody did, and that write prevails.
//!
//! Invariants
//! - I1 The writer calls [`dropped_units`] to learn what it has to zero, and the process that
//!   replays its log calls the same function to learn what still has to be zeros
//!   ([`super::evidence`]).

use mica_qcow2_format::{L2Entry, L2Format, RawL2Entry};
use mica_units::{GuestOffset, HostOffset};

/// Units of a cluster, as bits, in the place that starts at `host`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DroppedUnits {
    pub(crate) host: HostOffset,
    pub(crate) units: u32,
}

/// Which bytes that `old` gives to guest cluster `guest` alone are no longer its own with `new`.
pub(crate) fn dropped_units(
    l2: L2Format,
    guest: GuestOffset,
    old: RawL2Entry,
    new: RawL2Entry,
) -> Option<DroppedUnits> {
    // In a data file nothing is shared.
    let (host, units) = placed(l2, guest, old).filter(|_| old.copied() || l2.data_file)?;
    let kept = placed(l2, guest, new).filter(|(kept, _)| *kept == host).map_or(0, |(_, kept)| kept);
    let units = units & !kept;
    (units != 0).then_some(DroppedUnits { host, units })
}

/// Where an entry has data, and in which units.
fn placed(l2: L2Format, guest: GuestOffset, raw: RawL2Entry) -> Option<(HostOffset, u32)> {
    match l2.interpret_at(raw, guest).ok()? {
        L2Entry::Data(host) => Some((host, u32::MAX)),
        L2Entry::Subclusters { host: Some(host), allocated, .. } if allocated != 0 => {
            Some((host, allocated))
        }
        _ => None,
    }
}

/// The ranges of a place that `dropped` covers, as offset and length.
pub(crate) fn ranges_of(l2: L2Format, dropped: DroppedUnits) -> Vec<(HostOffset, u64)> {
    let unit = l2.subcluster_bytes();
    let count = (l2.cluster_bits.bytes() / unit).min(32);
    let mut ranges: Vec<(HostOffset, u64)> = Vec::new();
    for index in (0..count).filter(|index| dropped.units & (1 << index) != 0) {
        let at = HostOffset::new(dropped.host.bytes() + index * unit);
        match ranges.last_mut() {
            Some((start, len)) if start.bytes() + *len == at.bytes() => *len += unit,
            _ => ranges.push((at, unit)),
        }
    }
    ranges
}

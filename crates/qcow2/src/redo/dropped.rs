//! What a log takes away from the guest: bytes that the image has in a place of their own, and that
//! its tables do not name any more once the log is applied.
//!
//! Who writes the image meanwhile and leaves the tables as they are can have written to just these
//! bytes: to clusters of which an entry says that they are the image's alone ("copied"). All else
//! that such a program does changes a table or a count, which the log's sums tell. A writer makes
//! what it drops zeros in the file before its log says so (`write/zero.rs`); so if these bytes are
//! zeros still, nobody wrote there, and if they are not, somebody did, and has the right of way.
//!
//! Invariants
//! - I1 The writer asks [`dropped_units`] what it has to make zeros, and whoever replays its log
//!   asks the same function what has to be zeros still ([`super::evidence`]).

use mica_qcow2_format::{L2Entry, L2Format, RawL2Entry};
use mica_units::{GuestOffset, HostOffset};

/// Units of a cluster, as bits, in the place that starts at `host`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DroppedUnits {
    pub(crate) host: HostOffset,
    pub(crate) units: u32,
}

/// Which bytes that `old` gives to guest cluster `guest` alone are its own no more with `new`.
pub(crate) fn dropped_units(
    l2: L2Format,
    guest: GuestOffset,
    old: RawL2Entry,
    new: RawL2Entry,
) -> Option<DroppedUnits> {
    // In a data file nothing is ever shared.
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

/// The ranges of a place that `dropped` speaks of, as offset and length.
pub(crate) fn ranges_of(l2: L2Format, dropped: DroppedUnits) -> Vec<(HostOffset, u64)> {
    let unit = 1_u64 << l2.subcluster_bits();
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

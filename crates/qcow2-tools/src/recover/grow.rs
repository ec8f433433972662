//! The lost tail of a file: clusters beyond its end that tables name.
//!
//! They read as zeros. After a power cut this is how data looks whose length never became durable.
//! A file that is too short for them is extended: then they can be counted, and their places are
//! not used for anything else. The guest reads the same zeros as before.

use crate::check::Counted;
use mica_qcow2_format::Header;
use mica_units::HostCluster;

/// A file may grow to this many times its length.
const GROWTH_FACTOR: u64 = 64;
/// A file may double, and this much more, for a single name: 1 GiB.
const GROWTH_BYTES: u64 = 1 << 30;

/// The required length of the file, if it is too short. A lone name far beyond the end is not a
/// lost tail but a wrong entry, and is left alone.
pub(super) fn wanted_len(header: &Header, counted: &Counted) -> Option<u64> {
    let bits = header.cluster_bits;
    let count = bits.clusters_for(counted.file_bytes);
    let end = HostCluster::new(count);
    let limit = end_max(header, counted);
    // Tables may be lost too, and with them the names of many clusters.
    let near = HostCluster::new(2 * count + bits.clusters_for(GROWTH_BYTES));
    let mut named = 0_u64;
    let mut wanted = None;
    for (first, last) in counted.kept.beyond.iter() {
        if last >= limit {
            break;
        }
        let after = last.saturating_add(1);
        named += after.saturating_since(first.max(end));
        if after > end && (after <= near || after.saturating_since(end) <= 2 * named) {
            wanted = Some(bits.start_of(after).bytes());
        }
    }
    wanted
}

/// Where the file may end after it has grown.
pub(super) fn end_max(header: &Header, counted: &Counted) -> HostCluster {
    let bits = header.cluster_bits;
    let count = bits.clusters_for(counted.file_bytes);
    HostCluster::new(GROWTH_FACTOR * count + bits.clusters_for(GROWTH_BYTES))
}

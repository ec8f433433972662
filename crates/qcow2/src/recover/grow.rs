//! The lost tail of a file: clusters beyond its end that tables name.
//!
//! They read as zeros. After a power cut that is how data looks whose length never became durable.
//! A file that is too short by them is made long enough: then they can be counted, and nobody takes
//! their places for something else. The guest reads the same zeros as before.

use crate::check::Counted;
use crate::format::Header;

/// A file may double, and this much more: 1 GiB.
const GROWTH_BYTES: u64 = 1 << 30;
/// Clusters of a tail that need not be named by anything.
const SLACK_CLUSTERS: u64 = 1024;

/// How long the file should be, if it is too short. What lies far off, with nothing between, is no
/// lost tail but a wrong entry, and stays where it is.
pub(super) fn wanted_len(header: &Header, counted: &Counted) -> Option<u64> {
    let bits = header.cluster_bits;
    let end = bits.clusters_for(counted.file_bytes);
    let limit = end_max(header, counted);
    let mut named = 0_u64;
    let mut wanted = None;
    for (first, last) in counted.kept.beyond.iter() {
        if last >= limit {
            break;
        }
        named += (last + 1).saturating_sub(first.max(end));
        if last + 1 > end && last + 1 - end <= 2 * named + SLACK_CLUSTERS {
            wanted = Some((last + 1) << bits.bits());
        }
    }
    wanted
}

/// The number of clusters that the file may grow to.
pub(super) fn end_max(header: &Header, counted: &Counted) -> u64 {
    let bits = header.cluster_bits;
    2 * bits.clusters_for(counted.file_bytes) + bits.clusters_for(GROWTH_BYTES)
}

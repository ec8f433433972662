//! Finds writers that go through the disk in sequence and wait for a flush again and again, as
//! databases do with their logs.
//!
//! Such a writer gets the whole of a cluster with its first write there: what shows in the rest is
//! written, too. The writes that follow change no metadata, neither ours nor the file system's. A
//! sync after a write to blocks that the file system has yet to place waits for its journal, and
//! takes some three times as long as one after a write to blocks that are there.
//!
//! Invariant: what is remembered here decides how fast a write is, and nothing else. So a disk may
//! forget it at any time, and no order of memory matters.

use mica_units::GuestCluster;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many clusters are remembered; the place of each is its number modulo this.
const SLOTS: usize = 64;
/// Flushes while a writer goes from one cluster to the next, so that it counts as waiting for them.
const FLUSHES_MIN: u64 = 2;
/// Bits of a slot for the number of a cluster. The others count flushes, and wrap.
const CLUSTER_BITS: u32 = 40;

/// The clusters in which writers were seen last.
pub(super) struct Streams {
    /// A cluster and the flushes until then; `u64::MAX` if there is none.
    slots: [AtomicU64; SLOTS],
    flushes: AtomicU64,
}

impl Default for Streams {
    fn default() -> Self {
        Self { slots: [const { AtomicU64::new(u64::MAX) }; SLOTS], flushes: AtomicU64::new(0) }
    }
}

impl Streams {
    /// Somebody waits for a flush.
    pub(super) fn note_flush(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that units of `cluster` get bytes of their own. Returns whether the one that writes
    /// them came from the cluster before, and waited for flushes on its way.
    pub(super) fn enter(&self, cluster: GuestCluster) -> bool {
        let flushes = self.flushes.load(Ordering::Relaxed) & (u64::MAX >> CLUSTER_BITS);
        let tag = |cluster: u64| cluster & (u64::MAX >> (u64::BITS - CLUSTER_BITS));
        let place = |cluster: u64| usize::try_from(cluster % SLOTS as u64).expect("a slot");
        let holds = |seen: u64, cluster: u64| seen != u64::MAX && tag(seen) == tag(cluster);
        let number = cluster.number();
        let slot = &self.slots[place(number)];
        if !holds(slot.load(Ordering::Relaxed), number) {
            slot.store(flushes << CLUSTER_BITS | tag(number), Ordering::Relaxed);
        }
        let Some(before) = number.checked_sub(1) else { return false };
        let seen = self.slots[place(before)].load(Ordering::Relaxed);
        if !holds(seen, before) {
            return false;
        }
        let since = flushes.wrapping_sub(seen >> CLUSTER_BITS) & (u64::MAX >> CLUSTER_BITS);
        since >= FLUSHES_MIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(streams: &Streams, cluster: u64) -> bool {
        streams.enter(GuestCluster::new(cluster))
    }

    #[test]
    fn a_writer_that_waits_for_flushes_is_followed() {
        let streams = Streams::default();
        for cluster in 0..200 {
            assert_eq!(enter(&streams, cluster), cluster > 0, "{cluster}");
            (0..FLUSHES_MIN).for_each(|_| streams.note_flush());
        }
    }

    #[test]
    fn one_that_waits_once_a_cluster_or_never_is_not() {
        let streams = Streams::default();
        for cluster in 0..200 {
            assert!(!enter(&streams, cluster), "{cluster}");
            if cluster > 100 {
                streams.note_flush();
            }
        }
    }

    #[test]
    fn writes_to_other_places_are_no_sequence() {
        let streams = Streams::default();
        for cluster in [5, 7, 69, 6 + 64, 4, 3, 1 << 39, 1 << 40, (1 << 40) + 1, 900] {
            let expected = cluster == (1 << 40) + 1 || cluster == 70;
            assert_eq!(enter(&streams, cluster), expected, "{cluster}");
            (0..FLUSHES_MIN).for_each(|_| streams.note_flush());
        }
    }

    #[test]
    fn counts_of_flushes_wrap() {
        let streams = Streams::default();
        streams.flushes.store((1 << (u64::BITS - CLUSTER_BITS)) - 1, Ordering::Relaxed);
        enter(&streams, 8);
        (0..FLUSHES_MIN).for_each(|_| streams.note_flush());
        assert!(enter(&streams, 9));
    }
}

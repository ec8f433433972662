//! Bytes that the guest gives up become zeros in the file before the tables, or the log, drop them.
//!
//! A log that takes bytes away from the guest is applied only while these are zeros in the file:
//! nothing else proves that nobody wrote there since ([`crate::redo`], `dropped.rs`). This costs
//! nothing that would not be due anyway: clusters that lose their last link are punched out of the
//! file.
//!
//! ```text
//! hold the clusters ─▶ no slice offers them for writes in place ─▶ writes in place that began
//! before are done ─▶ zeros ─▶ link, log, publish ─▶ let go
//! ```
//!
//! Invariants
//! - I1 While a log records bytes as dropped, and the file's tables still name them, they are
//!   zeros: no write of this process goes there. Earlier writes are waited for; later ones find
//!   another entry; and a write into a place that is kept ([`PageState::is_zeroed`]) waits for a
//!   flush first.
//! - I2 If bytes cannot be made zeros (the file system cannot do it, or something else names the
//!   cluster too), the change does not go into the log: it is acknowledged after a flush.

use super::Writer;
use super::link::{Change, Drops, Entries, Entry};
use super::pages::PageState;
use crate::live::Held;
use crate::redo::{DroppedUnits, dropped_units, ranges_of};
use mica_block::{ErrorKind, Result, Space};
use mica_units::{GuestCluster, HostCluster, HostOffset};

impl Writer {
    /// Zeroes the bytes that `changes`, still invisible to everyone else, drop. Until the result is
    /// dropped nobody writes there in place. The caller holds the claims of the clusters.
    pub(super) async fn zero_what_drops(&self, changes: &mut [Change]) -> Result<Option<Held<'_>>> {
        let dropping: Vec<_> = changes
            .iter()
            .enumerate()
            .filter(|(_, change)| change.drops == Drops::Nothing)
            .filter_map(|(index, change)| Some((index, self.drops_of(change)?)))
            .collect();
        if dropping.is_empty() {
            return Ok(None);
        }
        let entries = dropping.iter().map(|(index, _)| changes[*index].entry).collect();
        let held = self.hold(entries).await;
        let mut ranges: Vec<(HostOffset, u64, bool)> = Vec::new();
        for (index, dropped) in &dropping {
            let change = &mut changes[*index];
            change.drops = match self.is_only_link(dropped.host).await? {
                true => Drops::Zeros,
                false => Drops::Data,
            };
            if change.drops == Drops::Zeros {
                let stays = self.keeps_place(change);
                ranges.extend(
                    ranges_of(self.l2, *dropped).iter().map(|(at, len)| (*at, *len, stays)),
                );
            }
        }
        if let Err(error) = self.make_zeros(ranges).await {
            if error.kind() != ErrorKind::Unsupported {
                return Err(error);
            }
            // Some may be zeros already: they become zeros in any case.
            dropping.iter().for_each(|(index, _)| changes[*index].drops = Drops::Data);
        }
        Ok(Some(held))
    }

    /// Holds the places of `entries`, and waits for the writes in place that began before.
    pub(super) async fn hold(&self, entries: Vec<Entry>) -> Held<'_> {
        let clusters = entries.iter().map(|entry| self.place_of(entry));
        let held = self.metadata.held.hold(clusters.collect());
        // Unchanged, but from now on nobody finds a place to write to.
        self.show(entries.iter().map(|entry| (entry.cluster, entry.raw, 0..self.units())));
        self.gate.in_place_grace().await;
        held
    }
}

impl Writer {
    /// What `change` takes away from the guest.
    pub(super) fn drops_of(&self, change: &Change) -> Option<DroppedUnits> {
        let guest = self.l2.cluster_bits.start_of(change.entry.cluster);
        dropped_units(self.l2, guest, change.entry.raw, change.new)
    }

    /// The place that an entry has, or that its cluster has in a data file: there, and only there,
    /// a cluster has the same number as on the disk.
    pub(super) fn place_of(&self, entry: &Entry) -> HostCluster {
        match self.l2.data_file {
            true => HostCluster::new(entry.cluster.number()),
            false => self.l2.cluster_bits.host_cluster(entry.raw.offset()),
        }
    }

    /// Whether the entry still names the cluster's place.
    pub(super) fn keeps_place(&self, change: &Change) -> bool {
        self.l2.data_file
            || !change.new.compressed() && change.new.offset() == change.entry.raw.offset()
    }

    /// Whether only one entry names the cluster at `host`, as far as its count shows.
    async fn is_only_link(&self, host: HostOffset) -> Result<bool> {
        if self.l2.data_file {
            return Ok(true);
        }
        let cluster = self.l2.cluster_bits.host_cluster(host);
        Ok(self.space.refcount(cluster).await? == Some(1))
    }

    /// Zeroes ranges, each of which either keeps its space in the file or does not.
    async fn make_zeros(&self, mut ranges: Vec<(HostOffset, u64, bool)>) -> Result<()> {
        ranges.sort_unstable_by_key(|(at, ..)| *at);
        let joins = |one: &(HostOffset, u64, bool), next: &(HostOffset, u64, bool)| {
            one.0.bytes() + one.1 == next.0.bytes() && one.2 == next.2
        };
        for run in ranges.chunk_by(joins) {
            let (Some((at, _, stays)), Some((last, last_len, _))) = (run.first(), run.last())
            else {
                continue;
            };
            let len = last.bytes() + last_len - at.bytes();
            self.make_zero(*at, len, *stays).await?;
        }
        Ok(())
    }

    async fn make_zero(&self, at: HostOffset, len: u64, stays: bool) -> Result<()> {
        let unsupported = |done: &Result<()>| {
            done.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unsupported)
        };
        let wanted = if stays { Space::Zero } else { Space::Punch };
        let done = self.data.space(wanted, at, len).await;
        if !unsupported(&done) {
            return done;
        }
        let other = if stays { Space::Punch } else { Space::Zero };
        let done = self.data.space(other, at, len).await;
        if !stays || done.is_err() {
            return done;
        }
        // Zeros that keep their space, for a file system that supports only holes.
        match self.data.space(Space::Allocate, at, len).await {
            allocated if unsupported(&allocated) => Ok(()),
            allocated => allocated,
        }
    }

    /// The entries of guest clusters `first..=last`, whose places may be written.
    pub(super) async fn settled_entries(
        &self,
        first: GuestCluster,
        last: GuestCluster,
    ) -> Result<Entries> {
        // Mostly it takes the lock once: others wait for it, for as long as it takes to log.
        let at_hand = {
            let pages = self.metadata.lock();
            let entries = self.entries_in(&pages, first, last);
            entries.filter(|entries| !self.are_zeroed(&pages, entries))
        };
        if let Some(entries) = at_hand {
            return Ok(entries);
        }
        let entries = Box::pin(self.entries(first, last)).await?;
        self.settle_zeroed(&entries).await?;
        Ok(entries)
    }

    /// Whether the place of one of `entries` was zeroed since the last flush.
    fn are_zeroed(&self, pages: &PageState, entries: &[Entry]) -> bool {
        entries.iter().any(|entry| pages.is_zeroed(self.place_of(entry)))
    }

    /// If the place of one of `entries` was zeroed since the last flush, waits until that is
    /// durable: a write there would look like another program's (I1).
    async fn settle_zeroed(&self, entries: &[Entry]) -> Result<()> {
        let is_fresh = self.are_zeroed(&self.metadata.lock(), entries);
        if is_fresh { Box::pin(self.flush()).await } else { Ok(()) }
    }
}

//! A write that changes metadata: claim, reserve, write the data, link, publish.
//!
//! What few requests wait for is boxed, here and in what this calls: the future of each request has
//! room for all that it may wait for, and is allocated and moved as a whole.

use super::Writer;
use super::fill::Parts;
use super::gather::{Claimed, Guest, Offer, Outcome, Pieces, Role};
use super::plan::{ClusterPlan, Plans, Reservations, clusters_of};
use super::unreadable;
use crate::map::slice_of;
use mica_block::{Error, ErrorKind, Extent, Result};
use mica_rt::{Buf, Pace};
use mica_units::{GuestCluster, GuestOffset, GuestRange, SECTOR_BYTES};
use smallvec::SmallVec;
use std::sync::Arc;

/// Clusters that one transaction changes at most; a longer request is split.
const CLUSTERS_MAX: u64 = 64;
/// Bytes that one transaction writes at most, so that what it copies stays bounded.
const TRANSACTION_BYTES_MAX: u64 = 4 << 20;
/// Clusters of a request after which other tasks get a turn: a request may have millions.
const CLUSTERS_PER_TURN: u64 = 512;

/// Whose bytes a transaction writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    Guest,
    /// The layers beneath.
    Merge,
}

/// Offers that were taken; they get a failure if nothing else was reported.
pub(super) struct Taken(pub(super) Vec<Arc<Offer>>);

impl Taken {
    pub(super) fn finish(mut self, result: &Result<()>) {
        for offer in self.0.drain(..) {
            offer.finish(result.clone());
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        for offer in self.0.drain(..) {
            let context = "the write that this one had joined was abandoned";
            offer.finish(Err(Error::new(ErrorKind::Io, context)));
        }
    }
}

impl Writer {
    /// Writes `buf` at `at`, which changes metadata, or may do so.
    pub(crate) async fn write_allocating(
        &self,
        at: GuestOffset,
        mut buf: Buf,
    ) -> (Result<()>, Buf) {
        let range = GuestRange::new(at, buf.len() as u64);
        let result = match range {
            Some(range) => self.write_range(range, &mut buf).await,
            None => Err(crate::map::beyond_end(self.map.len(), at)),
        };
        (result, buf)
    }

    async fn write_range(&self, range: GuestRange, buf: &mut Buf) -> Result<()> {
        assert!(
            (range.start().bytes() | range.len()).is_multiple_of(SECTOR_BYTES),
            "a write of whole sectors"
        );
        self.in_transactions(range, async |part| {
            let piece = buf.split_to(usize::try_from(part.len()).expect("a part of the buffer"));
            self.write_part(part, piece).await
        })
        .await
    }

    /// Runs a request to `range` in parts, each as one transaction by `transact`.
    pub(super) async fn in_transactions(
        &self,
        range: GuestRange,
        mut transact: impl AsyncFnMut(GuestRange) -> Result<()>,
    ) -> Result<()> {
        self.check_writable(range)?;
        self.mark_before_change().await?;
        self.record(range).await?;
        let mut pace = Pace::new(CLUSTERS_PER_TURN);
        let mut at = range.start().bytes();
        let end = range.end().bytes();
        while at < end {
            let stop = self.transaction_end(at).min(end);
            let part = GuestRange::between(GuestOffset::new(at), GuestOffset::new(stop));
            if let Err(error) = transact(part.expect("it goes on")).await {
                return Err(Box::pin(self.note_corruption(error)).await);
            }
            self.flush_if_full().await?;
            // Nothing is claimed between two transactions.
            pace.steps((stop - at) / self.l2.cluster_bits.bytes() + 1).await;
            at = stop;
        }
        Ok(())
    }

    /// What comes before a change of the bitmaps alone.
    pub(crate) async fn begin_change(&self) -> Result<()> {
        self.check_usable()?;
        self.mark_before_change().await
    }

    /// What comes before every change.
    pub(super) async fn mark_before_change(&self) -> Result<()> {
        if !self.header.is_marked() {
            Box::pin(self.mark_in_use()).await?;
        }
        self.note_change();
        Ok(())
    }

    /// Writes a part of a request, together with other pending writes to the same cluster.
    async fn write_part(&self, range: GuestRange, mut buf: Buf) -> Result<()> {
        let (first, last) = clusters_of(self.l2.cluster_bits, range);
        if first != last {
            let _claimed = self.claim_clusters(first, last).await;
            return self.write_transaction(Guest::new([(range, buf)]), Origin::Guest).await;
        }
        let claimed = loop {
            match self.gather.join(&self.clusters, first, range, buf) {
                Role::Leads(claimed, back) => {
                    buf = back;
                    break claimed;
                }
                Role::Offered(offer) => match offer.outcome().await {
                    Outcome::Done(result) => return result,
                    Outcome::Again(back) => buf = back,
                },
            }
        };
        // Writes to this cluster that are ready now offer themselves.
        mica_rt::yield_now().await;
        let mut pieces = Pieces::from([(range, buf)]);
        let mut offers = Vec::new();
        for (range, buf, offer) in self.gather.take(first, range) {
            pieces.push((range, buf));
            offers.push(offer);
        }
        let taken = Taken(offers);
        // In two boxes of less than a kilobyte: glibc has those at hand.
        let guest = Guest::new(pieces);
        let result = Box::pin(self.write_transaction(guest, Origin::Guest)).await;
        taken.finish(&result);
        drop(claimed);
        result
    }

    /// One transaction. The caller holds the claims of the clusters.
    pub(super) async fn write_transaction(&self, guest: Guest, origin: Origin) -> Result<()> {
        let bits = self.l2.cluster_bits;
        let ranges: SmallVec<[_; 1]> = guest.ranges().collect();
        let (Some(lowest), Some(highest)) = (ranges.first(), ranges.last()) else { return Ok(()) };
        let first = bits.guest_cluster(lowest.start());
        let (_, last) = clusters_of(bits, *highest);
        let entries = self.settled_entries(first, last).await?;
        let mut plans = Plans::new();
        let mut reservations = Reservations::new(self);
        self.place(&ranges, entries, &mut plans, &mut reservations).await?;
        if origin == Origin::Guest {
            self.widen(&mut plans);
        }
        // Read once: the disk may grow in the meantime.
        let disk_len = self.map.len();
        let visible = self.visible(disk_len, &plans).await?;
        let parts = Parts::plan(self, disk_len, &ranges, &plans, &visible)?;
        self.write_parts(parts, guest).await?;
        let changes: SmallVec<[_; 1]> =
            plans.into_iter().filter_map(|plan| self.change_of(&ranges, plan, &visible)).collect();
        if changes.is_empty() {
            Box::pin(self.load_slices(lowest.start(), highest.end())).await;
            return Ok(());
        }
        // From here on the clusters are not returned: some may be linked when the rest fails.
        let reserved = reservations.keep();
        self.link_or_fail(&changes, &reserved).await?.end_together().await?;
        Ok(())
    }

    /// Loads the slices from `start` to `end`, where a write changed nothing: the next one there
    /// goes straight to its place, which only a slice in memory shows. A load that only writes
    /// would never get one otherwise.
    async fn load_slices(&self, start: GuestOffset, end: GuestOffset) {
        let last = GuestOffset::new(end.bytes() - 1);
        for slice in slice_of(start).0..=slice_of(last).0 {
            // The write is done: a slice that cannot be loaded is the next request's error.
            if self.map.slice(slice).await.is_err() {
                return;
            }
        }
    }

    /// What currently shows in units of `plans` that are written whole; empty if none are.
    async fn visible(&self, disk_len: u64, plans: &[ClusterPlan]) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let filled = || plans.iter().filter(|plan| plan.must != 0);
        let (Some(first), Some(last)) = (filled().next(), filled().next_back()) else {
            return Ok(extents);
        };
        let bits = self.l2.cluster_bits;
        let start = bits.start_of(first.entry.cluster);
        let end = bits.start_of(last.entry.cluster.saturating_add(1));
        if let Some(range) = GuestRange::between(start, end.min(GuestOffset::new(disk_len))) {
            extents = self.map.plan(range).await.map_err(unreadable)?;
        }
        Ok(extents)
    }
}

impl Writer {
    /// Where the transaction that starts at `at` ends: at a cluster's end.
    pub(crate) fn transaction_end(&self, at: u64) -> u64 {
        let bits = self.l2.cluster_bits;
        let most = CLUSTERS_MAX.min((TRANSACTION_BYTES_MAX / bits.bytes()).max(1));
        let first = bits.guest_cluster(GuestOffset::new(at));
        bits.start_of(first.saturating_add(most)).bytes()
    }

    /// The right to change the entries of guest clusters `first..=last`.
    pub(super) async fn claim_clusters(
        &self,
        first: GuestCluster,
        last: GuestCluster,
    ) -> Claimed<'_> {
        self.gather.claim(&self.clusters, first, last).await
    }
}

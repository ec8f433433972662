//! A write that changes metadata: claim, reserve, write the data, link, publish.

use super::Writer;
use super::allocate::Reserved;
use super::fill::Parts;
use super::gather::{Claimed, Guest, Offer, Outcome, Role};
use super::link::{Change, Drops, Entry};
use mica_block::{Error, ErrorKind, Extent, Result};
use mica_qcow2_format::{CompressedCluster, L2Entry, RawL2Entry};
use mica_rt::{Buf, Pace};
use mica_units::{GuestOffset, GuestRange, HostOffset, SECTOR_BYTES};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Clusters that one transaction changes at most; a longer request is several.
const CLUSTERS_MAX: u64 = 64;
/// Bytes that one transaction writes at most, so that what it copies stays bounded.
const TRANSACTION_BYTES_MAX: u64 = 4 << 20;
/// Clusters of a request after which others have their turn: a request may have millions.
const CLUSTERS_PER_TURN: u64 = 512;
/// Dirty pages of metadata at which writers flush by themselves.
const DIRTY_PAGES_MAX: usize = 1024;

/// What becomes of one cluster.
pub(super) struct ClusterPlan {
    pub(super) entry: Entry,
    /// Where its data is written: a place that nothing else names.
    pub(super) host: HostOffset,
    pub(super) blank: bool,
    group: u64,
    /// Units (subclusters, or the cluster) that the host place holds already.
    pub(super) owned: u32,
    /// Units that are written whole: by the guest, or filled with what shows there now.
    pub(super) must: u32,
    zero: u32,
    freed: Vec<u64>,
}

/// What is known of a cluster before it has a place.
struct Before {
    host: Option<HostOffset>,
    owned: u32,
    zero: u32,
    /// Units that move to the new place.
    moved: u32,
    freed: Vec<u64>,
}

/// Reservations that go back unless they were linked.
pub(super) struct Reservations<'a> {
    writer: &'a Writer,
    reserved: Vec<Reserved>,
}

impl Drop for Reservations<'_> {
    fn drop(&mut self) {
        for reserved in self.reserved.drain(..) {
            self.writer.space.give_back(reserved);
        }
    }
}

/// Offers that were taken; told of a failure if nothing else was told.
struct Taken(Vec<Arc<Offer>>);

impl Taken {
    fn finish(mut self, result: &Result<()>) {
        for offer in self.0.drain(..) {
            offer.finish(result.clone());
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        for offer in self.0.drain(..) {
            let context = "the write that this one was joined to was given up";
            offer.finish(Err(Error::new(ErrorKind::Io, context)));
        }
    }
}

impl Writer {
    /// Writes `buf` at `at`, which changes metadata or cannot be told to leave it.
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

    /// Does a request to `range` in parts by `transact`, a transaction each.
    pub(super) async fn in_transactions(
        &self,
        range: GuestRange,
        mut transact: impl AsyncFnMut(GuestRange) -> Result<()>,
    ) -> Result<()> {
        self.check_writable(range)?;
        self.mark_in_use().await?;
        self.wrote.store(true, Ordering::Release);
        let mut pace = Pace::new(CLUSTERS_PER_TURN);
        let mut at = range.start().bytes();
        let end = range.end().bytes();
        while at < end {
            let stop = self.transaction_end(at).min(end);
            let part = GuestRange::between(GuestOffset::new(at), GuestOffset::new(stop));
            if let Err(error) = transact(part.expect("it goes on")).await {
                return Err(self.note_corruption(error).await);
            }
            self.flush_if_over_limit().await?;
            // Nothing is claimed between two transactions.
            pace.steps(((stop - at) >> self.l2.cluster_bits.bits()) + 1).await;
            at = stop;
        }
        Ok(())
    }

    /// Writes a part of a request, together with what others write to the same cluster meanwhile.
    async fn write_part(&self, range: GuestRange, mut buf: Buf) -> Result<()> {
        let bits = self.l2.cluster_bits;
        let first = bits.cluster_of(range.start().bytes());
        let last = bits.cluster_of(range.end().bytes() - 1);
        if first != last {
            let _claimed = self.claim_clusters(first, last).await;
            return self.write_transaction(Guest::new(vec![(range, buf)])).await;
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
        // Whoever is ready to write to this cluster offers itself now.
        mica_rt::yield_now().await;
        let mut pieces = vec![(range, buf)];
        let mut offers = Vec::new();
        for (range, buf, offer) in self.gather.take(first, range) {
            pieces.push((range, buf));
            offers.push(offer);
        }
        let taken = Taken(offers);
        let result = self.write_transaction(Guest::new(pieces)).await;
        taken.finish(&result);
        drop(claimed);
        result
    }

    /// One transaction. The caller has the claims of the clusters.
    async fn write_transaction(&self, guest: Guest) -> Result<()> {
        let bits = self.l2.cluster_bits;
        let ranges: Vec<_> = guest.ranges().collect();
        let (Some(lowest), Some(highest)) = (ranges.first(), ranges.last()) else { return Ok(()) };
        let first = bits.cluster_of(lowest.start().bytes());
        let last = bits.cluster_of(highest.end().bytes() - 1);
        let entries = self.entries(first, last).await?;
        self.settle_zeroed(&entries).await?;
        let mut plans = Vec::with_capacity(entries.len());
        let mut reservations = Reservations { writer: self, reserved: Vec::new() };
        self.place(&ranges, entries, &mut plans, &mut reservations).await?;
        // Once: the disk may become longer meanwhile.
        let disk_len = self.map.len();
        let visible = self.visible(disk_len, &plans).await?;
        let parts = Parts::plan(self, disk_len, &ranges, &plans, &visible);
        self.write_parts(parts, guest).await?;
        let changes: Vec<_> =
            plans.into_iter().filter_map(|plan| self.change_of(&ranges, plan, &visible)).collect();
        // From here on the clusters are not given back: some may be linked when the rest fails.
        reservations.reserved.clear();
        self.link_or_fail(&changes).await?;
        self.publish(&changes);
        Ok(())
    }

    /// What shows now where units of `plans` are written whole; empty if none are.
    async fn visible(&self, disk_len: u64, plans: &[ClusterPlan]) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let filled = || plans.iter().filter(|plan| plan.must != 0);
        let (Some(first), Some(last)) = (filled().next(), filled().next_back()) else {
            return Ok(extents);
        };
        let bits = self.l2.cluster_bits.bits();
        let start = GuestOffset::new(first.entry.cluster << bits);
        let end = ((last.entry.cluster + 1) << bits).min(disk_len);
        if let Some(range) = GuestRange::between(start, GuestOffset::new(end)) {
            extents = self.map.plan(range).await?;
        }
        Ok(extents)
    }
}

impl Writer {
    /// Where the transaction that starts at `at` ends: at a cluster's end.
    fn transaction_end(&self, at: u64) -> u64 {
        let bits = self.l2.cluster_bits;
        let most = CLUSTERS_MAX.min((TRANSACTION_BYTES_MAX >> bits.bits()).max(1));
        (bits.cluster_of(at) + most) << bits.bits()
    }

    /// The right to change the entries of guest clusters `first..=last`.
    pub(super) async fn claim_clusters(&self, first: u64, last: u64) -> Claimed<'_> {
        self.gather.claim(&self.clusters, first, last).await
    }

    /// Only after what changed is published: a flush may find no space, and the disk goes on.
    async fn flush_if_over_limit(&self) -> Result<()> {
        let is_much = {
            let pages = self.metadata.lock();
            pages.dirty_count() > DIRTY_PAGES_MAX || pages.logging.is_long()
        };
        if is_much { self.flush().await } else { Ok(()) }
    }

    /// Units of a cluster: its subclusters, or itself.
    pub(super) fn units(&self) -> u32 {
        if self.l2.extended { mica_qcow2_format::SUBCLUSTER_COUNT } else { 1 }
    }

    fn all_units(&self) -> u32 {
        u32::MAX >> (32 - self.units())
    }

    /// The units of guest cluster `cluster` that `range` touches.
    pub(super) fn touched(&self, cluster: u64, range: GuestRange) -> u32 {
        let start = cluster << self.l2.cluster_bits.bits();
        let whole = GuestRange::new(GuestOffset::new(start), self.l2.cluster_bits.bytes());
        let Some(part) = whole.and_then(|whole| whole.intersect(range)) else { return 0 };
        let unit_bits = self.l2.subcluster_bits();
        let first = (part.start().bytes() - start) >> unit_bits;
        let last = (part.end().bytes() - 1 - start) >> unit_bits;
        let mask = |end: u64| u32::try_from((1_u64 << end) - 1).expect("32 units at most");
        mask(last + 1) & !mask(first)
    }

    fn touched_by(&self, cluster: u64, ranges: &[GuestRange]) -> u32 {
        ranges.iter().fold(0, |units, range| units | self.touched(cluster, *range))
    }

    /// Decides where each cluster's data goes, and reserves what is missing: one run for the whole
    /// request where there is one.
    async fn place(
        &self,
        ranges: &[GuestRange],
        entries: Vec<Entry>,
        plans: &mut Vec<ClusterPlan>,
        reservations: &mut Reservations<'_>,
    ) -> Result<()> {
        let mut wanting = Vec::new();
        for entry in entries {
            let before = self.before(&entry)?;
            let host = before.host.unwrap_or(HostOffset::ZERO);
            let touched = self.touched_by(entry.cluster, ranges);
            if before.host.is_none() {
                wanting.push(plans.len());
            }
            plans.push(ClusterPlan {
                entry,
                host,
                blank: false,
                group: 0,
                owned: before.owned,
                must: touched & !before.owned | before.moved,
                zero: before.zero,
                freed: before.freed,
            });
        }
        let mut wanting = &wanting[..];
        while !wanting.is_empty() {
            let reserved = self.space.reserve(wanting.len() as u64).await?;
            reservations.reserved.push(reserved);
            let taken = usize::try_from(reserved.count).expect("as many as wanted");
            let (now, rest) = wanting.split_at(taken);
            for (index, cluster) in now.iter().zip(reserved.first..) {
                let host = HostOffset::new(cluster << self.l2.cluster_bits.bits());
                self.metadata.ranges.check(host, self.l2.cluster_bits.bytes())?;
                let plan = &mut plans[*index];
                (plan.host, plan.blank, plan.group) = (host, reserved.blank, reserved.group);
            }
            wanting = rest;
        }
        Ok(())
    }

    /// What the entry says for a write.
    fn before(&self, entry: &Entry) -> Result<Before> {
        let bits = self.l2.cluster_bits;
        let guest = GuestOffset::new(entry.cluster << bits.bits());
        let all = self.all_units();
        let says = self.l2.interpret_at(entry.raw, guest)?;
        if self.l2.data_file {
            let (owned, zero) = match says {
                L2Entry::Data(_) => (all, 0),
                L2Entry::Subclusters { allocated, zero, .. } => (allocated, zero),
                L2Entry::Zero | L2Entry::ZeroAllocated(_) => (0, all),
                L2Entry::Unallocated | L2Entry::Compressed(_) => (0, 0),
            };
            let host = Some(HostOffset::new(guest.bytes()));
            return Ok(Before { host, owned, zero, moved: 0, freed: Vec::new() });
        }
        let (host, owned, zero) = match says {
            L2Entry::Unallocated => (None, 0, 0),
            L2Entry::Zero => (None, 0, all),
            L2Entry::ZeroAllocated(host) => (Some(host), 0, all),
            L2Entry::Data(host) => (Some(host), all, 0),
            L2Entry::Subclusters { host, allocated, zero } => (host, allocated, zero),
            L2Entry::Compressed(compressed) => {
                let freed = self.compressed_clusters(&compressed)?;
                return Ok(Before { host: None, owned: 0, zero: 0, moved: all, freed });
            }
        };
        if let Some(host) = host {
            self.metadata.ranges.check(host, bits.bytes())?;
        }
        match host {
            Some(host) if !entry.raw.copied() => {
                let freed = vec![host.bytes() >> bits.bits()];
                Ok(Before { host: None, owned: 0, zero, moved: owned, freed })
            }
            host => Ok(Before { host, owned, zero, moved: 0, freed: Vec::new() }),
        }
    }

    /// The host clusters that a compressed cluster touches.
    pub(super) fn compressed_clusters(&self, compressed: &CompressedCluster) -> Result<Vec<u64>> {
        let bits = self.l2.cluster_bits.bits();
        let start = compressed.host.bytes();
        let clusters = start >> bits..=(start + compressed.len_max.max(1) - 1) >> bits;
        for cluster in clusters.clone() {
            self.metadata.ranges.check(HostOffset::new(cluster << bits), 1 << bits)?;
        }
        Ok(clusters.collect())
    }

    /// The change that links what was written; none where the entry says it already.
    fn change_of(
        &self,
        ranges: &[GuestRange],
        plan: ClusterPlan,
        visible: &[Extent],
    ) -> Option<Change> {
        let ClusterPlan { entry, host, blank, group, owned, must, zero, freed } = plan;
        let changed = must | self.touched_by(entry.cluster, ranges);
        let held = owned | changed;
        let zero = zero & !held;
        let says = if held == self.all_units() {
            L2Entry::Data(host)
        } else {
            L2Entry::Subclusters { host: Some(host), allocated: held, zero }
        };
        let new: RawL2Entry = self.l2.encode(says, true);
        if new == entry.raw {
            return None;
        }
        let after_data = !blank || !self.units_show_zeros(entry.cluster, must, visible);
        let units = changed.trailing_zeros()..u32::BITS - changed.leading_zeros();
        Some(Change { entry, new, group, after_data, units, freed, drops: Drops::Nothing })
    }

    /// Whether what shows in the `units` of a cluster reads as zeros.
    fn units_show_zeros(&self, cluster: u64, units: u32, visible: &[Extent]) -> bool {
        let not_zero = |extent: &&Extent| !extent.kind.reads_as_zero();
        visible
            .iter()
            .filter(not_zero)
            .all(|extent| self.touched(cluster, extent.range()) & units == 0)
    }
}

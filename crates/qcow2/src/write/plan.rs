//! What happens to the clusters that a request touches: where each one's data goes, and what its
//! entry becomes.

use super::Writer;
use super::allocate::Reserved;
use super::link::{Change, Drops, Entries, Entry};
use mica_block::{Extent, Result};
use mica_qcow2_format::{CompressedCluster, L2Entry, RawL2Entry, SUBCLUSTER_COUNT};
use mica_units::{ClusterBits, GuestCluster, GuestOffset, GuestRange, HostCluster, HostOffset};
use smallvec::SmallVec;

/// The plan for one cluster.
pub(super) struct ClusterPlan {
    pub(super) entry: Entry,
    /// Where its data is written: a place that nothing else names.
    pub(super) host: HostOffset,
    pub(super) blank: bool,
    group: u64,
    /// Units (subclusters, or the cluster) that the host place already holds.
    pub(super) owned: u32,
    /// Units that are written whole: by the guest, or filled with what currently shows there.
    pub(super) must: u32,
    /// Whether zeros are written even into a place that is blank.
    pub(super) is_solid: bool,
    zero: u32,
    freed: Vec<HostCluster>,
}

/// The plans of a request.
pub(super) type Plans = SmallVec<[ClusterPlan; 1]>;

/// What is known of a cluster before it gets a place.
struct Before {
    host: Option<HostOffset>,
    owned: u32,
    zero: u32,
    /// Units that move to the new place.
    moved: u32,
    freed: Vec<HostCluster>,
}

/// Reservations that are returned unless they were linked.
pub(super) struct Reservations<'a> {
    writer: &'a Writer,
    /// One run for the whole request if there is one.
    reserved: SmallVec<[Reserved; 1]>,
}

impl<'a> Reservations<'a> {
    pub(super) fn new(writer: &'a Writer) -> Self {
        Self { writer, reserved: SmallVec::new() }
    }

    /// Keeps the reserved clusters: they are no longer given back on drop.
    pub(super) fn keep(&mut self) -> SmallVec<[Reserved; 1]> {
        std::mem::take(&mut self.reserved)
    }
}

impl Drop for Reservations<'_> {
    fn drop(&mut self) {
        for reserved in self.reserved.drain(..) {
            self.writer.space.give_back(reserved);
        }
    }
}

impl Writer {
    /// Number of units of a cluster: its subclusters, or 1.
    pub(super) fn units(&self) -> u32 {
        if self.l2.extended { SUBCLUSTER_COUNT } else { 1 }
    }

    pub(super) fn all_units(&self) -> u32 {
        u32::MAX >> (32 - self.units())
    }

    /// The units of guest cluster `cluster` that `range` touches.
    pub(super) fn touched(&self, cluster: GuestCluster, range: GuestRange) -> u32 {
        let Some(whole) = self.l2.cluster_bits.range_of(cluster) else { return 0 };
        let Some(part) = whole.intersect(range) else { return 0 };
        let unit_of = |at: u64| (at - whole.start().bytes()) >> self.l2.subcluster_bits();
        let first = unit_of(part.start().bytes());
        let last = unit_of(part.end().bytes() - 1);
        let mask = |end: u64| u32::try_from((1_u64 << end) - 1).expect("32 units at most");
        mask(last + 1) & !mask(first)
    }

    fn touched_by(&self, cluster: GuestCluster, ranges: &[GuestRange]) -> u32 {
        ranges.iter().fold(0, |units, range| units | self.touched(cluster, *range))
    }

    /// Decides where each cluster's data goes, and reserves what is missing: one run for the whole
    /// request if there is one.
    pub(super) async fn place(
        &self,
        ranges: &[GuestRange],
        entries: Entries,
        plans: &mut Plans,
        reservations: &mut Reservations<'_>,
    ) -> Result<()> {
        let mut wanting = SmallVec::<[_; 1]>::new();
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
                is_solid: false,
                zero: before.zero,
                freed: before.freed,
            });
        }
        let mut wanting = &wanting[..];
        while !wanting.is_empty() {
            let reserved = self.space.reserve_unlinked(wanting.len() as u64).await?;
            reservations.reserved.push(reserved);
            let taken = usize::try_from(reserved.count).expect("as many as wanted");
            let (now, rest) = wanting.split_at(taken);
            for (index, cluster) in now.iter().zip(reserved.first.up_to(reserved.end())) {
                let host = self.l2.cluster_bits.start_of(cluster);
                self.metadata.ranges.check(host, self.l2.cluster_bits.bytes())?;
                let plan = &mut plans[*index];
                (plan.host, plan.blank, plan.group) = (host, reserved.blank, reserved.group);
            }
            wanting = rest;
        }
        Ok(())
    }

    /// Has the last cluster written as a whole if a writer comes through it in sequence and waits
    /// for flushes: see [`Streams`](super::streams::Streams).
    pub(super) fn widen(&self, plans: &mut Plans) {
        let Some(last) = plans.last_mut().filter(|plan| plan.must != 0) else { return };
        if self.streams.enter(last.entry.cluster) {
            last.must = self.all_units() & !last.owned;
            last.is_solid = true;
        }
    }

    /// What the entry means for a write.
    fn before(&self, entry: &Entry) -> Result<Before> {
        let bits = self.l2.cluster_bits;
        let guest = bits.start_of(entry.cluster);
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
                let freed = vec![bits.host_cluster(host)];
                Ok(Before { host: None, owned: 0, zero, moved: owned, freed })
            }
            host => Ok(Before { host, owned, zero, moved: 0, freed: Vec::new() }),
        }
    }

    /// The host clusters that a compressed cluster touches.
    pub(super) fn compressed_clusters(
        &self,
        compressed: &CompressedCluster,
    ) -> Result<Vec<HostCluster>> {
        let bits = self.l2.cluster_bits;
        let last = compressed.host.bytes() + compressed.len_max.max(1) - 1;
        let last = bits.host_cluster(HostOffset::new(last));
        let clusters = bits.host_cluster(compressed.host).through(last);
        for cluster in clusters.clone() {
            self.metadata.ranges.check(bits.start_of(cluster), bits.bytes())?;
        }
        Ok(clusters.collect())
    }

    /// The change that links what was written; `None` if the entry is already right.
    pub(super) fn change_of(
        &self,
        ranges: &[GuestRange],
        plan: ClusterPlan,
        visible: &[Extent],
    ) -> Option<Change> {
        let ClusterPlan { entry, host, blank, group, owned, must, zero, freed, .. } = plan;
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
    fn units_show_zeros(&self, cluster: GuestCluster, units: u32, visible: &[Extent]) -> bool {
        let not_zero = |extent: &&Extent| !extent.kind.reads_as_zero();
        visible
            .iter()
            .filter(not_zero)
            .all(|extent| self.touched(cluster, extent.range()) & units == 0)
    }
}

/// The first and the last cluster that `range`, which is not empty, touches.
pub(super) fn clusters_of(bits: ClusterBits, range: GuestRange) -> (GuestCluster, GuestCluster) {
    let last = GuestOffset::new(range.end().bytes() - 1);
    (bits.guest_cluster(range.start()), bits.guest_cluster(last))
}

//! Zeros and discards: changes of entries where whole units are covered, writes of zeros elsewhere.

use super::Writer;
use super::allocate::Reserved;
use super::link::{Change, Drops, Entry, Linked};
use super::plan::clusters_of;
use super::unreadable;
use mica_block::{Error, ErrorKind, Extent, ExtentKind, Result, Space, Zeroes};
use mica_qcow2_format::{L2Entry, Version};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostCluster, HostOffset};

/// Zeros that are written at a time.
const ZEROS_BYTES_MAX: u64 = 512 << 10;

/// What is requested for a range that reads as zeros afterwards.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    Zeroes(Zeroes),
    /// Only whole clusters, and only if that frees space.
    Discard,
}

impl Wish {
    fn may_unmap(self) -> bool {
        match self {
            Self::Zeroes(how) => how.may_unmap,
            Self::Discard => true,
        }
    }
}

impl Writer {
    /// Makes `range` read as zeros.
    pub(crate) async fn zero_range(&self, range: GuestRange, how: Zeroes) -> Result<()> {
        self.check_writable(range)?;
        if how.fast && !self.zeroes_fast(range, self.map.len()) {
            let context = "zeros would have to be written out here";
            return Err(Error::new(ErrorKind::Unsupported, context));
        }
        self.zero_or_discard(range, Wish::Zeroes(how)).await
    }

    /// Frees the space of the whole clusters in `range`.
    pub(crate) async fn discard_range(&self, range: GuestRange) -> Result<()> {
        self.check_writable(range)?;
        // Without a zero flag the layers beneath would show again.
        if self.l2.version == Version::V2 && self.has_backing() {
            return Ok(());
        }
        let bits = self.l2.cluster_bits;
        let start = range.start().bytes().next_multiple_of(bits.bytes());
        // The last cluster is whole where the disk ends in it.
        let end = match range.end().bytes() {
            end if end == self.map.len() => end,
            end => end - bits.offset_within(end),
        };
        match GuestRange::between(GuestOffset::new(start), GuestOffset::new(end.max(start))) {
            Some(whole) if !whole.is_empty() => self.zero_or_discard(whole, Wish::Discard).await,
            _ => Ok(()),
        }
    }

    async fn zero_or_discard(&self, range: GuestRange, wish: Wish) -> Result<()> {
        self.in_transactions(range, async |part| self.empty_part(part, wish).await).await
    }

    async fn empty_part(&self, part: GuestRange, wish: Wish) -> Result<()> {
        for rest in self.empty_units(part, wish).await? {
            self.write_zeros_out(rest).await?;
        }
        Ok(())
    }

    /// Empties the whole units of `part` through their entries; returns the ranges where zeros have
    /// to be written out.
    async fn empty_units(&self, part: GuestRange, wish: Wish) -> Result<Vec<GuestRange>> {
        let bits = self.l2.cluster_bits;
        let (first, last) = clusters_of(bits, part);
        let _claims = self.claim_clusters(first, last).await;
        // Only now: until the claim, the disk might have grown, and its last unit not be whole any
        // more.
        let Units { before, whole, after } = self.whole_units(part, self.map.len());
        let mut rest: Vec<_> = match wish {
            Wish::Zeroes(_) => [before, after].into_iter().flatten().collect(),
            Wish::Discard => Vec::new(),
        };
        let Some(whole) = whole else { return Ok(rest) };
        let (first, last) = clusters_of(bits, whole);
        let extents = self.extents_of(whole).await?;
        let own = self.layer.number;
        // What a frozen layer, or none, makes read as zeros stays so.
        let is_settled = |extent: &Extent| match extent.kind {
            ExtentKind::ZeroAllocated => extent.layer != own || !wish.may_unmap(),
            kind => kind.reads_as_zero(),
        };
        if extents.iter().all(is_settled) {
            return Ok(rest);
        }
        if self.l2.version == Version::V2 && wish != Wish::Discard {
            let shows = extents.iter().filter(|extent| !extent.kind.reads_as_zero());
            rest.extend(shows.map(Extent::range));
            return Ok(rest);
        }
        let mut changes = Vec::new();
        for entry in self.entries(first, last).await? {
            let cluster = bits.range_of(entry.cluster).and_then(|all| all.intersect(whole));
            let Some(cluster) = cluster else { continue };
            if extents.iter().filter_map(|extent| extent.within(cluster)).all(|e| is_settled(&e)) {
                continue;
            }
            match self.zeroed(entry, self.touched(entry.cluster, cluster), wish).await? {
                Zeroed::Same => {}
                Zeroed::Changed(change) => changes.push(change),
                Zeroed::NotByEntry => rest.push(cluster),
            }
        }
        let held = self.zero_what_drops(&mut changes).await?;
        let must_flush = self.link_or_fail(&changes, &[]).await?.end()?;
        if held.is_some() {
            drop(held);
            // What the clusters keep may be written in place again.
            let units = 0..self.units();
            self.show(
                changes.iter().map(|change| (change.entry.cluster, change.new, units.clone())),
            );
        }
        if must_flush {
            self.flush().await?;
        }
        Ok(rest)
    }

    /// Makes the entries of the whole units of `range`, which this layer does not own, say that
    /// they are zeros, whatever shows there now. The caller has the claims of the clusters, and the
    /// image is of version 3.
    pub(super) async fn zero_entries(&self, range: GuestRange) -> Result<()> {
        let bits = self.l2.cluster_bits;
        let (first, last) = clusters_of(bits, range);
        let mut changes = Vec::new();
        for entry in self.entries(first, last).await? {
            let cluster = bits.range_of(entry.cluster).and_then(|all| all.intersect(range));
            let Some(cluster) = cluster else { continue };
            let wish = Wish::Zeroes(Zeroes { may_unmap: true, fast: false });
            match self.zeroed(entry, self.touched(entry.cluster, cluster), wish).await? {
                Zeroed::Same => {}
                Zeroed::Changed(change) => changes.push(change),
                Zeroed::NotByEntry => unreachable!("a compressed cluster is owned as a whole"),
            }
        }
        self.link_or_fail(&changes, &[]).await?.end()?;
        Ok(())
    }

    async fn extents_of(&self, range: GuestRange) -> Result<Vec<Extent>> {
        self.map.plan(range).await.map_err(unreadable)
    }

    /// Writes zeros where something else shows.
    async fn write_zeros_out(&self, range: GuestRange) -> Result<()> {
        for extent in self.extents_of(range).await? {
            if extent.kind.reads_as_zero() {
                continue;
            }
            let mut at = extent.start.bytes();
            let end = at + extent.len;
            while at < end {
                let len = (end - at).min(ZEROS_BYTES_MAX);
                let zeros = Buf::zeroed(usize::try_from(len).expect("1 MiB"));
                self.write_allocating(GuestOffset::new(at), zeros).await.0?;
                at += len;
            }
        }
        Ok(())
    }
}

/// The new state of an entry whose units are zeroed.
enum Zeroed {
    Same,
    Changed(Change),
    NotByEntry,
}

/// A range, divided at the ends of its whole units.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Units {
    pub(super) before: Option<GuestRange>,
    pub(super) whole: Option<GuestRange>,
    pub(super) after: Option<GuestRange>,
}

impl Writer {
    /// Divides `part` into the bytes before its whole units, these units, and the bytes after. The
    /// last unit of the disk is whole if the disk ends in it.
    pub(super) fn whole_units(&self, part: GuestRange, disk_len: u64) -> Units {
        let unit = self.l2.subcluster_bytes();
        let (start, end) = (part.start().bytes(), part.end().bytes());
        let whole_start = start.next_multiple_of(unit);
        let whole_end = if end == disk_len { end } else { end / unit * unit };
        if whole_start >= whole_end {
            return Units { before: Some(part), whole: None, after: None };
        }
        let range = |from, to| {
            GuestRange::between(GuestOffset::new(from), GuestOffset::new(to))
                .filter(|range| !range.is_empty())
        };
        Units {
            before: range(start, whole_start),
            whole: range(whole_start, whole_end),
            after: range(whole_end, end),
        }
    }

    fn zeroes_fast(&self, range: GuestRange, disk_len: u64) -> bool {
        let divided = self.whole_units(range, disk_len);
        let is_whole = matches!(divided, Units { before: None, whole: Some(_), after: None });
        self.l2.version != Version::V2 && is_whole
    }

    async fn zeroed(&self, entry: Entry, units: u32, wish: Wish) -> Result<Zeroed> {
        let bits = self.l2.cluster_bits;
        let guest = bits.start_of(entry.cluster);
        if self.l2.data_file {
            return self.zeroed_in_data_file(entry, units, wish).await;
        }
        let all = u32::MAX >> (32 - self.units());
        let (host, allocated, zero) = match self.l2.interpret_at(entry.raw, guest)? {
            L2Entry::Unallocated => (None, 0, 0),
            L2Entry::Zero => (None, 0, all),
            L2Entry::ZeroAllocated(host) => (Some(host), 0, all),
            L2Entry::Data(host) => (Some(host), all, 0),
            L2Entry::Subclusters { host, allocated, zero } => (host, allocated, zero),
            L2Entry::Compressed(compressed) => {
                if units != all {
                    return Ok(Zeroed::NotByEntry);
                }
                let freed = self.compressed_clusters(&compressed)?;
                return Ok(changed(entry, self.zero_entry(), self.units(), freed));
            }
        };
        if let Some(host) = host {
            self.metadata.ranges.check(host, bits.bytes())?;
        }
        let (allocated, zero) = (allocated & !units, zero | units);
        let keeps = host.filter(|_| allocated != 0 || !wish.may_unmap() && entry.raw.copied());
        let freed = match (host, keeps) {
            (Some(host), None) => vec![bits.host_cluster(host)],
            _ => Vec::new(),
        };
        let says = match keeps {
            None if zero == all => {
                return Ok(changed(entry, self.zero_entry(), self.units(), freed));
            }
            Some(host) if zero == all => L2Entry::ZeroAllocated(host),
            host => L2Entry::Subclusters { host, allocated, zero },
        };
        Ok(changed(entry, self.l2.encode(says, entry.raw.copied()), self.units(), freed))
    }

    /// The entry of a cluster that reads as zeros and has no place. Version 2 lacks it: there
    /// nothing lies beneath when this is called.
    fn zero_entry(&self) -> mica_qcow2_format::RawL2Entry {
        let says = match self.l2.version {
            Version::V2 => L2Entry::Unallocated,
            Version::V3 => L2Entry::Zero,
        };
        self.l2.encode(says, false)
    }

    /// With a data file the place of a cluster is fixed: its bytes there become zeros, and the
    /// entry records it only if something beneath would show.
    async fn zeroed_in_data_file(&self, entry: Entry, units: u32, wish: Wish) -> Result<Zeroed> {
        let unit = self.l2.subcluster_bytes();
        let guest = self.l2.cluster_bits.start_of(entry.cluster);
        let all = u32::MAX >> (32 - self.units());
        let (allocated, zero) = match self.l2.interpret_at(entry.raw, guest)? {
            L2Entry::Data(_) => (all, 0),
            L2Entry::Subclusters { allocated, zero, .. } => (allocated, zero),
            L2Entry::Zero | L2Entry::ZeroAllocated(_) => (0, all),
            L2Entry::Unallocated | L2Entry::Compressed(_) => (0, 0),
        };
        let len = self.data.len()?;
        for index in (0..self.units()).filter(|index| units & (1 << index) != 0) {
            let at = guest.bytes() + u64::from(index) * unit;
            if at >= len {
                continue;
            }
            let change = if wish.may_unmap() { Space::Punch } else { Space::Zero };
            let (host, count) = (HostOffset::new(at), unit.min(len - at));
            match self.data.space(change, host, count).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    let zeros = Buf::zeroed(usize::try_from(count).expect("2 MiB"));
                    mica_block::write_all(&*self.data, zeros, host).await?;
                }
                done => done?,
            }
        }
        if units & !(allocated | zero) == 0 {
            return Ok(Zeroed::Same);
        }
        let zero = zero | units & !allocated;
        let says = match allocated {
            0 if zero == all => L2Entry::Zero,
            0 => L2Entry::Subclusters { host: None, allocated, zero },
            _ => {
                L2Entry::Subclusters { host: Some(HostOffset::new(guest.bytes())), allocated, zero }
            }
        };
        Ok(changed(entry, self.l2.encode(says, allocated != 0), self.units(), Vec::new()))
    }

    /// Links; after a failure the disk refuses further writes.
    pub(super) async fn link_or_fail<'a>(
        &'a self,
        changes: &'a [Change],
        reserved: &[Reserved],
    ) -> Result<Linked<'a>> {
        let linked = self.link(changes, reserved).await;
        if let Err(error) = &linked {
            self.fail(error);
        }
        linked
    }
}

fn changed(
    entry: Entry,
    new: mica_qcow2_format::RawL2Entry,
    all_units: u32,
    freed: Vec<HostCluster>,
) -> Zeroed {
    if new == entry.raw {
        return Zeroed::Same;
    }
    let drops = Drops::Nothing;
    let units = 0..all_units;
    Zeroed::Changed(Change { entry, new, group: 0, after_data: false, units, freed, drops })
}

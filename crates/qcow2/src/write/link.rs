//! L2 tables and their entries: finding them, making them, and linking clusters.

use super::Writer;
use super::allocate::Reserved;
use super::clusters::Beneath;
use super::pages::PageState;
use crate::index::slice::{Runs, SLICE_BITS, SLICE_BYTES};
use crate::live::TableKind;
use crate::map::slice_of;
use crate::redo::Stage;
use mica_block::{Error, ErrorKind, Result, Space, Store, read_exact};
use mica_qcow2_format::{L1Entry, RawL2Entry};
use mica_units::{GuestCluster, GuestOffset, GuestRange, HostCluster, HostOffset};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The L2 entry of a guest cluster: its place and its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) cluster: GuestCluster,
    pub(super) table: HostOffset,
    pub(super) at: HostOffset,
    pub(super) raw: RawL2Entry,
}

/// What a change does to bytes that belong to the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Drops {
    /// It drops none.
    Nothing,
    /// The bytes that it drops are zeros in the file.
    Zeros,
    /// The bytes that it drops still exist: the change must be durable before it is acknowledged.
    Data,
}

/// Entries: of one cluster mostly, and then without memory of their own.
pub(super) type Entries = SmallVec<[Entry; 1]>;

/// A new value for an entry.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) entry: Entry,
    pub(super) new: RawL2Entry,
    /// The group that makes the counts of the clusters it names durable; 0 if they are already.
    pub(super) group: u64,
    /// Whether the data has to be durable before the link.
    pub(super) after_data: bool,
    /// Units whose place or state changes, from the first to the last.
    pub(super) units: Range<u32>,
    /// Host clusters that lose a reference.
    pub(super) freed: Vec<HostCluster>,
    /// What happens to bytes that the guest no longer owns.
    pub(super) drops: Drops,
}

impl Writer {
    /// The entries of guest clusters `first..=last`. Tables that are missing, or shared with a
    /// snapshot, are created.
    pub(super) async fn entries(&self, first: GuestCluster, last: GuestCluster) -> Result<Entries> {
        let mut entries = Entries::new();
        let mut table = None;
        for cluster in first.through(last) {
            let index = self.l2.table_of(cluster);
            let host = match table {
                Some((known, host)) if known == index => host,
                _ => self.own_table(index).await?,
            };
            table = Some((index, host));
            entries.push(self.entry(cluster, host).await?);
        }
        Ok(entries)
    }

    /// As [`Self::entries`] if they are all at hand, in one table.
    pub(super) fn entries_in(
        &self,
        pages: &PageState,
        first: GuestCluster,
        last: GuestCluster,
    ) -> Option<Entries> {
        let index = self.l2.table_of(first);
        if index != self.l2.table_of(last) || index >= u64::from(self.l1_place.get().1) {
            return None;
        }
        let number = pages.get(self.l1_entry_at(index), L1Entry::BYTES)?;
        let l1_entry = L1Entry(u64::from_be_bytes(*number.first_chunk()?));
        // What is wrong with it is reported by those that look for it one by one.
        let table = l1_entry.decode(self.l2.cluster_bits).ok()??;
        if !l1_entry.copied() || self.metadata.ranges.check_table(table).is_err() {
            return None;
        }
        let entry = |cluster| {
            let at = self.entry_at(cluster, table);
            let raw = self.l2.raw(pages.get(at, self.l2.entry_bytes())?, 0)?;
            Some(Entry { cluster, table, at, raw })
        };
        first.through(last).map(entry).collect()
    }

    fn entry_at(&self, cluster: GuestCluster, table: HostOffset) -> HostOffset {
        let bytes = self.l2.entry_bytes() as u64;
        HostOffset::new(table.bytes() + self.l2.index_of(cluster) * bytes)
    }

    /// The entry of guest cluster `cluster` in the table at `table`.
    async fn entry(&self, cluster: GuestCluster, table: HostOffset) -> Result<Entry> {
        let (bytes, at) = (self.l2.entry_bytes(), self.entry_at(cluster, table));
        loop {
            let raw = self.metadata.lock().get(at, bytes).and_then(|table| self.l2.raw(table, 0));
            match raw {
                Some(raw) => return Ok(Entry { cluster, table, at, raw }),
                None => Box::pin(self.metadata.load(at)).await?,
            }
        }
    }

    fn l1_entry_at(&self, index: u64) -> HostOffset {
        HostOffset::new(self.l1_place.get().0.bytes() + index * L1Entry::BYTES as u64)
    }

    async fn l1_entry(&self, index: u64) -> Result<L1Entry> {
        let entries = self.l1_place.get().1;
        assert!(index < u64::from(entries), "L1 entry {index} of {entries}");
        Ok(L1Entry(self.metadata.read_u64(self.l1_entry_at(index)).await?))
    }

    /// The L2 table of L1 entry `index`, shared with nothing else.
    async fn own_table(&self, index: u64) -> Result<HostOffset> {
        loop {
            let entry = self.l1_entry(index).await?;
            if entry.copied() && entry.offset() == HostOffset::ZERO {
                let context = format!("L1 entry {index} names the header as its L2 table");
                return Err(Error::new(ErrorKind::Corrupt, context));
            }
            if let Some(table) = entry.decode(self.l2.cluster_bits)?
                && entry.copied()
            {
                self.metadata.ranges.check_table(table)?;
                return Ok(table);
            }
            let Some(_claim) = self.tables.claim_or_wait(index).await else { continue };
            // Another request may have created it between the look and the claim.
            if self.l1_entry(index).await? == entry {
                return Box::pin(self.make_table(index, entry)).await;
            }
        }
    }

    /// Creates a table for L1 entry `index`: an empty one, or a copy of the shared one.
    async fn make_table(&self, index: u64, old: L1Entry) -> Result<HostOffset> {
        let bits = self.l2.cluster_bits;
        let shared = old.decode(bits)?;
        if let Some(shared) = shared {
            self.metadata.ranges.check_table(shared)?;
        }
        let len = usize::try_from(bits.bytes()).expect("2 MiB");
        let content = match shared {
            None => None,
            Some(table) => Some(read_exact(&*self.metadata.store, table, len).await?),
        };
        let reserved = self.space.reserve_unlinked(1).await?;
        let table = bits.start_of(reserved.first);
        if let Err(error) = self.metadata.ranges.check(table, bits.bytes()) {
            return Err(self.note_corruption(error).await);
        }
        // So that a full device is reported to this request, and not to a flush for everyone.
        match self.metadata.store.space(Space::Allocate, table, bits.bytes()).await {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                self.space.give_back(reserved);
                return Err(error);
            }
            // If the file system cannot do it in advance, the flush will.
            _ => {}
        }
        let is_plain = reserved.blank && content.is_none();
        // A successor must be able to tell whether another program wrote there in the meantime.
        let old = match reserved.blank {
            true => None,
            false => match read_exact(&*self.metadata.store, table, len).await {
                Ok(old) => Some(old),
                Err(error) => {
                    self.space.give_back(reserved);
                    return Err(error);
                }
            },
        };
        let beneath = match &old {
            Some(old) => Beneath::Old(old),
            None if is_plain => Beneath::Same,
            None => Beneath::Blank,
        };
        let link = |pages: &mut PageState, at: HostOffset| {
            // A lookup that found an unknown table would take the image for corrupt.
            assert!(self.metadata.ranges.check_table(table).is_ok(), "known before it is linked");
            // The entry first: a dirty page is not evicted when others are read.
            let entry = L1Entry::encode(table, true).0.to_be_bytes();
            let bytes = pages.get_mut(at, L1Entry::BYTES, Stage::Late).expect("it is there");
            bytes.copy_from_slice(&entry);
            pages.put_cluster(table, bits.bytes(), content.as_deref(), beneath);
            self.space.linked(&[reserved]);
            let group = &mut pages.group;
            group.new_tables.insert(table);
            group.in_two_steps |= !is_plain || reserved.group > group.durable;
            group.freed.extend(shared.map(|shared| bits.host_cluster(shared)));
        };
        self.metadata.ranges.add_table(table, TableKind::L2);
        if let Err(error) = self.change_l1(index, link).await {
            self.metadata.ranges.remove(table);
            self.space.give_back(reserved);
            return Err(error);
        }
        if let Some(shared) = shared {
            self.metadata.ranges.remove(shared);
        }
        Ok(table)
    }

    /// Applies `change` to L1 entry `index`, at the place that it is passed.
    async fn change_l1(
        &self,
        index: u64,
        mut change: impl FnMut(&mut PageState, HostOffset),
    ) -> Result<()> {
        loop {
            let at = self.l1_entry_at(index);
            let changed = self.metadata.change(at, |pages| {
                // The table may have been moved in the meantime, or is being moved.
                let is_here = !pages.l1_is_held && self.l1_entry_at(index) == at;
                if is_here {
                    change(pages, at);
                }
                is_here
            });
            if changed.await? {
                return Ok(());
            }
            self.l1_moved().await;
        }
    }

    /// Writes the new entries, which link what was `reserved` for their data. The caller holds the
    /// claims of their clusters, and ends what is returned before the acknowledgement.
    pub(super) async fn link<'a>(
        &'a self,
        changes: &'a [Change],
        reserved: &[Reserved],
    ) -> Result<Linked<'a>> {
        for change in changes {
            assert!(
                change.drops != Drops::Nothing || self.drops_of(change).is_none(),
                "dropped bytes become zeros first"
            );
        }
        let mut pinned = Vec::new();
        loop {
            let missing = {
                let mut pages = self.metadata.lock();
                // After a failed sync there is no log any more, and no group that writes these.
                self.check_usable()?;
                let missing = changes.iter().find(|change| !pages.has(change.entry.at));
                let Some(missing) = missing else {
                    let must_flush = self.put_entries(&mut pages, changes);
                    self.space.linked(reserved);
                    pages.has_new_links = true;
                    let has_log = pages.logging.is_on();
                    return Ok(Linked { writer: self, changes, must_flush, has_log });
                };
                missing.entry.at
            };
            // Reading one page must not evict another.
            pinned.push(self.metadata.pin(missing, self.l2.entry_bytes() as u64));
            Box::pin(self.metadata.load(missing)).await?;
        }
    }

    /// Puts the new entries into their pages, which are there. Returns whether they must be flushed
    /// before the acknowledgement.
    fn put_entries(&self, pages: &mut PageState, changes: &[Change]) -> bool {
        let mut must_flush = false;
        for change in changes {
            let Change { entry, new, group, after_data, freed, drops, .. } = change;
            let bytes = self.l2.entry_bytes();
            let is_new = pages.group.new_tables.contains(&entry.table);
            let stage = if is_new { Stage::Early } else { Stage::Late };
            let to = match drops {
                Drops::Data => pages.get_mut_unlogged(entry.at, bytes, stage),
                _ => pages.get_mut(entry.at, bytes, stage),
            };
            self.l2.put_raw(to.expect("the page is there"), 0, *new);
            must_flush |= *drops == Drops::Data && pages.logging.is_on();
            if *drops == Drops::Zeros && self.keeps_place(change) {
                pages.note_zeroed(self.place_of(entry));
            }
            let state = &mut pages.group;
            state.in_two_steps |= *after_data || *group > state.durable;
            state.freed.extend(freed);
        }
        must_flush
    }
}

/// New entries that are in their pages. When this ends they are logged, and then visible to
/// readers; also if the request is abandoned, so that pages and slices say the same.
#[must_use = "the entries are logged and visible when it ends"]
pub(super) struct Linked<'a> {
    writer: &'a Writer,
    changes: &'a [Change],
    must_flush: bool,
    has_log: bool,
}

impl Linked<'_> {
    /// As [`Self::end`], together with others: of those that link in the same turn of the executor,
    /// the first to go on logs the entries of all in one group.
    pub(super) async fn end_together(self) -> Result<bool> {
        if self.has_log {
            mica_rt::yield_to_ready().await;
        }
        self.end()
    }

    /// Ends it. Returns whether the entries must be flushed before the acknowledgement.
    ///
    /// # Errors
    /// Why nothing is acknowledged any more: the log may be gone since the entries were put.
    pub(super) fn end(self) -> Result<bool> {
        let (writer, must_flush) = (self.writer, self.must_flush);
        drop(self);
        writer.check_usable()?;
        Ok(must_flush)
    }
}

impl Drop for Linked<'_> {
    fn drop(&mut self) {
        let Self { writer, changes, .. } = *self;
        let mut pages = writer.metadata.lock();
        writer.metadata.log_links(&mut pages);
        writer.due.note(&pages);
        writer.renaming.note(&pages);
        drop(pages);
        writer.publish(changes);
    }
}

impl Writer {
    /// Makes what `changes` linked visible to readers.
    fn publish(&self, changes: &[Change]) {
        let shown =
            changes.iter().map(|change| (change.entry.cluster, change.new, change.units.clone()));
        self.show(shown);
        self.counters.linked_clusters.fetch_add(changes.len() as u64, Ordering::Relaxed);
    }

    /// Updates the slices to the entries of guest clusters, in rising order, for some of their
    /// units.
    pub(super) fn show(
        &self,
        entries: impl DoubleEndedIterator<Item = (GuestCluster, RawL2Entry, Range<u32>)> + Clone,
    ) {
        let (Some(first), Some(last)) = (entries.clone().next(), entries.clone().next_back())
        else {
            return;
        };
        let layer = &self.layer;
        let Some(tables) = &layer.tables else { return };
        let bits = tables.l2.cluster_bits;
        let slice_of = |cluster: GuestCluster| slice_of(bits.start_of(cluster)).0;
        for number in slice_of(first.0)..=slice_of(last.0) {
            let base = GuestOffset::new(number << SLICE_BITS);
            let end = base.bytes() + SLICE_BYTES.min(self.map.len().saturating_sub(base.bytes()));
            let of_slice = entries.clone().filter(|(cluster, ..)| slice_of(*cluster) == number);
            let mut runs = Runs::default();
            let mut is_whole = true;
            for (cluster, raw, units) in of_slice {
                let cluster = bits.start_of(cluster).bytes();
                let unit_bytes = tables.l2.subcluster_bytes();
                let place = |unit: u32| cluster + u64::from(unit) * unit_bytes;
                let (start, stop) = (place(units.start), place(units.end).min(end));
                let (start, stop) = (GuestOffset::new(start), GuestOffset::new(stop));
                let Some(part) = GuestRange::between(start, stop) else { continue };
                let mut bytes = [0; 16];
                tables.l2.put_raw(&mut bytes, 0, raw);
                let bytes = &bytes[..tables.l2.entry_bytes()];
                // Bytes that this layer no longer owns show what is beneath: that is not known
                // here.
                is_whole &= raw != RawL2Entry::default();
                layer.append_l2_runs(tables, bytes, part, base, &mut runs);
            }
            self.map.change_slice(number, |slice| is_whole.then(|| slice.overlaid(&runs)));
        }
    }
}

//! Whether the changes that a log makes to the tables of an image fit the image found.
//!
//! Sums of pages show that nobody changed what the log changes ([`super::expected`]). This file
//! checks the rest, which follows from the tables alone, so that no operation of a writer can
//! forget to record it: the tables of the file are compared with those that the log makes of them.
//!
//! Invariants
//! - I1 Dropped bytes are zeros in the file: see [`super::dropped`].
//! - I2 Linked clusters are counted: nobody freed them.
//! - I3 Nor did anybody free them, and give them to another place. Where counts are kept lazily, a
//!   program that opens the image counts again, and so frees what only the log links; there the
//!   tables are searched for such places.

use super::dropped::{dropped_units, ranges_of};
use super::replay::{Counts, Replay};
use mica_block::{Result, RunKind, Store, read_exact};
use mica_qcow2_format::{Header, L1Entry, L2Entry, L2Format, RawL2Entry};
use mica_rt::Buf;
use mica_units::{GuestOffset, HostCluster, HostOffset};
use std::collections::BTreeMap;

/// Entries of an L1 table that are read at a time.
const L1_PIECE: u64 = 8192;
/// Bytes that are checked at a time.
const PIECE_BYTES: u64 = 1 << 20;

const DROPPED_SINCE: &str = "another program has since written where the guest had discarded";
const GIVEN_AWAY: &str = "another program has since put other data where it was";
const UNCOUNTED: &str = "another program has since freed what it had allocated";

/// What is asked of an image.
struct Evidence<'a> {
    replay: &'a Replay,
    store: &'a dyn Store,
    data: &'a dyn Store,
    counts: Counts<'a>,
    l2: L2Format,
    /// Clusters that the log links, and the disk's offset whose entry does; none if that is a
    /// table's.
    linked: BTreeMap<HostCluster, Option<GuestOffset>>,
}

/// Why the changes that `replay` makes to the image in `store`, which has this `header` and may
/// have its data in `data`, do not fit it; `None` if they do.
pub(super) async fn contradiction(
    replay: &Replay,
    header: &Header,
    store: &dyn Store,
    data: Option<&dyn Store>,
) -> Result<Option<&'static str>> {
    let (l2, data) = (header.l2_format(), data.unwrap_or(store));
    let counts = Counts::new(store, header);
    let mut evidence = Evidence { replay, store, data, counts, l2, linked: BTreeMap::new() };
    if let Some(why) = evidence.of_tables(header).await? {
        return Ok(Some(why));
    }
    let is_lazy = header.compatible.lazy_refcounts || header.incompatible.dirty;
    match is_lazy && !evidence.linked.is_empty() && evidence.gave_away(header).await? {
        true => Ok(Some(GIVEN_AWAY)),
        false => Ok(None),
    }
}

impl Evidence<'_> {
    /// Checks all tables.
    async fn of_tables(&mut self, header: &Header) -> Result<Option<&'static str>> {
        let mut first = 0;
        while first < u64::from(header.l1_entries) {
            let (at, old) = self.l1_piece(header, first).await?;
            let mut new = old.to_vec();
            let put = |at: usize, bytes: &[u8]| new[at..at + bytes.len()].copy_from_slice(bytes);
            self.replay.lay_over(old.len(), at, put);
            let entries = old.as_chunks().0.iter().zip(new.as_chunks().0).zip(first..);
            for ((old, new), index) in entries {
                let [old, new] = [old, new].map(|entry| L1Entry(u64::from_be_bytes(*entry)));
                if let Some(why) = self.of_table(index, old, new).await? {
                    return Ok(Some(why));
                }
            }
            first += L1_PIECE;
        }
        Ok(None)
    }

    /// A part of the L1 table as it is in the file, from entry `first` on, and where it is.
    async fn l1_piece(&self, header: &Header, first: u64) -> Result<(u64, Buf)> {
        let count = L1_PIECE.min(u64::from(header.l1_entries) - first);
        let at = header.l1_offset.bytes() + first * L1Entry::BYTES as u64;
        let len = usize::try_from(count).expect("a piece") * L1Entry::BYTES;
        Ok((at, read_exact(self.store, HostOffset::new(at), len).await?))
    }

    /// Whether the file names a cluster that the log links for anything else (I3).
    async fn gave_away(&self, header: &Header) -> Result<bool> {
        let bits = self.l2.cluster_bits;
        let len = usize::try_from(bits.bytes()).expect("a cluster");
        let end = self.store.len()?;
        let mut first = 0;
        while first < u64::from(header.l1_entries) {
            let (_, entries) = self.l1_piece(header, first).await?;
            for (entry, index) in entries.as_chunks().0.iter().zip(first..) {
                let entry = L1Entry(u64::from_be_bytes(*entry));
                let Some(table) = entry.decode(bits).ok().flatten() else { continue };
                if self.linked.get(&bits.host_cluster(table)).is_some_and(Option::is_some) {
                    return Ok(true);
                }
                // Nor does a table beyond the end name anything.
                if table.bytes().saturating_add(bits.bytes()) > end {
                    continue;
                }
                let bytes = read_exact(self.store, table, len).await?;
                let guests = self.l2.first_of_table(index);
                for within in 0..len / self.l2.entry_bytes() {
                    let guest = bits.start_of(guests.saturating_add(within as u64));
                    let Some(raw) = self.l2.raw(&bytes, within) else { continue };
                    if self.has_other(raw, guest) {
                        tracing::debug!(%guest, "it has a cluster that the log links elsewhere");
                        return Ok(true);
                    }
                }
            }
            first += L1_PIECE;
        }
        Ok(false)
    }

    /// Whether the entry `raw` of `guest` names a cluster that the log links elsewhere.
    fn has_other(&self, raw: RawL2Entry, guest: GuestOffset) -> bool {
        let bits = self.l2.cluster_bits;
        let (first, last) = match self.l2.interpret_at(raw, guest) {
            Ok(L2Entry::Data(host) | L2Entry::ZeroAllocated(host)) => (host, host),
            Ok(L2Entry::Subclusters { host: Some(host), .. }) => (host, host),
            Ok(L2Entry::Compressed(compressed)) => {
                let len = compressed.len_max.max(1) - 1;
                (compressed.host, compressed.host.checked_add(len).unwrap_or(compressed.host))
            }
            _ => return false,
        };
        let clusters = bits.host_cluster(first)..=bits.host_cluster(last);
        self.linked.range(clusters).any(|(_, by)| *by != Some(guest))
    }

    /// Checks the table that L1 entry `index` names, which was `old`.
    async fn of_table(
        &mut self,
        index: u64,
        old: L1Entry,
        new: L1Entry,
    ) -> Result<Option<&'static str>> {
        // A malformed entry names no table.
        let decode = |entry: L1Entry| entry.decode(self.l2.cluster_bits).ok().flatten();
        let Some(table) = decode(new) else { return Ok(None) };
        let is_new = decode(old) != Some(table);
        if is_new {
            if !self.is_counted(table).await? {
                return Ok(Some(UNCOUNTED));
            }
            self.linked.insert(self.l2.cluster_bits.host_cluster(table), None);
        }
        let replay = self.replay;
        for (at, page) in replay.logged_within(table, self.l2.cluster_bits.bytes()) {
            let before = match is_new {
                true => vec![0; page.len()],
                false => read_exact(self.store, at, page.len()).await?.to_vec(),
            };
            let entry_bytes = self.l2.entry_bytes();
            let first = (at.bytes() - table.bytes()) / entry_bytes as u64;
            for (within, entry) in (0..page.len() / entry_bytes).zip(first..) {
                let raw = |bytes: &[u8]| self.l2.raw(bytes, within);
                let (Some(old), Some(new)) = (raw(&before), raw(page)) else { continue };
                let cluster = self.l2.first_of_table(index).saturating_add(entry);
                if old != new
                    && let Some(guest) = self.l2.cluster_bits.range_of(cluster)
                    && let Some(why) = self.of_entry(guest.start(), old, new).await?
                {
                    return Ok(Some(why));
                }
            }
        }
        Ok(None)
    }

    /// Checks the entry of guest cluster `guest`.
    async fn of_entry(
        &mut self,
        guest: GuestOffset,
        old: RawL2Entry,
        new: RawL2Entry,
    ) -> Result<Option<&'static str>> {
        if let Some(dropped) = dropped_units(self.l2, guest, old, new) {
            for (at, len) in ranges_of(self.l2, dropped) {
                if !is_zero(self.data, at, len).await? {
                    tracing::debug!(%guest, %at, len, "dropped bytes were written since");
                    return Ok(Some(DROPPED_SINCE));
                }
            }
        }
        let place = |raw| match self.l2.interpret_at(raw, guest) {
            Ok(L2Entry::Data(host) | L2Entry::ZeroAllocated(host)) => Some(host),
            Ok(L2Entry::Subclusters { host, .. }) => host,
            _ => None,
        };
        // Nothing is counted in a data file.
        let linked = place(new).filter(|host| !self.l2.data_file && place(old) != Some(*host));
        if let Some(host) = linked {
            self.linked.insert(self.l2.cluster_bits.host_cluster(host), Some(guest));
        }
        match linked {
            Some(host) if !self.is_counted(host).await? => {
                tracing::debug!(%guest, %host, "a linked cluster has no count");
                Ok(Some(UNCOUNTED))
            }
            _ => Ok(None),
        }
    }

    /// Whether the cluster at `host` has a count.
    async fn is_counted(&mut self, host: HostOffset) -> Result<bool> {
        let cluster = self.l2.cluster_bits.host_cluster(host);
        let count = self.counts.get(self.replay, cluster).await?;
        Ok(count.is_some_and(|count| count > 0))
    }
}

/// Whether `len` bytes at `at` are zeros.
async fn is_zero(store: &dyn Store, at: HostOffset, len: u64) -> Result<bool> {
    let end = at.bytes().saturating_add(len);
    let mut at = at.bytes();
    while at < end {
        let place = HostOffset::new(at);
        let run = store.run_at(place, end - at)?;
        let len = run.len.min(end - at).min(PIECE_BYTES);
        if run.kind != RunKind::Hole {
            let bytes = read_exact(store, place, usize::try_from(len).expect("a piece")).await?;
            if bytes.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
        }
        at += len;
    }
    Ok(true)
}

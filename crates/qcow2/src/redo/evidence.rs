//! Whether the changes that a log makes to the tables of an image fit the image found.
//!
//! Sums of pages show that nobody changed what the log changes ([`super::expected`]). This file
//! checks the rest, which follows from the tables alone, so that no operation of a writer can
//! forget to record it: the tables of the file are compared with those that the log makes of them.
//!
//! Invariants
//! - I1 Dropped bytes are zeros in the file: see [`super::dropped`].
//! - I2 Linked clusters are counted: nobody freed them.

use super::dropped::{dropped_units, ranges_of};
use super::replay::{Counts, Replay};
use mica_block::{Result, RunKind, Store, read_exact};
use mica_qcow2_format::{Header, L1Entry, L2Entry, L2Format, RawL2Entry};
use mica_units::{GuestOffset, HostOffset};

/// Entries of an L1 table that are read at a time.
const L1_PIECE: u64 = 8192;
/// Bytes that are checked at a time.
const PIECE_BYTES: u64 = 1 << 20;

const DROPPED_SINCE: &str = "another program has since written where the guest had discarded";
const UNCOUNTED: &str = "another program has since freed what it had allocated";

/// What is asked of an image.
struct Evidence<'a> {
    replay: &'a Replay,
    store: &'a dyn Store,
    data: &'a dyn Store,
    counts: Counts<'a>,
    l2: L2Format,
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
    let mut evidence = Evidence { replay, store, data, counts, l2 };
    let mut first = 0;
    while first < u64::from(header.l1_entries) {
        let count = L1_PIECE.min(u64::from(header.l1_entries) - first);
        let at = header.l1_offset.bytes() + first * L1Entry::BYTES as u64;
        let len = usize::try_from(count).expect("a piece") * L1Entry::BYTES;
        let old = read_exact(store, HostOffset::new(at), len).await?;
        let mut new = old.to_vec();
        replay.lay_over(len, at, |at, bytes| new[at..at + bytes.len()].copy_from_slice(bytes));
        let entries = old.as_chunks().0.iter().zip(new.as_chunks().0).zip(first..);
        for ((old, new), index) in entries {
            let [old, new] = [old, new].map(|entry| L1Entry(u64::from_be_bytes(*entry)));
            if let Some(why) = evidence.of_table(index, old, new).await? {
                return Ok(Some(why));
            }
        }
        first += count;
    }
    Ok(None)
}

impl Evidence<'_> {
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
        if is_new && !self.is_counted(table).await? {
            return Ok(Some(UNCOUNTED));
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

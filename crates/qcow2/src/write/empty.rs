//! A layer that owns nothing any more: another L1 table, and what the old one named is freed.
//!
//! Invariants
//! - E1 The empty table is durable before the header names it, and the counts of its clusters are.
//! - E2 What the old table named is freed only when the header names the new one. A power cut in
//!   between, or before all is freed, leaks clusters.
//! - E3 The empty table counts in memory only when no layer is left beneath whose bytes the old one
//!   hid, and whoever took the layers before that looks once more ([`Map::note_emptied`]).
//!
//! [`Map::note_emptied`]: crate::map::Map::note_emptied

use super::Writer;
use super::allocate::Reserved;
use super::grow::{Held, len_of};
use super::header::HeaderChange;
use crate::l1_place::table_bytes;
use mica_block::{Result, read_exact, write_all};
use mica_qcow2_format::{L1Entry, L2Entry};
use mica_rt::Buf;
use mica_units::{HostCluster, HostOffset};

/// Freed clusters after which they are flushed.
const FREED_MANY: usize = 1 << 12;

/// A table without entries, for later.
#[must_use = "its clusters are counted"]
pub(crate) struct EmptyTable {
    run: Reserved,
    /// The tables that the present one names.
    old: Vec<OldTable>,
}

/// An L2 table that nothing names any more, and the first of the clusters of the disk for which it
/// was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OldTable {
    at: HostOffset,
    index: u64,
}

impl Writer {
    /// Makes a table without entries, durably. The caller holds the gate, until the layer is empty.
    pub(crate) async fn prepare_empty(&self) -> Result<EmptyTable> {
        self.check_usable()?;
        self.mark_before_change().await?;
        let bits = self.l2.cluster_bits;
        let (_, entries) = self.l1_place.get();
        let old = self.old_tables().await?;
        let count = bits.clusters_for(table_bytes(entries)).max(1);
        let len = bits.bytes_of(count);
        let what = "the empty L1 table of the active layer in one piece: once another layer is on \
                    top of it, it can be committed without one";
        let run = self.reserve_run(count, what).await?;
        let at = bits.start_of(run.first);
        let written = async {
            self.metadata.ranges.check(at, len)?;
            self.metadata.lock().drop_cluster(at, len);
            write_all(&*self.metadata.store, Buf::zeroed(len_of(len)), at).await?;
            // With the counts (E1).
            self.flush().await
        };
        if let Err(error) = written.await {
            self.space.give_back(run);
            return Err(error);
        }
        Ok(EmptyTable { run, old })
    }

    /// The tables that the L1 table names.
    async fn old_tables(&self) -> Result<Vec<OldTable>> {
        let (at, entries) = self.l1_place.get();
        let mut old = Vec::new();
        if at != HostOffset::ZERO {
            let len = len_of(table_bytes(entries));
            let table = read_exact(&*self.metadata.store, at, len).await?;
            for (index, entry) in (0..).zip(table.as_chunks().0) {
                // A malformed entry names nothing that could be freed.
                if let Ok(Some(at)) =
                    L1Entry(u64::from_be_bytes(*entry)).decode(self.l2.cluster_bits)
                {
                    old.push(OldTable { at, index });
                }
            }
        }
        Ok(old)
    }

    /// Owns nothing from now on, durably: `empty` is the table. The caller holds the gate, has
    /// flushed, and has taken out the layers that must not show (E3). Returns the tables that the
    /// old one named, for [`Self::free_table`].
    ///
    /// # Errors
    /// Any failure of the write or the sync of the header: then nothing more is written.
    pub(crate) async fn become_empty(&self, empty: EmptyTable) -> Result<Vec<OldTable>> {
        let bits = self.l2.cluster_bits;
        let _moving = self.l1_moves.lock().await;
        let _held = Held::new(&self.metadata);
        let (old_at, entries) = self.l1_place.get();
        let EmptyTable { run, old } = empty;
        let at = bits.start_of(run.first);
        self.metadata.change_header(&self.space, HeaderChange::L1(at, entries)).await?;
        let mut pages = self.metadata.lock();
        self.map.note_emptied();
        self.l1_place.set(at, entries);
        if old_at != HostOffset::ZERO {
            let count = bits.clusters_for(table_bytes(entries));
            pages.drop_cluster(old_at, bits.bytes_of(count));
            let first = bits.host_cluster(old_at);
            pages.group.freed.extend(first.up_to(first.saturating_add(count)));
            self.metadata.ranges.remove(old_at);
        }
        self.metadata.ranges.add(at, table_bytes(entries), "the L1 table");
        drop(pages);
        #[cfg(test)]
        crate::testing::pass("another L1 table");
        Ok(old)
    }

    /// Frees the table `old`, and what it names (E2).
    pub(crate) async fn free_table(&self, old: OldTable) -> Result<()> {
        self.check_usable()?;
        self.note_change();
        let bits = self.l2.cluster_bits;
        let len = usize::try_from(bits.bytes()).expect("2 MiB");
        let table = read_exact(&*self.metadata.store, old.at, len).await?;
        let mut freed = vec![bits.host_cluster(old.at)];
        let count = len / self.l2.entry_bytes();
        let first = self.l2.first_of_table(old.index);
        for (index, cluster) in (0..count).zip(first.up_to(first.saturating_add(count as u64))) {
            let Some(raw) = self.l2.raw(&table, index) else { break };
            // What is malformed leaks: nobody knows what it named.
            let host = match self.l2.interpret_at(raw, bits.start_of(cluster)) {
                Ok(L2Entry::Data(host) | L2Entry::ZeroAllocated(host)) => Some(host),
                Ok(L2Entry::Subclusters { host, .. }) => host,
                Ok(L2Entry::Compressed(compressed)) => {
                    freed.extend(self.compressed_clusters(&compressed).unwrap_or_default());
                    None
                }
                Ok(L2Entry::Unallocated | L2Entry::Zero) | Err(_) => None,
            };
            let is_free =
                |host: &HostOffset| self.metadata.ranges.check(*host, bits.bytes()).is_ok();
            freed.extend(host.filter(is_free).map(|host| bits.host_cluster(host)));
        }
        let is_much = self.drop_freed(old.at, freed);
        if is_much { Box::pin(self.flush()).await } else { Ok(()) }
    }

    /// The table at `at` is gone, and `freed` lose a reference with the next group. Returns whether
    /// a flush is due.
    fn drop_freed(&self, at: HostOffset, freed: Vec<HostCluster>) -> bool {
        let mut pages = self.metadata.lock();
        pages.drop_cluster(at, self.l2.cluster_bits.bytes());
        self.metadata.ranges.remove(at);
        pages.group.freed.extend(freed);
        pages.group.freed.len() > FREED_MANY
    }
}

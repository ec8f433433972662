//! Growing the refcounts: blocks for regions without one, and a longer table of blocks.
//!
//! A region that is reached without a block gets one within itself, which counts its own cluster:
//! the request that needs it waits. Usually that does not happen, as blocks are made ahead, on
//! clusters of the pool, which other blocks count:
//!
//! ```text
//! clusters of the pool ─▶ zeros, durable ─▶ their counts, durable ─▶ named in the table
//! ```
//!
//! Until they are named the log calls them unused, and a power cut leaks them. They take nothing
//! from the regions that they are for, whose clusters stay blank.

use super::super::clusters::Beneath;
use super::super::header::HeaderChange;
use super::table::RefcountTable;
use super::{Clusters, Reserved, Space};
use crate::live::TableKind;
use crate::redo::Stage;
use mica_block::{Error, ErrorKind, Result, Space as SpaceChange, Store, write_all};
use mica_qcow2_format::RefcountTableEntry;
use mica_rt::Buf;
use mica_units::{HostCluster, HostOffset, SECTOR_BYTES};
use std::sync::atomic::Ordering;

/// Refcount blocks that are created at once at most, and their bytes: creating one takes a sync,
/// for which requests wait.
const BLOCKS_MAX: u64 = 8;
const BLOCKS_BYTES_MAX: u64 = 1 << 20;
/// Blocks are made ahead for this many clusters at most, or for most of a region.
const PREPARED_CLUSTERS_MAX: u64 = 1 << 16;
/// Entries of a refcount table that are in one sector.
const SECTOR_ENTRIES: u64 = SECTOR_BYTES / RefcountTableEntry::BYTES as u64;

impl Space {
    /// Creates the refcount blocks of a region that has none, within the region itself, and of some
    /// that follow. The blocks are durable before the table names them.
    pub(super) async fn make_blocks(&self, region: u64) -> Result<()> {
        let _locked = self.growth.lock().await;
        if self.has_block(region) {
            return Ok(());
        }
        let count = self.blocks_to_make(region);
        let (first, end) = {
            let mut state = self.lock();
            let first = state.cursor.max(self.width.first_of_block(self.bits, region));
            let end = first.saturating_add(count);
            state.unwritten_from = state.unwritten_from.max(end);
            (first, end)
        };
        let (host, bytes) = (self.bits.start_of(first), count * self.bits.bytes());
        self.metadata.ranges.check(host, bytes)?;
        // The first one counts all of them; the others are of regions that are not used yet.
        let mut blocks = Buf::zeroed(usize::try_from(bytes).expect("2 MiB"));
        for cluster in first.up_to(end) {
            let index = usize::try_from(self.width.index_of(self.bits, cluster));
            let counts = blocks.own_bytes();
            self.width.set(counts, index.expect("in a block"), 1).expect("one fits");
        }
        // It is still in memory when the log reads it.
        let cluster_bytes = self.bits.bytes();
        let cluster_len = usize::try_from(cluster_bytes).expect("2 MiB");
        let _pinned = self.metadata.pin(host, cluster_bytes);
        let block = Some(&blocks[..cluster_len]);
        self.metadata.lock().put_cluster(host, cluster_bytes, block, Beneath::Same);
        let written = self.metadata.write_durably(blocks, host).await;
        if let Err(error) = written {
            self.metadata.lock().drop_cluster(host, cluster_bytes);
            return Err(error);
        }
        let table_offset = {
            let mut state = self.lock();
            state.min_file_len = state.min_file_len.max(self.bits.start_of(end).bytes());
            state.table_offset
        };
        let named = self.name_blocks(first, (region, count), table_offset).await;
        if named.is_err() {
            // The table could not be read. The next attempt finds the same place.
            self.metadata.lock().drop_cluster(host, cluster_bytes);
        }
        named
    }

    /// How many blocks are created from that of `region` on: of regions that have none, and as many
    /// as the block of the first one can count. Their entries are in one sector of the table: a
    /// power cut leaves all of them or none, as each but the first depends on the first.
    fn blocks_to_make(&self, region: u64) -> u64 {
        let state = self.lock();
        let first = state.cursor.max(self.width.first_of_block(self.bits, region));
        let room = self.width.first_of_block(self.bits, region + 1).saturating_since(first);
        // Most of a small region is left for what it is there for.
        self.missing_blocks(&state, region).min(room / 2).max(1)
    }

    /// How many blocks can be made at once from that of `region` on, whose entries are in one
    /// sector of the table.
    fn missing_blocks(&self, state: &Clusters, region: u64) -> u64 {
        let index = usize::try_from(region).expect("within the table");
        let missing = (index..).take_while(|index| state.table.get(*index) == Some(0));
        let fit = (BLOCKS_BYTES_MAX / self.bits.bytes()).clamp(1, BLOCKS_MAX);
        let in_sector = SECTOR_ENTRIES - region % SECTOR_ENTRIES;
        let missing = missing.take(usize::try_from(BLOCKS_MAX).expect("few")).count() as u64;
        missing.min(fit).min(in_sector)
    }

    fn has_block(&self, region: u64) -> bool {
        let index = usize::try_from(region).unwrap_or(usize::MAX);
        let entry = self.lock().table.get(index);
        // As `look` decides it: reserved bits alone are no block.
        entry.is_some_and(|entry| RefcountTableEntry(entry).offset() != HostOffset::ZERO)
    }

    /// Makes the table at `table_offset` name `count` blocks from cluster `first` on, for `region`
    /// and those after it, all with one change.
    async fn name_blocks(
        &self,
        first: HostCluster,
        (region, count): (u64, u64),
        table_offset: HostOffset,
    ) -> Result<()> {
        let host = self.bits.start_of(first);
        let blocks =
            first.up_to(first.saturating_add(count)).map(|block| self.bits.start_of(block));
        let entries: Vec<_> =
            blocks.clone().map(|block| RefcountTableEntry::encode(block).0).collect();
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let at = HostOffset::new(table_offset.bytes() + region * RefcountTableEntry::BYTES as u64);
        for block in blocks.clone() {
            self.metadata.ranges.add_table(block, TableKind::RefcountBlock);
        }
        let named = self
            .metadata
            .change(at, |pages| {
                let table = pages.get_mut(at, bytes.len(), Stage::Early);
                table.expect("the page is there").copy_from_slice(&bytes);
                // It is durable, and may be changed from now on. Those that are not in memory are
                // expected as they are when they are first changed.
                if pages.has(host) {
                    pages.log_cluster(host, self.bits.bytes());
                }
                // Named and no longer unused: in the log both with one group.
                self.lock().future_blocks = None;
            })
            .await;
        if named.is_err() {
            blocks.for_each(|block| self.metadata.ranges.remove(block));
            return named;
        }
        let mut state = self.lock();
        for (region, entry) in (region..).zip(entries) {
            state.table.set(usize::try_from(region).expect("within the table"), entry);
        }
        Ok(())
    }

    /// Gives the image a refcount table of twice the length, beyond everything in use. The new
    /// table and the blocks that count it are durable before the header names it.
    pub(super) async fn grow_table(&self) -> Result<()> {
        let _locked = self.growth.lock().await;
        let (old_table, old_offset, start) = {
            let state = self.lock();
            let covered = self.width.first_of_block(self.bits, state.table.len() as u64);
            (state.table.to_vec(), state.table_offset, state.unwritten_from.max(covered))
        };
        let plan = GrownTable::plan(self, &old_table, start)?;
        write_all(&*self.metadata.store, plan.bytes(self), plan.at(self)).await?;
        self.metadata.sync().await?;
        let clusters = u32::try_from(plan.table_clusters).expect("8 MiB at most");
        let change = HeaderChange::RefcountTable(plan.table_at(self), clusters);
        self.metadata.change_header(self, change).await?;
        self.adopt_table(&plan, old_table.len() as u64 * 8, old_offset);
        Ok(())
    }

    fn adopt_table(&self, plan: &GrownTable, old_bytes: u64, old_offset: HostOffset) {
        let cluster_bytes = self.bits.bytes();
        for block in 0..plan.blocks {
            let host = plan.block_at(self, block);
            self.metadata.ranges.add_table(host, TableKind::RefcountBlock);
        }
        let bytes = plan.table_clusters * cluster_bytes;
        self.metadata.ranges.add(plan.table_at(self), bytes, "the refcount table");
        self.metadata.ranges.remove(old_offset);
        let mut pages = self.metadata.lock();
        pages.drop_cluster(old_offset, old_bytes);
        let first = self.bits.host_cluster(old_offset);
        let end = first.saturating_add(self.bits.clusters_for(old_bytes));
        pages.group.freed.extend(first.up_to(end));
        drop(pages);
        let mut state = self.lock();
        state.table_offset = plan.table_at(self);
        state.table = RefcountTable::new(plan.table.iter().copied());
        state.unwritten_from = state.unwritten_from.max(plan.end());
        state.min_file_len = state.min_file_len.max(self.bits.start_of(plan.end()).bytes());
    }
}

impl Space {
    /// The next region without a block, if that will be reached soon.
    pub(super) fn region_to_prepare(&self, state: &Clusters) -> Option<u64> {
        let region_of = |cluster| self.width.block_of(self.bits, cluster);
        let entries = self.width.block_entries(self.bits);
        let ahead = state.taken.min(PREPARED_CLUSTERS_MAX).max(entries - entries / 4);
        let last = region_of(state.cursor.saturating_add(ahead));
        let mut regions = region_of(state.cursor) + 1..=last;
        let entry_of = |region| state.table.get(usize::try_from(region).unwrap_or(usize::MAX));
        regions.find(|region| entry_of(*region) == Some(0))
    }

    /// Whether [`Self::make_blocks_ahead`] should be called. Says so once.
    #[inline]
    pub(crate) fn wants_blocks(&self) -> bool {
        self.wants_blocks.load(Ordering::Relaxed)
            && self.wants_blocks.swap(false, Ordering::Relaxed)
    }

    /// Makes the blocks of the next regions without any. Nobody waits for them yet: a failure is
    /// that of the request that needs them, if it fails again then.
    pub(crate) async fn make_blocks_ahead(&self) {
        let Some(_locked) = self.growth.try_lock() else { return };
        let taken = {
            let mut state = self.lock();
            let Some(region) = self.region_to_prepare(&state) else { return };
            let wanted = self.missing_blocks(&state, region);
            state.future_blocks = state.take(wanted);
            state.future_blocks.map(|blocks| (region, blocks))
        };
        let Some((region, blocks)) = taken else { return };
        if let Err(error) = self.put_blocks(region, blocks).await {
            tracing::debug!(%error, "refcount blocks are not made ahead");
            let mut state = self.lock();
            state.future_blocks = None;
            state.give_back(blocks);
        }
    }

    /// Makes `blocks`, from the pool, those of `region` and the ones after it (I7). Nothing writes
    /// there any more when it has failed.
    async fn put_blocks(&self, region: u64, blocks: Reserved) -> Result<()> {
        let metadata = &self.metadata;
        if let Some(error) = metadata.failure() {
            return Err(error.clone());
        }
        let (host, bytes) = (self.bits.start_of(blocks.first), self.bits.bytes_of(blocks.count));
        metadata.ranges.check(host, bytes)?;
        match metadata.store.space(SpaceChange::Allocate, host, bytes).await {
            // Found out by the sync, it would end the writing.
            Err(error) if error.kind() == ErrorKind::NoSpace => return Err(error),
            _ => {}
        }
        // What was there before may still be in memory.
        metadata.lock().drop_cluster(host, bytes);
        let zeros = Buf::zeroed(usize::try_from(bytes).expect("2 MiB"));
        metadata.write_durably(zeros, host).await?;
        self.make_counts_durable(blocks).await?;
        let table_offset = self.lock().table_offset;
        self.name_blocks(blocks.first, (region, blocks.count), table_offset).await
    }

    /// Makes the refcounts of `run` durable, whose page may be written at any time: it counts what
    /// is used, or too much.
    async fn make_counts_durable(&self, run: Reserved) -> Result<()> {
        // No group is being written: so none has an older copy of the page.
        let _locked = self.metadata.page_writes.lock().await;
        let block = self.block_of(run.first)?.expect("clusters of the pool are counted");
        let at = self.count_at(block, run.first);
        let len = self.page_len();
        let page = HostOffset::new(at.bytes() / len * len);
        let bytes = loop {
            let copied = {
                let mut pages = self.metadata.lock();
                if run.group <= pages.group.durable {
                    return Ok(());
                }
                pages.begin_page_write(page, || self.state())
            };
            match copied {
                Some(bytes) => break bytes,
                None => self.metadata.load(page).await?,
            }
        };
        self.metadata.unname_before_group().await?;
        self.metadata.write_durably(bytes, page).await?;
        self.metadata.lock().end_page_write();
        Ok(())
    }
}

/// A longer refcount table: blocks, then the table, in one run of clusters that the blocks count.
struct GrownTable {
    start: HostCluster,
    blocks: u64,
    table_clusters: u64,
    table: Vec<u64>,
}

impl GrownTable {
    /// For the table `old`, at cluster `start` or after, which is beyond the clusters `old` covers.
    fn plan(space: &Space, old: &[u64], start: HostCluster) -> Result<Self> {
        let region_of = |cluster| space.width.block_of(space.bits, cluster);
        let cluster_entries = space.bits.bytes() / 8;
        let region = region_of(start);
        // The blocks of this plan begin at a region, so they count nothing before it.
        let start = match old.len() as u64 > region {
            true => space.width.first_of_block(space.bits, region + 1),
            false => start,
        };
        let region = region_of(start);
        let mut blocks = 1;
        loop {
            let wanted = (old.len() as u64 * 2).max(region + blocks + 1);
            let table_clusters = wanted.div_ceil(cluster_entries);
            let last = start.saturating_add(blocks + table_clusters - 1);
            let needed = region_of(last) - region + 1;
            if needed > blocks {
                blocks = needed;
                continue;
            }
            if table_clusters * space.bits.bytes() > mica_qcow2_format::REFCOUNT_TABLE_BYTES_MAX {
                let context = "the refcount table cannot grow any further";
                return Err(Error::new(ErrorKind::NoSpace, context));
            }
            let mut table = old.to_vec();
            table.resize(usize::try_from(table_clusters * cluster_entries).expect("8 MiB"), 0);
            let mut plan = Self { start, blocks, table_clusters, table };
            for block in 0..blocks {
                let index = usize::try_from(region + block).expect("within the table");
                plan.table[index] = RefcountTableEntry::encode(plan.block_at(space, block)).0;
            }
            return Ok(plan);
        }
    }

    fn end(&self) -> HostCluster {
        self.start.saturating_add(self.blocks + self.table_clusters)
    }

    fn at(&self, space: &Space) -> HostOffset {
        self.block_at(space, 0)
    }

    /// Where block number `block` of the run is.
    fn block_at(&self, space: &Space, block: u64) -> HostOffset {
        space.bits.start_of(self.start.saturating_add(block))
    }

    /// The table follows the last block.
    fn table_at(&self, space: &Space) -> HostOffset {
        self.block_at(space, self.blocks)
    }

    /// The contents of the run.
    fn bytes(&self, space: &Space) -> Buf {
        let cluster = usize::try_from(space.bits.bytes()).expect("2 MiB");
        let clusters = usize::try_from(self.blocks + self.table_clusters).expect("few");
        let mut bytes = Buf::zeroed(clusters * cluster);
        let blocks_len = usize::try_from(self.blocks).expect("few") * cluster;
        let (blocks, table) = bytes.own_bytes().split_at_mut(blocks_len);
        let region = space.width.block_of(space.bits, self.start);
        for counted in self.start.up_to(self.end()) {
            let block = space.width.block_of(space.bits, counted) - region;
            let block = usize::try_from(block).expect("few") * cluster;
            let index = space.width.index_of(space.bits, counted);
            let index = usize::try_from(index).expect("in a block");
            space.width.set(&mut blocks[block..block + cluster], index, 1).expect("one fits");
        }
        for (to, entry) in table.chunks_exact_mut(8).zip(&self.table) {
            to.copy_from_slice(&entry.to_be_bytes());
        }
        bytes
    }
}

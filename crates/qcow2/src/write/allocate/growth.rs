//! Growing the refcounts: blocks for regions without one, and a longer table of blocks.

use super::super::clusters::Beneath;
use super::super::header::HeaderChange;
use super::Space;
use super::table::RefcountTable;
use crate::live::TableKind;
use crate::redo::Stage;
use mica_block::{Error, ErrorKind, Result, write_all};
use mica_qcow2_format::RefcountTableEntry;
use mica_rt::Buf;
use mica_units::{HostCluster, HostOffset};

impl Space {
    /// Creates the refcount block of a region that has none, within the region itself. The block is
    /// durable before the table names it.
    pub(super) async fn make_block(&self, region: u64) -> Result<()> {
        let (cluster, end) = {
            let mut state = self.lock();
            let cluster = state.cursor.max(self.width.first_of_block(self.bits, region));
            let end = cluster.saturating_add(1);
            state.unwritten_from = state.unwritten_from.max(end);
            (cluster, end)
        };
        let host = self.bits.start_of(cluster);
        self.metadata.ranges.check(host, self.bits.bytes())?;
        let len = usize::try_from(self.bits.bytes()).expect("2 MiB");
        let mut block = Buf::zeroed(len);
        let index = usize::try_from(self.width.index_of(self.bits, cluster)).expect("in a block");
        self.width.set(block.own_bytes(), index, 1).expect("one fits");
        // It is still in memory when the log reads it.
        let _pinned = self.metadata.pin(host, self.bits.bytes());
        self.metadata.lock().put_cluster(host, self.bits.bytes(), Some(&block), Beneath::Same);
        let written = write_all(&*self.metadata.store, block, host).await;
        let written = match written {
            Ok(()) => self.metadata.sync().await,
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            self.metadata.lock().drop_cluster(host, self.bits.bytes());
            return Err(error);
        }
        let entry = RefcountTableEntry::encode(host).0;
        let table_offset = {
            let mut state = self.lock();
            state.min_file_len = state.min_file_len.max(self.bits.start_of(end).bytes());
            state.table_offset
        };
        let at = HostOffset::new(table_offset.bytes() + region * 8);
        self.metadata.ranges.add_table(host, TableKind::RefcountBlock);
        let named = self
            .metadata
            .change(at, |pages| {
                let bytes = pages.get_mut(at, 8, Stage::Early).expect("the page is there");
                bytes.copy_from_slice(&entry.to_be_bytes());
                // It is durable, and may be changed from now on.
                pages.log_cluster(host, self.bits.bytes());
            })
            .await;
        if let Err(error) = named {
            // The table could not be read. The next attempt finds the same place.
            self.metadata.ranges.remove(host);
            self.metadata.lock().drop_cluster(host, self.bits.bytes());
            return Err(error);
        }
        self.lock().table.set(usize::try_from(region).expect("within the table"), entry);
        Ok(())
    }

    /// Gives the image a refcount table of twice the length, beyond everything in use. The new
    /// table and the blocks that count it are durable before the header names it.
    pub(super) async fn grow_table(&self) -> Result<()> {
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

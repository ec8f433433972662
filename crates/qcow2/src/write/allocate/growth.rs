//! Growing the refcounts: blocks for regions without one, and a longer table of blocks.

use super::super::clusters::Beneath;
use super::super::header::HeaderChange;
use super::Space;
use crate::live::TableKind;
use crate::redo::Stage;
use mica_block::{Error, ErrorKind, Result, write_all};
use mica_qcow2_format::RefcountTableEntry;
use mica_rt::Buf;
use mica_units::HostOffset;

impl Space {
    /// Creates the refcount block of a region that has none, within the region itself. The block is
    /// durable before the table names it.
    pub(super) async fn make_block(&self, region: u64) -> Result<()> {
        let region_bits = self.width.block_entries_bits(self.bits);
        let cluster = {
            let mut state = self.lock();
            let cluster = state.cursor.max(region << region_bits);
            state.unwritten_from = state.unwritten_from.max(cluster + 1);
            cluster
        };
        let host = HostOffset::new(cluster << self.bits.bits());
        self.metadata.ranges.check(host, self.bits.bytes())?;
        let len = usize::try_from(self.bits.bytes()).expect("2 MiB");
        let mut block = Buf::zeroed(len);
        let index = usize::try_from(cluster & ((1 << region_bits) - 1)).expect("in a block");
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
            state.min_file_len = state.min_file_len.max((cluster + 1) << self.bits.bits());
            state.table_offset
        };
        let at = HostOffset::new(table_offset.bytes() + region * 8);
        self.metadata.ranges.add_table(host, TableKind::RefcountBlock);
        self.metadata
            .change(at, |pages| {
                let bytes = pages.get_mut(at, 8, Stage::Early).expect("the page is there");
                bytes.copy_from_slice(&entry.to_be_bytes());
                // It is durable, and may be changed from now on.
                pages.log_cluster(host, self.bits.bytes());
            })
            .await?;
        self.lock().table[usize::try_from(region).expect("within the table")] = entry;
        Ok(())
    }

    /// Gives the image a refcount table of twice the length, beyond everything in use. The new
    /// table and the blocks that count it are durable before the header names it.
    pub(super) async fn grow_table(&self) -> Result<()> {
        let (old_table, old_offset, start) = {
            let state = self.lock();
            let covered = (state.table.len() as u64) << self.width.block_entries_bits(self.bits);
            (state.table.clone(), state.table_offset, state.unwritten_from.max(covered))
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
            let host = HostOffset::new((plan.start + block) << self.bits.bits());
            self.metadata.ranges.add_table(host, TableKind::RefcountBlock);
        }
        let bytes = plan.table_clusters * cluster_bytes;
        self.metadata.ranges.add(plan.table_at(self), bytes, "the refcount table");
        self.metadata.ranges.remove(old_offset);
        let mut pages = self.metadata.lock();
        pages.drop_cluster(old_offset, old_bytes);
        let first = old_offset.bytes() >> self.bits.bits();
        pages.group.freed.extend(first..first + self.bits.clusters_for(old_bytes));
        drop(pages);
        let mut state = self.lock();
        state.table_offset = plan.table_at(self);
        state.table.clone_from(&plan.table);
        state.unwritten_from = state.unwritten_from.max(plan.end());
        state.min_file_len = state.min_file_len.max(plan.end() << self.bits.bits());
    }
}

/// A longer refcount table: blocks, then the table, in one run of clusters that the blocks count.
struct GrownTable {
    start: u64,
    blocks: u64,
    table_clusters: u64,
    table: Vec<u64>,
}

impl GrownTable {
    /// For the table `old`, at cluster `start` or after, which is beyond the clusters `old` covers.
    fn plan(space: &Space, old: &[u64], start: u64) -> Result<Self> {
        let region_bits = space.width.block_entries_bits(space.bits);
        let cluster_entries = space.bits.bytes() / 8;
        let region = start >> region_bits;
        // The blocks of this plan begin at a region, so they count nothing before it.
        let start = if old.len() as u64 > region { (region + 1) << region_bits } else { start };
        let region = start >> region_bits;
        let mut blocks = 1;
        loop {
            let wanted = (old.len() as u64 * 2).max(region + blocks + 1);
            let table_clusters = wanted.div_ceil(cluster_entries);
            let end = start + blocks + table_clusters;
            let needed = ((end - 1) >> region_bits) - region + 1;
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
            for block in 0..blocks {
                let host = HostOffset::new((start + block) << space.bits.bits());
                let index = usize::try_from(region + block).expect("within the table");
                table[index] = RefcountTableEntry::encode(host).0;
            }
            return Ok(Self { start, blocks, table_clusters, table });
        }
    }

    fn end(&self) -> u64 {
        self.start + self.blocks + self.table_clusters
    }

    fn at(&self, space: &Space) -> HostOffset {
        HostOffset::new(self.start << space.bits.bits())
    }

    fn table_at(&self, space: &Space) -> HostOffset {
        HostOffset::new((self.start + self.blocks) << space.bits.bits())
    }

    /// The contents of the run.
    fn bytes(&self, space: &Space) -> Buf {
        let cluster = usize::try_from(space.bits.bytes()).expect("2 MiB");
        let clusters = usize::try_from(self.blocks + self.table_clusters).expect("few");
        let mut bytes = Buf::zeroed(clusters * cluster);
        let blocks_len = usize::try_from(self.blocks).expect("few") * cluster;
        let (blocks, table) = bytes.own_bytes().split_at_mut(blocks_len);
        let entries = space.width.block_entries(space.bits);
        let region_start = self.start / entries * entries;
        for counted in self.start..self.end() {
            let since = counted - region_start;
            let block = usize::try_from(since / entries).expect("few") * cluster;
            let index = usize::try_from(since % entries).expect("in a block");
            space.width.set(&mut blocks[block..block + cluster], index, 1).expect("one fits");
        }
        for (to, entry) in table.chunks_exact_mut(8).zip(&self.table) {
            to.copy_from_slice(&entry.to_be_bytes());
        }
        bytes
    }
}

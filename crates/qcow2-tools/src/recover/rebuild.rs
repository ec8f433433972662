//! Rebuilding all refcounts: a table and its blocks in clusters that nothing names.
//!
//! The old structure, sound or not, is left alone until the header names the new one: a power cut
//! before that leaves the image as it was. Afterwards the old one is not counted, so it is free.
//!
//! - I1. A fresh cluster is named by nothing: no table, no data, not the old structure, nothing
//!   beyond the end of the file.
//! - I2. Only blocks with a refcount in them are written, so a sparse file costs what is in it.

use super::header::name_refcount_table;
use super::refcounts::{cluster_len, next_in_use};
use super::{grow, refcounts};
use crate::check::{Block, Counted, Finding, Kept, Ranges, Task, count};
use mica_block::{Error, ErrorKind, Result, Store, write_all};
use mica_qcow2_format::{Header, REFCOUNT_TABLE_BYTES_MAX, RefcountTableEntry};
use mica_rt::Buf;
use mica_units::{ClusterBits, HostCluster, HostOffset};
use std::collections::BTreeSet;
use std::sync::Arc;

/// How often the file may grow until there is room. Each time less is left beyond its end.
const ROUNDS_MAX: u32 = 8;
/// The end of a search that ends nowhere.
const NO_END: HostCluster = HostCluster::new(u64::MAX);
/// Longest write, unless a cluster is longer.
const WRITE_BYTES_MAX: usize = 1 << 20;

/// Whether refcounts lack a block of their own, or the table is not entirely in the file.
pub(super) fn is_needed(header: &Header, counted: &Counted) -> bool {
    let bits = header.cluster_bits;
    let table_bytes = u64::from(header.refcount_table_clusters) * bits.bytes();
    let table_end = header.refcount_table_offset.bytes().saturating_add(table_bytes);
    let file_end = counted.file_bytes.next_multiple_of(bits.bytes());
    if table_bytes == 0 || table_end > file_end || counted.kept.shared_block {
        return true;
    }
    let mut index = 0;
    while let Some(clusters) = refcounts::clusters_of(counted, index) {
        let stands =
            matches!(counted.refcounts.block(index), Block::At(at) if at < counted.file_bytes);
        if !stands && next_in_use(counted, clusters).is_some() {
            return true;
        }
        index += 1;
    }
    false
}

/// Rebuilds all refcounts and names them in the header. Returns the header, and the places of
/// everything but the refcounts.
pub(super) async fn rebuild(store: Arc<dyn Store>, header: &Header) -> Result<(Header, Kept)> {
    let (header, kept) = write_structure(Arc::clone(&store), header).await?;
    name_refcount_table(&*store, &header).await?;
    Ok((header, kept))
}

/// Writes all refcounts in the width that `header` says, whatever the file has, durably. Returns
/// the header that names them, which the caller writes.
pub(crate) async fn write_refcounts(store: Arc<dyn Store>, header: &Header) -> Result<Header> {
    Ok(write_structure(store, header).await?.0)
}

async fn write_structure(store: Arc<dyn Store>, header: &Header) -> Result<(Header, Kept)> {
    for _ in 0..ROUNDS_MAX {
        let ignore = &mut |_: Finding| {};
        let counted = count(Arc::clone(&store), header, Task::WithoutRefcounts, ignore).await?;
        let plan = Plan::new(header, &counted)?;
        if plan.end() > counted.references.end() {
            // Clusters that were beyond the end may now be in the file: they have to be counted.
            store.set_len(header.cluster_bits.start_of(plan.end()).bytes()).await?;
            store.sync().await?;
            continue;
        }
        plan.write(&*store, header, &counted).await?;
        store.sync().await?;
        let mut header = header.clone();
        header.refcount_table_offset = header.cluster_bits.start_of(plan.start);
        header.refcount_table_clusters = u32::try_from(plan.table_clusters).unwrap_or(u32::MAX);
        return Ok((header, counted.kept));
    }
    Err(no_room())
}

/// The place of the new structure: the table, then its blocks in order.
struct Plan {
    /// First cluster.
    start: HostCluster,
    table_clusters: u64,
    /// The blocks to be created, by their index in the table.
    blocks: BTreeSet<u64>,
}

impl Plan {
    fn new(header: &Header, counted: &Counted) -> Result<Self> {
        let mut in_use = BTreeSet::new();
        let refcounts = &counted.refcounts;
        let mut cluster = HostCluster::ZERO;
        while let Some(next) = next_in_use(counted, cluster..NO_END) {
            let index = refcounts.block_of(next);
            in_use.insert(index);
            cluster = refcounts.clusters_of(index).end;
        }
        let free = Free::new(counted);
        let mut needed = 1;
        loop {
            let start = free.first_run(needed);
            // The new structure counts itself.
            let mut blocks = in_use.clone();
            let last = start.saturating_add(needed - 1);
            blocks.extend(refcounts.block_of(start)..=refcounts.block_of(last));
            let table_bytes = blocks.last().map_or(0, |last| (last + 1) * 8);
            if table_bytes > REFCOUNT_TABLE_BYTES_MAX
                || start.saturating_add(needed) > grow::end_max(header, counted)
            {
                return Err(no_room());
            }
            let table_clusters = header.cluster_bits.clusters_for(table_bytes);
            let plan = Self { start, table_clusters, blocks };
            if plan.len() <= needed {
                return Ok(plan);
            }
            needed = plan.len();
        }
    }

    fn len(&self) -> u64 {
        self.table_clusters + self.blocks.len() as u64
    }

    fn end(&self) -> HostCluster {
        self.start.saturating_add(self.len())
    }

    async fn write(&self, store: &dyn Store, header: &Header, counted: &Counted) -> Result<()> {
        let bits = header.cluster_bits;
        let at = bits.start_of(self.start).bytes();
        let mut writer = Writer { store, at, bytes: Vec::new() };
        writer.append(&self.table(bits)).await?;
        let width = counted.refcounts.width();
        let own = self.start..self.end();
        for &index in &self.blocks {
            let mut block = vec![0; cluster_len(bits)];
            let clusters = counted.refcounts.clusters_of(index);
            for (number, cluster) in clusters.start.up_to(clusters.end).enumerate() {
                let references =
                    if own.contains(&cluster) { 1 } else { counted.references.get(cluster) };
                if references > 0 {
                    // References are counted in the same width as refcounts: they always fit.
                    let set = width.set(&mut block, number, references);
                    debug_assert!(set.is_some(), "in the block");
                }
            }
            writer.append(&block).await?;
        }
        writer.write_out().await
    }

    fn table(&self, bits: ClusterBits) -> Vec<u8> {
        let mut table = Vec::new();
        let blocks_at = self.start.saturating_add(self.table_clusters);
        for (number, &index) in self.blocks.iter().enumerate() {
            let at = bits.start_of(blocks_at.saturating_add(number as u64));
            // The table is 8 MiB at most.
            table.resize(usize::try_from(index * 8).unwrap_or(usize::MAX), 0);
            table.extend_from_slice(&RefcountTableEntry::encode(at).0.to_be_bytes());
        }
        table.resize(table.len().next_multiple_of(cluster_len(bits)), 0);
        table
    }
}

/// The clusters that nothing names.
pub(super) struct Free<'a> {
    counted: &'a Counted,
    taken: Ranges,
}

impl<'a> Free<'a> {
    pub(super) fn new(counted: &'a Counted) -> Self {
        let (beyond, structure) = (counted.kept.beyond.iter(), counted.kept.structure.iter());
        Self { counted, taken: Ranges::new(beyond.chain(structure).collect()) }
    }

    /// The first run of this many free clusters. The file may end inside it: beyond its end
    /// everything that nothing names is free.
    pub(super) fn first_run(&self, len: u64) -> HostCluster {
        let mut start = HostCluster::new(1);
        loop {
            let in_use = next_in_use(self.counted, start..NO_END);
            let taken = self.taken.at_or_after(start);
            let in_use_first = in_use.unwrap_or(NO_END);
            let (first, after) = match taken {
                Some((first, last)) if first <= in_use_first => (first, last.saturating_add(1)),
                _ => (in_use_first, in_use_first.saturating_add(1)),
            };
            if first.saturating_since(start) >= len {
                return start;
            }
            start = after;
        }
    }
}

/// Writes what is appended, in large pieces.
struct Writer<'a> {
    store: &'a dyn Store,
    at: u64,
    bytes: Vec<u8>,
}

impl Writer<'_> {
    async fn append(&mut self, bytes: &[u8]) -> Result<()> {
        if !self.bytes.is_empty() && self.bytes.len() + bytes.len() > WRITE_BYTES_MAX {
            self.write_out().await?;
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    async fn write_out(&mut self) -> Result<()> {
        let at = HostOffset::new(self.at);
        write_all(self.store, Buf::from_slice(&self.bytes), at).await?;
        self.at += self.bytes.len() as u64;
        self.bytes.clear();
        Ok(())
    }
}

fn no_room() -> Error {
    Error::new(
        ErrorKind::Limit,
        "there is no room for new refcounts: tables name too much beyond the end of the file; \
         qemu-img convert makes a clean copy",
    )
}

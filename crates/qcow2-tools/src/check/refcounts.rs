//! The refcounts that the image has on disk.
//!
//! The check of a flag needs only whether a refcount is one; so a bit for each cluster is kept of
//! all blocks. A block is read again if a message needs the refcount itself.

use super::{Checker, Finding, HOST_END_MAX, READ_BYTES_MAX};
use mica_block::Result;
use mica_qcow2_format::{Header, RefcountTableEntry, RefcountWidth};
use mica_rt::Buf;
use mica_units::{ClusterBits, HostCluster, HostOffset};
use std::ops::Range;

/// Where a refcount block is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Block {
    /// Nowhere: all its refcounts are 0.
    None,
    At(u64),
    /// At an invalid place.
    Unreadable,
}

/// What is known of a refcount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum One {
    Yes,
    No,
    /// QEMU does not report a flag whose refcount it cannot read.
    Unreadable,
    /// Of a cluster beyond the end of the file: nothing is kept for those.
    Unknown,
}

pub(crate) struct Refcounts {
    table: Vec<RefcountTableEntry>,
    width: RefcountWidth,
    bits: ClusterBits,
    file_end: HostCluster,
    /// For each block of the file: a bit for each cluster whose refcount is one; `None` if there is
    /// no such cluster.
    ones: Vec<Option<Box<[u64]>>>,
    last_read: Option<(u64, Buf)>,
}

impl Refcounts {
    pub(super) fn new(header: &Header, file_end: HostCluster) -> Self {
        Self {
            table: Vec::new(),
            width: header.refcount_width,
            bits: header.cluster_bits,
            file_end,
            ones: Vec::new(),
            last_read: None,
        }
    }

    pub(crate) fn width(&self) -> RefcountWidth {
        self.width
    }

    pub(crate) fn cluster_bits(&self) -> ClusterBits {
        self.bits
    }

    /// The index of the block that counts `cluster`.
    pub(crate) fn block_of(&self, cluster: HostCluster) -> u64 {
        self.width.block_of(self.bits, cluster)
    }

    /// The clusters that block `index` counts.
    pub(crate) fn clusters_of(&self, index: u64) -> Range<HostCluster> {
        let first = self.width.first_of_block(self.bits, index);
        first..first.saturating_add(self.width.block_entries(self.bits))
    }

    pub(crate) fn table_entries(&self) -> u64 {
        self.table.len() as u64
    }

    pub(crate) fn block(&self, index: u64) -> Block {
        let entry = usize::try_from(index).ok().and_then(|index| self.table.get(index));
        let Some(entry) = entry else { return Block::None };
        let offset = entry.offset();
        match offset.bytes() {
            0 => Block::None,
            at if !offset.is_aligned(self.bits.bytes())
                || at > HOST_END_MAX - self.bits.bytes() =>
            {
                Block::Unreadable
            }
            at => Block::At(at),
        }
    }

    pub(super) fn is_one(&self, cluster: HostCluster) -> One {
        if cluster >= self.file_end {
            return One::Unknown;
        }
        let index = self.block_of(cluster);
        let block = usize::try_from(index).ok().and_then(|index| self.ones.get(index));
        let Some(Some(ones)) = block else {
            let unreadable = self.block(index) == Block::Unreadable;
            return if unreadable { One::Unreadable } else { One::No };
        };
        let within = self.width.index_of(self.bits, cluster);
        let word = usize::try_from(within / 64).ok().and_then(|word| ones.get(word));
        match word {
            Some(word) if word >> (within % 64) & 1 == 1 => One::Yes,
            _ => One::No,
        }
    }

    fn ones_of(&self, block: &[u8], entries: u64) -> Option<Box<[u64]>> {
        if block.iter().all(|&byte| byte == 0) {
            return None;
        }
        let count = usize::try_from(entries).unwrap_or(0);
        let mut ones = vec![0_u64; count.div_ceil(64)];
        for (word, first) in ones.iter_mut().zip((0..count).step_by(64)) {
            for index in first..count.min(first + 64) {
                if self.width.get(block, index) == Some(1) {
                    *word |= 1 << (index - first);
                }
            }
        }
        Some(ones.into_boxed_slice())
    }
}

impl Checker<'_> {
    /// Reads the refcount table, and from all blocks which refcounts are one.
    pub(super) async fn load_refcounts(&mut self) -> Result<()> {
        let header = self.header;
        let bytes = u64::from(header.refcount_table_clusters) * header.cluster_bits.bytes();
        let mut at = header.refcount_table_offset.bytes();
        let end = at.saturating_add(bytes).min(self.file_bytes);
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(READ_BYTES_MAX);
            let piece = self.read(at, len).await?;
            let entries = piece.as_chunks::<{ RefcountTableEntry::BYTES }>().0;
            let entries =
                entries.iter().map(|&entry| RefcountTableEntry(u64::from_be_bytes(entry)));
            self.refcounts.table.extend(entries);
            at += len as u64;
        }
        let file_end = self.refcounts.file_end;
        let block_entries = header.refcount_width.block_entries(header.cluster_bits);
        let blocks = file_end.number().div_ceil(block_entries).min(self.refcounts.table_entries());
        // All blocks are read twice: here and when references are compared.
        self.expect_more(2 * blocks);
        for index in 0..blocks {
            let ones = match self.refcounts.block(index) {
                Block::At(at) if at < self.file_bytes => {
                    let block = self.read(at, self.cluster_len()).await?;
                    let clusters = self.refcounts.clusters_of(index);
                    let entries = clusters.end.min(file_end).saturating_since(clusters.start);
                    self.refcounts.ones_of(&block, entries)
                }
                _ => None,
            };
            self.refcounts.ones.push(ones);
            self.went_on(1);
        }
        Ok(())
    }

    /// The refcount of a cluster, or `None` where QEMU cannot read it.
    pub(super) async fn refcount(&mut self, cluster: HostCluster) -> Result<Option<u64>> {
        let at = match self.refcounts.block(self.refcounts.block_of(cluster)) {
            Block::None => return Ok(Some(0)),
            Block::Unreadable => return Ok(None),
            Block::At(at) => at,
        };
        if self.refcounts.last_read.as_ref().is_none_or(|(last, _)| *last != at) {
            let block = self.read(at, self.cluster_len()).await?;
            self.refcounts.last_read = Some((at, block));
        }
        let index = self.refcounts.width.index_of(self.refcounts.bits, cluster);
        let refcount =
            self.refcounts.last_read.as_ref().and_then(|(_, block)| {
                self.refcounts.width.get(block, usize::try_from(index).ok()?)
            });
        Ok(refcount)
    }

    /// Keeps where the refcount table and all that it names is, sound or not.
    pub(super) fn keep_refcount_structure(&mut self) {
        let (header, bits) = (self.header, self.header.cluster_bits);
        let bytes = u64::from(header.refcount_table_clusters) * bits.bytes();
        self.keep.structure(bits, header.refcount_table_offset.bytes(), bytes);
        for entry in &self.refcounts.table {
            if entry.offset() != HostOffset::ZERO {
                self.keep.structure(bits, entry.offset().bytes(), bits.bytes());
            }
        }
    }

    /// Counts the references of the refcount table to its blocks.
    pub(super) fn refer_refcount_blocks(&mut self) -> Result<()> {
        let bits = self.header.cluster_bits;
        let table = std::mem::take(&mut self.refcounts.table);
        for (index, entry) in table.iter().enumerate() {
            let index = index as u64;
            let offset = entry.offset();
            let cluster = bits.host_cluster(offset);
            if entry.has_reserved_bits() {
                self.corruption(Finding::RefcountTableReservedBits { index }, 1);
            } else if !offset.is_aligned(bits.bytes()) {
                self.corruption(Finding::RefcountBlockUnaligned { index }, 1);
            } else if cluster >= self.references.end() {
                self.corruption(Finding::RefcountBlockOutside { index }, 1);
            } else if cluster != HostCluster::ZERO {
                // All other users were counted before.
                self.keep.shared_block |= self.references.get(cluster) > 0;
                self.refer_place(offset.bytes(), bits.bytes(), 1)?;
                let references = self.references.get(cluster);
                if references != 1 {
                    self.corruption(Finding::RefcountBlockShared { index, references }, 1);
                }
            }
        }
        self.refcounts.table = table;
        Ok(())
    }
}

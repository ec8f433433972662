//! Refcounts of an image that is being made.

use crate::sink::Sink;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{RefcountTableEntry, RefcountWidth};
use mica_units::{ClusterBits, HostCluster, HostOffset};
use std::ops::Range;

/// How often each cluster of the file is referenced.
pub(super) struct Refcounts {
    cluster_bits: ClusterBits,
    width: RefcountWidth,
    counts: Vec<u32>,
}

impl Refcounts {
    /// None of `clusters` clusters is referenced.
    pub(super) fn new(cluster_bits: ClusterBits, width: RefcountWidth, clusters: u64) -> Self {
        let clusters = usize::try_from(clusters).unwrap_or(usize::MAX);
        Self { cluster_bits, width, counts: vec![0; clusters] }
    }

    /// Clusters that hold a byte of `start..end`.
    fn clusters(&self, bytes: &Range<u64>) -> Range<usize> {
        let first = self.cluster_bits.host_cluster(HostOffset::new(bytes.start));
        let end = self.cluster_bits.host_cluster_up(HostOffset::new(bytes.end));
        let at = |cluster: HostCluster| usize::try_from(cluster.number()).unwrap_or(usize::MAX);
        at(first)..at(end)
    }

    /// Whether all clusters that hold a byte of `bytes` can take one more reference.
    pub(super) fn can_add_reference(&self, bytes: &Range<u64>) -> bool {
        self.counts[self.clusters(bytes)]
            .iter()
            .all(|count| u64::from(*count) < self.width.max().min(u64::from(u32::MAX)))
    }

    /// Adds a reference to all clusters that hold a byte of `bytes`.
    pub(super) fn add_reference(&mut self, bytes: &Range<u64>) {
        let clusters = self.clusters(bytes);
        for count in &mut self.counts[clusters] {
            *count += 1;
        }
    }

    /// Writes the table at `table` and its blocks one after the other at `blocks`.
    pub(super) fn write(&self, sink: &mut Sink, table: u64, blocks: u64) -> Result<()> {
        let entries = usize::try_from(self.width.block_entries(self.cluster_bits));
        let entries = entries.unwrap_or(usize::MAX);
        let mut names = Vec::new();
        for (number, counts) in (0_u64..).zip(self.counts.chunks(entries)) {
            let at = blocks + (number << self.cluster_bits.bits());
            names.extend(RefcountTableEntry::encode(HostOffset::new(at)).0.to_be_bytes());
            let block = sink.room(at, 1 << self.cluster_bits.bits())?;
            for (index, count) in counts.iter().enumerate() {
                self.width.set(block, index, u64::from(*count)).ok_or_else(|| {
                    let bits = self.width.bits();
                    let context = format!("refcount {count} does not fit {bits} bits");
                    Error::new(ErrorKind::Limit, context)
                })?;
            }
        }
        sink.write(table, &names)
    }
}

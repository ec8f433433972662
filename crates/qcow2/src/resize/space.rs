//! Clusters that are taken and freed while nothing else is written: the allocator of the writing
//! engine without its transactions.

use crate::format::Header;
use crate::write::allocate::{Reserved, Space};
use crate::write::pages::Metadata;
use mica_block::{Error, ErrorKind, Result, Space as SpaceChange, Store, write_all};
use mica_units::{ClusterBits, HostOffset};
use std::sync::Arc;

/// Clusters that may be passed over in the search for a run, for each that is wanted, and besides.
const PASSED_PER_CLUSTER: u64 = 4;
const PASSED_MIN: u64 = 4096;

/// The clusters of one file.
pub(super) struct FileSpace {
    store: Arc<dyn Store>,
    metadata: Arc<Metadata>,
    space: Space,
    bits: ClusterBits,
}

impl FileSpace {
    pub(super) async fn open(store: Arc<dyn Store>, header: &Header) -> Result<Self> {
        let bits = header.cluster_bits;
        let metadata = Metadata::new(Arc::clone(&store), bits);
        let ranges = &metadata.ranges;
        ranges.add(HostOffset::ZERO, bits.bytes(), "the header");
        ranges.add(header.l1_offset, u64::from(header.l1_entries) * 8, "the L1 table");
        let table_bytes = u64::from(header.refcount_table_clusters) * bits.bytes();
        ranges.add(header.refcount_table_offset, table_bytes, "the refcount table");
        let space = Space::open(&metadata, header).await?;
        Ok(Self { store, metadata, space, bits })
    }

    /// Takes `count` clusters in a row.
    pub(super) async fn take(&self, count: u64) -> Result<HostOffset> {
        let mut run: Option<Reserved> = None;
        let mut passed = Vec::new();
        let mut looked_at = 0;
        while run.is_none_or(|run| run.count < count) {
            if looked_at > count * PASSED_PER_CLUSTER + PASSED_MIN {
                let what = "the file has no room for a longer L1 table in one piece";
                return Err(Error::new(ErrorKind::NoSpace, what));
            }
            let wanted = count - run.map_or(0, |run| run.count);
            let next = self.space.reserve(wanted).await?;
            looked_at += next.count;
            match &mut run {
                Some(run) if run.first + run.count == next.first => run.count += next.count,
                run => passed.extend(run.replace(next)),
            }
        }
        for passed in passed {
            self.free(self.place(passed.first), passed.count).await?;
        }
        let first = run.map_or(0, |run| run.first);
        Ok(self.place(first))
    }

    /// Where the file ends and `count` clusters follow that nothing counts.
    pub(super) async fn end(&self, count: u64) -> Result<HostOffset> {
        let mut first = self.bits.clusters_for(self.store.len()?);
        let mut cluster = first;
        while cluster < first + count {
            let free = matches!(self.space.refcount(cluster).await?, None | Some(0));
            cluster += 1;
            if !free {
                first = cluster;
            }
        }
        Ok(self.place(first))
    }

    /// Takes one reference from each of `count` clusters at `at`; the space of those that lose the
    /// last one goes back to the file system.
    pub(super) async fn free(&self, at: HostOffset, count: u64) -> Result<()> {
        let first = self.bits.cluster_of(at.bytes());
        for cluster in first..first + count {
            let is_last = self.space.refcount(cluster).await? == Some(1);
            self.space.release(cluster).await?;
            if !is_last {
                continue;
            }
            let at = self.place(cluster);
            let punched = self.store.space(SpaceChange::Punch, at, self.bits.bytes()).await;
            if let Err(error) = punched
                && error.kind() != ErrorKind::Unsupported
            {
                tracing::debug!(%error, "a freed cluster keeps its space");
            }
        }
        Ok(())
    }

    /// Makes the refcounts durable, and gives back what was counted ahead.
    pub(super) async fn commit(&self) -> Result<()> {
        // An old refcount table is among what is freed: the header names the new one by now.
        let freed = std::mem::take(&mut self.metadata.lock().group.freed);
        for cluster in self.space.drain_pool().into_iter().chain(freed) {
            self.space.release(cluster).await?;
        }
        let mut dirty = self.metadata.lock().take_dirty();
        let pages = std::mem::take(&mut dirty.early);
        for (at, bytes) in pages.into_iter().chain(std::mem::take(&mut dirty.late)) {
            write_all(&*self.store, bytes, at).await?;
        }
        self.metadata.lock().written(&dirty);
        self.store.sync().await
    }

    fn place(&self, cluster: u64) -> HostOffset {
        HostOffset::new(cluster << self.bits.bits())
    }
}

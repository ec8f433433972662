//! Clusters that are allocated and freed while nothing else is written: the allocator of the
//! writing engine without its transactions.

use super::allocate::{Reserved, Space};
use super::pages::Metadata;
use mica_block::{Error, ErrorKind, Result, Space as SpaceChange, Store, write_all};
use mica_qcow2_format::Header;
use mica_units::{ClusterBits, HostCluster, HostOffset};
use std::cell::RefCell;
use std::sync::Arc;

/// In the search for a run, clusters that may be skipped for each one wanted, and in addition.
const PASSED_PER_CLUSTER: u64 = 4;
const PASSED_MIN: u64 = 4096;

/// The clusters of one file.
pub struct FileSpace {
    store: Arc<dyn Store>,
    metadata: Arc<Metadata>,
    space: Space,
    bits: ClusterBits,
    /// Clusters that lost their last reference and still occupy space.
    freed: RefCell<Vec<HostCluster>>,
}

impl FileSpace {
    /// The clusters of the image in `store`, which has this header and is used by nobody else.
    pub async fn open(store: Arc<dyn Store>, header: &Header) -> Result<Self> {
        let bits = header.cluster_bits;
        let metadata = Metadata::new(Arc::clone(&store), bits);
        let ranges = &metadata.ranges;
        ranges.set_file_end(bits.host_cluster_up(HostOffset::new(store.len()?)));
        ranges.add(HostOffset::ZERO, bits.bytes(), "the header");
        ranges.add(header.l1_offset, u64::from(header.l1_entries) * 8, "the L1 table");
        let table_bytes = u64::from(header.refcount_table_clusters) * bits.bytes();
        ranges.add(header.refcount_table_offset, table_bytes, "the refcount table");
        let space =
            Space::open(&metadata, header, metadata.store.reads_unwritten_as_zeros()).await?;
        Ok(Self { store, metadata, space, bits, freed: RefCell::default() })
    }

    /// Takes `count` contiguous clusters.
    ///
    /// # Errors
    /// `NoSpace` if there are no such clusters, or `Corrupt` if metadata lies there that nothing
    /// counts; any error of the store.
    pub async fn take(&self, count: u64) -> Result<HostOffset> {
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
                Some(run) if run.end() == next.first => run.count += next.count,
                run => passed.extend(run.replace(next)),
            }
        }
        for passed in passed {
            self.free(self.bits.start_of(passed.first), passed.count).await?;
        }
        let first = run.map_or(HostCluster::ZERO, |run| run.first);
        let at = self.bits.start_of(first);
        self.metadata.ranges.check(at, self.bits.bytes_of(count))?;
        Ok(at)
    }

    /// The end of the file, if `count` clusters that nothing counts follow there.
    pub async fn end(&self, count: u64) -> Result<HostOffset> {
        let mut first = self.bits.host_cluster_up(HostOffset::new(self.store.len()?));
        let mut cluster = first;
        while cluster < first.saturating_add(count) {
            let free = matches!(self.space.refcount(cluster).await?, None | Some(0));
            cluster = cluster.saturating_add(1);
            if !free {
                first = cluster;
            }
        }
        Ok(self.bits.start_of(first))
    }

    /// Checks that the L2 table at `at` overlaps no other metadata, so that it may be written.
    ///
    /// # Errors
    /// `Corrupt` if it does.
    pub fn check(&self, at: HostOffset) -> Result<()> {
        self.metadata.ranges.check(at, self.bits.bytes())
    }

    /// Whether the table or block at `at` overlaps no other.
    pub fn is_alone(&self, at: HostOffset) -> bool {
        self.metadata.ranges.check_table(at).is_ok()
    }

    /// The clusters that nobody uses and that still occupy space.
    pub fn take_freed(&self) -> Vec<HostCluster> {
        self.freed.take()
    }

    /// `clusters` are no longer used and still occupy space.
    pub fn put_freed(&self, clusters: Vec<HostCluster>) {
        self.freed.borrow_mut().extend(clusters);
    }

    /// The L2 table at `at`, if that is not 0, is metadata.
    pub fn protect(&self, at: HostOffset) {
        if at != HostOffset::ZERO {
            self.metadata.ranges.add(at, self.bits.bytes(), "an L2 table");
        }
    }

    /// The bytes at `at` are no longer metadata.
    pub fn forget(&self, at: HostOffset) {
        self.metadata.ranges.remove(at);
    }

    /// Takes one reference from each of `count` clusters at `at`.
    ///
    /// # Errors
    /// `Corrupt` if metadata is among them: tables that free metadata are corrupt.
    pub async fn free(&self, at: HostOffset, count: u64) -> Result<()> {
        let first = self.bits.host_cluster(at);
        for cluster in first.up_to(first.saturating_add(count)) {
            self.check(self.bits.start_of(cluster))?;
            if self.space.refcount(cluster).await? == Some(1) {
                self.freed.borrow_mut().push(cluster);
            }
            self.space.release(cluster).await?;
        }
        Ok(())
    }

    /// Returns the space of freed clusters to the file system: the file ends after the last cluster
    /// that counts, and not before `least` bytes. The counts are durable. What was freed and taken
    /// again keeps its bytes.
    pub async fn give_back(&self, least: u64) -> Result<()> {
        let mut end = self.bits.host_cluster_up(HostOffset::new(self.store.len()?));
        let least = self.bits.host_cluster_up(HostOffset::new(least));
        for last in least.up_to(end).rev() {
            let is_free = matches!(self.space.refcount(last).await?, None | Some(0));
            if !is_free || self.check(self.bits.start_of(last)).is_err() {
                break;
            }
            end = last;
        }
        let freed = self.still_free(end).await?;
        // Keeping the space costs nothing but the space.
        let len = self.bits.start_of(end).bytes();
        let is_longer = self.store.len()? > len;
        if is_longer && let Err(error) = self.store.set_len(len).await {
            tracing::debug!(%error, "the file keeps its length");
        }
        for run in freed.chunk_by(|one, next| next.checked_since(*one) == Some(1)) {
            let (at, len) = (self.bits.start_of(run[0]), self.bits.bytes_of(run.len() as u64));
            let punched = self.store.space(SpaceChange::Punch, at, len).await;
            if let Err(error) = punched
                && error.kind() != ErrorKind::Unsupported
            {
                tracing::debug!(%error, "freed clusters keep their space");
            }
        }
        self.store.sync().await
    }

    /// The clusters before `end` that were freed and that nobody has taken since, in rising order.
    async fn still_free(&self, end: HostCluster) -> Result<Vec<HostCluster>> {
        let mut freed = self.freed.take();
        freed.retain(|cluster| *cluster < end);
        freed.sort_unstable();
        freed.dedup();
        let mut free = Vec::new();
        for cluster in freed {
            if matches!(self.space.refcount(cluster).await?, None | Some(0)) {
                free.push(cluster);
            }
        }
        Ok(free)
    }

    /// Makes the refcounts durable, and returns what was counted ahead.
    pub async fn commit(&self) -> Result<()> {
        // An old refcount table is among the freed clusters: by now the header names the new one.
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::read_exact;
    use mica_qcow2_format::{Compression, L2Format, RefcountTableEntry, Version};
    use mica_rt::{Backend, Buf, Executor};
    use mica_store::MemoryStore;

    const BITS: u32 = 12;
    const CLUSTER_LEN: usize = 1 << BITS;
    /// Of the file: every second one is free, from the fourth on.
    const CLUSTERS: usize = 60;

    fn place(cluster: usize) -> HostOffset {
        HostOffset::new((cluster << BITS) as u64)
    }

    /// A file with holes of one cluster, and its header.
    fn file_with_holes() -> (Arc<dyn Store>, Header) {
        let l2 = L2Format {
            cluster_bits: ClusterBits::new(BITS).expect("of the format"),
            version: Version::V3,
            extended: false,
            data_file: false,
        };
        let header = Header {
            refcount_table_offset: place(1),
            refcount_table_clusters: 1,
            ..Header::new(l2, Compression::Deflate)
        };
        let mut bytes = vec![0; CLUSTERS * CLUSTER_LEN];
        let entry = RefcountTableEntry::encode(place(2)).0.to_be_bytes();
        bytes[CLUSTER_LEN..][..8].copy_from_slice(&entry);
        for cluster in (0..CLUSTERS).filter(|cluster| *cluster < 3 || cluster % 2 == 0) {
            let block = &mut bytes[2 * CLUSTER_LEN..3 * CLUSTER_LEN];
            header.refcount_width.set(block, cluster, 1).expect("a refcount that fits");
        }
        (Arc::new(MemoryStore::new_writable("the image", bytes)), header)
    }

    /// `mica bitmap` wiped the data of bitmaps that it had just written: a table of two clusters
    /// passed over the holes, which counted as freed, and the data was put there.
    #[test]
    fn holes_that_a_longer_run_passed_over_and_that_are_taken_then_keep_their_bytes() {
        Executor::new(Backend::Sim { seed: 1 }).expect("an executor").block_on(async {
            let (store, header) = file_with_holes();
            let space = FileSpace::open(Arc::clone(&store), &header).await.expect("opened");
            let mut taken = vec![(space.take(2).await.expect("room"), 2 * CLUSTER_LEN)];
            for _ in 0..400 {
                taken.push((space.take(1).await.expect("room"), CLUSTER_LEN));
            }
            let in_holes = taken.iter().filter(|(at, _)| *at < place(CLUSTERS)).count();
            assert!(in_holes > 10, "only {in_holes} holes were used");
            for (at, len) in &taken {
                let bytes = Buf::from_slice(&vec![0xa5; *len]);
                write_all(&*store, bytes, *at).await.expect("written");
            }
            space.commit().await.expect("committed");
            space.give_back(0).await.expect("given back");
            for (at, len) in &taken {
                let bytes = read_exact(&*store, *at, *len).await.expect("read");
                assert!(bytes.iter().all(|byte| *byte == 0xa5), "{at:?} was wiped");
            }
        });
    }

    #[test]
    fn what_was_freed_and_is_free_gives_its_space_back() {
        Executor::new(Backend::Sim { seed: 1 }).expect("an executor").block_on(async {
            let (store, header) = file_with_holes();
            let noise = Buf::from_slice(&[0xa5; CLUSTER_LEN]);
            write_all(&*store, noise, place(10)).await.expect("written");
            let space = FileSpace::open(Arc::clone(&store), &header).await.expect("opened");
            space.free(place(10), 1).await.expect("freed");
            space.commit().await.expect("committed");
            space.give_back(0).await.expect("given back");
            let bytes = read_exact(&*store, place(10), CLUSTER_LEN).await.expect("read");
            assert!(bytes.iter().all(|byte| *byte == 0), "it keeps its space");
        });
    }
}

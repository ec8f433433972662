//! Allocation of new clusters: refcounts, free runs, and clusters that were counted ahead.
//!
//! A cluster's refcount has to be durable before anything durable names the cluster. So clusters
//! are counted ahead, a run at a time: their counts are written with one group and are durable from
//! then on, so the links of later groups need not wait for counts. The file is extended with each
//! run, which takes a thread and a change of the inode: the more is allocated, the longer a run.
//! Clusters that were counted and not used are returned on close. A power cut leaks at most three
//! runs of half the length: up to 6 MiB at first, and 96 MiB when much was allocated, all of it
//! holes.
//!
//! Regions of the file get their refcount blocks before they are reached, in the background
//! ([`growth`]): a block takes a sync or two, for which no request should wait.
//!
//! Invariants
//! - I1 A cluster is given to one request only: it leaves the pool with its reservation.
//! - I2 A cluster in the pool has refcount 1 in memory; it is durable once the group in which it
//!   was counted is.
//! - I3 A cluster counts as blank only while nothing was ever written to it: it lies beyond the end
//!   that the file had when it was opened, and was never allocated before. If the store does not
//!   read such bytes as zeros, no cluster is blank.
//! - I4 A counted cluster lies within the file: the file is extended before the count is written,
//!   so a link that survives a power cut never names a place beyond the end.
//! - I5 No refcount block is put on a cluster that has a refcount, other than one of the pool, nor
//!   where metadata is known to be.
//! - I6 No cluster before the cursor is free: what is freed there takes the cursor back.
//! - I7 The table names a block only when the block, and the count of its cluster, are durable.

mod growth;
mod table;

use super::pages::{Metadata, PageState};
use crate::live::TableKind;
use crate::redo::{SpaceState, Stage};
use mica_block::{Error, ErrorKind, Result, Store, read_exact};
use mica_qcow2_format::{Header, RefcountTableEntry, RefcountWidth};
use mica_rt::sync;
use mica_units::{ClusterBits, HostCluster, HostOffset};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use table::RefcountTable;

/// Bytes of clusters that are counted ahead at first, at least [`AHEAD_CLUSTERS_MIN`] clusters.
const AHEAD_BYTES: u64 = 4 << 20;
/// Bytes that are counted ahead when much was allocated.
const AHEAD_BYTES_MAX: u64 = 64 << 20;
const AHEAD_CLUSTERS_MIN: u64 = 16;
const AHEAD_CLUSTERS_FIRST: u64 = 256;
const AHEAD_CLUSTERS_MAX: u64 = 1024;
/// The part of what was allocated that is counted ahead.
const AHEAD_SHARE: u64 = 8;
/// One more than the highest address that an entry can name.
const HOST_END: HostOffset = HostOffset::new(1 << 56);

/// Clusters that are counted but not used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Counted {
    first: HostCluster,
    count: u64,
    /// The group in which they were counted.
    group: u64,
    blank: bool,
}

/// A run of host clusters that was taken for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reserved {
    pub(crate) first: HostCluster,
    pub(crate) count: u64,
    /// The group with which their refcounts become durable.
    pub(crate) group: u64,
    /// Whether they read as zeros, also after a power cut.
    pub(crate) blank: bool,
}

impl Reserved {
    /// The cluster after the last.
    pub(crate) fn end(&self) -> HostCluster {
        self.first.saturating_add(self.count)
    }
}

struct Clusters {
    table: RefcountTable,
    table_offset: HostOffset,
    /// Where the search for free clusters continues.
    cursor: HostCluster,
    /// The length to which the file was extended here.
    min_file_len: u64,
    /// Nothing was ever written to the clusters from this one on.
    unwritten_from: HostCluster,
    pool: VecDeque<Counted>,
    /// Runs that are reserved and not linked yet, of requests that say when they are, in rising
    /// order.
    in_flight: Vec<(HostCluster, u64)>,
    /// Clusters of the pool that are being made refcount blocks: counted, and not used yet.
    future_blocks: Option<Reserved>,
    /// Number of clusters that were taken from the pool.
    taken: u64,
}

/// The clusters of one image file.
pub(crate) struct Space {
    metadata: Arc<Metadata>,
    bits: ClusterBits,
    width: RefcountWidth,
    /// Whether a cluster that was never written reads as zeros (I3).
    has_blanks: bool,
    state: Arc<Mutex<Clusters>>,
    refill: sync::Mutex,
    /// The right to make refcount blocks, or a longer table of them.
    growth: sync::Mutex,
    /// Whether blocks will be needed soon.
    wants_blocks: AtomicBool,
}

/// The result of looking for a free run.
enum Look {
    Free {
        first: HostCluster,
        count: u64,
    },
    /// Nothing was free as far as the cursor went.
    On,
    /// The page with the refcounts has to be read first.
    Read(HostOffset),
    /// The region has no refcount block.
    NoBlock(u64),
    /// The refcount table ends here.
    TableFull,
}

impl Space {
    /// The space of the image with this `metadata` and `header`; `has_blanks` says whether what was
    /// never written reads as zeros, in its tables and in its data.
    pub(crate) async fn open(
        metadata: &Arc<Metadata>,
        header: &Header,
        has_blanks: bool,
    ) -> Result<Self> {
        let bits = header.cluster_bits;
        let bytes = u64::from(header.refcount_table_clusters) * bits.bytes();
        let len = usize::try_from(bytes).expect("the header's limit is 8 MiB");
        let table = read_exact(&*metadata.store, header.refcount_table_offset, len).await?;
        let entries = table.as_chunks().0.iter().map(|entry| u64::from_be_bytes(*entry));
        let mut blocks = metadata.ranges.gather(TableKind::RefcountBlock);
        // A disk uses few of thousands.
        for entry in entries.clone().filter(|entry| *entry != 0) {
            if let Some(block) = RefcountTableEntry(entry).decode(bits)? {
                blocks.push(block);
            }
        }
        blocks.finish();
        let file_end = bits.host_cluster_up(HostOffset::new(metadata.store.len()?));
        let state = Clusters {
            table: RefcountTable::new(entries),
            table_offset: header.refcount_table_offset,
            min_file_len: 0,
            cursor: HostCluster::ZERO,
            unwritten_from: file_end,
            pool: VecDeque::new(),
            in_flight: Vec::new(),
            future_blocks: None,
            taken: 0,
        };
        let state = Arc::new(Mutex::new(state));
        let of_log = Arc::clone(&state);
        metadata.set_space(Box::new(move || of_log.lock().logged()));
        Ok(Self {
            metadata: Arc::clone(metadata),
            bits,
            width: header.refcount_width,
            has_blanks,
            state,
            refill: sync::Mutex::default(),
            growth: sync::Mutex::default(),
            wants_blocks: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Clusters> {
        self.state.lock()
    }

    /// How many clusters are counted ahead when `taken` were allocated.
    fn ahead(&self, taken: u64) -> u64 {
        let clusters = |bytes, most| self.bits.clusters_for(bytes).clamp(AHEAD_CLUSTERS_MIN, most);
        let first = clusters(AHEAD_BYTES, AHEAD_CLUSTERS_FIRST);
        let most = clusters(AHEAD_BYTES_MAX, AHEAD_CLUSTERS_MAX);
        (taken / AHEAD_SHARE).clamp(first, most)
    }

    /// Takes a run of at most `wanted` clusters; it may be shorter.
    pub(crate) async fn reserve(&self, wanted: u64) -> Result<Reserved> {
        self.reserve_by(wanted, Clusters::take).await
    }

    /// As [`Self::reserve`], for a request that links them later, after a write for example: the
    /// log calls them unused until [`Self::linked`], so that they do not leak if the process dies
    /// meanwhile.
    pub(crate) async fn reserve_unlinked(&self, wanted: u64) -> Result<Reserved> {
        self.reserve_by(wanted, Clusters::take_unlinked).await
    }

    async fn reserve_by(
        &self,
        wanted: u64,
        take: impl Fn(&mut Clusters, u64) -> Option<Reserved>,
    ) -> Result<Reserved> {
        loop {
            let (taken, is_low) = {
                let mut state = self.lock();
                (take(&mut state, wanted), self.is_low(&state))
            };
            if let Some(reserved) = taken {
                if is_low {
                    Box::pin(self.count_ahead_once()).await;
                }
                return Ok(reserved);
            }
            let Some(_locked) = self.refill.lock_or_wait().await else { continue };
            let taken = {
                let state = self.lock();
                state.pool.is_empty().then_some(state.taken)
            };
            let Some(taken) = taken else { continue };
            let ahead = self.ahead(taken);
            match Box::pin(self.count_ahead(wanted.max(ahead))).await {
                // What is needed may still have room.
                Err(error) if error.kind() == ErrorKind::NoSpace && wanted < ahead => {
                    Box::pin(self.count_ahead(wanted)).await?;
                }
                counted => counted?,
            }
        }
    }

    /// Whether it is time to count the next run.
    fn is_low(&self, state: &Clusters) -> bool {
        let left: u64 = state.pool.iter().map(|run| run.count).sum();
        left <= self.ahead(state.taken) / 2
    }

    /// Counts the next run before the pool is empty, so that its counts are durable in time, unless
    /// that is being done.
    async fn count_ahead_once(&self) {
        let Some(_locked) = self.refill.try_lock() else { return };
        let ahead = {
            let state = self.lock();
            if !self.is_low(&state) {
                return;
            }
            self.ahead(state.taken)
        };
        // A failure is reported to the request that needs the clusters.
        let _ = self.count_ahead(ahead).await;
    }

    /// The state of the clusters for the log. The caller has the pages locked: so nothing that is
    /// linked in them is called unused, and the counts of everything linked are in them, or
    /// durable.
    pub(crate) fn state(&self) -> SpaceState {
        self.lock().logged()
    }

    /// The clusters that were reserved unlinked as `runs` are linked in the pages, which the caller
    /// has locked since before that.
    pub(super) fn linked(&self, runs: &[Reserved]) {
        if !runs.is_empty() {
            let mut state = self.lock();
            runs.iter().for_each(|run| state.end_in_flight(run.first));
        }
    }

    /// Takes back clusters that were reserved and never linked. They may have been written to.
    pub(crate) fn give_back(&self, reserved: Reserved) {
        let mut state = self.lock();
        state.give_back(reserved);
        state.verify_if_debug(self.bits);
    }

    /// Empties the pool: the caller gets all clusters that are counted and not used.
    pub(crate) fn drain_pool(&self) -> Vec<HostCluster> {
        let pool = std::mem::take(&mut self.lock().pool);
        pool.iter().flat_map(|run| run.first.up_to(run.first.saturating_add(run.count))).collect()
    }

    /// Finds a free run and counts it. The caller has `refill` locked.
    async fn count_ahead(&self, wanted: u64) -> Result<()> {
        loop {
            let look = self.look(wanted)?;
            match look {
                Look::Free { first, count } => {
                    self.lengthen(first.saturating_add(count)).await?;
                    if self.count_run(first, count) {
                        return Ok(());
                    }
                }
                Look::On => mica_rt::yield_now().await,
                Look::Read(page) => self.metadata.load(page).await?,
                Look::NoBlock(region) => self.make_blocks(region).await?,
                Look::TableFull => self.grow_table().await?,
            }
        }
    }

    /// Extends the file up to cluster `end` (I4). The caller has `refill` locked.
    async fn lengthen(&self, end: HostCluster) -> Result<()> {
        let store = &*self.metadata.store;
        let len = self.bits.start_of(end).bytes();
        if store.len()? >= len {
            return Ok(());
        }
        if store.identity().is_device() {
            let context = format!("{} has no room for more clusters", store.name());
            return Err(Error::new(ErrorKind::NoSpace, context));
        }
        store.set_len(len).await.map_err(|error| error.wrap(store.name()))
    }

    /// Where the file can end if clusters from `unused`, in rising order, are at its end.
    pub(crate) async fn cut_tail(&self, unused: &[HostCluster]) -> Result<()> {
        let store = &*self.metadata.store;
        let file_end = self.bits.host_cluster_up(HostOffset::new(store.len()?));
        let expected = HostCluster::ZERO.up_to(file_end).rev();
        let tail = unused.iter().rev().zip(expected).take_while(|(have, want)| *have == want);
        let Some((first, _)) = tail.last() else { return Ok(()) };
        let len = self.bits.start_of(*first).bytes();
        store.set_len(len).await?;
        let mut state = self.lock();
        state.min_file_len = state.min_file_len.min(len);
        Ok(())
    }

    /// Searches from the cursor to the end of its page of refcounts, and takes the cursor along.
    fn look(&self, wanted: u64) -> Result<Look> {
        let state = self.lock();
        let cluster = state.cursor;
        if cluster >= self.bits.host_cluster(HOST_END) {
            let context = "the image file has no free cluster left";
            return Err(Error::new(ErrorKind::NoSpace, context));
        }
        let region = self.width.block_of(self.bits, cluster);
        let index = usize::try_from(region).unwrap_or(usize::MAX);
        let Some(entry) = state.table.get(index) else { return Ok(Look::TableFull) };
        let Some(block) = RefcountTableEntry(entry).decode(self.bits)? else {
            return Ok(Look::NoBlock(region));
        };
        let page_end = cluster.saturating_add(self.page_entries() - self.index_in_page(cluster));
        drop(state);
        self.metadata.ranges.check_table(block)?;
        let pages = self.metadata.lock();
        let at = self.count_at(block, cluster);
        let len = self.page_len();
        let page = HostOffset::new(at.bytes() / len * len);
        let Some(bytes) = pages.get(page, usize::try_from(len).expect("4 KiB")) else {
            return Ok(Look::Read(at));
        };
        let count = |cluster: HostCluster| {
            let index = usize::try_from(self.index_in_page(cluster)).expect("within a page");
            self.width.get(bytes, index).unwrap_or(u64::MAX)
        };
        let first = cluster.up_to(page_end).find(|cluster| count(*cluster) == 0);
        // While the pages are locked: what is freed from here on takes the cursor back (I6).
        self.advance(cluster, first.unwrap_or(page_end));
        let Some(first) = first else { return Ok(Look::On) };
        let stop = page_end.min(first.saturating_add(wanted));
        let used = first.saturating_add(1).up_to(stop).find(|cluster| count(*cluster) != 0);
        Ok(Look::Free { first, count: used.unwrap_or(stop).saturating_since(first) })
    }

    /// Advances the cursor, unless something before it was freed in the meantime.
    fn advance(&self, from: HostCluster, to: HostCluster) {
        let mut state = self.lock();
        if state.cursor >= from {
            state.cursor = to;
        }
    }

    /// Size of a page of refcounts, in bytes.
    fn page_len(&self) -> u64 {
        self.bits.bytes().min(4096)
    }

    /// Number of refcounts in a page, a power of two.
    fn page_entries(&self) -> u64 {
        (self.page_len() * 8) >> self.width.order()
    }

    /// Index of `cluster`'s refcount in its page. Blocks are whole pages, so it does not matter in
    /// which block it is.
    fn index_in_page(&self, cluster: HostCluster) -> u64 {
        cluster.number() & (self.page_entries() - 1)
    }

    /// Where the byte of `cluster`'s refcount is, in the block at `block`.
    fn count_at(&self, block: HostOffset, cluster: HostCluster) -> HostOffset {
        let index = self.width.index_of(self.bits, cluster);
        HostOffset::new(block.bytes() + index * u64::from(self.width.bits()) / 8)
    }

    /// Counts a run that was found free, and puts it into the pool. Returns whether its page was
    /// still in memory.
    fn count_run(&self, first: HostCluster, count: u64) -> bool {
        let mut pages = self.metadata.lock();
        let Ok(Some(block)) = self.block_of(first) else { return false };
        if !pages.has(self.count_at(block, first)) {
            return false;
        }
        let end = first.saturating_add(count);
        self.put_counts(&mut pages, block, first..end, 1);
        let group = pages.group.number;
        drop(pages);
        let mut state = self.lock();
        // Unless something before it was freed since it was found.
        if state.cursor == first {
            state.cursor = end;
        }
        state.min_file_len = state.min_file_len.max(self.bits.start_of(end).bytes());
        let blank_from = if self.has_blanks { state.unwritten_from.clamp(first, end) } else { end };
        for (first, end, blank) in [(first, blank_from, false), (blank_from, end, true)] {
            if first < end {
                let count = end.saturating_since(first);
                state.pool.push_back(Counted { first, count, group, blank });
            }
        }
        state.unwritten_from = state.unwritten_from.max(end);
        state.verify_if_debug(self.bits);
        if self.region_to_prepare(&state).is_some() {
            self.wants_blocks.store(true, Ordering::Relaxed);
        }
        true
    }

    fn block_of(&self, cluster: HostCluster) -> Result<Option<HostOffset>> {
        let region = self.width.block_of(self.bits, cluster);
        let state = self.lock();
        let entry = usize::try_from(region).ok().and_then(|region| state.table.get(region));
        let block = entry.map_or(Ok(None), |entry| RefcountTableEntry(entry).decode(self.bits))?;
        drop(state);
        if let Some(block) = block {
            self.metadata.ranges.check_table(block)?;
        }
        Ok(block)
    }

    /// Sets the refcounts of clusters whose counts are in one page, which is in memory. Touches no
    /// other bytes of it: what is touched is logged.
    fn put_counts(
        &self,
        pages: &mut PageState,
        block: HostOffset,
        clusters: Range<HostCluster>,
        value: u64,
    ) {
        let bits = u64::from(self.width.bits());
        let first = self.index_in_page(clusters.start);
        let count = clusters.end.saturating_since(clusters.start);
        assert!(first + count <= self.page_entries(), "the counts are in one page");
        // Counts of less than a byte share it with others.
        let bytes = first * bits / 8..((first + count) * bits).div_ceil(8);
        let start = HostOffset::new(self.count_at(block, clusters.start).bytes());
        let len = usize::try_from(bytes.end - bytes.start).expect("within a page");
        let touched = pages.get_mut(start, len, Stage::Early).expect("the page is there");
        let before = first - bytes.start * 8 / bits;
        for index in before..before + count {
            let index = usize::try_from(index).expect("within a page");
            self.width.set(touched, index, value).expect("a refcount that fits");
        }
    }

    /// The refcount of `cluster`, or `None` if there is no block for it.
    pub(crate) async fn refcount(&self, cluster: HostCluster) -> Result<Option<u64>> {
        let Some(block) = self.block_of(cluster)? else { return Ok(None) };
        let at = self.count_at(block, cluster);
        loop {
            let count = {
                let pages = self.metadata.lock();
                let len = self.page_len();
                let page = HostOffset::new(at.bytes() / len * len);
                let index = usize::try_from(self.index_in_page(cluster)).expect("in a page");
                let bytes = pages.get(page, usize::try_from(len).expect("4 KiB"));
                bytes.map(|bytes| self.width.get(bytes, index))
            };
            match count {
                Some(count) => return Ok(count),
                None => self.metadata.load(at).await?,
            }
        }
    }

    /// Takes one reference from `cluster`. After the last one it is free at once.
    pub(crate) async fn release(&self, cluster: HostCluster) -> Result<()> {
        loop {
            let Some(count) = self.refcount(cluster).await? else { return Ok(()) };
            let Some(block) = self.block_of(cluster)? else { return Ok(()) };
            let mut pages = self.metadata.lock();
            if !pages.has(self.count_at(block, cluster)) {
                continue;
            }
            // Fewer than the references to it: at worst the rest becomes a leak.
            let alone = cluster..cluster.saturating_add(1);
            self.put_counts(&mut pages, block, alone, count.saturating_sub(1));
            drop(pages);
            if count <= 1 {
                let mut state = self.lock();
                state.cursor = state.cursor.min(cluster);
            }
            return Ok(());
        }
    }
}

impl Clusters {
    fn take(&mut self, wanted: u64) -> Option<Reserved> {
        let run = self.pool.front_mut()?;
        let count = wanted.min(run.count);
        let taken = Reserved { first: run.first, count, group: run.group, blank: run.blank };
        run.first = run.first.saturating_add(count);
        run.count -= count;
        if run.count == 0 {
            self.pool.pop_front();
        }
        self.taken += count;
        Some(taken)
    }

    fn take_unlinked(&mut self, wanted: u64) -> Option<Reserved> {
        let taken = self.take(wanted)?;
        let index = self.in_flight.partition_point(|run| run.0 < taken.first);
        self.in_flight.insert(index, (taken.first, taken.count));
        Some(taken)
    }

    fn end_in_flight(&mut self, first: HostCluster) {
        if let Ok(index) = self.in_flight.binary_search_by_key(&first, |run| run.0) {
            self.in_flight.remove(index);
        }
    }

    /// What the log has to know.
    fn logged(&self) -> SpaceState {
        SpaceState { min_file_len: self.min_file_len, unused: self.unused() }
    }

    /// What is counted and not linked, in rising order; neighbours are joined.
    fn unused(&self) -> Vec<(HostCluster, u64)> {
        let joins =
            |run: &(HostCluster, u64), next: HostCluster| run.0.saturating_add(run.1) == next;
        // Many requests in flight have few runs, of which this is called for each.
        let mut runs: Vec<(HostCluster, u64)> = Vec::new();
        for (first, count) in &self.in_flight {
            match runs.last_mut().filter(|run| joins(run, *first)) {
                Some(run) => run.1 += count,
                None => runs.push((*first, *count)),
            }
        }
        runs.extend(self.future_blocks.iter().map(|run| (run.first, run.count)));
        runs.extend(self.pool.iter().map(|run| (run.first, run.count)));
        runs.sort_unstable();
        runs.dedup_by(|next, run| {
            let is_joined = joins(run, next.0);
            if is_joined {
                run.1 += next.1;
            }
            is_joined
        });
        runs
    }

    fn give_back(&mut self, Reserved { first, count, group, .. }: Reserved) {
        self.end_in_flight(first);
        self.pool.push_front(Counted { first, count, group, blank: false });
    }

    /// After a change of the pool, which has few runs.
    fn verify_if_debug(&self, bits: ClusterBits) {
        if cfg!(debug_assertions) {
            self.verify(bits);
        }
    }

    /// Asserts what holds of the pool by itself.
    fn verify(&self, bits: ClusterBits) {
        for run in &self.pool {
            assert!(run.count > 0, "a run has clusters");
            let end = run.first.saturating_add(run.count);
            assert!(end <= self.unwritten_from, "I3: it was allocated");
            assert!(bits.start_of(end).bytes() <= self.min_file_len, "I4: it lies within the file");
        }
        let in_flight: u64 = self.in_flight.iter().map(|run| run.1).sum();
        let future_blocks = self.future_blocks.map_or(0, |run| run.count);
        let pool: u64 = self.pool.iter().map(|run| run.count).sum();
        let unused = self.unused();
        for pair in unused.windows(2) {
            assert!(
                pair[0].0.saturating_add(pair[0].1) <= pair[1].0,
                "I1: a cluster is there once"
            );
        }
        let all: u64 = unused.iter().map(|run| run.1).sum();
        assert_eq!(all, in_flight + future_blocks + pool, "I1: a cluster is there once");
    }
}

#[cfg(test)]
mod tests;

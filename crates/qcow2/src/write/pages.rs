//! The metadata of an image that is being written, in memory: pages of its tables and refcounts.
//!
//! A page is the unit in which metadata is read, changed and written: 4 KiB, or a cluster if that
//! is smaller. Changes stay here until a group of them is made durable (see
//! [`commit`](super::commit)); until then they exist nowhere else, so all reads of the active
//! layer's metadata go through [`MetadataStore`](super::overlay::MetadataStore).
//!
//! Invariants
//! - I1 A page that is dirty, or being written or read, is never evicted.
//! - I2 A page is read from the file only while it is not here: a change made here is never
//!   overwritten by the older contents of the file.
//! - I3 A dirty page is written at its stage of the group that took it: early pages may be durable
//!   before any late page of the group.
//! - I4 A dirty page is listed at its stage and at no other; a clean one is not listed.
//! - I5 The pages in memory stand once each in the order in which they are looked at for eviction.
//! - I6 What a page holds is in the file, dirty, or in a group that was taken and not yet ended: a
//!   group that fails is put back, and none of its pages is clean before it is written.
//! - I7 Nobody but the request that puts it here sees an L2 entry before it is in the log.

use super::file::ImageFile;
use crate::live::{HeldClusters, Live, MetadataRanges};
use crate::redo::{HeaderLogged, HeaderState, Logging, Mark, SpaceState, Stage};
use mica_block::{ChangeFuture, Error, Result, Store, read_exact, write_all};
use mica_rt::Buf;
use mica_rt::sync::Claims;
use mica_units::{ClusterBits, HostCluster, HostOffset};
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, OnceLock};

/// Largest page.
pub(super) const PAGE_BITS_MAX: u32 = 12;
/// Clean pages that are kept: 8 MiB, the tables of 64 GiB in clusters of 64 KiB. There are more
/// only while every one of them is used between one load and the next.
const CLEAN_PAGES_MAX: usize = 2048;

pub(super) struct Page {
    pub(super) bytes: Box<[u8]>,
    pub(super) dirty: Option<Stage>,
    pub(super) writing: bool,
    pub(super) used: Cell<bool>,
}

/// Copies of dirty pages by stage; neighbours are joined.
#[derive(Default)]
pub(crate) struct Dirty {
    pub(crate) early: Vec<(HostOffset, Buf)>,
    pub(crate) late: Vec<(HostOffset, Buf)>,
    early_pages: BTreeSet<u64>,
    late_pages: BTreeSet<u64>,
}

/// The pages in memory, and the rest of the current group.
pub(crate) struct PageState {
    bits: u32,
    /// Clean pages that are kept.
    clean_max: usize,
    pub(super) pages: HashMap<u64, Page>,
    /// Pages in the order in which they were read, to find clean ones to evict.
    pub(super) order: VecDeque<u64>,
    loading: HashMap<u64, u32>,
    pub(super) early: BTreeSet<u64>,
    pub(super) late: BTreeSet<u64>,
    pub(crate) group: Group,
    /// Whether L1 entries must not change at present: their table is being moved.
    pub(crate) l1_is_held: bool,
    /// What the header holds, or is about to.
    pub(crate) header: HeaderState,
    /// Host clusters of the guest that were zeroed in place, as the first step of a change that is
    /// not durable yet, and the group of that change.
    zeroed: HashMap<HostCluster, u64>,
    /// What changed since the last group, for the next process to open the image.
    pub(crate) logging: Logging,
    /// Whether there may be entries that are not in the log: see [`Metadata::log_links`].
    pub(super) has_new_links: bool,
}

/// The changes of metadata since the last group was taken.
#[derive(Default)]
pub(crate) struct Group {
    /// Its number; the first is 1.
    pub(crate) number: u64,
    /// The refcounts of groups up to this one are durable.
    pub(crate) durable: u64,
    /// Whether its data and refcounts must be durable before its links are written.
    pub(crate) in_two_steps: bool,
    /// Whether a change of it is not in the log, and is acknowledged only once it is durable.
    pub(crate) has_unlogged: bool,
    /// Tables that were created in this group, so that nothing durable names them.
    pub(crate) new_tables: BTreeSet<HostOffset>,
    /// Host clusters that lose a reference with this group.
    pub(crate) freed: Vec<HostCluster>,
    /// Of a group that was taken: how far the log went then, if that is to be recorded.
    pub(crate) logged: Option<Mark>,
}

/// What the log has to know of the clusters of an image that is open for writing. The caller has
/// the pages locked.
pub(super) type SpaceNow = Box<dyn Fn() -> SpaceState + Send + Sync>;

/// The metadata of one image.
pub(crate) struct Metadata {
    pub(crate) store: Arc<ImageFile>,
    pub(crate) ranges: Arc<MetadataRanges>,
    /// Clusters of the guest that are not written in place at present.
    pub(crate) held: Arc<HeldClusters>,
    /// Serializes changes of the header.
    pub(super) header_changes: Claims,
    /// Serializes writes of pages: an older copy of one never follows a newer one into the file.
    pub(super) page_writes: Claims,
    syncs: Claims,
    /// The failure of a sync.
    sync_failed: OnceLock<Error>,
    failed: OnceLock<Error>,
    state: Mutex<PageState>,
    space: OnceLock<SpaceNow>,
}

impl Metadata {
    pub(crate) fn new(store: Arc<dyn Store>, cluster_bits: ClusterBits) -> Arc<Self> {
        let state = PageState {
            bits: cluster_bits.bits().min(PAGE_BITS_MAX),
            clean_max: CLEAN_PAGES_MAX,
            pages: HashMap::new(),
            order: VecDeque::new(),
            loading: HashMap::new(),
            early: BTreeSet::new(),
            late: BTreeSet::new(),
            group: Group { number: 1, ..Group::default() },
            l1_is_held: false,
            header: HeaderState::default(),
            zeroed: HashMap::new(),
            logging: Logging::default(),
            has_new_links: false,
        };
        Arc::new(Self {
            store: Arc::new(ImageFile::new(store, cluster_bits)),
            ranges: Arc::new(MetadataRanges::new(cluster_bits)),
            held: Arc::default(),
            header_changes: Claims::default(),
            page_writes: Claims::default(),
            syncs: Claims::default(),
            sync_failed: OnceLock::new(),
            failed: OnceLock::new(),
            state: Mutex::new(state),
            space: OnceLock::new(),
        })
    }

    /// What readers of the layer need to know.
    pub(crate) fn live(&self) -> Live {
        Live { held: Arc::clone(&self.held), ranges: Arc::clone(&self.ranges) }
    }

    /// Why nothing is written any more, if so.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failed.get()
    }

    /// From now on nothing is acknowledged. What was acknowledged is in the log, for the next
    /// process to open the image.
    pub(crate) fn fail(&self, error: &Error) {
        if self.failed.set(error.clone()).is_ok() {
            tracing::error!(?error, "the disk accepts no more writes");
        }
    }

    /// As [`Self::fail`] if the file does not hold what it is believed to hold: writing more to the
    /// image would not mend it.
    pub(crate) fn fail_for_good(&self, error: &Error) {
        self.fail(error);
        self.lock().logging.end();
    }

    /// Makes durable what was written.
    pub(crate) async fn sync(&self) -> Result<()> {
        self.sync_alone(|store| store.sync()).await
    }

    /// Writes `bytes` and makes them durable, and nothing else.
    pub(crate) async fn write_durably(&self, bytes: Buf, at: HostOffset) -> Result<()> {
        let explain = |error: Error| error.wrap(self.store.name());
        let (written, bytes) = self.store.write_at(bytes, at).await;
        written.map_err(explain)?;
        self.sync_alone(|store| store.sync_written(bytes, at)).await
    }

    /// The kernel reports a failure once, to whoever asks first, and may have lost what others
    /// wrote, too. So everybody syncs through here, one after the other, and after one failure no
    /// sync succeeds.
    async fn sync_alone(&self, sync: impl FnOnce(&ImageFile) -> ChangeFuture) -> Result<()> {
        let _turn = self.syncs.claim(0).await;
        if let Some(error) = self.sync_failed.get() {
            return Err(error.clone());
        }
        let synced = sync(&self.store).await.map_err(|error| error.wrap(self.store.name()));
        if let Err(error) = &synced {
            let _ = self.sync_failed.set(error.clone());
            self.fail_for_good(error);
        }
        synced
    }

    /// Writes something that must not stay half-written: a failure ends the writing.
    pub(crate) async fn write_through(&self, bytes: Buf, at: HostOffset) -> Result<()> {
        let written = write_all(&*self.store, bytes, at).await;
        if let Err(error) = &written {
            self.fail(error);
        }
        written
    }

    /// Changes a field of the header, in memory and in the file, and nowhere else: no group writes
    /// the header, so that an older copy in a group never replaces what is written here.
    pub(super) async fn write_header(
        self: &Arc<Self>,
        logged: HeaderLogged,
        bytes: &[u8],
        at: HostOffset,
    ) -> Result<()> {
        let _pinned = self.pin(at, bytes.len() as u64);
        self.change(at, |pages| pages.patch(at, bytes)).await?;
        let written = self.store.write_header(logged, bytes, at).await;
        written.map_err(|error| error.wrap(self.store.name()))
    }

    /// Keeps the pages of a range from being evicted while the file is read under them.
    pub(super) fn pin(self: &Arc<Self>, at: HostOffset, len: u64) -> Pinned {
        let mut state = self.lock();
        let first = state.page_of(at);
        let pages: Vec<_> = (first..at.bytes() + len).step_by(1 << state.bits).collect();
        for page in &pages {
            *state.loading.entry(*page).or_default() += 1;
        }
        drop(state);
        Pinned { metadata: Arc::clone(self), pages }
    }

    fn unpin(&self, page: u64) {
        let mut state = self.lock();
        if let Some(count) = state.loading.get_mut(&page) {
            *count -= 1;
            if *count == 0 {
                state.loading.remove(&page);
            }
        }
    }

    /// Locks the pages. Never held across I/O.
    pub(crate) fn lock(&self) -> MutexGuard<'_, PageState> {
        self.state.lock()
    }

    /// The clusters in use are those of `space`.
    pub(super) fn set_space(&self, space: SpaceNow) {
        assert!(self.space.set(space).is_ok(), "an image has one space");
    }

    /// Logs the entries in `pages` that are not in the log yet. Whoever sees an entry may write to
    /// its place, and acknowledge that, without logging anything; so this comes first (I7).
    pub(super) fn log_links(&self, pages: &mut PageState) {
        if std::mem::take(&mut pages.has_new_links)
            && let Some(space) = self.space.get()
        {
            pages.log_touched(space);
        }
    }

    /// Loads the page of `at` into memory. It may be gone again when the caller locks: then the
    /// caller repeats this.
    pub(crate) async fn load(&self, at: HostOffset) -> Result<()> {
        let Some(loading) = self.start_loading(at) else { return Ok(()) };
        let len = loading.len;
        let bytes = read_exact(&*self.store, HostOffset::new(loading.page), len).await?;
        self.lock().insert_loaded(loading.page, &bytes);
        Ok(())
    }

    fn start_loading(&self, at: HostOffset) -> Option<Loading<'_>> {
        let mut state = self.lock();
        let page = state.page_of(at);
        if let Some(page) = state.pages.get(&page) {
            page.used.set(true);
            return None;
        }
        *state.loading.entry(page).or_default() += 1;
        Some(Loading { metadata: self, page, len: 1 << state.bits })
    }

    /// Reads the big-endian number at `at`.
    pub(crate) async fn read_u64(&self, at: HostOffset) -> Result<u64> {
        loop {
            if let Some(bytes) = self.lock().get(at, 8) {
                return Ok(u64::from_be_bytes(*bytes.first_chunk().expect("8 bytes")));
            }
            self.load(at).await?;
        }
    }

    /// Changes the page of `at`, read first if it has to be.
    pub(crate) async fn change<R>(
        &self,
        at: HostOffset,
        mut change: impl FnMut(&mut PageState) -> R,
    ) -> Result<R> {
        loop {
            {
                let mut state = self.lock();
                if state.has(at) {
                    return Ok(change(&mut state));
                }
            }
            self.load(at).await?;
        }
    }
}

/// A page that is being read.
struct Loading<'a> {
    metadata: &'a Metadata,
    page: u64,
    len: usize,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.metadata.unpin(self.page);
    }
}

/// Pages that are not evicted until this is dropped.
pub(super) struct Pinned {
    metadata: Arc<Metadata>,
    pages: Vec<u64>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        for page in &self.pages {
            self.metadata.unpin(*page);
        }
    }
}

impl PageState {
    pub(super) fn page_of(&self, at: HostOffset) -> u64 {
        at.bytes() >> self.bits << self.bits
    }

    /// Size of a page, in bytes.
    pub(crate) fn page_bytes(&self) -> u64 {
        1 << self.bits
    }

    pub(crate) fn has(&self, at: HostOffset) -> bool {
        self.pages.contains_key(&self.page_of(at))
    }

    /// The `len` bytes at `at`, which lie in one page, if that is in memory.
    pub(crate) fn get(&self, at: HostOffset, len: usize) -> Option<&[u8]> {
        let page = self.page_of(at);
        let within = usize::try_from(at.bytes() - page).expect("within a page");
        let page = self.pages.get(&page)?;
        page.used.set(true);
        Some(&page.bytes[within..within + len])
    }

    /// As [`Self::get`], to change, which makes the page dirty and is logged. A page that is dirty
    /// early stays so: its table is not linked yet.
    pub(crate) fn get_mut(
        &mut self,
        at: HostOffset,
        len: usize,
        stage: Stage,
    ) -> Option<&mut [u8]> {
        if self.has(at) {
            self.logging.touch(at, len, stage);
        }
        self.dirty_bytes(at, len, stage)
    }

    /// As [`Self::get_mut`], for a change that is acknowledged only after a flush.
    pub(super) fn get_mut_unlogged(
        &mut self,
        at: HostOffset,
        len: usize,
        stage: Stage,
    ) -> Option<&mut [u8]> {
        self.group.has_unlogged = true;
        self.dirty_bytes(at, len, stage)
    }

    fn dirty_bytes(&mut self, at: HostOffset, len: usize, stage: Stage) -> Option<&mut [u8]> {
        let number = self.page_of(at);
        let within = usize::try_from(at.bytes() - number).expect("within a page");
        let page = self.pages.get_mut(&number)?;
        page.used.set(true);
        if page.dirty.is_none() {
            self.logging.expect(number, &page.bytes);
            page.dirty = Some(stage);
            match stage {
                Stage::Early => self.early.insert(number),
                Stage::Late => self.late.insert(number),
            };
        }
        Some(&mut page.bytes[within..within + len])
    }

    /// Changes a page that is here, just as its file is being changed.
    fn patch(&mut self, at: HostOffset, bytes: &[u8]) {
        let number = self.page_of(at);
        let within = usize::try_from(at.bytes() - number).expect("within a page");
        let page = self.pages.get_mut(&number).expect("the page is there");
        page.bytes[within..within + bytes.len()].copy_from_slice(bytes);
    }

    /// Notes that the guest's host cluster `cluster` is zeros in the file, before the tables record
    /// it durably.
    pub(super) fn note_zeroed(&mut self, cluster: HostCluster) {
        self.zeroed.insert(cluster, self.group.number);
    }

    /// Whether the host cluster must not be written before the next flush: see
    /// [`PageState::note_zeroed`].
    pub(super) fn is_zeroed(&self, cluster: HostCluster) -> bool {
        !self.zeroed.is_empty() && self.zeroed.contains_key(&cluster)
    }

    /// Everything noted up to group `number` is durable.
    pub(super) fn forget_zeroed(&mut self, number: u64) {
        self.zeroed.retain(|_, group| *group > number);
    }

    pub(super) fn forget_dirty(&mut self, number: u64) {
        self.early.remove(&number);
        self.late.remove(&number);
    }

    fn insert_loaded(&mut self, number: u64, bytes: &[u8]) {
        if self.pages.contains_key(&number) {
            return;
        }
        let page = Page { bytes: bytes.into(), dirty: None, writing: false, used: Cell::new(true) };
        self.pages.insert(number, page);
        self.order.push_back(number);
        self.evict();
    }

    /// Evicts clean pages beyond the bound, least recently used first.
    pub(super) fn evict(&mut self) {
        let busy = self.early.len() + self.late.len();
        let mut looks = self.order.len();
        while self.pages.len() > self.clean_max + busy && looks > 0 {
            looks -= 1;
            let Some(number) = self.order.pop_front() else { return };
            let Some(page) = self.pages.get_mut(&number) else { continue };
            let pinned = page.dirty.is_some() || page.writing || self.loading.contains_key(&number);
            if pinned || page.used.take() {
                self.order.push_back(number);
            } else {
                self.pages.remove(&number);
            }
        }
    }

    /// How many pages are dirty.
    pub(crate) fn dirty_count(&self) -> usize {
        self.early.len() + self.late.len()
    }

    /// Takes the group, and begins the next.
    pub(crate) fn take_group(&mut self, space: SpaceState) -> (Dirty, Group) {
        let next = Group {
            number: self.group.number + 1,
            durable: self.group.durable,
            ..Group::default()
        };
        let mut taken = std::mem::replace(&mut self.group, next);
        taken.logged = self.mark_log(space, &taken);
        (self.take_dirty(), taken)
    }

    /// Copies all dirty pages; these are clean from now on, and being written until
    /// [`Self::written`].
    pub(crate) fn take_dirty(&mut self) -> Dirty {
        let early_pages = std::mem::take(&mut self.early);
        let late_pages = std::mem::take(&mut self.late);
        let (early, late) = (self.copies(&early_pages), self.copies(&late_pages));
        self.verify_if_debug();
        Dirty { early, late, early_pages, late_pages }
    }

    /// Adds a group whose early pages could not all be written to the next one. None of its links
    /// is in the file.
    pub(crate) fn put_back(&mut self, dirty: &Dirty, taken: Group) {
        self.logging.put_back(taken.logged);
        self.group.new_tables.extend(taken.new_tables);
        self.group.freed.extend(taken.freed);
        self.group.has_unlogged |= taken.has_unlogged;
        self.group.in_two_steps = true;
        self.mark_dirty(&dirty.early_pages, Stage::Early);
        self.mark_dirty(&dirty.late_pages, Stage::Late);
        self.written(dirty);
    }

    /// As [`Self::put_back`], for a group whose links could not all be written, while what they
    /// need is durable.
    pub(crate) fn put_back_links(&mut self, dirty: &Dirty, taken: Group) {
        self.logging.put_back(taken.logged);
        self.group.durable = taken.number;
        self.group.freed.extend(taken.freed);
        self.group.has_unlogged |= taken.has_unlogged;
        self.mark_dirty(&dirty.late_pages, Stage::Late);
        self.written(dirty);
    }

    /// Makes pages dirty again. A page that is early stays so or becomes so: its table is not
    /// linked yet.
    fn mark_dirty(&mut self, numbers: &BTreeSet<u64>, stage: Stage) {
        for number in numbers {
            let Some(page) = self.pages.get_mut(number) else { continue };
            if page.dirty == Some(Stage::Early) {
                continue;
            }
            page.dirty = Some(stage);
            match stage {
                Stage::Early => {
                    self.late.remove(number);
                    self.early.insert(*number)
                }
                Stage::Late => self.late.insert(*number),
            };
        }
    }

    fn copies(&mut self, numbers: &BTreeSet<u64>) -> Vec<(HostOffset, Buf)> {
        const JOINED_MAX: usize = 256;
        let mut copies = Vec::new();
        let numbers: Vec<_> = numbers.iter().copied().collect();
        let page_bytes = self.page_bytes();
        let chunks = numbers.chunk_by(|one, next| one + page_bytes == *next);
        for joined in chunks.flat_map(|chunk| chunk.chunks(JOINED_MAX)) {
            let len = usize::try_from(page_bytes).expect("4 KiB");
            let mut buf = Buf::new(joined.len() * len);
            for (number, part) in joined.iter().zip(buf.own_bytes().chunks_exact_mut(len)) {
                let page = self.pages.get_mut(number).expect("I1: a dirty page is here");
                part.copy_from_slice(&page.bytes);
                page.dirty = None;
                page.writing = true;
            }
            copies.push((HostOffset::new(joined[0]), buf));
        }
        copies
    }

    /// The pages that `dirty` was copied from are in the file.
    pub(crate) fn written(&mut self, dirty: &Dirty) {
        for number in dirty.early_pages.iter().chain(&dirty.late_pages) {
            if let Some(page) = self.pages.get_mut(number) {
                page.writing = false;
            }
        }
        self.evict();
        self.verify_if_debug();
    }

    /// Once a group begins or ends, as this looks at every page.
    fn verify_if_debug(&self) {
        if cfg!(debug_assertions) {
            self.verify();
        }
    }

    /// Asserts the invariants that can be seen in memory.
    pub(super) fn verify(&self) {
        let page_len = usize::try_from(self.page_bytes()).expect("4 KiB");
        for (number, page) in &self.pages {
            assert_eq!(self.page_of(HostOffset::new(*number)), *number, "the start of a page");
            assert_eq!(page.bytes.len(), page_len, "a whole page");
            let is_early = page.dirty == Some(Stage::Early);
            let is_late = page.dirty == Some(Stage::Late);
            assert_eq!(self.early.contains(number), is_early, "I4: page {number:#x}");
            assert_eq!(self.late.contains(number), is_late, "I4: page {number:#x}");
        }
        let dirty = self.early.iter().chain(&self.late);
        for number in dirty {
            assert!(self.pages.contains_key(number), "I1: page {number:#x}");
            assert!(!self.logging.misses(*number), "the log can be compacted: page {number:#x}");
        }
        let ordered: HashSet<_> = self.order.iter().collect();
        assert_eq!(ordered.len(), self.order.len(), "I5: a page stands once");
        assert_eq!(ordered.len(), self.pages.len(), "I5: every page stands");
        assert!(self.order.iter().all(|number| self.pages.contains_key(number)), "I5");
        assert!(self.loading.values().all(|count| *count > 0), "a load or a pin");
        assert!(self.group.durable < self.group.number, "a group that is not taken is not durable");
        assert!(self.zeroed.values().all(|group| *group <= self.group.number), "no later group");
    }
}

#[cfg(test)]
mod tests;

//! What a log makes of the metadata of an image: pages, and when each may be written.

use super::baseline::Run;
use super::expected::{Expected, Sums, sums_of};
use super::format::{EARLY, EARLY_ZEROS, LATE, LATE_ZEROS, ZERO_PAGES_MAX};
use super::found::{Found, records};
use crate::write::clusters::ZEROS;
use mica_block::{Error, ErrorKind, Result, Store, read_exact};
use mica_qcow2_format::{Header, RefcountTableEntry};
use mica_rt::Buf;
use mica_units::{HostCluster, HostOffset};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Changes are collected in pages of at most this size, or of a cluster if that is smaller, so that
/// no page is of two kinds.
const PAGE_BYTES_MAX: u64 = 4096;
/// Pages that a log changes at most: a writer flushes long before that.
const PAGES_MAX: usize = 1 << 16;
const _: () = assert!(ZERO_PAGES_MAX <= PAGES_MAX as u64 / 2);
/// Pages for which a log lists what the file may hold, at most; some are listed repeatedly.
const EXPECTED_MAX: usize = 4 * PAGES_MAX;
/// Clusters that a log calls unused and that are examined, at most.
const UNUSED_MAX: usize = 4096;
/// Pages of refcounts that are kept at most while a log is examined.
const COUNT_PAGES_MAX: usize = 1024;

/// When a page is written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Step {
    /// Counts, and tables that nothing names yet.
    Early,
    /// Tables that nothing named at first, and that later got links.
    Tables,
    /// Links.
    Late,
}

impl Step {
    pub(super) const ALL: [Self; 3] = [Self::Early, Self::Tables, Self::Late];
}

fn page_bytes(header: &Header) -> u64 {
    header.cluster_bits.bytes().min(PAGE_BYTES_MAX)
}

struct Page {
    step: Step,
    /// Whether a group changes it, and not only the unused clusters.
    is_logged: bool,
    bytes: Buf,
}

/// The pages of an image that a log changes, as they will be.
pub(super) struct Replay {
    page_bytes: u64,
    pages: BTreeMap<u64, Page>,
}

impl Replay {
    /// What the log that was `found` makes of the image in `store` with this `header`.
    pub(super) async fn plan(store: &dyn Store, header: &Header, found: &Found) -> Result<Self> {
        let mut replay = Self::empty(header);
        for group in &found.groups {
            for record in records(group) {
                let step = match record.kind {
                    EARLY | EARLY_ZEROS => Step::Early,
                    LATE | LATE_ZEROS => Step::Late,
                    _ => continue,
                };
                replay.put(store, (record.at, record.content), step).await?;
                let end = record.at.saturating_add(record.zeros);
                let mut at = record.at;
                while at < end {
                    let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(ZEROS.len());
                    replay.put(store, (at, &ZEROS[..len]), step).await?;
                    at += len as u64;
                }
            }
        }
        Ok(replay)
    }

    /// As [`Self::plan`], with what the log calls unused free again.
    pub(super) async fn free_unused(
        &mut self,
        store: &dyn Store,
        header: &Header,
        unused: &[Run],
    ) -> Result<()> {
        // A dirty image gets counted again, and whoever did that before may have allocated them.
        if header.compatible.lazy_refcounts || header.incompatible.dirty {
            return Ok(());
        }
        let clusters =
            unused.iter().flat_map(|(first, count)| first.up_to(first.saturating_add(*count)));
        let mut counts = Counts::new(store, header);
        for cluster in clusters.take(UNUSED_MAX) {
            self.free(&mut counts, cluster).await?;
        }
        Ok(())
    }

    /// Changes nothing yet.
    pub(super) fn empty(header: &Header) -> Self {
        Self { page_bytes: page_bytes(header), pages: BTreeMap::new() }
    }

    /// The pages that are written in `step`, and where.
    pub(super) fn pages_of(&self, step: Step) -> impl Iterator<Item = (HostOffset, &[u8])> {
        let pages = self.pages.iter().filter(move |(_, page)| page.step == step);
        pages.map(|(at, page)| (HostOffset::new(*at), &page.bytes[..]))
    }

    /// The pages that groups change within `len` bytes at `at`.
    pub(super) fn logged_within(
        &self,
        at: HostOffset,
        len: u64,
    ) -> impl Iterator<Item = (HostOffset, &[u8])> {
        let pages = self.pages.range(at.bytes()..at.bytes().saturating_add(len));
        pages
            .filter(|(_, page)| page.is_logged)
            .map(|(at, page)| (HostOffset::new(*at), &page.bytes[..]))
    }

    /// Puts the pages over the `len` bytes that the file has at `at`: `put` gets each part, and
    /// where among those bytes it belongs.
    pub(super) fn lay_over(&self, len: usize, at: u64, mut put: impl FnMut(usize, &[u8])) {
        let end = at + len as u64;
        for (start, page) in self.pages.range(at / self.page_bytes * self.page_bytes..end) {
            let from = at.max(*start);
            let stop = end.min(start + self.page_bytes);
            let within = |of: u64, at: u64| usize::try_from(at - of).expect("within a buffer");
            let content = &page.bytes[within(*start, from)..within(*start, stop)];
            put(within(at, from), content);
        }
    }

    /// Whether each page of the file in `store` is as the writer of the log that was `found`, or a
    /// process that began to replay it, may have left it (R7). Otherwise another program wrote
    /// since.
    pub(super) async fn goes_on_from(&self, store: &dyn Store, found: &Found) -> Result<bool> {
        let mut allowed: BTreeMap<u64, Vec<Sums>> = BTreeMap::new();
        for Expected { at, pages, sums } in found.expected() {
            if allowed.len() + pages as usize > EXPECTED_MAX {
                return Ok(false);
            }
            for page in 0..u64::from(pages) {
                let place = at.checked_add(page * self.page_bytes);
                let ends = place.and_then(|at| at.checked_add(self.page_bytes));
                let (Some(at), Some(_)) = (place, ends) else { return Ok(false) };
                allowed.entry(at).or_default().push(sums);
            }
        }
        let len = usize::try_from(self.page_bytes).expect("4 KiB");
        let sums_at = async |at| Ok(sums_of(&read_exact(store, at, len).await?));
        let fits = |at, there: &Sums, allowed: &[Sums]| {
            let mut sectors = there.iter().enumerate();
            let fits = sectors.all(|(sector, sum)| allowed.iter().any(|sums| sums[sector] == *sum));
            if !fits {
                tracing::debug!(%at, "a page of the image has changed");
            }
            fits
        };
        // A process that replayed it and died wrote some of the pages, in this order.
        let mut may_be_made = found.replay_began();
        for (at, bytes) in Step::ALL.into_iter().flat_map(|step| self.pages_of(step)) {
            let Some(mut allowed) = allowed.remove(&at.bytes()) else { return Ok(false) };
            let (there, made) = (sums_at(at).await?, sums_of(bytes));
            if may_be_made {
                allowed.push(made);
            }
            if !fits(at, &there, &allowed) {
                return Ok(false);
            }
            may_be_made &= there == made;
        }
        for (at, allowed) in allowed {
            let at = HostOffset::new(at);
            if !fits(at, &sums_at(at).await?, &allowed) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether the file in `store` has all pages as they will be. Links alone prove nothing:
    /// another program may have put a table of its own where a lost one was to be.
    pub(super) async fn is_in(&self, store: &dyn Store) -> Result<bool> {
        self.has_steps_in(&Step::ALL, store).await
    }

    /// Whether it has the pages with links so, of an image that the log goes on from.
    pub(super) async fn has_links_in(&self, store: &dyn Store) -> Result<bool> {
        self.has_steps_in(&[Step::Tables, Step::Late], store).await
    }

    async fn has_steps_in(&self, steps: &[Step], store: &dyn Store) -> Result<bool> {
        for (at, bytes) in steps.iter().flat_map(|step| self.pages_of(*step)) {
            if *read_exact(store, at, bytes.len()).await? != *bytes {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The page of `at`, read first unless it is about to be overwritten as a whole (`is_whole`).
    async fn page(
        &mut self,
        store: &dyn Store,
        (at, step): (u64, Step),
        is_whole: bool,
    ) -> Result<&mut Page> {
        let start = at / self.page_bytes * self.page_bytes;
        if self.pages.len() > PAGES_MAX {
            let context = "what its last writer left changes more than any writer does";
            return Err(Error::new(ErrorKind::Limit, context));
        }
        match self.pages.entry(start) {
            Entry::Occupied(page) => Ok(page.into_mut()),
            Entry::Vacant(place) => {
                let len = usize::try_from(self.page_bytes).expect("4 KiB");
                let bytes = match is_whole {
                    true => Buf::zeroed(len),
                    false => read_exact(store, HostOffset::new(start), len).await?,
                };
                Ok(place.insert(Page { step, is_logged: false, bytes }))
            }
        }
    }

    /// Applies one record to its pages.
    async fn put(
        &mut self,
        store: &dyn Store,
        (at, content): (u64, &[u8]),
        step: Step,
    ) -> Result<()> {
        if at.checked_add(content.len() as u64).is_none() {
            let context = "what its last writer left is beyond any file";
            return Err(Error::new(ErrorKind::Corrupt, context));
        }
        let page_bytes = self.page_bytes;
        let mut done = 0;
        while done < content.len() {
            let here = at + done as u64;
            let within = usize::try_from(here % page_bytes).expect("within a page");
            let page_len = usize::try_from(page_bytes).expect("4 KiB");
            let count = (page_len - within).min(content.len() - done);
            let page = self.page(store, (here, step), count == page_len).await?;
            if page.step != step {
                page.step = Step::Tables;
            }
            page.is_logged = true;
            page.bytes.put(within, &content[done..done + count]);
            done += count;
        }
        Ok(())
    }

    /// Frees a cluster that was counted ahead, if that is its only count.
    async fn free(&mut self, counts: &mut Counts<'_>, cluster: HostCluster) -> Result<()> {
        let width = counts.header.refcount_width;
        let Some((at, within)) = counts.place_of(self, cluster).await? else {
            return Ok(());
        };
        let page = self.page(counts.store, (at, Step::Early), false).await?;
        if width.get(&page.bytes, within) == Some(1) {
            width.set(page.bytes.own_bytes(), within, 0).expect("zero fits");
        }
        Ok(())
    }
}

/// The refcounts of an image, of which each page is read once: a log may ask for thousands, and
/// storage may be slow.
pub(super) struct Counts<'a> {
    store: &'a dyn Store,
    header: &'a Header,
    pages: BTreeMap<u64, Buf>,
}

impl<'a> Counts<'a> {
    pub(super) fn new(store: &'a dyn Store, header: &'a Header) -> Self {
        Self { store, header, pages: BTreeMap::new() }
    }

    /// The refcount of `cluster` as `replay` makes it; `None` if no block has it.
    pub(super) async fn get(
        &mut self,
        replay: &Replay,
        cluster: HostCluster,
    ) -> Result<Option<u64>> {
        let Some((at, within)) = self.place_of(replay, cluster).await? else { return Ok(None) };
        let width = self.header.refcount_width;
        if let Some(page) = replay.pages.get(&at) {
            return Ok(width.get(&page.bytes, within));
        }
        Ok(width.get(self.page(at).await?, within))
    }

    /// The page that has the refcount of `cluster`, and its index there.
    async fn place_of(
        &mut self,
        replay: &Replay,
        cluster: HostCluster,
    ) -> Result<Option<(u64, usize)>> {
        let (bits, width) = (self.header.cluster_bits, self.header.refcount_width);
        let region = width.block_of(bits, cluster);
        let table = self.header.refcount_table_offset.bytes();
        let table_end = table + u64::from(self.header.refcount_table_clusters) * bits.bytes();
        let Some(entry_at) = region
            .checked_mul(RefcountTableEntry::BYTES as u64)
            .and_then(|skipped| table.checked_add(skipped))
            .filter(|at| at + RefcountTableEntry::BYTES as u64 <= table_end)
        else {
            return Ok(None);
        };
        let page_bytes = replay.page_bytes;
        // A table begins with a cluster, so that no entry is on two pages.
        let within = usize::try_from(entry_at % page_bytes).expect("within a page");
        let page = self.page(entry_at - entry_at % page_bytes).await?;
        let mut entry = [0; RefcountTableEntry::BYTES];
        entry.copy_from_slice(&page[within..within + RefcountTableEntry::BYTES]);
        replay.lay_over(entry.len(), entry_at, |at, bytes| {
            entry[at..at + bytes.len()].copy_from_slice(bytes);
        });
        let entry = RefcountTableEntry(u64::from_be_bytes(entry));
        let Ok(Some(block)) = entry.decode(bits) else { return Ok(None) };
        let index = width.index_of(bits, cluster);
        let page_entries = page_bytes * 8 / u64::from(width.bits());
        let at = block.bytes() + index / page_entries * page_bytes;
        Ok(Some((at, usize::try_from(index % page_entries).expect("within a page"))))
    }

    /// The page of the file at `at`.
    async fn page(&mut self, at: u64) -> Result<&[u8]> {
        if self.pages.len() >= COUNT_PAGES_MAX && !self.pages.contains_key(&at) {
            self.pages.clear();
        }
        match self.pages.entry(at) {
            Entry::Occupied(page) => Ok(page.into_mut()),
            Entry::Vacant(place) => {
                let len = usize::try_from(page_bytes(self.header)).expect("4 KiB");
                Ok(place.insert(read_exact(self.store, HostOffset::new(at), len).await?))
            }
        }
    }
}

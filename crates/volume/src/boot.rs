//! Boots of a volume in a store that is far: what is read first is recorded, and fetched ahead the
//! next time.
//!
//! An **image** is a volume and everything that was cloned from it, directly or not: whatever is
//! booted of it reads about the same. So it has one record, in the store. A **boot** is what
//! follows an opening: it ends after [`BOOT_MAX`], or when a record's room is read, or when the
//! volume is closed.
//!
//! ```text
//! opened ─▶ record ─▶ fetch ─▶ chunks ─▶ reads of guests ─▶ trace ─▶ next record
//! ```
//!
//! Invariants
//! - I1 Nothing waits for a record, and nothing depends on one: without it, or with a damaged one,
//!   everything is read as it is asked for.
//! - I2 What is fetched is what the map of the volume says now. A record has no data, and names
//!   guest blocks only.
//! - I3 What was read already is not fetched, and what is being fetched is not read again
//!   (`chunks`, I1). Fetching ahead makes way for guests: while one waits for the store, few
//!   requests are ours.
//! - I4 Memory is bounded by what the volume was opened with, for each image, and given back at the
//!   end of the boot.

mod chunks;
mod fetch;
mod stored;
#[cfg(test)]
mod tests;
mod trace;

pub(crate) use chunks::{Chunks, Reader, Role};
pub(crate) use stored::BootRecords;

use crate::format::Id;
use crate::format::boot::BootRecord;
use crate::reader::View;
use crate::shared::{Shared, lock};
use crate::tree::Tree;
use chunks::Using;
use mica_block::BootStats;
use mica_rt::sync::Signal;
use mica_rt::{spawn, timeout};
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trace::Trace;

/// The longest boot.
const BOOT_MAX: Duration = Duration::from_secs(120);
/// What a volume that is closed waits, at most, for its record: whoever comes next waits with it.
const CLOSING_MAX: Duration = Duration::from_secs(1);

/// What there is to know of a boot record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BootInfo {
    /// Bytes of disks that it names.
    pub bytes: u64,
    /// In so many ranges.
    pub ranges: u64,
    /// Boots that changed it.
    pub boots: u64,
    /// When the last of them did, in nanoseconds since 1970.
    pub time_ns: u64,
}

impl BootInfo {
    pub(crate) fn of(record: &BootRecord) -> Self {
        let BootRecord { boots, time_ns, ref ranges, .. } = *record;
        Self { bytes: record.bytes(), ranges: ranges.len() as u64, boots, time_ns }
    }
}

/// The boot of a volume that is open.
pub(crate) struct Boot {
    image: Id,
    chunks: Arc<Chunks>,
    /// Held until the boot ends.
    using: Mutex<Option<Using>>,
    trace: Mutex<Trace>,
    is_recording: AtomicBool,
    /// Reads of guests that are under way to the store.
    reads: AtomicUsize,
    /// Raised when the trace is full.
    full: Signal,
    /// Raised when the boot has ended.
    ended: Signal,
    /// Of the record that was found when the volume was opened, or put since.
    found: Mutex<Option<BootInfo>>,
}

impl Boot {
    /// Of a volume of `image` that is read by `tree`, with memory for `bytes`.
    pub(crate) fn new(image: Id, bytes: u64, tree: &Tree) -> Arc<Self> {
        let chunks = tree.chunks_of(image);
        let using = Mutex::new(Some(chunks.begin(bytes)));
        let (trace, reads, full, ended, found) = Default::default();
        let is_recording = AtomicBool::new(true);
        Arc::new(Self { image, chunks, using, trace, is_recording, reads, full, ended, found })
    }

    /// What guests read with.
    pub(crate) fn for_guests(&self, tree: &Tree) -> Arc<Tree> {
        tree.through(&self.chunks, Role::Guest)
    }

    /// A guest reads what `view` has, until what is returned is dropped.
    pub(crate) fn read(self: &Arc<Self>, view: &View) -> Option<BootRead> {
        if !self.is_recording.load(Ordering::Relaxed) {
            return None;
        }
        let mut trace = lock(&self.trace);
        let mut is_stored = false;
        for blocks in view.stored() {
            is_stored = true;
            if !trace.note(blocks) {
                self.is_recording.store(false, Ordering::Relaxed);
                self.full.raise();
            }
        }
        is_stored.then(|| {
            self.reads.fetch_add(1, Ordering::Relaxed);
            BootRead(Arc::clone(self))
        })
    }

    /// Of these blocks, those that no guest has read since the volume was opened.
    fn unread(&self, blocks: &Range<u64>) -> Vec<Range<u64>> {
        lock(&self.trace).unread(blocks)
    }

    pub(crate) fn figures(&self) -> BootStats {
        let found = *lock(&self.found);
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        BootStats {
            record_bytes: found.map_or(0, |found| found.bytes),
            boots: found.map_or(0, |found| found.boots),
            fetched_bytes: count(&self.chunks.fetched),
            served_bytes: count(&self.chunks.served),
            is_booting: !self.ended.is_raised(),
        }
    }
}

/// A read of a guest that is under way.
pub(crate) struct BootRead(Arc<Boot>);

impl Drop for BootRead {
    fn drop(&mut self) {
        self.0.reads.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    fn boot_records(&self, boot: &Boot) -> BootRecords<'_> {
        BootRecords {
            objects: &*self.heads.objects,
            environment: &self.heads.environment,
            store: self.heads.store,
            image: boot.image,
        }
    }

    /// Has fetched what the record says, and ends the boot when it is over.
    pub(crate) async fn tend_boot(self: &Arc<Self>) {
        let Some(boot) = &self.boot else { return };
        // It ends with the boot, or before.
        drop(spawn(Arc::clone(self).fetch_boot()));
        let is_over = timeout(BOOT_MAX, boot.full.raised());
        match self.over.unless_raised(boot.ended.unless_raised(is_over)).await {
            Some(Some(_)) => self.end_boot(true).await,
            // Whoever closes the volume does it.
            Some(None) => {}
            // It was handed over, or taken.
            None => self.end_boot(false).await,
        }
    }

    async fn fetch_boot(self: Arc<Self>) {
        let Some(boot) = &self.boot else { return };
        let volume = self.heads.name.as_str();
        let newest = match self.boot_records(boot).newest().await {
            Ok(newest) => newest,
            // I1.
            Err(error) => {
                let error = error.in_one_line();
                tracing::warn!(volume, error, "the boot record cannot be read");
                return;
            }
        };
        let Some(record) = newest.and_then(|newest| newest.record) else { return };
        *lock(&boot.found) = Some(BootInfo::of(&record));
        if let Err(error) = fetch::fetch(&self, boot, &record).await {
            let error = error.in_one_line();
            tracing::debug!(volume, error, "no more is fetched for the boot");
        }
    }

    /// Ends the boot, if it has not ended: after all of it, or because the volume is closed.
    pub(crate) async fn end_boot(&self, is_whole: bool) {
        let Some(boot) = &self.boot else { return };
        boot.is_recording.store(false, Ordering::Relaxed);
        boot.ended.raise();
        let trace = mem::take(&mut *lock(&boot.trace));
        drop(lock(&boot.using).take());
        if trace.is_empty() {
            return;
        }
        let records = self.boot_records(boot);
        let update = records.update(|old| trace.merged(old, is_whole));
        let updated = match is_whole {
            true => Ok(update.await),
            false => timeout(CLOSING_MAX, update).await,
        };
        let volume = self.heads.name.as_str();
        match updated {
            Ok(Ok(Some(record))) => *lock(&boot.found) = Some(BootInfo::of(&record)),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => {
                let error = error.in_one_line();
                tracing::debug!(volume, error, "what the boot read is not recorded");
            }
            Err(_) => tracing::debug!(volume, "the store takes long: the boot is not recorded"),
        }
    }
}

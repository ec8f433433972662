//! Boots of a volume in a store that is far: what is read first is recorded, and fetched ahead the
//! next time.
//!
//! An **image** is a volume and everything that was cloned from it, directly or not: whatever is
//! booted of it reads about the same. So it has one record, in the store. A **boot** is what
//! follows an opening: it ends after two minutes, or when a record's room is read, or when the
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
//!   (`chunks`, I1). Fetching ahead makes way for guests: while one of any volume waits for the
//!   store, few requests are ours (`ahead`, I2).
//! - I4 Memory is bounded by what the volume was opened with, for each image, and for all of them
//!   together (`ahead`, I1). It is given back at the end of the boot.

mod stored;
mod trace;

pub(crate) use stored::BootRecords;
pub(crate) use trace::Trace;

use crate::ahead::{Ahead, GuestRead};
use crate::chunks::{Chunks, Role, Using};
use crate::format::Id;
use crate::format::boot::BootRecord;
use crate::reader::View;
use crate::tree::Tree;
use mica_block::BootStats;
use mica_rt::sync::Signal;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    pub(crate) image: Id,
    pub(crate) chunks: Arc<Chunks>,
    /// Held until the boot ends.
    pub(crate) using: Mutex<Option<Using>>,
    pub(crate) trace: Mutex<Trace>,
    pub(crate) is_recording: AtomicBool,
    pub(crate) ahead: Arc<Ahead>,
    /// Raised when the trace is full.
    pub(crate) full: Signal,
    /// Raised when the boot has ended.
    pub(crate) ended: Signal,
    /// Of the record that was found when the volume was opened, or put since.
    pub(crate) found: Mutex<Option<BootInfo>>,
}

impl Boot {
    /// Of a volume of `image` that is read by `tree`, with memory for `bytes`.
    pub(crate) fn new(image: Id, bytes: u64, tree: &Tree) -> Arc<Self> {
        let chunks = tree.chunks_of(image);
        let using = Mutex::new(Some(chunks.begin(bytes)));
        let (trace, full, ended, found) = Default::default();
        let (is_recording, ahead) = (AtomicBool::new(true), Arc::clone(tree.ahead()));
        Arc::new(Self { image, chunks, using, trace, is_recording, ahead, full, ended, found })
    }

    /// What guests read with.
    pub(crate) fn for_guests(&self, tree: &Tree) -> Arc<Tree> {
        tree.through(&self.chunks, Role::Guest)
    }

    /// A guest reads, or asks what there is to read, until what is returned is dropped: also after
    /// the boot, for other volumes may boot then.
    pub(crate) fn guest(&self) -> GuestRead {
        self.ahead.guest()
    }

    /// A guest reads what `view` has.
    pub(crate) fn note(&self, view: &View) {
        if !self.is_recording.load(Ordering::Relaxed) {
            return;
        }
        let mut trace = self.trace.lock();
        for blocks in view.stored() {
            if !trace.note(blocks) {
                self.is_recording.store(false, Ordering::Relaxed);
                self.full.raise();
            }
        }
    }

    /// Of these blocks, those that no guest has read since the volume was opened.
    pub(crate) fn unread(&self, blocks: &Range<u64>) -> Vec<Range<u64>> {
        self.trace.lock().unread(blocks)
    }

    pub(crate) fn figures(&self) -> BootStats {
        let found = *self.found.lock();
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

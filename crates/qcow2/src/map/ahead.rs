//! Reading ahead of a guest that reads in sequence.
//!
//! The system reads ahead within a file. What lies side by side on the disk of a long chain lies in
//! many files, so that almost every read is the first one of its place, and waits for the device.
//! The map knows where the sequence continues: those places are named to the system in time.
//!
//! ```text
//! read of data ─▶ Sequence: does it continue the one before? ─▶ 128 KiB in a row
//!    ─▶ the next window of the disk is planned ─▶ a few of its places are tried
//!         ├─▶ all are cached: nothing to do, and not asked again for a while
//!         └─▶ the system is told of all its data; the next window is twice as long
//! ```
//!
//! Invariants
//! - I1 It is a hint. Nothing that was planned here is read for a guest, so that it may be out of
//!   date by then, and no error is one.
//! - I2 One window of a chain is under way at a time. It has at most [`WINDOW_MAX`] bytes and
//!   [`EXTENTS_MAX`] places, and begins at most as far ahead of the guest as it is long.
//! - I3 A read that continues nothing costs a load, a comparison and two stores.
//! - I4 A window counts as a request that is under way: the disk is not closed, nor are its files
//!   handed to another process, before it is done.

use super::Map;
use crate::layers::Layers;
use mica_block::{Extent, ExtentKind, OwnedInFlight};
use mica_units::{GuestOffset, GuestRange};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of data in a row that make a sequence.
const RUN_MIN: u64 = 128 << 10;
/// A read that begins at most this far behind the end of the one before may continue it: holes
/// in between are not read.
const GAP_MAX: u64 = 4 << 20;
/// What is left out counts against the sequence by this part of it. Most of it may be holes; but
/// small reads that leave out much more than they read are none.
const GAP_PART: u64 = 8;
/// As much as a sequence counts at most: enough for the longest gap.
const RUN_MAX: u64 = 1 << 20;
/// Length of the first window of a sequence, and of the longest.
const WINDOW_MIN: u64 = 1 << 20;
pub(crate) const WINDOW_MAX: u64 = 8 << 20;
/// Places of a window that the system is told of, and how many it is told of at once: each holds a
/// descriptor until it is under way.
pub(crate) const EXTENTS_MAX: usize = 256;
const HINTS_MAX: usize = 8;
/// Places of a window that are tried to learn whether it is cached.
const PROBES: usize = 4;
/// Where all of them are cached, nothing is asked for this long.
const CACHED_STRIDE: u64 = 32 << 20;

/// The sequence in which a guest reads. Its fields are hints to each other: if two queues
/// interleave, less is read ahead.
#[derive(Default)]
pub(crate) struct Sequence {
    /// The end of the last read.
    next: AtomicU64,
    /// Bytes of data that were read in a row, less what gaps cost.
    run: AtomicU64,
    /// Up to where the disk has been examined.
    ahead: AtomicU64,
    /// Length of the next window.
    window: AtomicU64,
    /// Whether a window is under way.
    is_busy: AtomicBool,
}

impl Sequence {
    /// Takes note of a read of data; returns the window to look at now, if there is one, which is
    /// under way then until [`Self::finish`].
    #[inline]
    pub(crate) fn follow(&self, start: GuestOffset, len: u64) -> Option<Range<u64>> {
        let end = start.bytes().saturating_add(len);
        let gap = start.bytes().wrapping_sub(self.next.load(Ordering::Relaxed));
        self.next.store(end, Ordering::Relaxed);
        if gap > GAP_MAX {
            self.run.store(len.min(RUN_MIN - 1), Ordering::Relaxed);
            return None;
        }
        self.continue_at(end, len, gap)
    }

    fn continue_at(&self, end: u64, len: u64, gap: u64) -> Option<Range<u64>> {
        let before = self.run.load(Ordering::Relaxed);
        let run = before.saturating_sub(gap / GAP_PART).saturating_add(len).min(RUN_MAX);
        self.run.store(run, Ordering::Relaxed);
        if run < RUN_MIN {
            return None;
        }
        if before < RUN_MIN {
            self.ahead.store(end, Ordering::Relaxed);
            self.window.store(WINDOW_MIN, Ordering::Relaxed);
        }
        let window = self.window.load(Ordering::Relaxed).clamp(WINDOW_MIN, WINDOW_MAX);
        let from = self.ahead.load(Ordering::Relaxed).max(end);
        if from - end > window / 2 || self.is_busy.swap(true, Ordering::Acquire) {
            return None;
        }
        self.ahead.store(from, Ordering::Relaxed);
        Some(from..from.saturating_add(window))
    }

    /// The window from `start` has been examined up to `end`; `is_cached` if there was nothing to
    /// do. If the guest began another sequence meanwhile, that one is not touched.
    fn finish(&self, start: u64, end: u64, is_cached: bool) {
        let window = self.window.load(Ordering::Relaxed);
        let (ahead, window) = match is_cached {
            true => (end.saturating_add(CACHED_STRIDE), WINDOW_MIN),
            false => (end, (window * 2).min(WINDOW_MAX)),
        };
        let changed =
            self.ahead.compare_exchange(start, ahead, Ordering::Relaxed, Ordering::Relaxed);
        if changed.is_ok() {
            self.window.store(window, Ordering::Relaxed);
        }
        self.is_busy.store(false, Ordering::Release);
    }
}

impl Map {
    /// Takes note of a read; returns the window that is to be read ahead now, if it continues a
    /// sequence: [`Self::begin_ahead`] must follow.
    #[inline]
    pub(crate) fn follow(&self, layers: &Layers, extent: &Extent) -> Option<Range<u64>> {
        // Within one file the system reads ahead by itself.
        match extent.kind == ExtentKind::Data && layers.all().len() > 1 {
            true => self.index.sequence.follow(extent.start, extent.len),
            false => None,
        }
    }

    /// Reads a window ahead, which counts as `under_way` (I4).
    #[cold]
    pub(crate) fn begin_ahead(self: &Arc<Self>, window: Range<u64>, under_way: OwnedInFlight) {
        let map = Arc::clone(self);
        drop(mica_rt::spawn(async move {
            let (end, is_cached) = map.read_ahead(window.start, window.end.min(map.len())).await;
            map.index.sequence.finish(window.start, end, is_cached);
            drop(map);
            drop(under_way);
        }));
    }

    /// Tells the system of the data in this window, unless it has it. Returns how far it got, and
    /// whether it had nothing to do.
    async fn read_ahead(&self, start: u64, mut end: u64) -> (u64, bool) {
        let window = GuestRange::between(GuestOffset::new(start), GuestOffset::new(end));
        let window = window.filter(|window| !window.is_empty());
        let Some(window) = window else { return (start, true) };
        // What cannot be planned fails when it is read (I1).
        let Ok(mut extents) = self.plan(window).await else { return (end, true) };
        extents.retain(|extent| extent.kind == ExtentKind::Data);
        if let Some(beyond) = extents.get(EXTENTS_MAX) {
            end = beyond.start.bytes();
            extents.truncate(EXTENTS_MAX);
        }
        let layers = self.layers();
        let data = |extent: &Extent| &layers.get(extent.layer).data;
        let step = extents.len().div_ceil(PROBES).max(1);
        if extents.iter().step_by(step).all(|extent| data(extent).is_cached(extent.host)) {
            return (end, true);
        }
        for extents in extents.chunks(HINTS_MAX) {
            let hints =
                extents.iter().map(|extent| data(extent).read_ahead(extent.host, extent.len));
            mica_rt::join_all(hints).await;
        }
        (end, false)
    }
}

#[cfg(test)]
mod tests;

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

use super::Map;
use mica_block::{Extent, ExtentKind, LocalFuture};
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of data in a row that make a sequence.
const RUN_MIN: u64 = 128 << 10;
/// A read that begins at most this far behind the end of the one before continues it: holes
/// in between are not read.
const GAP_MAX: u64 = 4 << 20;
/// Length of the first window of a sequence, and of the longest.
const WINDOW_MIN: u64 = 1 << 20;
pub(crate) const WINDOW_MAX: u64 = 8 << 20;
/// Places of a window that the system is told of.
pub(crate) const EXTENTS_MAX: usize = 256;
/// Places of a window that are tried to learn whether it is cached.
const PROBES: usize = 4;
/// Where all of them are cached, nothing is asked for this long.
const CACHED_STRIDE: u64 = 32 << 20;

/// The sequence in which a guest reads. Its fields are hints to each other: nothing is wrong if two
/// queues interleave.
#[derive(Default)]
pub(crate) struct Sequence {
    /// The end of the last read.
    next: AtomicU64,
    /// Bytes of data that were read in a row.
    run: AtomicU64,
    /// Up to where the disk was looked at.
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
    pub(crate) fn follow(&self, start: GuestOffset, len: u64) -> Option<(u64, u64)> {
        let end = start.bytes().saturating_add(len);
        let gap = start.bytes().wrapping_sub(self.next.load(Ordering::Relaxed));
        self.next.store(end, Ordering::Relaxed);
        if gap > GAP_MAX {
            self.run.store(len.min(RUN_MIN - 1), Ordering::Relaxed);
            return None;
        }
        self.continue_at(end, len)
    }

    fn continue_at(&self, end: u64, len: u64) -> Option<(u64, u64)> {
        let before = self.run.load(Ordering::Relaxed);
        self.run.store(before.saturating_add(len), Ordering::Relaxed);
        if before.saturating_add(len) < RUN_MIN {
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
        Some((from, from.saturating_add(window)))
    }

    /// The window up to `end` was looked at; `is_cached` if there was nothing to do.
    fn finish(&self, end: u64, is_cached: bool) {
        let window = self.window.load(Ordering::Relaxed);
        let (ahead, window) = match is_cached {
            true => (end.saturating_add(CACHED_STRIDE), WINDOW_MIN),
            false => (end, (window * 2).min(WINDOW_MAX)),
        };
        self.ahead.store(ahead, Ordering::Relaxed);
        self.window.store(window, Ordering::Relaxed);
        self.is_busy.store(false, Ordering::Release);
    }
}

impl Map {
    /// Takes note of a read of data, and reads ahead if it continues a sequence.
    #[inline]
    pub(super) fn follow(self: &Arc<Self>, extent: &Extent) {
        if let Some(window) = self.index.sequence.follow(extent.start, extent.len) {
            self.begin_ahead(window);
        }
    }

    #[cold]
    fn begin_ahead(self: &Arc<Self>, (start, end): (u64, u64)) {
        let map = Arc::clone(self);
        drop(mica_rt::spawn(async move {
            let end = end.min(map.len());
            let is_cached = map.read_ahead(start, end).await;
            map.index.sequence.finish(end.max(start), is_cached);
        }));
    }

    /// Tells the system of the data in this window, unless it has it; returns whether it has.
    async fn read_ahead(&self, start: u64, end: u64) -> bool {
        let window = GuestRange::between(GuestOffset::new(start), GuestOffset::new(end));
        let Some(window) = window.filter(|window| !window.is_empty()) else { return true };
        // What cannot be planned fails when it is read (I1).
        let Ok(mut extents) = self.plan(window).await else { return true };
        extents.retain(|extent| extent.kind == ExtentKind::Data);
        extents.truncate(EXTENTS_MAX);
        let layers = self.layers();
        let data = |extent: &Extent| &layers.get(extent.layer).data;
        let step = extents.len().div_ceil(PROBES).max(1);
        if extents.iter().step_by(step).all(|extent| data(extent).is_cached(extent.host)) {
            return true;
        }
        let hints = extents.iter().map(|extent| data(extent).read_ahead(extent.host, extent.len));
        let hints: Vec<LocalFuture<'static, ()>> = hints.collect();
        mica_rt::join_all(hints).await;
        false
    }
}

#[cfg(test)]
mod tests;

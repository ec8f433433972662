//! When a writer flushes although nobody asked for it: what waits for a flush has bounds.
//!
//! A flush is due long before they are reached, and is then made in a task of its own, while
//! requests go on: a guest that never flushes does not wait for the device. Only a request that
//! finds a bound reached waits.
//!
//! Invariants
//! - I1 What is bounded exceeds its bound by no more than the requests under way add.
//! - I2 At most one such flush is under way.

use super::Writer;
use super::pages::PageState;
use mica_block::Result;
use std::sync::atomic::{AtomicBool, Ordering};

/// Dirty pages of metadata at which a flush is due.
const DIRTY_PAGES_DUE: usize = 1024;
/// Those that there may be.
const DIRTY_PAGES_MAX: usize = 4 * DIRTY_PAGES_DUE;
/// Freed clusters at which a flush is due: none of them is used again, or given back, before it.
const FREED_DUE: usize = 1 << 14;
/// Those that there may be.
const FREED_MAX: usize = 4 * FREED_DUE;

/// What is known of the need for a flush.
#[derive(Default)]
pub(super) struct Due {
    /// Whether a flush, or a shorter log, was due at the last link, or after the last such flush.
    is_due: AtomicBool,
    is_under_way: AtomicBool,
}

impl Due {
    /// Takes note of the `pages` after a change.
    pub(super) fn note(&self, pages: &PageState) {
        if is_due(pages) {
            self.is_due.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the caller is to make the flush that is due, by [`Writer::flush_due`].
    #[inline]
    pub(super) fn begin(&self) -> bool {
        self.is_due.load(Ordering::Relaxed) && !self.is_under_way.swap(true, Ordering::Relaxed)
    }
}

impl Writer {
    /// Waits for a flush if a bound is reached. Only after a change is published: a flush may find
    /// no space, and the disk stays usable.
    pub(super) async fn flush_if_full(&self) -> Result<()> {
        if !self.due.is_due.load(Ordering::Relaxed) {
            return Ok(());
        }
        let is_full = {
            let mut pages = self.metadata.lock();
            let is_long = pages.logging.is_long()
                && (self.due.is_under_way.load(Ordering::Relaxed)
                    || !pages.compact_log(self.space.state()));
            let is_due = is_long || holds_much(&pages);
            self.due.is_due.store(is_due, Ordering::Relaxed);
            is_due && is_full(&pages)
        };
        if is_full { Box::pin(self.flush()).await } else { Ok(()) }
    }

    /// The flush that [`Due::begin`] asked for. Nobody waits for it: a failure ends the writing,
    /// or is that of the next flush.
    pub(super) async fn flush_due(&self) {
        if let Err(error) = self.flush().await {
            tracing::debug!(%error, "a flush that was due failed");
        }
        let is_due = is_due(&self.metadata.lock());
        self.due.is_due.store(is_due, Ordering::Relaxed);
        self.due.is_under_way.store(false, Ordering::Relaxed);
    }
}

/// Whether a flush is due, or a log that is shorter.
fn is_due(pages: &PageState) -> bool {
    pages.logging.is_long() || holds_much(pages)
}

fn holds_much(pages: &PageState) -> bool {
    pages.dirty_count() > DIRTY_PAGES_DUE || pages.group.freed.len() > FREED_DUE
}

fn is_full(pages: &PageState) -> bool {
    pages.logging.is_nearly_full()
        || pages.dirty_count() > DIRTY_PAGES_MAX
        || pages.group.freed.len() > FREED_MAX
}

//! The ring of the open handles.

use super::Handle;
use crate::stamp::now_ns;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The open handles, and the hand of the clock that closes them.
#[derive(Default)]
pub(super) struct Ring {
    pub(super) entries: Vec<Arc<Handle>>,
    hand: usize,
}

impl Ring {
    /// Rounds of the hand: one may clear all marks, the next finds what is idle.
    const SWEEPS: usize = 2;

    pub(super) fn insert(&mut self, handle: Arc<Handle>) {
        handle.position.store(self.entries.len(), Ordering::Relaxed);
        self.entries.push(handle);
    }

    pub(super) fn remove(&mut self, handle: &Arc<Handle>) {
        self.remove_at(handle.position.load(Ordering::Relaxed));
    }

    pub(super) fn remove_at(&mut self, position: usize) {
        self.entries.swap_remove(position);
        if let Some(moved) = self.entries.get(position) {
            moved.position.store(position, Ordering::Relaxed);
        }
    }

    /// Closes an idle handle other than `opening` and returns its position (I2).
    pub(super) fn find_idle(&mut self, opening: Option<&Arc<Handle>>) -> Option<usize> {
        for _ in 0..Self::SWEEPS * self.entries.len() {
            if self.hand >= self.entries.len() {
                self.hand = 0;
            }
            let position = self.hand;
            self.hand += 1;
            let handle = &self.entries[position];
            let is_opening = opening.is_some_and(|opening| Arc::ptr_eq(handle, opening));
            if is_opening || handle.used.swap(false, Ordering::Relaxed) {
                continue;
            }
            // One that is being used or opened right now is not idle.
            let Some(mut slot) = handle.slot.try_lock() else { continue };
            if slot.file.as_ref().is_some_and(|file| Arc::strong_count(file) == 1) {
                slot.known.closed_ns = now_ns();
                slot.file = None;
                return Some(position);
            }
        }
        None
    }
}

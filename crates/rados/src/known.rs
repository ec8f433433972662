//! What is known to be in a store, and need not be put again.
//!
//! Invariants
//! - I1 A folder is known only if its marker is there, durable. Nobody ever removes one.

use crate::layout::folders_of;
use mica_block::ObjectName;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

/// Folders that are remembered, at most.
const KNOWN_MAX: usize = 10_000;

/// What is known to be there.
#[derive(Default)]
pub(crate) struct Folders {
    known: Mutex<HashSet<ObjectName>>,
    /// Whether the store says that it is laid out as this one does it.
    is_ours: AtomicBool,
}

impl Folders {
    /// Whether the store is known to be laid out as this one does it.
    pub(crate) fn is_ours(&self) -> bool {
        self.is_ours.load(Ordering::Acquire)
    }

    pub(crate) fn set_ours(&self) {
        self.is_ours.store(true, Ordering::Release);
    }

    /// The folders that `name` is in and that are not known.
    pub(crate) fn unknown(&self, name: &ObjectName) -> Vec<ObjectName> {
        let known = self.known();
        folders_of(name).filter(|folder| !known.contains(folder)).collect()
    }

    fn known(&self) -> MutexGuard<'_, HashSet<ObjectName>> {
        self.known.lock()
    }

    /// From here on the folder is known.
    pub(crate) fn learn(&self, folder: ObjectName) {
        let mut known = self.known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(folder);
    }
}

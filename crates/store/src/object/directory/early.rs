//! Objects whose names become durable with the next one of their folder.

use super::new::NewFile;
use crate::handles::{Handles, SetAside};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;

/// Objects that are left so at most: the names of others are made durable at once.
const EARLY_MAX: usize = 4;
/// Descriptors that each of them has.
const DESCRIPTORS: usize = 2;

/// See the module. What is left when this is dropped keeps its name in `.tmp` (I2).
pub(super) struct EarlyNames {
    all: Mutex<Vec<Early>>,
    handles: Arc<Handles>,
}

struct Early {
    folder: String,
    new: NewFile,
    _descriptors: SetAside,
}

impl EarlyNames {
    pub(super) fn new(handles: &Arc<Handles>) -> Self {
        Self { all: Mutex::default(), handles: Arc::clone(handles) }
    }

    /// Leaves `new`, an object in `folder`, with its name in `.tmp` until it is taken. Gives it
    /// back if there is no room.
    pub(super) fn leave(&self, folder: &str, new: NewFile) -> Option<NewFile> {
        let mut all = self.all();
        if all.len() >= EARLY_MAX {
            return Some(new);
        }
        let _descriptors = self.handles.set_aside(DESCRIPTORS);
        all.push(Early { folder: folder.to_owned(), new, _descriptors });
        None
    }

    /// Takes those in `folder`.
    pub(super) fn take(&self, folder: &str) -> Vec<NewFile> {
        let mut all = self.all();
        all.extract_if(.., |early| early.folder == folder).map(|early| early.new).collect()
    }

    fn all(&self) -> MutexGuard<'_, Vec<Early>> {
        self.all.lock()
    }
}

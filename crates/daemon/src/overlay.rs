//! The file of an ephemeral disk's overlay. It belongs to the disk's settings, and is there for as
//! long as they are.

use mica_block::Result;
use mica_store::NamelessFile;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// The overlay of an ephemeral disk. Its file is made when it is needed.
#[derive(Clone, Default, Debug)]
pub(crate) struct Overlay(Arc<Mutex<Option<Arc<NamelessFile>>>>);

impl Overlay {
    /// One for a disk that is ephemeral.
    pub(crate) fn wanted(is_ephemeral: bool) -> Option<Self> {
        is_ephemeral.then(Self::default)
    }

    /// Its file, which `make` makes if there is none yet.
    ///
    /// # Errors
    /// Those of `make`, and of the system.
    pub(crate) fn file(&self, make: impl FnOnce() -> Result<OwnedFd>) -> Result<Arc<NamelessFile>> {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*file {
            return Ok(Arc::clone(file));
        }
        let made = Arc::new(NamelessFile::new(make()?)?);
        *file = Some(Arc::clone(&made));
        Ok(made)
    }
}

/// What each disk has is its own.
impl PartialEq for Overlay {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Overlay {}

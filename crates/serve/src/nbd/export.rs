//! A disk as clients see it.

use super::contexts::Context;
use crate::discard::Discard;
use mica_block::Disk;
use mica_rt::sync::SharedLock;
use std::fmt;
use std::sync::Arc;

/// A disk and its name.
pub struct Export {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Its name. Where it is alone, it is also served under the empty name.
    pub name: String,
    /// Shown to people who list the exports; may be empty.
    pub description: String,
    /// What happens to space that clients no longer need.
    pub discard: Discard,
    /// The lock of changes at the edges of sectors: one for all servers of the disk.
    pub edges: Arc<SharedLock>,
    /// What clients can ask about its parts besides `base:allocation`.
    pub contexts: Vec<Arc<dyn Context>>,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?})", self.name)
    }
}

//! A disk as clients find it.

use crate::discard::Discard;
use mica_block::Disk;
use std::fmt;
use std::sync::Arc;

/// A disk and what it is called.
pub struct Export {
    /// What is served.
    pub disk: Arc<dyn Disk>,
    /// Its name. The first export is also served under the empty name.
    pub name: String,
    /// Shown to people who list the exports; may be empty.
    pub description: String,
    /// What becomes of space that clients do not need any more.
    pub discard: Discard,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:?})", self.name)
    }
}

//! Where the index of a chain is kept: a file beside each layer.

use crate::{Result, Store};
use std::path::Path;
use std::sync::Arc;

/// Keeps the sidecars of layers.
pub trait Sidecars: Send + Sync {
    /// The sidecar of the layer at `path`, if there is one.
    ///
    /// # Errors
    /// What the system reports.
    fn open(&self, path: &Path) -> Result<Option<Arc<dyn Store>>>;

    /// Replaces the layer's sidecar by `content`, atomically.
    ///
    /// # Errors
    /// What the system reports.
    fn write(&self, path: &Path, content: &[u8]) -> Result<()>;

    /// Removes the layer's sidecar. It is not an error if there is none.
    ///
    /// # Errors
    /// What the system reports.
    fn remove(&self, path: &Path) -> Result<()>;
}

/// No layer has a sidecar, and none is kept.
pub struct NoSidecars;

impl Sidecars for NoSidecars {
    fn open(&self, _path: &Path) -> Result<Option<Arc<dyn Store>>> {
        Ok(None)
    }

    fn write(&self, _path: &Path, _content: &[u8]) -> Result<()> {
        Ok(())
    }

    fn remove(&self, _path: &Path) -> Result<()> {
        Ok(())
    }
}

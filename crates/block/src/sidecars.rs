//! Where the index of a chain is kept: a file beside each layer.

use crate::{LocalFuture, Result, Store};
use std::path::Path;
use std::sync::Arc;

/// A sidecar that is to be kept.
#[derive(Clone, Copy, Debug)]
pub struct NewSidecar<'a> {
    /// The path of its layer.
    pub path: &'a Path,
    /// What it will contain.
    pub content: &'a [u8],
}

/// Keeps the sidecars of layers.
pub trait Sidecars: Send + Sync {
    /// The sidecar of the layer at `path`, if there is one.
    ///
    /// # Errors
    /// What the system reports.
    fn open(&self, path: &Path) -> Result<Option<Arc<dyn Store>>>;

    /// Puts each of `sidecars` in the place of its layer's, all of it or nothing, also if power is
    /// cut. If one fails, others may have been put in place.
    ///
    /// Errors: what the system reports.
    fn write_all<'a>(&'a self, sidecars: &'a [NewSidecar<'a>]) -> LocalFuture<'a, Result<()>>;

    /// The chain is open: what was kept in mind of its layers, to find their sidecars sooner, is
    /// not needed any more.
    fn chain_is_open(&self);

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

    fn write_all<'a>(&'a self, _sidecars: &'a [NewSidecar<'a>]) -> LocalFuture<'a, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn chain_is_open(&self) {}

    fn remove(&self, _path: &Path) -> Result<()> {
        Ok(())
    }
}

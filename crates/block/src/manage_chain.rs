//! What only a chain of images can do: its owner changes which layers it has, under running
//! requests.

use crate::{LocalFuture, Result, SnapshotGroup};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How a layer got on top of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pushed {
    /// For how long changes of the disk waited. Reads did not.
    pub pause: Duration,
}

/// A chain whose active layer is written, as its owner sees it.
pub trait ManageChain {
    /// Puts the image at `path` on top, an empty overlay of the active layer: from then on it is
    /// the one that is written. What was acknowledged before is durable in the layer beneath.
    /// Reads continue; changes wait for as long as it takes to flush what was written since the
    /// previous flush.
    ///
    /// Errors: `Denied` if the policy forbids the image; `Invalid` if it is no such overlay;
    /// `Limit` if the chain already has as many layers as it may have; otherwise as
    /// [`crate::Disk::flush`]. The chain is then as it was.
    fn push<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<Pushed>>;

    /// The same at one instant with the other chains of `group`. If one of them fails, all do, and
    /// all are as they were.
    ///
    /// Errors: as [`Self::push`], and why the group has failed.
    fn push_in_group<'a>(
        &'a self,
        path: &'a Path,
        group: &'a Arc<SnapshotGroup>,
    ) -> LocalFuture<'a, Result<Pushed>>;
}

//! What only a chain of images can do: its owner changes which layers it has, under running
//! requests.

use crate::{LocalFuture, Result};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// A chain whose active layer is written, as its owner sees it.
pub trait ManageChain {
    /// Puts the image at `path` on top, an empty overlay of the active layer: from then on it is
    /// the one that is written. What was acknowledged before is durable in the layer beneath.
    /// Reads continue; changes wait for as long as it takes to flush what was written since the
    /// previous flush.
    ///
    /// Errors: `Denied` if the policy forbids the image, or while a merge is under way; `Invalid`
    /// if it is no such overlay; `Limit` if the chain already has as many layers as it may have;
    /// otherwise as [`crate::Disk::flush`]. The chain is then as it was.
    fn push<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<()>>;

    /// Copies into the active layer what the disk shows through the layers between it and `base`,
    /// a layer of the chain, and takes these out of the chain; with no `base` all layers beneath.
    /// Their files are not changed. `control` is asked between two steps.
    ///
    /// Errors: `Invalid` if `base` is no layer beneath the active one; `Denied` while another merge
    /// is under way; otherwise those of reading and writing. The chain then shows what it did, and
    /// what was copied need not be copied again.
    fn stream<'a>(
        &'a self,
        base: Option<&'a Path>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>>;

    /// Copies into the base of `layers` what the layers above it, up to the top of `layers`, own,
    /// and takes these out of the chain. Their files are not changed, but show something else if
    /// they are read on top of that base. The active layer stays in the chain, and is emptied; what
    /// is written meanwhile goes down, too. `control` is asked between two steps.
    ///
    /// Errors: as [`Self::stream`]; `Denied` if somebody else has the base open.
    fn commit<'a>(
        &'a self,
        layers: CommitLayers<'a>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>>;
}

/// The layers that are merged into one of them: all above the base, up to the top.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommitLayers<'a> {
    /// The uppermost; by default the active layer, which is empty afterwards and stays on top of
    /// the base.
    pub top: Option<&'a Path>,
    /// The one that is written; by default the one beneath the top.
    pub base: Option<&'a Path>,
    /// What becomes of the active layer, if that is the top.
    pub active: ActiveAfter,
}

/// What becomes of an active layer that was merged into another one.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum ActiveAfter {
    /// It is empty, on top of what it was merged into.
    #[default]
    Emptied,
    /// It stays as it is, and so does the chain.
    Kept,
}

/// How far a merge is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MergeProgress {
    /// Bytes of the disk that need not be looked at again.
    pub done: u64,
    /// Bytes of the disk.
    pub total: u64,
    /// Bytes that were copied.
    pub copied: u64,
}

/// Who decides how fast a merge goes, and whether it goes on.
pub trait MergeControl {
    /// Called before each step. Whatever it waits for the merge waits for; if it breaks, the merge
    /// ends, and the chain has the layers that it had.
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>>;
}

/// How a merge ended that did not fail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Merged {
    /// The layers at these paths are not in the chain any more.
    Done {
        /// From the base.
        dropped: Vec<PathBuf>,
        /// Bytes that were copied.
        copied: u64,
    },
    /// It was told to end.
    Cancelled,
}

//! What the verbs that merge layers of images have in common.

use crate::convert::Progress;
use crate::failure::Failure;
use mica_block::{LocalFuture, MergeControl, MergeProgress};
use serde_json::Value;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// A merge that nobody stops, and that is shown.
pub(crate) struct Shown(Progress);

impl Shown {
    pub(crate) fn new(progress: Progress) -> Self {
        Self(progress)
    }

    /// Ends the progress display, and returns the merge's figures.
    pub(crate) fn finish(self) -> Value {
        self.0.finish()
    }
}

impl MergeControl for Shown {
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        self.0.at(progress.done);
        Box::pin(std::future::ready(ControlFlow::Continue(())))
    }
}

/// The position of the layer at `path`.
pub(crate) fn position_of(layers: &[PathBuf], path: &Path) -> Result<usize, Failure> {
    mica_stack::position_of(layers, path)
        .ok_or_else(|| Failure::new(format!("{} is not a layer of the chain", path.display())))
}

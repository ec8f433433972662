//! Compaction of a volume that nobody else has open.

use crate::collect::Sparse;
use crate::volume::Volume;
use mica_block::{Disk, Manage, Result};
use mica_rt::sync::Signal;

impl Volume {
    /// Writes again what `sparse` says of this volume, so that the next collection can delete its
    /// extents, and closes it; returns how many blocks that were. When `given_up` is raised the
    /// rest is left as it is.
    ///
    /// # Errors
    /// As a write: `Denied` if another writer has the volume by now.
    pub async fn compact(self, sparse: &Sparse, given_up: &Signal) -> Result<u64> {
        let extents = sparse.extents.iter().copied().collect();
        let rewritten = given_up.unless_raised(self.tidy(&extents, None)).await;
        let flushed = self.flush().await;
        self.close().await?;
        flushed?;
        rewritten.unwrap_or(Ok(0))
    }
}

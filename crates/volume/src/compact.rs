//! Compaction of a volume that nobody has open.

use crate::collect::Sparse;
use crate::heads::Claimed;
use crate::volumes::Volumes;
use mica_block::{Disk, Manage, Result};
use mica_rt::sync::Signal;

impl Volumes {
    /// Writes again what `sparse` says, so that the next collection can delete its extents; returns
    /// how many blocks that were. When `given_up` is raised the rest is left as it is.
    ///
    /// # Errors
    /// `Denied` if the volume is open: its server does it then, with [`crate::Volume::tidy`].
    /// Otherwise as a write.
    pub async fn compact(&self, sparse: &Sparse, given_up: &Signal) -> Result<u64> {
        let volume = self.open_volume(&sparse.name, Claimed::Refuse).await?;
        let extents = sparse.extents.iter().copied().collect();
        let rewritten = given_up.unless_raised(volume.tidy(&extents, None)).await;
        let flushed = volume.flush().await;
        volume.close().await?;
        flushed?;
        rewritten.unwrap_or(Ok(0))
    }
}

//! Rules about the snapshots of volumes that nobody has open.

use super::Volumes;
use crate::heads::Claimed;
use crate::keep::Keep;
use crate::names::VolumeName;
use mica_block::{Manage, Result, SnapshotInfo};

impl Volumes {
    /// The automatic snapshots of a volume that `rules` do not keep now, the oldest first; nothing
    /// is changed. Of one that a writer has open, among those that are in the store.
    ///
    /// # Errors
    /// As [`Self::snapshots`].
    pub async fn expired_snapshots(
        &self,
        name: &VolumeName,
        rules: &Keep,
    ) -> Result<Vec<SnapshotInfo>> {
        let all = self.snapshots(name).await?;
        Ok(rules.dropped(self.environment.now_ns(), all))
    }

    /// Drops the automatic snapshots of a volume that nobody has open which `rules` do not keep
    /// now, and says which those were, the oldest first. The space comes back with the next
    /// collection. One that is open drops them itself: [`crate::Volume::keep_snapshots`].
    ///
    /// # Errors
    /// As [`Self::drop_snapshot`]. Some may be dropped then.
    pub async fn keep_snapshots(
        &self,
        name: &VolumeName,
        rules: &Keep,
    ) -> Result<Vec<SnapshotInfo>> {
        let heads = self.heads(name);
        heads.with_head(async |head| heads.check_closed(head)).await?;
        // What changes nothing costs no head.
        if self.expired_snapshots(name, rules).await?.is_empty() {
            return Ok(Vec::new());
        }
        // Of an encrypted one as well, whoever has its key.
        let volume = self.open_without_blocks(name, Claimed::OnlyIfClosed).await?;
        let dropped = volume.keep_snapshots(rules).await;
        volume.close().await?;
        dropped
    }
}

#[cfg(test)]
mod tests;

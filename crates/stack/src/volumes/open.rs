//! Opening a volume, or a snapshot of one.

use super::held::HeldVolume;
use super::lock::VolumeLock;
use super::stores::{Store, Stores, host};
use super::url::VolumeUrl;
use mica_block::{Manage, Result};
use mica_volume::{Claimed, VolumeName};
use std::sync::Arc;

/// How a volume is opened.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct VolumeOptions {
    /// For reading and writing; a snapshot is only read.
    pub writable: bool,
    /// Whether another writer that may be alive is fenced.
    pub force: bool,
}

impl Stores {
    /// Opens what `url` names.
    ///
    /// # Errors
    /// `NotFound` if it does not exist; `Denied` if a writer has it that may be alive, unless that
    /// one is to be fenced.
    pub async fn open_volume(
        &self,
        url: &VolumeUrl,
        options: &VolumeOptions,
    ) -> Result<Arc<dyn Manage>> {
        let store = self.open(&url.store).await?;
        if let Some(which) = url.which() {
            return Ok(Arc::new(store.volumes().open_snapshot(&url.name, &which).await?));
        }
        if !options.writable {
            return Ok(Arc::new(store.volumes().open_readable(&url.name).await?));
        }
        if store.is_remote() {
            store.probe().await?;
        }
        let lock = store.lock_volume(&url.name).await?;
        let is_ours = store.is_abandoned(&url.name, lock.as_ref()).await?;
        let claimed = if options.force || is_ours { Claimed::TakeOver } else { Claimed::Refuse };
        let volume = store.volumes().open_volume(&url.name, claimed).await?;
        Ok(Arc::new(HeldVolume::new(volume, store, lock)))
    }
}

/// A volume that a verb is about to change: as long as this is there, nobody on this machine opens
/// it.
pub struct Settled {
    _lock: Option<VolumeLock>,
}

impl Store {
    /// Makes a volume ready to be changed by a verb: if its writer was killed on this machine, its
    /// time is over, and what it had put into the store counts.
    ///
    /// # Errors
    /// `Denied` if another process of this machine has it open; otherwise what the store reports.
    pub async fn settle(&self, name: &VolumeName) -> Result<Settled> {
        let lock = self.lock_volume(name).await?;
        if self.is_abandoned(name, lock.as_ref()).await? {
            self.volumes().open_volume(name, Claimed::TakeOver).await?.close().await?;
        }
        Ok(Settled { _lock: lock })
    }

    /// Deletes a volume that nobody writes, or with `force` one that somebody may write: that
    /// writer is fenced first.
    ///
    /// # Errors
    /// `NotFound` if there is none; `Denied` if somebody has it open.
    pub async fn delete(&self, name: &VolumeName, force: bool) -> Result<()> {
        let lock = self.lock_volume(name).await?;
        let is_ours = self.is_abandoned(name, lock.as_ref()).await?;
        let claimed = if force || is_ours { Claimed::TakeOver } else { Claimed::Refuse };
        self.volumes().delete(name, claimed).await?;
        if let Some(lock) = lock {
            lock.remove();
        }
        Ok(())
    }

    /// Takes the lock of a volume, if it is on this machine.
    pub(super) async fn lock_volume(&self, name: &VolumeName) -> Result<Option<VolumeLock>> {
        match self.directory() {
            Some(directory) => Ok(Some(VolumeLock::take(directory, name).await?)),
            None => Ok(None),
        }
    }

    /// Whether the volume's writer was on this machine and is dead, which the lock proves.
    pub(super) async fn is_abandoned(
        &self,
        name: &VolumeName,
        lock: Option<&VolumeLock>,
    ) -> Result<bool> {
        if lock.is_none() {
            return Ok(false);
        }
        let open_on = self.volumes().info(name).await?.open_on;
        Ok(open_on.is_some_and(|open_on| open_on == host()))
    }
}

//! Opening a volume, or a snapshot of one.

use super::held::HeldVolume;
use super::lock::VolumeLock;
use super::stores::{Store, Stores, host};
use super::url::VolumeUrl;
use mica_block::{Error, ErrorKind, Manage, Result};
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
        if let Some(snapshot) = &url.snapshot {
            let what = format!("there is no snapshot {snapshot} of {}", url.name.as_str());
            return Err(Error::new(ErrorKind::NotFound, what));
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

impl Store {
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

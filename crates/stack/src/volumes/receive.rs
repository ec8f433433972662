//! Receiving a volume that another store has sent.

use super::lock::VolumeLock;
use super::stores::Store;
use mica_block::{ErrorKind, Result};
use mica_volume::{ReceiveOptions, Received, VolumeKey, VolumeName};
use std::io::Read;
use std::sync::Arc;

impl Store {
    /// As [`mica_volume::Volumes::receive`], with a key for what is encrypted, while nobody on this
    /// machine opens the volume. In a directory, what a process leaves of a new volume if it is
    /// killed is refused as a part.
    ///
    /// # Errors
    /// As there; `Denied` if another process of this machine has it open.
    pub async fn receive(
        &self,
        name: &VolumeName,
        (options, key): (ReceiveOptions, Option<Arc<VolumeKey>>),
        source: &mut dyn Read,
        each: impl FnMut(&Received),
    ) -> Result<()> {
        let volumes = self.volumes().with_key(key);
        let lock = loop {
            match self.settle(name).await {
                Ok(_held) => return volumes.receive(name, options, source, each).await,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            let Some(directory) = self.directory() else {
                return volumes.receive(name, options, source, each).await;
            };
            let lock = VolumeLock::take(directory, name).await?;
            // Another process may have made it meanwhile: the lock's file says what it left.
            if !self.has(name).await? {
                break lock;
            }
        };
        lock.sign(None, true)?;
        let received = volumes.receive(name, options, source, each).await;
        match self.volumes().info(name).await {
            Err(error) if error.kind() == ErrorKind::NotFound => lock.remove(),
            // Whoever could not take it back has left a part, and it stays signed as one.
            Ok(info) if info.open_on.is_none() => lock.clear(),
            Ok(_) | Err(_) => {}
        }
        received
    }

    pub(super) async fn has(&self, name: &VolumeName) -> Result<bool> {
        match self.volumes().info(name).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

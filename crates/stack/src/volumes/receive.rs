//! Receiving a volume that another store has sent.

use super::lock::VolumeLock;
use super::stores::Store;
use mica_block::{ErrorKind, Result};
use mica_volume::{ReceiveOptions, Received, VolumeName};
use std::io::Read;

impl Store {
    /// As [`mica_volume::Volumes::receive`], while nobody on this machine opens the volume. In a
    /// directory, what a process leaves of a new volume if it is killed is refused as a part.
    ///
    /// # Errors
    /// As there; `Denied` if another process of this machine has it open.
    pub async fn receive(
        &self,
        name: &VolumeName,
        options: ReceiveOptions,
        source: &mut dyn Read,
        each: impl FnMut(&Received),
    ) -> Result<()> {
        match self.volumes().info(name).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.receive_new(name, options, source, each).await
            }
            Err(error) => Err(error),
            Ok(_) => self.receive_known(name, options, source, each).await,
        }
    }

    async fn receive_known(
        &self,
        name: &VolumeName,
        options: ReceiveOptions,
        source: &mut dyn Read,
        each: impl FnMut(&Received),
    ) -> Result<()> {
        let _held = self.settle(name).await?;
        self.volumes().receive(name, options, source, each).await
    }

    async fn receive_new(
        &self,
        name: &VolumeName,
        options: ReceiveOptions,
        source: &mut dyn Read,
        each: impl FnMut(&Received),
    ) -> Result<()> {
        let lock = match self.directory() {
            Some(directory) => Some(VolumeLock::take(directory, name).await?),
            None => None,
        };
        // Another process may have made it meanwhile: the file of its lock says what it left.
        match self.volumes().info(name).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
            Ok(_) => {
                drop(lock);
                return self.receive_known(name, options, source, each).await;
            }
        }
        if let Some(lock) = &lock {
            lock.sign(None, true)?;
        }
        let received = self.volumes().receive(name, options, source, each).await;
        let Some(lock) = lock else { return received };
        match self.volumes().info(name).await {
            Err(error) if error.kind() == ErrorKind::NotFound => lock.remove(),
            // Whoever could not take it back has left a part, and it stays signed as one.
            Ok(info) if info.open_on.is_none() => lock.clear(),
            Ok(_) | Err(_) => {}
        }
        received
    }
}

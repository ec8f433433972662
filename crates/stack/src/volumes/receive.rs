//! Receiving a volume that another store has sent.

use super::open::Settled;
use super::stores::Store;
use mica_block::{ErrorKind, Result};
use mica_volume::{ReceiveOptions, Received, VolumeName};
use std::io::Read;

impl Store {
    /// As [`mica_volume::Volumes::receive`], while nobody on this machine opens the volume.
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
        let is_there = match self.volumes().info(name).await {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        let held = match is_there {
            true => self.settle(name).await?,
            false => Settled::new(self.lock_volume(name).await?),
        };
        let received = self.volumes().receive(name, options, source, each).await;
        if !is_there && received.is_err() {
            held.remove_if_gone(self, name).await;
        }
        received
    }
}

//! Cloning a volume that nobody serves.

use super::stores::Store;
use mica_block::{ErrorKind, Result, Which};
use mica_volume::VolumeName;

impl Store {
    /// As [`mica_volume::Volumes::clone_volume`]. If that is refused, and the writer of `source`
    /// was killed on this machine, its time is over first: that of a server, or of a verb such as a
    /// collection. Only then, as a clone of what is in a head already disturbs nobody.
    ///
    /// # Errors
    /// As there.
    pub async fn clone_volume(
        &self,
        source: &VolumeName,
        which: Option<&Which>,
        target: &VolumeName,
    ) -> Result<()> {
        let volumes = self.volumes();
        let refused = match volumes.clone_volume(source, which, target).await {
            // It is open, or a snapshot of it is in no head yet.
            Err(error) if matches!(error.kind(), ErrorKind::Denied | ErrorKind::NotFound) => error,
            cloned => return cloned,
        };
        match volumes.info(source).await {
            Ok(info) if info.open_on.is_some() => {}
            Ok(_) | Err(_) => return Err(refused),
        }
        match self.settle(source).await {
            Ok(_held) => volumes.clone_volume(source, which, target).await,
            // Its writer lives, or has a log: what was refused first says what to do.
            Err(error) if error.kind() == ErrorKind::Denied => Err(refused),
            Err(error) => Err(error),
        }
    }
}

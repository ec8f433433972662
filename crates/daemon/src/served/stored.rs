//! Where the volume of a disk is, for those who read its store themselves.

use super::Served;
use mica_block::{Error, ErrorKind, Manage, Result};
use mica_rt::timeout;
use mica_stack::VolumeUrl;
use std::sync::Arc;
use std::time::Duration;

/// Limit for pending writes to get into the store.
const STORE_LIMIT: Duration = Duration::from_secs(30);

/// A volume in its store.
pub(crate) struct Stored {
    /// That of the volume, also where one of its snapshots is served: it is what verbs are about.
    pub(crate) url: VolumeUrl,
    /// Why what was written last may not be there, if so.
    pub(crate) missing: Option<Error>,
}

impl Served {
    /// Where the volume is. If it is open for writing, what was answered before is put there first,
    /// as far as that works: who looks for what is wrong with a store wants to see it as it is.
    ///
    /// # Errors
    /// `Unsupported` if the disk is no volume.
    pub(crate) fn stored(&self) -> Result<Stored> {
        let url = self.volume.url()?.ok_or_else(|| {
            let what = format!(
                "the disk {:?} is not a volume: `mica info`, `mica check` and `mica tree` are for \
                 images",
                self.name
            );
            Error::new(ErrorKind::Unsupported, what)
        })?;
        let url = VolumeUrl { snapshot: None, ..url };
        let disk = self.opened().disk();
        let missing = match disk {
            Ok(disk) => {
                let stored = self.resources.workers.run(move || checkpoint(disk));
                stored.and_then(|stored| stored).err()
            }
            Err(_) if !self.settings.writes() || self.volume.is_snapshot() => None,
            Err(_) => self.why_not_stored(),
        };
        Ok(Stored { url, missing })
    }
}

async fn checkpoint(disk: Arc<dyn Manage>) -> Result<()> {
    // One that is served read-only has nothing to put.
    let Some(volume) = disk.volume() else { return Ok(()) };
    timeout(STORE_LIMIT, volume.checkpoint()).await.unwrap_or_else(|_| {
        let what = format!("the store has not taken it within {} s", STORE_LIMIT.as_secs());
        Err(Error::new(ErrorKind::Io, what))
    })
}

//! Opening a volume, or a snapshot of one.

use super::held::HeldVolume;
use super::lock::VolumeLock;
use super::logs::LogPlace;
use super::stores::{Store, Stores, host};
use super::url::VolumeUrl;
use mica_block::{Error, ErrorKind, Manage, Result};
use mica_volume::{Claimed, Durability, Opening, Sparse, VolumeName};
use std::path::Path;
use std::sync::Arc;

/// How a volume is opened.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct VolumeOptions {
    /// For reading and writing; a snapshot is only read.
    pub writable: bool,
    /// Whether another writer that may be alive is fenced, and what is only in its log given up.
    pub force: bool,
    /// The log of what is not in the store yet.
    pub log: Option<LogPlace>,
    /// What the answer to a flush promises: that what was written is in the log, if there is one,
    /// unless this says something else.
    pub durability: Option<Durability>,
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
        let log = match &options.log {
            Some(place) => Some(self.log(place).await?),
            None => None,
        };
        let is_ours = store.is_abandoned(&url.name, lock.as_ref()).await?;
        let left = lock.as_ref().and_then(VolumeLock::left).filter(|_| is_ours);
        let claimed = match (options.force, is_ours, left, &log) {
            (true, ..) | (_, true, None, _) => Claimed::TakeOver,
            // The log knows whether it is the one.
            (_, true, Some(_), Some(_)) | (_, false, ..) => Claimed::Refuse,
            (_, true, Some(left), None) => return Err(needs_log(&url.name, left)),
        };
        let usual = if log.is_some() { Durability::Host } else { Durability::Store };
        let durability = options.durability.unwrap_or(usual);
        let opening = Opening { claimed, log, durability };
        let volume = store.volumes().open_volume(&url.name, opening).await?;
        if let Some(lock) = &lock {
            lock.sign(options.log.as_ref().map(|place| &*place.path));
        }
        Ok(Arc::new(HeldVolume::new(volume, store, lock)))
    }
}

/// A volume that a verb is about to change: as long as this is there, nobody on this machine opens
/// it.
pub struct Settled {
    lock: Option<VolumeLock>,
}

impl Settled {
    pub(super) fn new(lock: Option<VolumeLock>) -> Self {
        Self { lock }
    }

    /// Removes what the lock of `name` was held by, unless there is such a volume.
    pub(super) async fn remove_if_gone(self, store: &Store, name: &VolumeName) {
        let is_gone = store.volumes().info(name).await.is_err_and(is_missing);
        if let Some(lock) = self.lock.filter(|_| is_gone) {
            lock.remove();
        }
    }
}

fn is_missing(error: Error) -> bool {
    error.kind() == ErrorKind::NotFound
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
            if let Some(left) = lock.as_ref().and_then(VolumeLock::left) {
                return Err(needs_log(name, left));
            }
            self.volumes().open_volume(name, Claimed::TakeOver).await?.close().await?;
        }
        Ok(Settled::new(lock))
    }

    /// Deletes a volume that nobody writes, or with `force` one that somebody may write: that
    /// writer is fenced first.
    ///
    /// # Errors
    /// `NotFound` if there is none; `Denied` if somebody has it open.
    pub async fn delete(&self, name: &VolumeName, force: bool) -> Result<()> {
        let lock = self.lock_volume(name).await?;
        let has_log = lock.as_ref().is_some_and(|lock| lock.left().is_some());
        let is_ours = self.is_abandoned(name, lock.as_ref()).await? && !has_log;
        let claimed = if force || is_ours { Claimed::TakeOver } else { Claimed::Refuse };
        self.volumes().delete(name, claimed).await?;
        if let Some(lock) = lock {
            lock.remove();
        }
        Ok(())
    }

    /// Writes again what is in sparse extents of a volume that nobody has open; returns how many
    /// blocks that were.
    ///
    /// # Errors
    /// `Denied` if somebody has it open, `NotFound` if it is no more; otherwise what the store
    /// reports.
    pub async fn compact(&self, sparse: &Sparse) -> Result<u64> {
        // Before the lock, which is waited for if a server has it.
        if let Some(host) = self.volumes().info(&sparse.name).await?.open_on {
            let what = format!("volume {} is open on {host}", sparse.name.as_str());
            return Err(Error::new(ErrorKind::Denied, what));
        }
        let _lock = self.lock_volume(&sparse.name).await?;
        self.volumes().compact(sparse).await
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

/// Why a volume is left alone whose writer was killed: what it acknowledged may only be in its log.
fn needs_log(name: &VolumeName, log: &Path) -> Error {
    let (name, log) = (name.as_str(), log.display());
    let what = format!(
        "volume {name} was not closed, and its log {log} may have what the store has not: serve it \
         with --log-device {log}, or by --force without that"
    );
    Error::new(ErrorKind::Denied, what)
}

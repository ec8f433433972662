//! Compaction of volumes that nobody has open.
//!
//! While a volume is compacted it is open under a writer of the compactor, which gives way: on this
//! machine a server that starts, or a verb, finds the lock of the volume free, and fences it. If
//! the compactor opens the volume only after they have taken the lock, a server asks again who has
//! the volume, and before a verb begins it puts a head (K4). A compactor that is killed leaves the
//! volume open, and so does a server. The next one goes on with it, if it is proved that the writer
//! is dead.
//!
//! Invariants
//! - K1 A writer that lives is never fenced by a compactor. In a directory it has the lock of the
//!   volume, or the one of compactors, which is held from before a volume is opened by one until
//!   after it is closed: whoever has both knows that the writer of this machine is dead. Elsewhere
//!   the file that it has locked in memory shows whether it lives; that is there only once a head
//!   names the writer, and where it is not, nothing is proved.
//! - K2 Only the writer that is known to be dead is fenced, whoever has the volume by then.
//! - K3 A volume whose writer had a log is left to whoever has that.
//! - K4 A volume is opened only as of the head that was found while its lock was held: whoever has
//!   put another since has the volume.
//! - K5 A volume that was handed over is left to its heir, also on the heir's host: to close it
//!   again would end the hand-over, and then any host could open it.
//!
//! A host proves nothing about the writers of another: what these have left open stays as it is
//! until somebody there, or somebody by force, opens it.

use super::alive::AliveNote;
use super::lock::{CompactorLock, VolumeLock};
use super::open::{Locked, Standing, needs_log};
use super::stores::Store;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::sync::Signal;
use mica_volume::{Claimed, Sparse, VolumeInfo, VolumeKey, VolumeName};
use std::sync::Arc;

/// The right to compact volumes of a store, among processes that see its locks.
pub struct Compactor<'a> {
    store: &'a Store,
    _lock: Option<CompactorLock>,
}

impl Store {
    /// The right to compact volumes; `None` if another process has it.
    ///
    /// # Errors
    /// Those of the system.
    pub async fn compactor(&self) -> Result<Option<Compactor<'_>>> {
        let lock = match self.directory() {
            Some(directory) => match CompactorLock::take(directory).await? {
                None => return Ok(None),
                taken => taken,
            },
            None => None,
        };
        Ok(Some(Compactor { store: self, _lock: lock }))
    }

    /// Whether a volume would be compacted, as far as that can be told without taking its lock.
    pub async fn is_left_to_compactors(&self, info: &VolumeInfo) -> bool {
        let Some(host) = &info.open_on else { return info.heir.is_none() };
        match self.directory() {
            Some(directory) => {
                let (last, is_held) = VolumeLock::look(directory, &info.name);
                let needs_more = last.log.is_some() || last.is_import;
                // The head names a log also where what the lock said was lost.
                !is_held && !needs_more && info.log.is_none() && last.was_here_as(host)
            }
            None => self.dead_writer(info).await.is_some(),
        }
    }
}

impl Compactor<'_> {
    /// Writes again what is in sparse extents of a volume that nobody has open, with its key if it
    /// is encrypted; returns how many blocks that were. Whoever opens the volume meanwhile, on this
    /// machine or by force, has it: this ends then. When `given_up` is raised the rest is left as
    /// it is.
    ///
    /// # Errors
    /// `Denied` if somebody has it open, or has left it so with a log, or it was handed over, or
    /// takes another key; `NotFound` if it is no more; otherwise what the store reports.
    pub async fn compact(
        &self,
        sparse: &Sparse,
        key: Option<Arc<VolumeKey>>,
        given_up: &Signal,
    ) -> Result<u64> {
        let Self { store, .. } = self;
        let name = &sparse.name;
        let seen = self.look(name).await?;
        let volumes = store.volumes().with_key(key);
        let volume = volumes.open_volume(name, Claimed::AsOf(seen.head)).await?;
        seen.dead.iter().for_each(AliveNote::forget);
        let alive = store.sign_of_life(&volume, seen.volume);
        let writer = volume.writer();
        let compacted = volume.compact(sparse, given_up).await;
        // If the volume could not be closed, this shows the next compactor that its writer is dead.
        let is_over = match &compacted {
            Ok(_) => true,
            Err(_) => store.volumes().info(name).await.is_ok_and(|info| info.writer != writer),
        };
        alive.iter().filter(|_| is_over).for_each(AliveNote::remove);
        compacted
    }

    /// Looks whether the volume may be opened, as [`Self::compact`] says.
    pub(super) async fn look(&self, name: &VolumeName) -> Result<Locked> {
        let Self { store, .. } = self;
        // Before the lock, which is waited for if a server has it.
        let info = store.volumes().info(name).await?;
        if let Some(heir) = &info.heir {
            return Err(was_handed(name, heir));
        }
        if !store.is_left_to_compactors(&info).await {
            return Err(is_open(name));
        }
        let mut locked = store.locked(name, false).await?;
        locked.check_whole(name)?;
        if locked.standing == Standing::Open {
            return Err(is_open(name));
        }
        if let Some(left) = locked.left() {
            return Err(needs_log(name, left));
        }
        // Not held any longer: a server that starts must not fail for this. It finds a writer that
        // was here, whose lock is free, and fences it.
        locked.sign(None, false)?;
        drop(locked.lock.take());
        Ok(locked)
    }
}

fn was_handed(name: &VolumeName, heir: &str) -> Error {
    let what = format!("volume {} was handed over to {heir}", name.as_str());
    Error::new(ErrorKind::Denied, what)
}

fn is_open(name: &VolumeName) -> Error {
    let what = format!("volume {} is open", name.as_str());
    Error::new(ErrorKind::Denied, what)
}

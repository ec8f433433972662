//! A volume that is open for writing, and what has to be held as long as it is.

use super::alive::AliveNote;
use super::lock::VolumeLock;
use super::stores::Store;
use mica_block::{
    ClonedFrom, Disk, Error, ErrorKind, Extent, Geometry, Haste, IoFuture, LocalFuture, Manage,
    ManageIndex, ManageSnapshots, ManageVolume, MapStats, Planned, Result, VolumeStats, Which,
    WriteStats, Writing, Zeroes,
};
use mica_rt::{Buf, join_all, sleep};
use mica_units::{GuestOffset, GuestRange, LayerNumber};
use mica_volume::{Keep, SnapshotPer, Volume, VolumeName, Volumes};
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How often, and how long, a head is waited for that has a snapshot: half a minute.
const HEAD_TRIES: u32 = 300;
const HEAD_PAUSE: Duration = Duration::from_millis(100);
/// Ranges in one answer, at most.
const DIFFERENCES_MAX: usize = 1 << 17;

/// The volume. Everything but its life is its own.
pub(super) struct HeldVolume {
    volume: Arc<Volume>,
    name: VolumeName,
    /// Others of this process find it, too.
    store: Arc<Store>,
    lock: Option<VolumeLock>,
    /// What shows that this process lives, where a store has no locks.
    alive: Option<AliveNote>,
    /// By which automatic snapshots are taken.
    keep: Option<(Keep, SnapshotPer)>,
}

impl HeldVolume {
    pub(super) fn new(
        volume: Arc<Volume>,
        (store, name): (Arc<Store>, VolumeName),
        (lock, alive): (Option<VolumeLock>, Option<AliveNote>),
        keep: Option<(Keep, SnapshotPer)>,
    ) -> Self {
        Self { volume, name, store, lock, alive, keep }
    }

    /// The store, which a verb waits for no longer than it would elsewhere.
    fn volumes(&self) -> Volumes {
        self.store.volumes().with_key(None).for_verbs()
    }

    fn taken(&self) -> &dyn ManageSnapshots {
        self.volume.snapshots().expect("a volume has snapshots")
    }

    /// Clones the snapshot `which` by `clone`. A head has to have it first: that is put in the
    /// background.
    async fn clone_snapshot(
        &self,
        which: &Which,
        clone: impl AsyncFn(&Volumes) -> Result<()>,
    ) -> Result<()> {
        self.volume.destage_all().await?;
        let (volumes, mut tries) = (self.volumes(), 0);
        loop {
            tries += 1;
            match clone(&volumes).await {
                Err(error) if error.kind() == ErrorKind::NotFound && tries < HEAD_TRIES => {
                    if !self.taken().list().await?.iter().any(|taken| which.is_of(taken)) {
                        return Err(error);
                    }
                    sleep(HEAD_PAUSE).await;
                }
                cloned => return cloned,
            }
        }
    }

    /// Clones what there is now, by a snapshot that goes with this.
    async fn clone_now(&self, target: &VolumeName) -> Result<()> {
        let taken = Which::Number(self.taken().take("").await?.number);
        let clone =
            async |volumes: &Volumes| volumes.clone_present(&self.name, &taken, target).await;
        let cloned = self.clone_snapshot(&taken, clone).await;
        match self.taken().remove(&taken).await {
            Ok(()) => {}
            // Rules may have dropped it, as any that has no label.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(%error, "the snapshot that was cloned is still there"),
        }
        cloned
    }

    /// The volume is closed; one that is left to its log is not.
    fn clear_lock(&self) {
        if let Some(lock) = self.lock.as_ref().filter(|_| !self.volume.is_left_to_log()) {
            lock.clear();
        }
        self.alive.iter().for_each(AliveNote::remove);
    }
}

impl ManageVolume for HeldVolume {
    fn destage_all(&self) -> LocalFuture<'_, Result<()>> {
        self.volume.destage_all()
    }

    fn checkpoint(&self) -> LocalFuture<'_, Result<()>> {
        ManageVolume::checkpoint(&*self.volume)
    }

    fn prepare_handover(&self) {
        self.volume.prepare_handover();
    }

    fn abandon_handover(&self) {
        self.volume.abandon_handover();
    }

    fn check_handover_target(&self, host: &str) -> Result<()> {
        self.volume.check_handover_target(host)
    }

    fn hand_over<'a>(&'a self, host: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            ManageVolume::hand_over(&*self.volume, host).await?;
            self.clear_lock();
            Ok(())
        })
    }

    fn abort_import(&self) -> LocalFuture<'_, Result<()>> {
        // Its lock says that it is a part until nothing of it is there.
        self.volume.abort_import()
    }

    fn is_ending(&self) -> bool {
        self.volume.is_ending()
    }

    fn figures(&self) -> VolumeStats {
        self.volume.figures()
    }

    fn clone_as<'a>(
        &'a self,
        which: Option<&'a Which>,
        target: &'a str,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let target = VolumeName::new(target)?;
            match which {
                Some(which) => {
                    let clone = async |volumes: &Volumes| {
                        volumes.clone_volume(&self.name, Some(which), &target).await
                    };
                    self.clone_snapshot(which, clone).await
                }
                None => self.clone_now(&target).await,
            }
        })
    }

    fn cloned_from(&self) -> LocalFuture<'_, Option<ClonedFrom>> {
        self.volume.cloned_from()
    }

    fn differences<'a>(
        &'a self,
        before: &'a Which,
        after: Option<&'a Which>,
    ) -> LocalFuture<'a, Result<Vec<GuestRange>>> {
        Box::pin(async move {
            self.volume.destage_all().await?;
            let (mut ranges, mut count) = (Vec::new(), 0_usize);
            let add = |range| {
                count += 1;
                if count <= DIFFERENCES_MAX {
                    ranges.push(range);
                }
            };
            let sides = ((&self.name, Some(before)), (&self.name, after));
            self.volumes().diff(sides.0, sides.1, add).await?;
            if count > DIFFERENCES_MAX {
                let what = format!(
                    "{count} ranges differ, and an answer has {DIFFERENCES_MAX} at most: mica \
                     volume diff shows them all"
                );
                return Err(Error::new(ErrorKind::Limit, what));
            }
            Ok(ranges)
        })
    }
}

impl Disk for HeldVolume {
    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        self.volume.plan(range, extents)
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.volume.survey(range)
    }

    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        self.volume.read(extent, buf)
    }

    fn is_writable(&self) -> bool {
        self.volume.is_writable()
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        self.volume.write(at, buf)
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.volume.write_zeroes(range, how)
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        self.volume.discard(range)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.volume.flush()
    }
}

impl Manage for HeldVolume {
    fn resize(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.volume.resize(len)
    }

    fn idle(&self) -> LocalFuture<'_, ()> {
        self.volume.idle()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            self.volume.close().await?;
            self.clear_lock();
            Ok(())
        })
    }

    fn hasten(&self, haste: Haste) -> LocalFuture<'_, ()> {
        self.volume.hasten(haste)
    }

    fn latch(&self) -> Option<Error> {
        self.volume.latch()
    }

    fn weakness(&self) -> Option<Cow<'static, str>> {
        self.volume.weakness()
    }

    fn write_stats(&self) -> WriteStats {
        self.volume.write_stats()
    }

    fn map_stats(&self) -> MapStats {
        self.volume.map_stats()
    }

    fn layer_count(&self) -> usize {
        self.volume.layer_count()
    }

    fn layer_paths(&self) -> Vec<PathBuf> {
        self.volume.layer_paths()
    }

    fn data_paths(&self) -> Vec<PathBuf> {
        self.volume.data_paths()
    }

    fn is_encrypted(&self, position: usize) -> bool {
        self.volume.is_encrypted(position)
    }

    fn layer_position(&self, layer: LayerNumber) -> usize {
        self.volume.layer_position(layer)
    }

    fn index(&self) -> Option<&dyn ManageIndex> {
        self.volume.index()
    }

    fn chain(&self) -> Option<&dyn mica_block::ManageChain> {
        self.volume.chain()
    }

    fn bitmaps(&self) -> Option<&dyn mica_block::ManageBitmaps> {
        self.volume.bitmaps()
    }

    fn snapshots(&self) -> Option<&dyn ManageSnapshots> {
        self.volume.snapshots()
    }

    fn volume(&self) -> Option<&dyn ManageVolume> {
        Some(self)
    }

    fn tend(&self) -> LocalFuture<'_, ()> {
        match &self.keep {
            None => self.volume.tend(),
            Some((rules, per)) => {
                let keep: LocalFuture<'_, ()> = match per {
                    SnapshotPer::Interval => Box::pin(self.volume.take_by(rules)),
                    SnapshotPer::Write | SnapshotPer::Flush => Box::pin(self.volume.drop_by(rules)),
                };
                let both: [LocalFuture<'_, ()>; 2] = [self.volume.tend(), keep];
                Box::pin(async { join_all(both).await.into_iter().collect() })
            }
        }
    }
}

//! A volume that is open for writing, and what has to be held as long as it is.

use super::lock::VolumeLock;
use super::stores::Store;
use mica_block::{
    Disk, Error, Extent, Geometry, Haste, IoFuture, LocalFuture, Manage, ManageIndex,
    ManageSnapshots, ManageVolume, MapStats, Planned, Result, VolumeStats, WriteStats, Writing,
    Zeroes,
};
use mica_rt::{Buf, join_all};
use mica_units::{GuestOffset, GuestRange, LayerNumber};
use mica_volume::{Keep, SnapshotPer, Volume};
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

/// The volume. Everything but its life is its own.
pub(super) struct HeldVolume {
    volume: Arc<Volume>,
    /// So that others of this process find it.
    _store: Arc<Store>,
    lock: Option<VolumeLock>,
    /// By which automatic snapshots are taken.
    keep: Option<(Keep, SnapshotPer)>,
}

impl HeldVolume {
    pub(super) fn new(
        volume: Arc<Volume>,
        store: Arc<Store>,
        lock: Option<VolumeLock>,
        keep: Option<(Keep, SnapshotPer)>,
    ) -> Self {
        Self { volume, _store: store, lock, keep }
    }

    /// The volume is closed; one that is left to its log is not.
    fn clear_lock(&self) {
        if let Some(lock) = self.lock.as_ref().filter(|_| !self.volume.is_left_to_log()) {
            lock.clear();
        }
    }
}

impl ManageVolume for HeldVolume {
    fn store(&self) -> LocalFuture<'_, Result<()>> {
        self.volume.store()
    }

    fn set_leaving(&self, is_leaving: bool) {
        self.volume.set_leaving(is_leaving);
    }

    fn check_heir(&self, host: &str) -> Result<()> {
        self.volume.check_heir(host)
    }

    fn hand_over<'a>(&'a self, host: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            ManageVolume::hand_over(&*self.volume, host).await?;
            self.clear_lock();
            Ok(())
        })
    }

    fn is_ending(&self) -> bool {
        self.volume.is_ending()
    }

    fn figures(&self) -> VolumeStats {
        self.volume.figures()
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

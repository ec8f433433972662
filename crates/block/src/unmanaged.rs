//! Disks of which there is nothing to manage but that they are served.

use crate::{
    Disk, Error, ErrorKind, Haste, LocalFuture, Manage, ManageBitmaps, ManageChain, ManageIndex,
    ManageSnapshots, ManageVolume, MapStats, Result, WriteStats,
};
use mica_units::LayerNumber;
use std::borrow::Cow;
use std::future::ready;
use std::path::PathBuf;

/// A disk without layers, figures or work of its own, which keeps its length and is never latched.
/// Not for wrappers: they forward all of [`Manage`].
pub trait Unmanaged: Disk {
    /// Why its length cannot be changed.
    const LENGTH: &'static str;
}

impl<D: Unmanaged> Manage for D {
    fn resize(&self, _len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(ready(Err(Error::new(ErrorKind::Unsupported, D::LENGTH))))
    }

    fn idle(&self) -> LocalFuture<'_, ()> {
        Box::pin(ready(()))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.flush()
    }

    fn hasten(&self, _haste: Haste) -> LocalFuture<'_, ()> {
        Box::pin(ready(()))
    }

    fn latch(&self) -> Option<Error> {
        None
    }

    fn weakness(&self) -> Option<Cow<'static, str>> {
        None
    }

    fn write_stats(&self) -> WriteStats {
        WriteStats::default()
    }

    fn map_stats(&self) -> MapStats {
        MapStats::default()
    }

    fn layer_count(&self) -> usize {
        1
    }

    fn layer_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn data_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn is_encrypted(&self, _position: usize) -> bool {
        false
    }

    fn layer_position(&self, _layer: LayerNumber) -> usize {
        0
    }

    fn index(&self) -> Option<&dyn ManageIndex> {
        None
    }

    fn chain(&self) -> Option<&dyn ManageChain> {
        None
    }

    fn bitmaps(&self) -> Option<&dyn ManageBitmaps> {
        None
    }

    fn snapshots(&self) -> Option<&dyn ManageSnapshots> {
        None
    }

    fn volume(&self) -> Option<&dyn ManageVolume> {
        None
    }

    fn tend(&self) -> LocalFuture<'_, ()> {
        Box::pin(ready(()))
    }
}

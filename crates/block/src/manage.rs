//! What the owner of a disk does besides serving its data: control, figures, and the index.
//!
//! A server is handed an `Arc<dyn Disk>` and can do none of this. Nothing here has a default: a
//! wrapper that forgot to forward a call would silently disable it.

use crate::{
    Disk, Error, ErrorKind, LocalFuture, ManageBitmaps, ManageChain, ManageSnapshots, ManageVolume,
    Result, StoreIdentity,
};
use mica_units::{LayerNumber, SECTOR_BYTES};
use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// A disk as its owner sees it. One object is both, so that two handles cannot disagree about which
/// disk they mean; an `Arc<dyn Manage>` becomes an `Arc<dyn Disk>` where only data is needed.
pub trait Manage: Disk {
    /// Makes the disk `len` bytes long, while it is served: no shorter than it is. The new part
    /// reads as zeros, and shows in [`Disk::geometry`] once the new length is durable.
    ///
    /// Errors: `Invalid` for a length that is shorter, not a multiple of a sector, or more than the
    /// image can have; `Unsupported` if the disk cannot do it; otherwise as [`Disk::write`]. The
    /// disk then keeps its length.
    fn resize(&self, len: u64) -> LocalFuture<'_, Result<()>>;

    /// Waits until no request is in flight, including those that nothing awaits any more.
    fn idle(&self) -> LocalFuture<'_, ()>;

    /// Stops writing: flushes, and leaves the image as if no process had it open. Nothing else may
    /// be in flight, and nothing is written afterwards.
    fn close(&self) -> LocalFuture<'_, Result<()>>;

    /// The process is about to end: from now on a store that does not answer is not waited for
    /// longer than `haste` allows. Returns when the disk is closed, or was given up: then it is
    /// latched, and [`Self::close`] says whether what it promised is kept all the same. Of a disk
    /// that waits for no store, at once. Runs beside requests and [`Self::close`], and a second
    /// time beside the first.
    fn hasten(&self, haste: Haste) -> LocalFuture<'_, ()>;

    /// Why the disk is latched: after this failure it acknowledges no more writes until it is
    /// opened again. `None` if it is not.
    fn latch(&self) -> Option<Error>;

    /// Which promise of this disk does not hold now, and why; `None` if all hold.
    fn weakness(&self) -> Option<Cow<'static, str>>;

    /// What writing has cost.
    fn write_stats(&self) -> WriteStats;

    /// Statistics of its map's cache.
    fn map_stats(&self) -> MapStats;

    /// Number of layers: one unless it is a chain.
    fn layer_count(&self) -> usize;

    /// The paths of a chain's layers, from the base; empty if it is not a chain.
    fn layer_paths(&self) -> Vec<PathBuf>;

    /// The paths of the external data files of a chain's layers.
    fn data_paths(&self) -> Vec<PathBuf>;

    /// The external data file of the layer that has so many beneath it, if it has one.
    fn data_path(&self, position: usize) -> Option<PathBuf> {
        let _ = position;
        None
    }

    /// Whether the layer that has so many beneath it is encrypted: where its bytes are in its file,
    /// others are.
    fn is_encrypted(&self, position: usize) -> bool;

    /// How many layers are beneath the one that an extent names.
    fn layer_position(&self, layer: LayerNumber) -> usize;

    /// The index of a chain, or of one that it may become; `None` of any other disk.
    fn index(&self) -> Option<&dyn ManageIndex>;

    /// What only a chain can do, and getting layers; `None` of a disk that cannot get any, and of
    /// one that is only read.
    fn chain(&self) -> Option<&dyn ManageChain>;

    /// The dirty bitmaps of a chain; `None` if it is not a chain.
    fn bitmaps(&self) -> Option<&dyn ManageBitmaps>;

    /// The snapshots of a volume; `None` of a disk that has none of its own.
    fn snapshots(&self) -> Option<&dyn ManageSnapshots>;

    /// What only a volume can do; `None` of any other disk, and of a volume that is only read.
    fn volume(&self) -> Option<&dyn ManageVolume>;

    /// Does what the disk has to do by itself while it is open: putting what was written into a
    /// store of objects before somebody asks for it. Returns when the disk is closed or latched,
    /// and at once if it never has such work. Called once, by its owner, in a task of its own; all
    /// promises of [`Disk`] hold without it, too.
    fn tend(&self) -> LocalFuture<'_, ()>;
}

/// How long the end of a process may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Haste {
    /// A store that answers is waited for, and one that does not for a moment.
    Soon,
    /// No store is waited for.
    AtOnce,
}

/// The index of a chain, which the sidecars of its layers hold.
pub trait ManageIndex {
    /// How many layers, from the base, the index covers.
    fn covered_layers(&self) -> usize;

    /// Which file the lowest layer is: chains that share layers share it.
    fn base(&self) -> StoreIdentity;

    /// Waits until the index is called for: by a reader that found a damaged sidecar, so that
    /// [`Self::build`] has work, or by [`Self::call`].
    fn called(&self) -> LocalFuture<'_, ()>;

    /// Ends the wait of [`Self::called`].
    fn call(&self);

    /// Brings the sidecars of all frozen layers up to date; returns how many it wrote. Stops
    /// between two layers when `progress` breaks.
    ///
    /// Errors: if a layer cannot be read or a sidecar cannot be written. What was written before
    /// remains valid.
    fn build<'a>(
        &'a self,
        progress: &'a mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
    ) -> LocalFuture<'a, Result<usize>>;

    /// The state of each frozen layer's sidecar and its length in bytes, from the base. One that
    /// cannot be read counts as missing.
    fn seal_states(&self) -> LocalFuture<'_, Vec<(SealState, u64)>>;

    /// Removes the sidecars of all frozen layers.
    ///
    /// # Errors
    /// What the system reports; the others are removed all the same.
    fn remove(&self) -> Result<()>;
}

/// Progress of the building of an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexProgress {
    /// Layers done.
    pub layer: usize,
    /// Layers in all.
    pub layers: usize,
}

/// The state of a sidecar's seal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SealState {
    /// Sealed, and the layer is unchanged.
    Sealed,
    /// There is no sidecar, or one of another version or layer.
    Missing,
    /// The sidecar belongs to another state of the layer, or to another chain beneath.
    Stale,
    /// Timestamps prove nothing: the layer was moved, copied, or changed about when it was sealed.
    Unproven,
}

/// Statistics of the map's cache, counted since the disk was opened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MapStats {
    /// Look-ups answered from the cache.
    pub hits: u64,
    /// Look-ups that had to load a slice.
    pub misses: u64,
    /// Slices loaded from an index.
    pub index_loads: u64,
    /// Windows of slices resolved by walking the chain.
    pub walks: u64,
    /// Layers examined by those walks.
    pub layers_walked: u64,
    /// Bytes of slices now in the cache that it shares with no other disk.
    pub cached_bytes: u64,
    /// The most that the caches of all disks with that cache together may hold, in bytes.
    pub budget_bytes: u64,
}

/// What writing has cost besides the guest's own bytes, counted since the disk was opened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct WriteStats {
    /// Bytes read to fill the rest of a unit that a write moved to a new place.
    pub copied_read_bytes: u64,
    /// Bytes of these written, including zeros written around them.
    pub copied_written_bytes: u64,
    /// Bytes of metadata written.
    pub metadata_bytes: u64,
    /// Calls that made something durable (`fdatasync`).
    pub syncs: u64,
    /// Groups of changes made durable.
    pub groups: u64,
    /// Entries of the map that were changed by writes.
    pub linked_clusters: u64,
}

/// Checks that a served disk of `old` bytes may become `new` bytes long.
///
/// # Errors
/// `Invalid` if it may not.
pub fn check_longer(old: u64, new: u64) -> Result<()> {
    let refuse = |what: String| Err(Error::new(ErrorKind::Invalid, what));
    if new < old {
        return refuse(format!("a disk of {old} bytes is not made shorter while it is served"));
    }
    if !new.is_multiple_of(SECTOR_BYTES) {
        return refuse(format!("{new} bytes are not whole sectors"));
    }
    Ok(())
}

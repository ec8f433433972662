//! A raw image that may get layers, from its owner's side: what it is now answers.

use super::{LayeredRaw, Now};
use mica_block::{
    CommitLayers, Disk as _, Error, ErrorKind, Haste, IndexProgress, LocalFuture, Manage,
    ManageBitmaps, ManageChain, ManageIndex, ManageSnapshots, ManageVolume, MapStats, MergeControl,
    MergeLayers, Merged, NamedBacking, Pushed, RaiseLayers, Renaming, Result, SealState,
    SnapshotGroup, StoreIdentity, View, WriteStats,
};
use mica_qcow2::Chain;
use mica_units::LayerNumber;
use std::borrow::Cow;
use std::future::ready;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

fn no_layers() -> Error {
    Error::new(ErrorKind::Invalid, "the disk is a raw image, which has no layers beneath")
}

impl Manage for LayeredRaw {
    fn resize(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.change(async move |raw| raw.resize(len).await, move |chain| chain.resize(len))
    }

    fn idle(&self) -> LocalFuture<'_, ()> {
        Box::pin(async move {
            self.reads.grace().await;
            self.changes.grace().await;
            if let Some(chain) = self.chain() {
                chain.idle().await;
            }
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            // A layer that is being put on top is there first.
            let _alone = self.pushing.lock().await;
            match self.chain() {
                Some(chain) => chain.close().await,
                None => self.flush().await,
            }
        })
    }

    fn hasten(&self, _haste: Haste) -> LocalFuture<'_, ()> {
        Box::pin(ready(()))
    }

    fn latch(&self) -> Option<Error> {
        self.manage(|disk| disk.latch())
    }

    fn weakness(&self) -> Option<Cow<'static, str>> {
        self.manage(|disk| disk.weakness())
    }

    fn write_stats(&self) -> WriteStats {
        self.manage(|disk| disk.write_stats())
    }

    fn map_stats(&self) -> MapStats {
        self.manage(|disk| disk.map_stats())
    }

    fn layer_count(&self) -> usize {
        self.manage(|disk| disk.layer_count())
    }

    fn layer_paths(&self) -> Vec<PathBuf> {
        self.manage(|disk| disk.layer_paths())
    }

    fn data_paths(&self) -> Vec<PathBuf> {
        self.manage(|disk| disk.data_paths())
    }

    fn data_path(&self, position: usize) -> Option<PathBuf> {
        self.manage(|disk| disk.data_path(position))
    }

    fn is_encrypted(&self, position: usize) -> bool {
        self.manage(|disk| disk.is_encrypted(position))
    }

    fn layer_position(&self, layer: LayerNumber) -> usize {
        self.manage(|disk| disk.layer_position(layer))
    }

    /// The index of the chain that this disk may become.
    fn index(&self) -> Option<&dyn ManageIndex> {
        Some(self)
    }

    fn chain(&self) -> Option<&dyn ManageChain> {
        Some(self)
    }

    fn bitmaps(&self) -> Option<&dyn ManageBitmaps> {
        self.chain()?.bitmaps()
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

impl LayeredRaw {
    /// What `act` says of what the disk is now.
    fn manage<T>(&self, act: impl FnOnce(&dyn Manage) -> T) -> T {
        match self.now() {
            Now::Raw(raw) => act(&**raw),
            Now::Chain(chain) => act(chain),
        }
    }

    /// What `merge` does with the chain, if there is one.
    fn merge<'a>(
        &'a self,
        merge: impl FnOnce(&'a Chain) -> LocalFuture<'a, Result<Merged>>,
    ) -> LocalFuture<'a, Result<Merged>> {
        self.chain().map_or_else(|| Box::pin(ready(Err(no_layers()))) as _, merge)
    }
}

impl ManageIndex for LayeredRaw {
    fn covered_layers(&self) -> usize {
        self.chain().map_or(0, Chain::indexed_layers)
    }

    fn base(&self) -> StoreIdentity {
        match self.now() {
            Now::Raw(raw) => raw.identity(),
            Now::Chain(chain) => ManageIndex::base(chain),
        }
    }

    fn called(&self) -> LocalFuture<'_, ()> {
        Box::pin(async move {
            match self.chain() {
                Some(chain) => chain.called().await,
                None => self.index_call.wait().await,
            }
        })
    }

    fn call(&self) {
        match self.chain() {
            Some(chain) => chain.call(),
            None => self.index_call.set(),
        }
    }

    fn build<'a>(
        &'a self,
        progress: &'a mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
    ) -> LocalFuture<'a, Result<usize>> {
        match self.chain() {
            Some(chain) => chain.build(progress),
            None => Box::pin(ready(Ok(0))),
        }
    }

    fn seal_states(&self) -> LocalFuture<'_, Vec<(SealState, u64)>> {
        match self.chain() {
            Some(chain) => chain.seal_states(),
            None => Box::pin(ready(Vec::new())),
        }
    }

    fn remove(&self) -> Result<()> {
        self.chain().map_or(Ok(()), ManageIndex::remove)
    }
}

impl ManageChain for LayeredRaw {
    fn push<'a>(
        &'a self,
        path: &'a Path,
        names: &'a dyn Renaming,
        group: Option<&'a SnapshotGroup>,
    ) -> LocalFuture<'a, Result<Pushed>> {
        Box::pin(async move {
            let pushed = self.put_on_top(path, names, group).await;
            pushed.map_err(|error| match group {
                None => error,
                Some(group) => group.fail(error),
            })
        })
    }

    fn write_ahead(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(Self::write_ahead(self))
    }

    fn cluster_bytes(&self) -> Option<u64> {
        self.chain()?.cluster_bytes()
    }

    fn view(&self, position: usize) -> LocalFuture<'_, Result<View>> {
        Box::pin(async move { self.chain().ok_or_else(no_layers)?.view(position).await })
    }

    fn stream<'a>(
        &'a self,
        base: Option<&'a Path>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>> {
        self.merge(move |chain| ManageChain::stream(chain, base, control))
    }

    fn raise<'a>(
        &'a self,
        layers: RaiseLayers<'a>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>> {
        self.merge(move |chain| ManageChain::raise(chain, layers, control))
    }

    fn commit<'a>(
        &'a self,
        layers: CommitLayers<'a>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>> {
        self.merge(move |chain| ManageChain::commit(chain, layers, control))
    }

    fn check_merge<'a>(&'a self, layers: MergeLayers<'a>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.chain().ok_or_else(no_layers)?.check_merge(layers).await })
    }

    fn check_name<'a>(&'a self, base: NamedBacking<'a>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.chain().ok_or_else(no_layers)?.check_name(base).await })
    }

    fn close_on<'a>(&'a self, base: NamedBacking<'a>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.chain().ok_or_else(no_layers)?.close_on(base).await })
    }
}

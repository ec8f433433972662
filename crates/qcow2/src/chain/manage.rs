//! A chain from its owner's side: control, statistics, and the index.

use crate::chain::{Chain, not_writable};
use crate::write::Writer;
use mica_block::{
    CommitLayers, Disk, Error, Haste, IndexProgress, LocalFuture, Manage, ManageBitmaps,
    ManageChain, ManageIndex, ManageSnapshots, MapStats, MergeControl, MergeLayers, Merged,
    NamedBacking, Pushed, RaiseLayers, Renaming, Result, SealState, SnapshotGroup, StoreIdentity,
    View, WriteStats,
};
use mica_qcow2_format::BackingName;
use mica_units::LayerNumber;
use std::borrow::Cow;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Manage for Chain {
    fn resize(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        let merging = Arc::clone(&self.merging);
        self.change_if_writable(async move |writer| {
            merging.check_may_grow()?;
            writer.grow(len).await
        })
    }

    fn idle(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.gate.idle())
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            // A layer that was frozen just now is closed first.
            let _alone = self.pushing.lock().await;
            // Nobody waits for what is prepared in the background.
            self.gate.changes_grace().await;
            match self.writer.load_full() {
                Some(writer) => writer.complete(async |writer| writer.close().await).await,
                None => Ok(()),
            }
        })
    }

    fn hasten(&self, _haste: Haste) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn latch(&self) -> Option<Error> {
        self.writer.load().as_ref()?.latch()
    }

    fn weakness(&self) -> Option<Cow<'static, str>> {
        self.writer.load().as_ref()?.weakness().map(Cow::Borrowed)
    }

    fn write_stats(&self) -> WriteStats {
        self.writer.load().as_ref().map(|writer| writer.stats()).unwrap_or_default()
    }

    fn map_stats(&self) -> MapStats {
        self.map.stats()
    }

    fn layer_count(&self) -> usize {
        self.map.layers().all().len()
    }

    fn layer_paths(&self) -> Vec<PathBuf> {
        self.map.layers().all().iter().map(|layer| layer.path.to_path_buf()).collect()
    }

    fn data_paths(&self) -> Vec<PathBuf> {
        let layers = self.map.layers();
        let paths = layers.all().iter().filter_map(|layer| layer.data_path.as_deref());
        paths.map(Into::into).collect()
    }

    fn data_path(&self, position: usize) -> Option<PathBuf> {
        let layers = self.map.layers();
        layers.all().get(position)?.data_path.as_deref().map(Into::into)
    }

    fn is_encrypted(&self, position: usize) -> bool {
        self.map.layers().all().get(position).is_some_and(|layer| layer.cipher.is_some())
    }

    fn layer_position(&self, layer: LayerNumber) -> usize {
        let layers = self.map.layers();
        // A layer that was merged meanwhile has left its data to another: mostly to the active one.
        layers.known_position(layer).unwrap_or(layers.frozen().len())
    }

    fn index(&self) -> Option<&dyn ManageIndex> {
        Some(self)
    }

    fn chain(&self) -> Option<&dyn ManageChain> {
        self.is_writable().then_some(self as &dyn ManageChain)
    }

    fn bitmaps(&self) -> Option<&dyn ManageBitmaps> {
        Some(self)
    }

    fn snapshots(&self) -> Option<&dyn ManageSnapshots> {
        None
    }

    fn volume(&self) -> Option<&dyn mica_block::ManageVolume> {
        None
    }

    fn tend(&self) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

impl ManageChain for Chain {
    fn push<'a>(
        &'a self,
        path: &'a Path,
        names: &'a dyn Renaming,
        group: Option<&'a SnapshotGroup>,
    ) -> LocalFuture<'a, Result<Pushed>> {
        Box::pin(Chain::push(self, path, names, group))
    }

    fn write_ahead(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(Chain::write_ahead(self))
    }

    fn cluster_bytes(&self) -> Option<u64> {
        let layers = self.map.layers_now();
        Some(layers.active().tables.as_ref()?.l2.cluster_bits.bytes())
    }

    fn view(&self, position: usize) -> LocalFuture<'_, Result<View>> {
        Box::pin(Chain::view(self, position))
    }

    fn stream<'a>(
        &'a self,
        base: Option<&'a Path>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>> {
        Box::pin(self.settled(Chain::stream(self, base, control)))
    }

    fn raise<'a>(
        &'a self,
        layers: RaiseLayers<'a>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>> {
        Box::pin(self.settled(Chain::raise(self, layers, control)))
    }

    fn commit<'a>(
        &'a self,
        layers: CommitLayers<'a>,
        control: &'a dyn MergeControl,
    ) -> LocalFuture<'a, Result<Merged>> {
        Box::pin(self.settled(Chain::commit(self, layers, control)))
    }

    fn check_merge<'a>(&'a self, layers: MergeLayers<'a>) -> LocalFuture<'a, Result<()>> {
        Box::pin(Chain::check_merge(self, layers))
    }

    fn check_name<'a>(&'a self, base: NamedBacking<'a>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
            writer.plan_backing(Some(&name_of(base))).await.map(drop)
        })
    }

    fn close_on<'a>(&'a self, base: NamedBacking<'a>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let _alone = self.pushing.lock().await;
            self.merging.check_none()?;
            self.gate.changes_grace().await;
            let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
            let base = name_of(base);
            let named = async |writer: Arc<Writer>| {
                let named = async {
                    // What the new base does not show.
                    writer.flush().await?;
                    writer.name_backing(Some(&base)).await
                };
                let named = named.await;
                let closed = writer.close().await;
                named.and(closed)
            };
            writer.complete(named).await
        })
    }
}

fn name_of(base: NamedBacking<'_>) -> BackingName {
    BackingName { name: base.name.to_owned(), format: base.format.map(str::to_owned) }
}

impl ManageIndex for Chain {
    fn covered_layers(&self) -> usize {
        self.indexed_layers()
    }

    fn base(&self) -> StoreIdentity {
        self.map.layers().base().store.identity()
    }

    fn called(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.map.index_call.wait())
    }

    fn call(&self) {
        self.map.index_call.set();
    }

    fn build<'a>(
        &'a self,
        progress: &'a mut dyn FnMut(IndexProgress) -> ControlFlow<()>,
    ) -> LocalFuture<'a, Result<usize>> {
        Box::pin(self.build_index(progress))
    }

    fn seal_states(&self) -> LocalFuture<'_, Vec<(SealState, u64)>> {
        Box::pin(self.map.seal_states())
    }

    fn remove(&self) -> Result<()> {
        self.map.drop_index()
    }
}

//! A new active layer under running requests.
//!
//! ```text
//! open the overlay ─▶ flush ─▶ hold the gate ─▶ close the writer
//!   ─▶ names ─▶ the layers ─▶ the writer ─▶ names durable ─▶ let go
//! ```
//!
//! Of several chains as a group each waits for all others twice: when it holds its gate, and when
//! its writer is closed. What follows cannot fail.
//!
//! Reads continue throughout: the map in memory stays true, as the new layer is empty. Changes wait
//! while the gate is held: as long as it takes to flush what was written since the previous flush.
//!
//! Invariants
//! - I1 What was acknowledged before the gate is held is durable in the layer that gets frozen, and
//!   nothing else is in it; what is acknowledged later is in the new layer.
//! - I2 After an error the chain is unchanged: its writer, which may have been closed, goes on, and
//!   begins a redo log of another name with the next change. If the call is dropped while the
//!   writer is being closed, nothing more is acknowledged. That a layer is closed may not be
//!   durable yet when the process dies: who goes on in the layer above syncs it first
//!   (`stack/src/above.rs`).
//! - I3 The frozen layer is read through a file of its own, so that the one that was written, and
//!   with it the locks that keep other readers out, can go.
//! - I4 If files change their names ([`Renaming`]): the old name is the active layer's whenever
//!   something is acknowledged, also after the process was killed, and after a power cut whenever a
//!   flush was. The gate is let go only when the new names are durable.

use super::{Chain, not_writable, open_writer};
use crate::layer::Layer;
use crate::open::{check_length, freeze, open_overlay};
use crate::write::Writer;
use mica_block::{Disk, Error, Pushed, Renaming, Result, SnapshotGroup};
use std::path::Path;
use std::sync::Arc;

impl Chain {
    /// Puts the image at `path` on top: an empty overlay of the active layer. From then on it is
    /// the one that is written.
    ///
    /// # Errors
    /// `Denied` if the chain is open for reading only, if the policy forbids the image, or while
    /// layers are merged;
    /// `Invalid` if the image is no such overlay; `Limit` if the chain already has as many layers
    /// as it may have; else any error of the stores.
    pub async fn push(&self, path: &Path) -> Result<Pushed> {
        self.put_on_top(path, (None, None)).await
    }

    /// The same at one instant with the other chains of `group`. If one fails, all do.
    ///
    /// # Errors
    /// As [`Self::push`], and why the group has failed.
    pub async fn push_in_group(&self, path: &Path, group: &SnapshotGroup) -> Result<Pushed> {
        let pushed = self.put_on_top(path, (None, Some(group))).await;
        pushed.map_err(|error: Error| group.fail(error))
    }

    /// The same alone, and files change their `names`
    /// ([`mica_block::ManageChain::push_renaming`]).
    pub(super) async fn push_renaming(&self, path: &Path, names: &dyn Renaming) -> Result<Pushed> {
        self.put_on_top(path, (Some(names), None)).await
    }

    async fn put_on_top(
        &self,
        path: &Path,
        (names, group): (Option<&dyn Renaming>, Option<&SnapshotGroup>),
    ) -> Result<Pushed> {
        let _alone = self.pushing.claim(0).await;
        self.merging.check_none()?;
        let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
        let map = &self.map;
        let before = map.layers();
        let (mut layer, metadata) = open_overlay(&*map.images, path, &before).await?;
        if names.is_some() {
            layer.path = Arc::clone(&before.active().path);
        }
        let layer = Arc::new(layer);
        let next = (&layer, path);
        let next = open_writer(map, next, metadata, &self.gate, self.repair).await?;
        // So that little is left to flush while changes wait.
        self.flush().await?;
        let start = mica_rt::now();
        let held = self.gate.hold().await;
        if let Some(group) = group {
            group.all_hold().await?;
        }
        // The disk may have grown since the overlay was opened.
        check_length(&layer, before.active())?;
        let ending = async |writer: Arc<Writer>| self.end(&writer, before.active(), names).await;
        let frozen = writer.complete(ending).await?;
        if let Some(group) = group {
            group.all_taken().await?;
        }
        map.replace_layers(before.pushed(Arc::new(frozen), layer));
        let next = Arc::new(next);
        self.writer.store(Some(Arc::clone(&next)));
        if let Some(names) = names {
            map.images.note_name(&before.active().path);
            if let Err(error) = names.sync().await {
                // A power cut may show the old name, under which nothing of what follows is.
                next.fail(&error);
                return Err(error);
            }
        }
        drop(held);
        let pause = mica_rt::now().saturating_since(start);
        map.index_call.set();
        Ok(Pushed { pause })
    }

    /// Closes the writer of the `active` layer; returns that as one that is frozen. Files have
    /// their new names then.
    async fn end(
        &self,
        writer: &Writer,
        active: &Layer,
        names: Option<&dyn Renaming>,
    ) -> Result<Layer> {
        writer.close().await?;
        let images = &*self.map.images;
        let Some(names) = names else { return freeze(images, active, &active.path) };
        names.rename().await?;
        match freeze(images, active, names.kept()) {
            Ok(frozen) => Ok(frozen),
            Err(error) => {
                if let Err(undone) = names.undo().await {
                    // What is written next would be found under no name that is opened.
                    writer.fail(&undone);
                }
                Err(Error::wrap(error, names.kept().display().to_string()))
            }
        }
    }
}

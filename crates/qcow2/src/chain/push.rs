//! A new active layer under running requests.
//!
//! ```text
//! open the overlay ─▶ flush ─▶ hold the gate ─▶ close the writer
//!   ─▶ the layers ─▶ the writer ─▶ let go
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
//! - I2 After an error the chain is unchanged: its writer, which may have been closed, goes on. If
//!   the call is dropped while the writer is being closed, nothing more is acknowledged.
//! - I3 The frozen layer is read through a file of its own, so that the one that was written, and
//!   with it the locks that keep other readers out, can go.

use super::{Chain, not_writable, open_writer};
use crate::open::{check_length, freeze, open_overlay};
use mica_block::{Disk, Error, Pushed, Result, SnapshotGroup};
use std::path::Path;
use std::sync::Arc;

impl Chain {
    /// Puts the image at `path` on top: an empty overlay of the active layer. From then on it is
    /// the one that is written.
    ///
    /// # Errors
    /// `Denied` if the chain is open for reading only, or if the policy forbids the image;
    /// `Invalid` if the image is no such overlay; `Limit` if the chain already has as many layers
    /// as it may have; else any error of the stores.
    pub async fn push(&self, path: &Path) -> Result<Pushed> {
        self.push_with(path, None).await
    }

    /// The same at one instant with the other chains of `group`. If one fails, all do.
    ///
    /// # Errors
    /// As [`Self::push`], and why the group has failed.
    pub async fn push_in_group(&self, path: &Path, group: &SnapshotGroup) -> Result<Pushed> {
        let pushed = self.push_with(path, Some(group)).await;
        pushed.map_err(|error: Error| group.fail(error))
    }

    async fn push_with(&self, path: &Path, group: Option<&SnapshotGroup>) -> Result<Pushed> {
        let _alone = self.pushing.claim(0).await;
        let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
        let map = &self.map;
        let before = map.layers();
        let (layer, metadata) = open_overlay(&*map.images, path, &before).await?;
        let layer = Arc::new(layer);
        let next = open_writer(map, &layer, metadata, &self.gate, self.repair).await?;
        // So that little is left to flush while changes wait.
        self.flush().await?;
        let start = mica_rt::now();
        let held = self.gate.hold().await;
        if let Some(group) = group {
            group.all_hold().await?;
        }
        // The disk may have grown since the overlay was opened.
        check_length(&layer, before.active())?;
        let frozen = writer.complete(async |writer| {
            writer.close().await?;
            freeze(&*map.images, before.active())
        });
        let frozen = frozen.await?;
        if let Some(group) = group {
            group.all_taken().await?;
        }
        map.replace_layers(before.pushed(Arc::new(frozen), layer));
        self.writer.store(Some(Arc::new(next)));
        drop(held);
        let pause = mica_rt::now().saturating_since(start);
        map.index_call.set();
        Ok(Pushed { pause })
    }
}

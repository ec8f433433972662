//! A new active layer under running requests.
//!
//! ```text
//! open the overlay ─▶ flush ─▶ hold the gate ─▶ close the writer
//!   ─▶ the layers ─▶ the writer ─▶ let go
//! ```
//!
//! Reads continue throughout: the map in memory stays true, as the new layer is empty. Changes wait
//! while the gate is held: as long as it takes to flush what was written since the previous flush.
//!
//! Invariants
//! - I1 What was acknowledged before the gate is held is durable in the layer that gets frozen, and
//!   nothing else is in it; what is acknowledged later is in the new layer.
//! - I2 After an error the chain is unchanged. If the call is dropped while the writer is being
//!   closed, nothing more is acknowledged.

use super::{Chain, not_writable, open_writer};
use crate::open::{check_length, freeze, open_overlay};
use mica_block::{Disk, Result};
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
    pub async fn push(&self, path: &Path) -> Result<()> {
        let _alone = self.pushing.claim(0).await;
        self.merging.check_none()?;
        let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
        let map = &self.map;
        let before = map.layers();
        let (layer, metadata) = open_overlay(&*map.images, path, &before).await?;
        let layer = Arc::new(layer);
        let next = open_writer(map, &layer, metadata, &self.gate, self.repair).await?;
        // So that little is left to flush while changes wait.
        self.flush().await?;
        let held = self.gate.hold().await;
        // The disk may have grown since the overlay was opened.
        check_length(&layer, before.active())?;
        let frozen = writer.complete(async |writer| {
            writer.close().await?;
            freeze(&*map.images, before.active(), writer.raw_file())
        });
        let frozen = frozen.await?;
        map.replace_layers(before.pushed(Arc::new(frozen), layer));
        self.writer.store(Some(Arc::new(next)));
        drop(held);
        map.index_call.set();
        Ok(())
    }
}

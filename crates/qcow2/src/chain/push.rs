//! A new active layer under running requests.
//!
//! ```text
//! open the overlay ─▶ flush ─▶ hold the gate ─▶ flush ─▶ names ─▶ the layers ─▶ the writer
//!   ─▶ names durable ─▶ let go ─▶ close the old writer
//! ```
//!
//! Of several chains as a group each waits for all others twice: when it holds its gate, and when
//! nothing is left that can fail.
//!
//! Reads continue throughout: the map in memory stays true, as the new layer is empty. Changes wait
//! while the gate is held: as long as it takes to flush what was written since the previous flush.
//! What else closes the old layer, counts, bitmaps and marks, is done while changes go on above.
//! Dirty bitmaps that are kept true go on, empty, in the new layer ([`super::dirty`]).
//!
//! Invariants
//! - I1 What was acknowledged before the gate is held is durable in the layer that gets frozen, and
//!   nothing else is in it; what is acknowledged later is in the new layer.
//! - I2 After an error the chain is unchanged: its writer, which was not closed, goes on. A writer
//!   that was closed never does.
//! - I3 Once it is closed, the frozen layer is read through a file of its own, so that the one that
//!   was written, and with it the locks that keep other readers out, can go.
//! - I4 If files change their names ([`Renaming`]): the old name is the active layer's whenever
//!   something is acknowledged, also after the process was killed, and after a power cut whenever a
//!   flush was. The gate is let go only when the new names are durable.
//! - I5 If the process dies before the old layer is closed, that one is in use, and lacks nothing
//!   that is read: no link of it is in its log alone. Its counts are too high at most. If it cannot
//!   be closed, the new layer is marked as in use: that it was frozen is not forgotten.

use super::{Chain, not_writable, open_writer};
use crate::layer::Layer;
use crate::open::{check_length, freeze, freeze_open, open_overlay};
use crate::write::Writer;
use mica_block::{Disk, Error, Pushed, Renaming, Result, SnapshotGroup};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Flushes before the one for which changes wait.
const FLUSHES_AHEAD_MAX: u32 = 4;
/// A flush that took no longer had little to do.
const SHORT_FLUSH: Duration = Duration::from_millis(1);

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
        let (mut layer, metadata) =
            open_overlay(&*map.images, path, (&before, names.is_some())).await?;
        if names.is_some() {
            layer.path = Arc::clone(&before.active().path);
        }
        let layer = Arc::new(layer);
        let next = (&layer, path);
        let next = open_writer(map, next, metadata, &self.gate, self.repair).await?;
        self.continue_bitmaps(&writer, &next, path).await?;
        self.flush_ahead().await?;
        let start = mica_rt::now();
        let held = self.gate.hold().await;
        if let Some(group) = group {
            group.all_hold().await?;
        }
        // The disk may have grown since the overlay was opened.
        check_length(&layer, before.active())?;
        let freezing =
            async |writer: Arc<Writer>| self.freeze(&writer, before.active(), names).await;
        let frozen = Arc::clone(&writer).complete(freezing).await?;
        if let Some(group) = group {
            group.all_taken().await?;
        }
        map.replace_layers(before.pushed(Arc::new(frozen), layer));
        let next = Arc::new(next);
        self.writer.store(Some(Arc::clone(&next)));
        let mut named = Ok(());
        if let Some(names) = names {
            map.images.note_name(&before.active().path);
            named = names.sync().await;
            if let Err(error) = &named {
                // A power cut may show the old name, under which nothing of what follows is.
                next.fail(error);
            }
        }
        drop(held);
        let pause = mica_rt::now().saturating_since(start);
        self.close_frozen((writer, next), before.active(), names).await;
        map.index_call.set();
        named.map(|()| Pushed { pause })
    }

    /// Flushes until little is left to flush while changes wait: what came during one flush takes
    /// the next one.
    async fn flush_ahead(&self) -> Result<()> {
        for _ in 0..FLUSHES_AHEAD_MAX {
            let start = mica_rt::now();
            self.flush().await?;
            if mica_rt::now().saturating_since(start) <= SHORT_FLUSH {
                break;
            }
        }
        Ok(())
    }

    /// Makes durable what the `active` layer holds; returns that as one that is frozen, under its
    /// new name if it has one.
    async fn freeze(
        &self,
        writer: &Writer,
        active: &Layer,
        names: Option<&dyn Renaming>,
    ) -> Result<Layer> {
        writer.flush().await?;
        let images = &*self.map.images;
        let Some(names) = names else { return freeze_open(images, active, &active.path) };
        names.rename().await?;
        match freeze_open(images, active, names.kept()) {
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

    /// Closes the writer of the layer that was `active`, and opens that again: closing has changed
    /// its file. The snapshot is taken whether that succeeds or not (I5).
    async fn close_frozen(
        &self,
        (writer, next): (Arc<Writer>, Arc<Writer>),
        active: &Layer,
        names: Option<&dyn Renaming>,
    ) {
        let path = names.map_or(&*active.path, |names| names.kept());
        let closed = writer.complete(async |writer: Arc<Writer>| writer.close().await).await;
        if let Err(error) = &closed {
            tracing::warn!(
                image = %path.display(),
                %error,
                "the snapshot is taken, and the frozen layer could not be closed: it uses more \
                 space than it needs, until `mica check -r leaks` is run on it"
            );
            // The mark of the layer beneath says nothing of one that is empty and unused (I5).
            let used = next.complete(async |next: Arc<Writer>| next.mark_in_use().await).await;
            if let Err(error) = used {
                tracing::warn!(image = %path.display(), %error, "it may be written on");
            }
        }
        match freeze(&*self.map.images, active, path) {
            Ok(frozen) => self.map.replace_layers(self.map.layers().replaced(Arc::new(frozen))),
            // It is read through the file of its writer.
            Err(error) => tracing::warn!(image = %path.display(), %error, "it stays locked"),
        }
    }
}

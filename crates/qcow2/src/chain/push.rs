//! A new active layer under running requests.
//!
//! ```text
//! [write ahead ─▶] open the overlay ─▶ sync, if there is data ─▶ hold the gate ─▶ write out
//!   ─▶ names ─▶ the layers ─▶ the writer ─▶ let go ─▶ the frozen layer and the names durable
//!   ─▶ close the old writer
//! ```
//!
//! Of several chains as a group each waits for all others twice: when it holds its gate, and when
//! nothing is left that can fail.
//!
//! Reads continue throughout: the map in memory stays true, as the new layer is empty. Changes wait
//! while the gate is held, which is as long as it takes to put pages into the page cache and to
//! change a name. Only if links of the last moment must not be there before their data is, changes
//! wait for the sync between the two, and most of what it has to do is done before the gate is
//! held. Flushes wait until what lies beneath is durable ([`crate::write::beneath`]). Dirty bitmaps
//! that are kept true go on, empty, in the new layer ([`super::dirty`]).
//!
//! What a crash leaves, by when it comes:
//!
//! ```text
//!                     process killed                     power cut
//! before the names    the old layer is written, with     the old layer is written, as after any
//!                     its log; the overlay is a stray    power cut; the overlay is a stray file
//! names ─▶ durable    the overlay is written. The old    either of them is written. If it is the
//!                     layer has all that it has in its   overlay, the old layer is as after any
//!                                                        power cut: nobody was told that more
//!                                                        is durable, and what is already in the
//!                                                        overlay is newer, and was not flushed
//! durable ─▶ closed   the overlay is written             the overlay is written
//! ```
//!
//! A frozen layer that was not closed is closed by the next process that opens the chain for
//! writing ([`crate::unclosed`]).
//!
//! Invariants
//! - I1 What was acknowledged before the gate is held is in the layer that gets frozen, and nothing
//!   else is in it; what is acknowledged later is in the new layer.
//! - I2 After an error the chain is unchanged: its writer, which was not closed, goes on. A writer
//!   that was closed never does. Only if something cannot be made durable after the gate was let
//!   go, the new layer stays on top, and nothing more is acknowledged.
//! - I3 Once it is closed, the frozen layer is read through a file of its own, so that the one that
//!   was written, and with it the locks that keep other readers out, can go.
//! - I4 The names say what is written ([`Renaming`]): the new layer's from before anything is
//!   acknowledged that is in it, also after the process was killed. No flush of it is acknowledged,
//!   and no snapshot, before the names and all of the frozen layer are durable.
//! - I5 Once the names say that it is frozen, no link of the old layer is in its log alone: it
//!   lacks nothing that is read, also if the process dies before it is closed. Its counts are too
//!   high at most.
//! - I6 Another layer is put on top only when the one before is settled and closed: only the layer
//!   just beneath the active one may not be durable yet.

use super::{Chain, not_writable, open_writer};
use crate::layer::Layer;
use crate::layers::Layers;
use crate::open::{check_length, freeze, freeze_open, open_overlay};
use crate::write::Writer;
use mica_block::{Error, LocalFuture, Pushed, Renaming, Result, SnapshotGroup};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Flushes before the gate is held.
const FLUSHES_AHEAD_MAX: u32 = 4;
/// A flush that took no longer had little to do.
const SHORT_FLUSH: Duration = Duration::from_millis(1);
/// A flush that took no longer, but more of the time of the one before, in percent, took it for
/// what every flush costs on this device.
const LONG_FLUSH: Duration = Duration::from_millis(50);
const SHORTER_PERCENT: u32 = 75;

impl Chain {
    /// Puts the image at `path` on top: an empty overlay of the active layer. From then on it is
    /// the one that is written, and `names` say so. If it is one of a `group`, that happens at one
    /// instant with the others: if one fails, all do.
    ///
    /// # Errors
    /// `Denied` if the chain is open for reading only, if the policy forbids the image, or while
    /// layers are merged;
    /// `Invalid` if the image is no such overlay; `Limit` if the chain already has as many layers
    /// as it may have; why the group has failed; else any error of the stores and the names.
    pub async fn push(
        &self,
        path: &Path,
        names: &dyn Renaming,
        group: Option<&SnapshotGroup>,
    ) -> Result<Pushed> {
        let pushed = self.put_on_top(path, names, group).await;
        pushed.map_err(|error: Error| match group {
            None => error,
            Some(group) => group.fail(error),
        })
    }

    /// Makes durable what the active layer has to write out, if that is much: a [`Chain::push`]
    /// soon after finds little.
    ///
    /// # Errors
    /// Any failure of the flush. A chain that is only read has nothing to write out.
    pub async fn write_ahead(&self) -> Result<()> {
        // What a flush is about to make durable, a push must not take for durable.
        let _alone = self.pushing.lock().await;
        let Some(writer) = self.writer.load_full() else { return Ok(()) };
        flush_ahead(async || flush_if_slow_to_write_out(&writer).await).await
    }

    async fn put_on_top(
        &self,
        path: &Path,
        names: &dyn Renaming,
        group: Option<&SnapshotGroup>,
    ) -> Result<Pushed> {
        let _alone = self.pushing.lock().await;
        self.merging.check_none()?;
        let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
        let map = &self.map;
        let before = map.layers();
        let (layer, next) = self.open_next(path, &before, names).await?;
        self.continue_bitmaps(&writer, &next, path).await?;
        flush_while_long(async || flush_or_sync_ahead(&writer).await).await?;
        let start = mica_rt::now();
        let held = self.gate.hold().await;
        let freezing = async |writer: Arc<Writer>| {
            if let Some(group) = group {
                group.all_hold().await?;
            }
            // The disk may have grown since the overlay was opened.
            check_length(&layer, before.active())?;
            self.freeze(&writer, before.active(), names, group).await
        };
        let frozen = Arc::clone(&writer).complete(freezing).await?;
        map.replace_layers(before.pushed(Arc::new(frozen), layer));
        let settling = next.begin_settling();
        self.writer.store(Some(next));
        if names.kept().is_some() {
            map.images.note_name(&before.active().path);
        }
        drop(held);
        let pause = mica_rt::now().saturating_since(start);
        let settled = settle(&writer, names).await;
        settling.end(&settled);
        self.close_frozen(writer, before.active(), names).await;
        map.index_call.set();
        settled.map(|()| Pushed { pause })
    }

    /// The image at `path` as a layer on top of those `before`, and its writer.
    async fn open_next(
        &self,
        path: &Path,
        before: &Layers,
        names: &dyn Renaming,
    ) -> Result<(Arc<Layer>, Arc<Writer>)> {
        let map = &self.map;
        let takes_name = names.kept().is_some();
        let (mut layer, metadata) = open_overlay(&*map.images, path, (before, takes_name)).await?;
        if takes_name {
            layer.path = Arc::clone(&before.active().path);
        }
        let layer = Arc::new(layer);
        let next = open_writer(map, (&layer, path), metadata, &self.gate, self.repair).await?;
        // Until it is on top, nothing is in it that needs what lies beneath.
        next.takes_beneath_as_durable();
        Ok((layer, Arc::new(next)))
    }

    /// Writes out what the `active` layer holds, and changes the names, if all others of the group
    /// get as far; returns the layer as one that is frozen.
    async fn freeze(
        &self,
        writer: &Writer,
        active: &Layer,
        names: &dyn Renaming,
        group: Option<&SnapshotGroup>,
    ) -> Result<Layer> {
        writer.write_out().await?;
        let named = async {
            names.rename().await?;
            let taken = async {
                let path = names.kept().unwrap_or(&active.path);
                let frozen = freeze_open(&*self.map.images, active, path)
                    .map_err(|error| error.wrap(path.display().to_string()))?;
                if let Some(group) = group {
                    group.all_taken().await?;
                }
                Ok(frozen)
            };
            match taken.await {
                Ok(frozen) => Ok(frozen),
                Err(error) => {
                    if let Err(undone) = names.undo().await {
                        // What is written next would be found under no name that is opened.
                        writer.fail(&undone);
                    }
                    Err(error)
                }
            }
        };
        match named.await {
            Ok(frozen) => Ok(frozen),
            Err(error) => {
                // The writer goes on, and takes what it wrote out to be durable. If it cannot be,
                // the writer has failed.
                let _ = writer.sync_written_out().await;
                Err(error)
            }
        }
    }

    /// Closes the writer of the layer that was `active`, and opens that again: closing has changed
    /// its file. The snapshot is taken whether that succeeds or not (I5).
    async fn close_frozen(&self, writer: Arc<Writer>, active: &Layer, names: &dyn Renaming) {
        let path = names.kept().unwrap_or(&active.path);
        let close = async |writer: Arc<Writer>| writer.close_frozen().await;
        if let Err(error) = writer.complete(close).await {
            tracing::warn!(
                image = %path.display(),
                %error,
                "the snapshot is taken, and the frozen layer could not be closed: it uses more \
                 space than it needs, until `mica check -r leaks` is run on it"
            );
        }
        match freeze(&*self.map.images, active, path) {
            Ok(frozen) => self.map.replace_layers(self.map.layers().replaced(Arc::new(frozen))),
            // It is read through the file of its writer.
            Err(error) => tracing::warn!(
                image = %path.display(),
                %error,
                "the frozen layer stays locked: reopening it read-only failed"
            ),
        }
    }
}

/// Flushes `writer` if writing out its changes would keep guests waiting for long. Returns whether
/// it did.
async fn flush_if_slow_to_write_out(writer: &Arc<Writer>) -> Result<bool> {
    if !writer.has_much_to_write_out() {
        return Ok(false);
    }
    let flush = async |writer: Arc<Writer>| writer.flush_ahead().await;
    Arc::clone(writer).complete(flush).await.map(|()| true)
}

/// Shortens the time for which changes will wait: flushes if there are many pages to write, syncs
/// if only data has to be durable before links to it. A flush would not help then: there are soon
/// other such links. Returns whether it did either.
async fn flush_or_sync_ahead(writer: &Arc<Writer>) -> Result<bool> {
    if writer.has_many_pages() {
        return flush_if_slow_to_write_out(writer).await;
    }
    if !writer.needs_sync_between() {
        return Ok(false);
    }
    let sync = async |writer: Arc<Writer>| writer.sync_ahead().await;
    Arc::clone(writer).complete(sync).await.map(|()| true)
}

/// Flushes until little is left to be written out: what came during one flush takes the next one.
/// `flush` returns whether there was enough to be worth it.
///
/// # Errors
/// Those of `flush`.
pub async fn flush_ahead(mut flush: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let mut before = Duration::MAX;
    for _ in 0..FLUSHES_AHEAD_MAX {
        let start = mica_rt::now();
        if !flush().await? {
            break;
        }
        let took = mica_rt::now().saturating_since(start);
        let is_of_device = took <= LONG_FLUSH && took > before / 100 * SHORTER_PERCENT;
        if took <= SHORT_FLUSH || is_of_device {
            break;
        }
        before = took;
    }
    Ok(())
}

/// Flushes once, and again only while it takes so long that much came meanwhile. `flush` returns
/// whether there was enough to be worth it.
///
/// # Errors
/// Those of `flush`.
pub async fn flush_while_long(mut flush: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    for _ in 0..FLUSHES_AHEAD_MAX {
        let start = mica_rt::now();
        if !flush().await? || mica_rt::now().saturating_since(start) <= LONG_FLUSH {
            break;
        }
    }
    Ok(())
}

/// Makes durable what the frozen layer's `writer` wrote out, and the names (I4).
async fn settle(writer: &Writer, names: &dyn Renaming) -> Result<()> {
    let written: LocalFuture<'_, Result<()>> = match writer.has_begun_since() {
        true => Box::pin(writer.sync_written_out()),
        false => Box::pin(async { Ok(()) }),
    };
    mica_rt::join_all([written, names.sync()]).await.into_iter().collect()
}

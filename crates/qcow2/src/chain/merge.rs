//! Layers are taken out of a chain under running requests: what they own goes up into the active
//! layer (*stream*) or into a frozen one (*raise*), or down into a frozen one (*commit*).
//!
//! ```text
//! stream   base … [between] … active     data goes up,   active names the base
//! raise    base … [between] … into above data goes up,   into names the base
//! commit   base … [sources … top] above  data goes down, above names the base
//!          base … [sources … active]     data goes down, active is empty and names the base
//!
//! copy, step by step ─▶ durable ─▶ the header of the layer above names the base ─▶ durable
//!   ─▶ the layers in memory ─▶ nobody reads through those that left any more
//! ```
//!
//! Stream copies in transactions of the active layer's own writer, under the claims of the clusters
//! ([`crate::write::pull`]): what a guest writes, before or after, is newer and stays. What the
//! active layer owns it keeps, so that what was copied once need not be looked at again; a last
//! pass that finds nothing to copy proves it, and a disk that grew meanwhile gets one more.
//!
//! How the active layer itself is committed is in [`active`].
//!
//! Commit opens the base for writing and gives it a [`Writer`](crate::write::Writer) of its own,
//! over a map that ends with the base. All that it reads is frozen. Raise opens the layer that
//! takes over in the same way.
//!
//! Invariants
//! - I1 The chain shows the same at every instant, in memory and in the files: stream adds to the
//!   active layer what shows there already, and raise to a frozen one; commit changes bytes of the
//!   base only where a layer above it, up to the top, owns them or ends before them, which hides
//!   them until the header of the layer above the top names the base.
//! - I2 That header is written only when everything that was copied is durable, and in one sector:
//!   a power cut leaves the chain with the layers or without them.
//! - I3 No slice, sidecar or decoded cluster in memory outlives what it was made of. The tree of
//!   the index ends beneath the lowest layer that changes or leaves, and nobody has a longer one,
//!   before the layers are exchanged; sidecars are not written meanwhile. Slices that name a layer
//!   which leaves are dropped; a layer that leaves is found by its number until every request is
//!   done that may have a plan with it.
//! - I4 While the base, or the layer that takes over, is written the chain reads it through its
//!   writer's pages. A place in it is not used again before every request that may have found it is
//!   done: the writer waits at the chain's gate, and the chain's slices of what was written are
//!   dropped before the next flush.
//! - I5 The base gets no redo log: all that it could lose is in the layers above; or, of a layer
//!   that takes over in a raise, in those that leave, until it is durable.
//! - I6 One merge of a chain at a time; no layer is put on top meanwhile.
//! - I7 After an error, or if it is cancelled, the chain has the layers that it had, and the base
//!   is closed properly if it can be; but an active layer whose header could not be written, after
//!   which nothing is, may stand on the base.
//! - I8 When layers have left, what the dirty bitmaps of a name say together has all that it had
//!   before, and what was copied into a layer that keeps bitmaps; see [`bitmaps`].
//! - I9 No internal snapshot changes: a layer whose backing file gets another name or other content
//!   has none. Of a stream or a raise that is the layer that takes over; of a commit, the layers
//!   above the base up to the top. The base's own snapshots have what they have in clusters of
//!   their own, and the layer above the top stands on the same content as before.
//!
//! A base that was not closed, since the process died, is closed by the next one that opens the
//! chain for writing, or that merges into it ([`crate::unclosed`]).
//!
//! Power cuts. Before the header is durable the old layers are there, unchanged; the active layer
//! has more of its own (stream), or the base differs where nobody sees it (commit; if its length
//! grew, the new part is zeros to whoever could see it). After it the base is complete. Sidecars
//! need no care: their seals tell position, length, timestamps and tables of their layers, and the
//! layer above the top has another header.

mod active;
mod bitmaps;
mod check;
mod commit;
mod pace;
mod raise;
mod sources;
mod stream;
mod target;
mod touched;

use super::{Chain, not_writable};
use crate::layer::Layer;
use crate::layers::Layers;
use crate::open::same_file;
use crate::snapshots::check_none_stands_on_backing;
use mica_block::{Error, ErrorKind, Images, Merged, Result};
use mica_qcow2_format::{BackingName, parse_image_name};
use mica_units::LayerNumber;
use parking_lot::Mutex;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of the disk that one step copies at most, rounded up to a cluster.
const STEP_BYTES: u64 = 1 << 20;
/// Bytes of the disk that are looked at together, to find what has to be copied.
const SCAN_BYTES: u64 = 32 << 20;

/// What a chain remembers of its merges.
#[derive(Default)]
pub(super) struct Merging {
    is_under_way: AtomicBool,
    /// What slows down the guest so that a merge ends.
    pub(super) brake: pace::Brake,
    /// What the guest changes while the active layer is merged.
    pub(super) touches: touched::Touches,
    /// Where a commit that did not end goes on.
    resumes: Mutex<Option<Resume>>,
}

/// How far a commit of these layers got. They are frozen, and this process keeps the base locked.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Resume {
    base: LayerNumber,
    top: LayerNumber,
    done: u64,
}

/// A merge is under way until this is dropped.
#[must_use = "the merge ends when this is dropped"]
struct UnderWay<'a>(&'a Merging);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.is_under_way.store(false, Ordering::SeqCst);
    }
}

impl Merging {
    /// Refuses what must not happen during a merge.
    ///
    /// # Errors
    /// `Denied` while one is under way.
    pub(super) fn check_none(&self) -> Result<()> {
        match self.is_under_way.load(Ordering::SeqCst) {
            true => Err(Error::new(
                ErrorKind::Denied,
                "layers of the chain are being merged: wait for the end, or cancel it",
            )),
            false => Ok(()),
        }
    }
}

impl Merging {
    /// Refuses to let the disk grow while its active layer goes down.
    ///
    /// # Errors
    /// `Denied` in that case.
    pub(super) fn check_may_grow(&self) -> Result<()> {
        match self.touches.are_wanted() {
            true => Err(Error::new(
                ErrorKind::Denied,
                "the disk cannot grow while its active layer is committed",
            )),
            false => Ok(()),
        }
    }
}

impl Chain {
    /// Begins a merge (I6).
    async fn begin_merge(&self) -> Result<UnderWay<'_>> {
        if self.writer.load().is_none() {
            return Err(not_writable());
        }
        // Whoever puts a layer on top is done, or sees that a merge is under way.
        let _alone = self.pushing.lock().await;
        self.merging.check_none()?;
        self.merging.is_under_way.store(true, Ordering::SeqCst);
        Ok(UnderWay(&self.merging))
    }

    /// What `merge` gives, when all that it began has ended: whoever asked for it may end the
    /// executor.
    pub(super) async fn settled(
        &self,
        merge: impl Future<Output = Result<Merged>>,
    ) -> Result<Merged> {
        let merged = merge.await;
        self.gate.changes_grace().await;
        merged
    }

    /// The last step of every merge: `next` are the layers from now on, with those that left
    /// retired. Slices that name only layers that `keeps` allows stay. The caller holds the gate,
    /// and nobody has a tree that covers what changes (I3).
    fn exchange_layers(&self, next: Layers, keeps: impl Fn(LayerNumber) -> bool) {
        self.map.exchange_layers(next, keeps);
        self.map.index.forget_distrust();
    }

    /// Forgets retired layers once nobody can name them.
    async fn forget_retired(&self) {
        self.gate.grace().await;
        self.map.decoded.clear();
        self.map.replace_layers(self.map.layers().without_retired());
    }
}

/// Warns if what one of the `leaving` layers has encrypted goes into `target` as it is.
fn warn_of_plain(target: &Layer, leaving: &[Arc<Layer>]) {
    if target.cipher.is_some() {
        return;
    }
    if let Some(layer) = leaving.iter().find(|layer| layer.cipher.is_some()) {
        let (target, layer) = (target.path.display(), layer.path.display());
        tracing::warn!("{target} is not encrypted, and {layer}, which is merged into it, is");
    }
}

/// Makes sure that what lies beneath these `layers` may change (I9).
async fn check_no_snapshots(layers: &[Arc<Layer>]) -> Result<()> {
    for layer in layers.iter().filter(|layer| layer.tables.is_some()) {
        check_none_stands_on_backing(&*layer.store, &layer.path).await?;
    }
    Ok(())
}

/// The position of the layer whose file is at `path`.
fn position_at(images: &dyn Images, layers: &Layers, path: &Path) -> Result<usize> {
    let wanted = images.identify(path)?;
    let is_it = |layer: &Arc<Layer>| same_file(layer.identity, wanted);
    layers.all().iter().position(is_it).ok_or_else(|| {
        let context = format!("{} is not a layer of the chain", path.display());
        Error::new(ErrorKind::Invalid, context)
    })
}

/// The name by which `upper` names `base` as its backing file: a plain one if both are in one
/// folder.
fn backing_name(images: &dyn Images, upper: &Layer, base: &Layer) -> Result<BackingName> {
    let (from, to) = (absolute(&upper.path)?, absolute(&base.path)?);
    let mut names: Vec<OsString> = Vec::new();
    if from.parent() == to.parent()
        && let Some(name) = to.file_name()
    {
        names.push(name.to_owned());
        // A colon in it would look like a protocol.
        let mut here = OsString::from("./");
        here.push(name);
        names.push(here);
    }
    names.push(to.into());
    let leads_there = |name: &OsString| {
        let resolved = parse_image_name(name).and_then(|name| match name.format {
            None => images.resolve(&upper.path, &name.path),
            Some(_) => Err(Error::new(ErrorKind::Invalid, "it looks like JSON")),
        });
        let found = resolved.and_then(|path| images.identify(&path));
        found.is_ok_and(|found| same_file(found, base.identity))
    };
    let name = names.into_iter().find(leads_there).ok_or_else(|| {
        let context = format!(
            "{} has no name by which {} could name it",
            base.path.display(),
            upper.path.display()
        );
        Error::new(ErrorKind::Unsupported, context)
    })?;
    Ok(BackingName { name, format: Some(base.format_name().to_owned()) })
}

fn absolute(path: &Path) -> Result<std::path::PathBuf> {
    std::path::absolute(path).map_err(|error| Error::from_io(path.display().to_string(), error))
}

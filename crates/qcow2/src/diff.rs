//! What differs between two states of chains, without reading data: what the layers own that only
//! one of them has.
//!
//! ```text
//! two names ─▶ descent: layers from the top down, on both sides, until they meet
//!           ─▶ sources: where these layers own something: by their tables, or by the index
//!           ─▶ windows: the union, piece by piece
//! ```
//!
//! Invariants
//! - I1 What is not named as different is equal: its uppermost owner is a layer that both have, or
//!   nobody. What is named may be equal, too, if the same bytes were written again.
//! - I2 The work is that of the layers that only one state has: those beneath the layer at which
//!   they meet are not read at all. Nor is a node of the index that they do not have in common.
//! - I3 Memory is bounded: the headers of those layers, and one window of owners.
//! - I4 An index is used only under the seals of those layers; what is damaged in it costs time. A
//!   tree that failed has lost its place, and one that has passed a window cannot go back to it: so
//!   after a failure none of them is asked again.

mod descent;
mod ranges;
mod tree;

use crate::index::sidecar::Header as Seal;
use crate::layer::Layer;
use crate::snapshots::SnapshotSelector;
use descent::{Descended, descend};
use mica_block::{Images, Result};
use mica_units::{GuestOffset, GuestRange};
use ranges::Ranges;
use std::path::Path;
use std::sync::Arc;
use tree::Tree;

/// Windows in which owners are gathered: at least, and at most.
const WINDOW_BYTES_MIN: u64 = 32 << 20;
const WINDOW_BYTES_MAX: u64 = 1 << 30;

/// A state of a chain.
#[derive(Clone, Copy)]
pub struct DiffState<'a> {
    /// What opens its images.
    pub images: &'a dyn Images,
    /// Its uppermost layer.
    pub path: &'a Path,
    /// The format of that.
    pub format: DiffFormat,
    /// An internal snapshot of that.
    pub snapshot: Option<&'a SnapshotSelector>,
}

/// The format of an uppermost layer, which is always stated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiffFormat {
    /// A qcow2 image.
    Qcow2,
    /// The disk's bytes, as they are.
    Raw,
    /// A LUKS image.
    Luks,
}

/// What two states of chains do not share.
pub struct ChainDiff {
    sides: [Side; 2],
    common: Option<Arc<Layer>>,
    /// The lowest layers of both that they do not share, if they are states of the same file: an
    /// internal snapshot is one of them.
    same_file: Option<[Arc<Layer>; 2]>,
    sources: Vec<Source>,
    window_bytes: u64,
    at: u64,
    end: u64,
}

/// What one state has and the other has not.
struct Side {
    /// From the top.
    layers: Vec<Arc<Layer>>,
    /// Bytes of the disk.
    len: u64,
}

/// Where layers say what they own.
enum Source {
    Tables(Arc<Layer>),
    Tree(Box<Tree>),
}

/// The place of a source whose tree is unusable.
struct Unusable(usize);

impl ChainDiff {
    /// The difference of `first` and `second`.
    ///
    /// # Errors
    /// Anything that makes one of the images unusable down to the layer at which the two meet.
    pub async fn open(first: DiffState<'_>, second: DiffState<'_>) -> Result<Self> {
        let Descended { tops, own, common } = descend([first, second]).await?;
        let mut sources = Vec::new();
        let same_file = same_file(&own);
        for (state, layers) in [first, second].into_iter().zip(&own) {
            let others = layers.len() - usize::from(same_file.is_some());
            sources.append(&mut sources_of(state, &layers[..others]).await);
        }
        let [one, other] = own;
        let sides = [(one, tops[0].len()), (other, tops[1].len())];
        let sides = sides.map(|(layers, len)| Side { layers, len });
        let tables = sides.iter().flat_map(|side| &side.layers);
        let tables = tables.filter_map(|layer| layer.tables.as_ref());
        let window_bytes = tables.map(|tables| tables.l2.table_bytes()).max().unwrap_or(0);
        let window_bytes = window_bytes.clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX);
        let end = sides.iter().map(|side| side.len).max().unwrap_or(0);
        Ok(Self { sides, common, same_file, sources, window_bytes, at: 0, end })
    }

    /// The uppermost layer that both have; `None` if they have nothing in common.
    pub fn common(&self) -> Option<&Path> {
        self.common.as_ref().map(|layer| &*layer.path)
    }

    /// Whether they share anything: a layer, or the clusters of one file.
    pub fn are_related(&self) -> bool {
        self.common.is_some() || self.same_file.is_some()
    }

    /// The layers that only the first, and only the second has, from the top.
    pub fn own_layers(&self) -> [Vec<&Path>; 2] {
        [0, 1].map(|side| self.sides[side].layers.iter().map(|layer| &*layer.path).collect())
    }

    /// Bytes of both disks.
    pub fn lens(&self) -> [u64; 2] {
        [0, 1].map(|side| self.sides[side].len)
    }

    /// The next ranges in which the two may differ, behind all that were returned, in order and
    /// disjoint; `None` if there are no more. Without anything in common they are all that either
    /// owns.
    ///
    /// # Errors
    /// If tables cannot be read.
    pub async fn next(&mut self) -> Result<Option<Vec<GuestRange>>> {
        while self.at < self.end {
            let next = match self.next_owned().await? {
                Ok(next) => next,
                Err(Unusable(source)) => {
                    self.leave_index(source);
                    continue;
                }
            };
            let Some(start) = next else {
                self.at = self.end;
                break;
            };
            let start = start / self.window_bytes * self.window_bytes;
            let end = start.saturating_add(self.window_bytes).min(self.end);
            let window = range(start, end);
            let found = match self.gather(window).await? {
                Ok(found) => found,
                Err(Unusable(source)) => {
                    self.leave_index(source);
                    continue;
                }
            };
            self.at = end;
            if !found.is_empty() {
                return Ok(Some(found.finish(window)));
            }
        }
        Ok(None)
    }

    /// Where the next thing lies that may differ, from the present place on.
    async fn next_owned(&mut self) -> Result<std::result::Result<Option<u64>, Unusable>> {
        let mut next = self.end;
        let from = |at, end| (GuestOffset::new(at), GuestOffset::new(end));
        for layer in self.same_file.iter().flatten() {
            let (at, end) = from(self.at, next);
            next = layer.unowned_until(at, end).await?.bytes();
        }
        for (index, source) in self.sources.iter_mut().enumerate() {
            let (at, end) = from(self.at, next);
            let found = match source {
                Source::Tables(layer) => layer.unowned_until(at, end).await?.bytes(),
                Source::Tree(tree) => match tree.next_from(self.at).await {
                    Ok(found) => found.unwrap_or(end.bytes()),
                    Err(_) => return Ok(Err(Unusable(index))),
                },
            };
            next = next.min(found);
        }
        if let Some(masked) = self.masked().filter(|masked| masked.end().bytes() > self.at) {
            next = next.min(masked.start().bytes().max(self.at));
        }
        Ok(Ok((next < self.end).then_some(next)))
    }

    /// What may differ in `window`.
    async fn gather(
        &mut self,
        window: GuestRange,
    ) -> Result<std::result::Result<Ranges, Unusable>> {
        let mut found = Ranges::default();
        if let Some([one, other]) = &self.same_file
            && !one.has_same_tables(other, window).await?
        {
            let runs = [one.own_runs(window).await?, other.own_runs(window).await?];
            found.add_difference(&runs[0], &runs[1]);
        }
        for (index, source) in self.sources.iter_mut().enumerate() {
            match source {
                Source::Tables(layer) => found.add(&layer.own_runs(window).await?),
                Source::Tree(tree) => {
                    if tree.add(window, &mut found).await.is_err() {
                        return Ok(Err(Unusable(index)));
                    }
                }
            }
        }
        if let Some(masked) = self.masked().and_then(|masked| masked.intersect(window)) {
            found.add_range(masked, window);
        }
        Ok(Ok(found))
    }

    /// From now on asks the tables of all layers, because the tree at `failed` is unusable (I4).
    fn leave_index(&mut self, failed: usize) {
        if let Some(Source::Tree(tree)) = self.sources.get(failed) {
            tracing::warn!(layer = %tree.path().display(), "the index of this layer is unusable");
        }
        let tables = |source| match source {
            Source::Tables(layer) => vec![layer],
            Source::Tree(tree) => tree.into_layers(),
        };
        let layers = std::mem::take(&mut self.sources).into_iter().flat_map(tables);
        self.sources = layers.map(Source::Tables).collect();
    }

    /// The part of the common layers that shows in one state, and lies beyond the end of a layer of
    /// the other.
    fn masked(&self) -> Option<GuestRange> {
        let common = self.common.as_ref()?.len();
        let ends = self
            .sides
            .each_ref()
            .map(|side| side.layers.iter().map(|layer| layer.len()).min().unwrap_or(u64::MAX));
        let (start, end) = (ends[0].min(ends[1]), ends[0].max(ends[1]).min(common));
        (start < end).then(|| range(start, end))
    }
}

fn range(start: u64, end: u64) -> GuestRange {
    let range = GuestRange::between(GuestOffset::new(start), GuestOffset::new(end));
    range.expect("it ends after it starts")
}

/// The lowest layers of both sides, if they are one file: with the same header they stand on the
/// same.
fn same_file(own: &[Vec<Arc<Layer>>; 2]) -> Option<[Arc<Layer>; 2]> {
    let (one, other) = (own[0].last()?, own[1].last()?);
    let file = |layer: &Layer| (layer.identity.device, layer.identity.inode);
    let is_same = file(one) == file(other) && one.tables.is_some() && other.tables.is_some();
    is_same.then(|| [Arc::clone(one), Arc::clone(other)])
}

/// What says where `layers` of `state`, from the top, own something: the index for as many of them
/// as it covers, and their own tables for those above. The index of an image is that of its
/// present, and says nothing of an internal snapshot.
async fn sources_of(state: DiffState<'_>, layers: &[Arc<Layer>]) -> Vec<Source> {
    let mut sealed: Vec<(Seal, Arc<dyn mica_block::Store>)> = Vec::new();
    let present = usize::from(state.snapshot.is_some()).min(layers.len());
    for layer in layers[present..].iter().rev() {
        let Some((seal, store)) = tree::read_seal(state.images, layer).await else { break };
        if sealed.last().is_some_and(|(below, _)| !tree::follows(&seal, below)) {
            break;
        }
        sealed.push((seal, store));
    }
    let (upper, lower) = layers.split_at(layers.len() - sealed.len());
    let mut sources: Vec<_> = upper.iter().cloned().map(Source::Tables).collect();
    if !lower.is_empty() {
        sources.push(Source::Tree(Box::new(Tree::new(sealed, lower.to_vec()))));
    }
    sources
}

#[cfg(test)]
mod tests;

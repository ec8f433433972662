//! Where some layers own something, by the index: the map of the uppermost of them, without
//! anything that is older than the lowest.
//!
//! A node that a lower layer's sidecar has says nothing of them, and is skipped with all below it.

use super::ranges::Ranges;
use crate::index::load::{BadNode, read_node_in};
use crate::index::node_ref::NodeRef;
use crate::index::sidecar::{HEADER_BYTES, Header as Seal};
use crate::index::slice::{Runs, SLICE_BITS, SLICE_SECTORS, Slice};
use crate::layer::Layer;
use mica_block::{Images, Store, read_exact};
use mica_map::{Directory, Walk, WalkStep, open_node};
use mica_units::{GuestRange, HostOffset};
use std::path::Path;
use std::sync::Arc;

/// The least that a node takes in a sidecar.
const NODE_BYTES_MIN: u64 = 10;

/// The index of some layers.
pub(super) struct Tree {
    /// From the top.
    layers: Vec<Arc<Layer>>,
    /// The sidecars of these layers, from the lowest.
    sidecars: Vec<Arc<dyn Store>>,
    /// The position of the lowest in its chain.
    lowest: u16,
    walk: Walk<NodeRef>,
    /// The next slice, by its number.
    pending: Option<(u64, Slice)>,
    /// How many nodes may still come: a damaged sidecar may name one node many times.
    nodes_left: u64,
}

/// The seal of a layer's sidecar and the sidecar, if it fits without reading the layer.
pub(super) async fn read_seal(
    images: &dyn Images,
    layer: &Layer,
) -> Option<(Seal, Arc<dyn Store>)> {
    layer.tables.as_ref()?;
    let store = images.sidecars().open(&layer.path).ok().flatten()?;
    let bytes = read_exact(&*store, HostOffset::ZERO, HEADER_BYTES).await.ok()?;
    let seal = Seal::decode(&bytes)?;
    let fits = store.len().ok()? == seal.len
        && seal.layer_len == layer.len()
        && seal.fits_unread(&layer.identity);
    fits.then_some((seal, store))
}

/// Whether the sidecar with this `seal` was built on the one whose seal is `below`.
pub(super) fn follows(seal: &Seal, below: &Seal) -> bool {
    seal.parent == Some(below.id) && Some(seal.layer) == below.layer.checked_add(1)
}

impl Tree {
    /// The index in these sidecars, from the lowest, each of which follows the one before; `layers`
    /// are theirs, from the top.
    pub(super) fn new(sealed: Vec<(Seal, Arc<dyn Store>)>, layers: Vec<Arc<Layer>>) -> Self {
        let (first, _) = sealed.first().expect("it covers a layer");
        let (last, _) = sealed.last().expect("it covers a layer");
        let bytes: u64 = sealed.iter().map(|(seal, _)| seal.len).sum();
        Self {
            layers,
            lowest: first.layer,
            walk: Walk::new(last.root, 0..=u64::MAX >> SLICE_BITS),
            pending: None,
            nodes_left: bytes / NODE_BYTES_MIN,
            sidecars: sealed.into_iter().map(|(_, store)| store).collect(),
        }
    }

    /// The uppermost layer that it covers.
    pub(super) fn path(&self) -> &Path {
        &self.layers[0].path
    }

    /// The layers that it covers.
    pub(super) fn into_layers(self) -> Vec<Arc<Layer>> {
        self.layers
    }

    /// Where the first slice that one of the layers changed starts, or `at` if that lies in it.
    /// What was added is passed.
    pub(super) async fn next_from(&mut self, at: u64) -> Result<Option<u64>, BadNode> {
        if self.pending.is_none() {
            self.advance().await?;
        }
        Ok(self.pending.as_ref().map(|(number, _)| (number << SLICE_BITS).max(at)))
    }

    /// Adds what the layers own in `window`, which consists of whole slices, unless the disk ends.
    pub(super) async fn add(
        &mut self,
        window: GuestRange,
        found: &mut Ranges,
    ) -> Result<(), BadNode> {
        let first = window.start().bytes() >> SLICE_BITS;
        loop {
            if self.pending.is_none() {
                self.advance().await?;
            }
            let Some((number, slice)) = self.pending.take() else { return Ok(()) };
            if number << SLICE_BITS >= window.end().bytes() {
                self.pending = Some((number, slice));
                return Ok(());
            }
            let Some(position) = number.checked_sub(first) else { continue };
            let sector = u32::try_from(position).expect("a window has few slices") * SLICE_SECTORS;
            let mut runs = Runs::default();
            slice.append_runs(sector, &mut runs);
            runs.retain_layers(|layer| layer.as_u16() >= self.lowest);
            found.add(&runs);
        }
    }

    /// Walks to the next slice.
    async fn advance(&mut self) -> Result<(), BadNode> {
        loop {
            match self.walk.next_step() {
                WalkStep::Done => return Ok(()),
                WalkStep::Read(at) if at.file() < self.lowest => self.walk.skip(),
                WalkStep::Leaf(_, at) if at.file() < self.lowest => {}
                WalkStep::Read(at) => {
                    let node = self.read(at).await?;
                    let payload = open_node(&node, at).map_err(|_| BadNode::damaged(at))?;
                    let directory = Directory::decode(payload, at);
                    self.walk.feed(directory.map_err(|_| BadNode::damaged(at))?);
                }
                WalkStep::Leaf(number, at) => {
                    let node = self.read(at).await?;
                    let payload = open_node(&node, at).map_err(|_| BadNode::damaged(at))?;
                    let slice = Slice::decode(payload, usize::from(at.file()) + 1);
                    self.pending = Some((number, slice.ok_or(BadNode::damaged(at))?));
                    return Ok(());
                }
            }
        }
    }

    async fn read(&mut self, at: NodeRef) -> Result<mica_rt::Buf, BadNode> {
        self.nodes_left = self.nodes_left.checked_sub(1).ok_or(BadNode::damaged(at))?;
        let index = usize::from(at.file() - self.lowest);
        let store = self.sidecars.get(index).ok_or(BadNode::damaged(at))?;
        read_node_in(&**store, at).await
    }
}

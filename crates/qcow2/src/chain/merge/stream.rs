//! Layers go up into the active one.

use super::pace::Pace;
use super::{SCAN_BYTES, STEP_BYTES, backing_name, check_no_snapshots, position_at, warn_of_plain};
use crate::chain::{Chain, not_writable};
use crate::layers::Layers;
use crate::map::Map;
use crate::write::Writer;
use crate::write::pull::Leaving;
use mica_block::{Disk, Error, ErrorKind, MergeControl, MergeProgress, Merged, Result};
use mica_qcow2_format::BackingName;
use mica_units::{GuestOffset, GuestRange, LayerNumber};
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;

/// Passes over a disk at most: two, and one more whenever it has grown.
pub(super) const PASSES_MAX: u32 = 1000;

/// How a pass over the disk ended.
enum Pass {
    /// It found so many bytes of the disk, and copied something or nothing.
    Ended {
        end: u64,
        is_settled: bool,
    },
    Cancelled,
}

/// A stream that is under way.
struct Stream<'a> {
    chain: &'a Chain,
    pace: Pace<'a>,
    leaving: Arc<Leaving>,
    copied: u64,
    /// How far a pass came.
    done: u64,
}

impl Chain {
    /// As [`ManageChain::stream`](mica_block::ManageChain::stream).
    pub(in crate::chain) async fn stream(
        &self,
        base: Option<&Path>,
        control: &dyn MergeControl,
    ) -> Result<Merged> {
        let _under_way = self.begin_merge().await?;
        self.set_resume(None);
        let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
        let layers = self.map.layers();
        let active = layers.frozen().len();
        let mut dropped = Vec::new();
        let Some((from, name)) = self.plan_stream(&writer, base).await? else {
            return Ok(Merged::Done { dropped, copied: 0 });
        };
        warn_of_plain(layers.active(), &layers.all()[from..active]);
        self.bitmaps_go_up(layers.all()[from..active].to_vec()).await?;
        let leaving = Arc::new(Leaving::new(&layers, from, active));
        let pace = Pace::new(self, &layers.all()[from..active], control);
        let mut stream = Stream { chain: self, pace, leaving, copied: 0, done: 0 };
        for pass in 0.. {
            if pass == PASSES_MAX {
                let context = "what was copied is not found in the active layer";
                return Err(Error::new(ErrorKind::Io, context));
            }
            let end = match stream.pass().await? {
                Pass::Cancelled => return Ok(Merged::Cancelled),
                Pass::Ended { is_settled: false, .. } => continue,
                Pass::Ended { end, .. } => end,
            };
            let copied = stream.copied;
            if let ControlFlow::Break(()) = stream.pace.ask_at_end(end, copied).await {
                return Ok(Merged::Cancelled);
            }
            if self.cut_below_active(&writer, from, end, name.as_ref()).await? {
                break;
            }
        }
        let gone = &layers.all()[from..active];
        dropped.extend(gone.iter().map(|layer| layer.path.to_path_buf()));
        Ok(Merged::Done { dropped, copied: stream.copied })
    }

    /// The position of the lowest layer that leaves, and by which name the active one names what is
    /// beneath that; `None` if nothing leaves.
    pub(super) async fn plan_stream(
        &self,
        writer: &Writer,
        base: Option<&Path>,
    ) -> Result<Option<(usize, Option<BackingName>)>> {
        let (images, layers) = (&*self.map.images, self.map.layers());
        let active = layers.frozen().len();
        let from = match base {
            None => 0,
            Some(path) => position_at(images, &layers, path)? + 1,
        };
        if from > active {
            let context = "the base is the active layer itself";
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        if from == active {
            return Ok(None);
        }
        check_no_snapshots(&layers.all()[active..]).await?;
        let name = match from {
            0 => None,
            from => Some(backing_name(images, layers.active(), &layers.all()[from - 1])?),
        };
        // A header without room for the name is better refused before than after.
        writer.plan_backing(name.as_ref()).await?;
        Ok(Some((from, name)))
    }

    /// Takes out the layers beneath the active one, from position `from` on, as the active layer
    /// owns what shows through them up to `end`. False if the disk is longer by now.
    async fn cut_below_active(
        &self,
        writer: &Arc<Writer>,
        from: usize,
        end: u64,
        name: Option<&BackingName>,
    ) -> Result<bool> {
        let map = &self.map;
        // So that little is left to flush while changes wait.
        self.flush().await?;
        let _index = map.hold_index().await;
        map.index.cut(from);
        // Whoever loads slices with the longer tree is done (I3).
        self.gate.grace().await;
        let held = self.gate.hold().await;
        if map.len() != end {
            return Ok(false);
        }
        let named = Arc::clone(writer).complete(async |writer| {
            writer.flush().await?;
            writer.name_backing(name).await
        });
        named.await?;
        let before = map.layers();
        let next = before.without(from, before.frozen().len(), from);
        let stays = is_layer_of(&next);
        self.exchange_layers(next, stays);
        drop(held);
        self.forget_retired().await;
        Ok(true)
    }
}

/// A predicate: whether a number is that of a layer of `layers` that is not retired.
pub(super) fn is_layer_of(layers: &Layers) -> impl Fn(LayerNumber) -> bool + use<> {
    let count = layers.all().iter().map(|layer| layer.number.index() + 1).max().unwrap_or(0);
    let mut stays = vec![false; count];
    layers.all().iter().for_each(|layer| stays[layer.number.index()] = true);
    move |number| stays.get(number.index()).copied().unwrap_or(false)
}

impl Stream<'_> {
    /// Goes over the disk once and copies what is missing.
    async fn pass(&mut self) -> Result<Pass> {
        let chain = self.chain;
        let (end, mut at, mut is_settled) = (chain.map.len(), 0, true);
        while at < end {
            // A later pass only looks whether something is missing.
            self.done = self.done.max(at);
            let (done, copied) = (self.done, self.copied);
            let progress = MergeProgress { done, total: end, copied, ..MergeProgress::default() };
            if let ControlFlow::Break(()) = self.pace.step(progress).await {
                return Ok(Pass::Cancelled);
            }
            let (needed, scanned) =
                first_missing(chain, &chain.map, &self.leaving, at..end).await?;
            let Some(needed) = needed else {
                at = scanned;
                continue;
            };
            self.pace.begin();
            is_settled = false;
            let writer = chain.writer.load_full();
            let writer = writer.as_ref().expect("a disk that is written stays so");
            let window = step_from(writer, at, needed.bytes(), end);
            let leaving = Arc::clone(&self.leaving);
            let pulled = async move |writer: Arc<Writer>| writer.pull(window, &leaving).await;
            self.copied += chain.change(pulled).await?;
            at = window.end().bytes();
        }
        Ok(Pass::Ended { end, is_settled })
    }
}

/// The first byte of what `map` shows in the `rest` of the disk that has to be copied before the
/// layers that are `leaving` are gone, if one is found, and how far was looked.
pub(super) async fn first_missing(
    chain: &Chain,
    map: &Map,
    leaving: &Leaving,
    rest: Range<u64>,
) -> Result<(Option<GuestOffset>, u64)> {
    let Range { start: at, end } = rest;
    let (start, disk_end) = (GuestOffset::new(at), GuestOffset::new(end));
    let rest = GuestRange::between(start, disk_end).expect("it goes on");
    let _in_flight = chain.gate.enter();
    if leaving.ignores_holes(rest)
        && let Some(len) = map.skip_unowned(start, disk_end).await?
    {
        return Ok((None, at + len));
    }
    let stop = end.min((at / SCAN_BYTES + 1) * SCAN_BYTES);
    let window = GuestRange::between(start, GuestOffset::new(stop)).expect("it goes on");
    let extents = map.plan(window).await?;
    Ok((leaving.first_need(&extents), stop))
}

/// What one step of a `writer` looks at that begins with `needed`, or, so that it has whole
/// clusters of its layer, somewhat before, but not before `at`. At most one transaction.
pub(super) fn step_from(writer: &Writer, at: u64, needed: u64, end: u64) -> GuestRange {
    let cluster_bytes = writer.cluster_bytes();
    let start = at.max(needed / cluster_bytes * cluster_bytes);
    let step = (start + STEP_BYTES.max(cluster_bytes)) / cluster_bytes * cluster_bytes;
    let stop = step.min(writer.transaction_end(start)).min(end);
    GuestRange::between(GuestOffset::new(start), GuestOffset::new(stop)).expect("it goes on")
}

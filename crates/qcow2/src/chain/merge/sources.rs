//! The layers that a commit takes from: what they own of the disk, the uppermost first, and nothing
//! of what is above or beneath them.

use crate::decoded::DecodedClusters;
use crate::index::load::sectors_of;
use crate::index::slice::{Runs, SLICE_BITS, SLICE_BYTES, SLICE_SECTORS};
use crate::layer::Layer;
use crate::map::slice_of;
use mica_block::{Extent, ExtentKind, Result};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, LayerNumber};
use std::collections::HashMap;
use std::sync::Arc;

/// Slices that are looked at together.
const WINDOW_SLICES: u64 = 8;
/// Layers whose tables are read concurrently.
const BATCH: usize = 64;

/// Frozen layers, from the lowest.
pub(super) struct Sources {
    layers: Vec<Arc<Layer>>,
    by_number: HashMap<LayerNumber, Arc<Layer>>,
    /// From here on the shortest of them hides what is beneath.
    hides_from: u64,
    decoded: DecodedClusters,
}

/// What the layer beneath them has to show in their place.
pub(super) enum Wanted {
    /// The bytes at these places, which follow one another.
    Data(Vec<Extent>),
    Zeros(GuestRange),
}

impl Sources {
    pub(super) fn new(layers: &[Arc<Layer>]) -> Self {
        let by_number = layers.iter().map(|layer| (layer.number, Arc::clone(layer))).collect();
        let hides_from = layers.iter().map(|layer| layer.len()).min().unwrap_or(u64::MAX);
        Self { layers: layers.to_vec(), by_number, hides_from, decoded: DecodedClusters::default() }
    }

    /// Bytes of the disk that the uppermost covers.
    pub(super) fn top_len(&self) -> u64 {
        self.layers.last().map_or(0, |layer| layer.len())
    }

    /// The end of what is looked at together from `at` on.
    pub(super) fn window(at: u64, end: u64) -> GuestRange {
        let (slice, _) = slice_of(GuestOffset::new(at));
        let stop = ((slice / WINDOW_SLICES + 1) * WINDOW_SLICES) << SLICE_BITS;
        GuestRange::between(GuestOffset::new(at), GuestOffset::new(stop.min(end)))
            .expect("it goes on")
    }

    /// How far from `at` on nothing is wanted, as far as that is clear from the L1 tables; 0 if
    /// there may be something.
    pub(super) async fn idle_from(&self, at: u64, end: u64) -> Result<u64> {
        let mut stop = end.min(self.hides_from);
        for layer in self.layers.iter().rev() {
            if stop <= at {
                return Ok(0);
            }
            let found = layer.unowned_until(GuestOffset::new(at), GuestOffset::new(stop)).await?;
            stop = stop.min(found.bytes());
        }
        Ok(stop.saturating_sub(at))
    }

    /// What is wanted in `window`, in rising order. A part of at most `part_bytes` is wanted at a
    /// time.
    pub(super) async fn wanted(&self, window: GuestRange, part_bytes: u64) -> Result<Vec<Wanted>> {
        let mut wanted: Vec<Wanted> = Vec::new();
        let mut push = |extent: Extent, is_data: bool| {
            let end = extent.range().end();
            match wanted.last_mut() {
                Some(Wanted::Data(run)) if is_data => {
                    let len = Extent::total_len(run);
                    if run[0].start.checked_add(len) == Some(extent.start)
                        && len + extent.len <= part_bytes
                    {
                        run.push(extent);
                        return;
                    }
                }
                Some(Wanted::Zeros(range)) if !is_data && range.end() == extent.start => {
                    *range = GuestRange::between(range.start(), end).expect("it goes on");
                    return;
                }
                _ => {}
            }
            wanted.push(match is_data {
                true => Wanted::Data(vec![extent]),
                false => Wanted::Zeros(extent.range()),
            });
        };
        for extent in self.owned(window).await? {
            match extent.kind {
                ExtentKind::Data | ExtentKind::DataInHole | ExtentKind::Encoded => {
                    pieces(extent, part_bytes).for_each(|piece| push(piece, true));
                }
                ExtentKind::Zero | ExtentKind::ZeroAllocated => push(extent, false),
                ExtentKind::Hole | ExtentKind::HoleInCluster => {
                    let from = GuestOffset::new(self.hides_from.max(extent.start.bytes()));
                    let hidden = GuestRange::between(from, extent.range().end());
                    let hidden = hidden.filter(|hidden| !hidden.is_empty());
                    hidden.and_then(|at| extent.within(at)).into_iter().for_each(|extent| {
                        push(extent, false);
                    });
                }
            }
        }
        Ok(wanted)
    }

    /// What these layers own of `window`, which begins with a slice or in one.
    async fn owned(&self, window: GuestRange) -> Result<Vec<Extent>> {
        let (first, base) = slice_of(window.start());
        let whole = GuestRange::between(base, window.end()).expect("it ends after it starts");
        let mut limit = sectors_of(whole.len());
        let mut runs = Runs::default();
        for batch in self.layers.rchunks(BATCH) {
            let reads = batch.iter().rev().map(|layer| layer.own_runs(whole));
            for (layer, own) in batch.iter().rev().zip(mica_rt::join_all(reads).await) {
                let mut own = own?;
                limit = limit.min(sectors_of(layer.len().saturating_sub(base.bytes())));
                own.truncate(limit);
                if !own.is_empty() {
                    runs = Runs::overlay(&own, &runs);
                }
            }
            if runs.cover(limit) {
                break;
            }
        }
        let mut extents = Vec::new();
        let mut at = window.start().bytes();
        let slices = (first..).zip(0_u32..);
        for (number, position) in slices {
            let start = number << SLICE_BITS;
            let stop = (start + SLICE_BYTES).min(window.end().bytes());
            let slice = runs.slice_at(position * SLICE_SECTORS);
            let (start, from) = (GuestOffset::new(start), GuestOffset::new(at));
            slice.append_extents(start, from, stop - at, &mut extents);
            at = stop;
            if at == window.end().bytes() {
                break;
            }
        }
        Ok(extents)
    }

    /// The bytes at `extents`, which follow one another.
    pub(super) async fn read(&self, extents: &[Extent]) -> Result<Buf> {
        let read = |extent: &Extent| {
            let layer = self.by_number.get(&extent.layer).expect("one of these layers");
            let (layer, extent) = (Arc::clone(layer), *extent);
            async move {
                let buf = Buf::new(usize::try_from(extent.len).expect("a step"));
                let (result, buf) = match extent.kind {
                    ExtentKind::Encoded => {
                        layer.read_deferred(extent.start, buf, &self.decoded).await
                    }
                    _ => {
                        let (result, buf) = layer.data.read_at(buf, extent.host).await;
                        (result.map_err(|error| layer.explain(error)), buf)
                    }
                };
                result.map(|()| buf)
            }
        };
        let mut bytes = Buf::new(usize::try_from(Extent::total_len(extents)).expect("a step"));
        let mut at = 0;
        for part in mica_rt::join_all(extents.iter().map(read)).await {
            let part = part?;
            bytes.put(at, &part);
            at += part.len();
        }
        Ok(bytes)
    }
}

/// `extent` in pieces of at most `bytes`.
fn pieces(extent: Extent, bytes: u64) -> impl Iterator<Item = Extent> {
    let starts = (0..extent.len).step_by(usize::try_from(bytes).unwrap_or(usize::MAX));
    starts.filter_map(move |start| {
        let at = extent.start.checked_add(start)?;
        extent.within(GuestRange::new(at, bytes.min(extent.len - start))?)
    })
}

//! A survey: a plan with what reading does not need. Which layer ends the search for a hole, which
//! holes lie in clusters, and which parts of a raw image are holes in its file.
//!
//! It ends early rather than take memory without bound: a fragmented disk of many terabytes has
//! billions of extents, and one L2 table that every L1 entry names makes a disk of that kind of a
//! file of kilobytes.

use crate::layer::Layer;
use crate::layers::Layers;
use crate::map::{EXTENTS_PER_TURN, Map};
use mica_block::{Extent, ExtentKind, Result, RunKind};
use mica_rt::Pace;
use mica_units::{GuestOffset, GuestRange, HostOffset};

/// Extents after which a survey ends, with the slice that it is in.
const EXTENTS_MANY: usize = 4096;
/// Slices after which it ends: each can have holes in clusters that are one extent of the plan.
const SLICES_MANY: u64 = 256;
/// Runs of files after which it ends, each of which is a query.
const FILE_RUNS_MAX: usize = 4096;
/// A query to a file system counts as this many extents.
const STEPS_PER_FILE_RUN: u64 = 16;
/// This many layers that are examined count as one.
const LAYERS_PER_STEP: u64 = 8;

impl Map {
    /// As [`Disk::survey`](mica_block::Disk::survey).
    pub(crate) async fn survey(&self, range: GuestRange) -> Result<Vec<Extent>> {
        self.check_range(range)?;
        let mut pace = Pace::new(EXTENTS_PER_TURN);
        let mut planned = Vec::new();
        let (mut done, mut slices) = (0, 0);
        while done < range.len() && planned.len() < EXTENTS_MANY && slices < SLICES_MANY {
            match self.plan_step(range.after(done), &mut planned, &mut pace).await {
                Ok(len) => done += len,
                // What is known is an answer; the next survey reports the failure.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
            slices += 1;
        }
        self.add_detail(planned, &mut pace).await
    }

    /// The detail of `planned`, or of the beginning of it.
    async fn add_detail(&self, planned: Vec<Extent>, pace: &mut Pace) -> Result<Vec<Extent>> {
        let mut found =
            SurveyedExtents { extents: Vec::with_capacity(planned.len()), file_runs: 0 };
        let layers = self.layers();
        for extent in planned {
            pace.steps(1).await;
            match append_detail(&layers, extent, &mut found, pace).await {
                Ok(()) => (),
                // As above.
                Err(_) if !found.extents.is_empty() => break,
                Err(error) => return Err(error),
            }
            if found.file_runs == FILE_RUNS_MAX {
                break;
            }
        }
        Ok(found.extents)
    }
}

/// The extents that a survey has found so far.
struct SurveyedExtents {
    extents: Vec<Extent>,
    file_runs: usize,
}

/// Appends the detail of `extent`, or, if it fails or becomes too much, of the beginning of it.
async fn append_detail(
    layers: &Layers,
    extent: Extent,
    found: &mut SurveyedExtents,
    pace: &mut Pace,
) -> Result<()> {
    // A hole may name a layer that the chain has no longer.
    let layer = match extent.kind {
        ExtentKind::Hole => layers.base(),
        _ => layers.get(extent.layer),
    };
    match extent.kind {
        ExtentKind::Hole => {
            // The most that it costs, if every layer is queried.
            pace.steps(layers.all().len() as u64 / LAYERS_PER_STEP).await;
            append_holes(layers, extent, &mut found.extents).await
        }
        // Zeros according to the file: this layer owns them, in their place.
        ExtentKind::Data if layer.tables.is_none() => {
            append_file_runs(layer, (extent, ExtentKind::ZeroAllocated), found, pace).await
        }
        ExtentKind::Data if layer.is_preallocated().await => {
            append_file_runs(layer, (extent, ExtentKind::DataInHole), found, pace).await
        }
        _ => {
            found.extents.push(extent);
            Ok(())
        }
    }
}

/// A hole ends at the layer above the uppermost one that is too short to reach it.
async fn append_holes(layers: &Layers, hole: Extent, extents: &mut Vec<Extent>) -> Result<()> {
    let mut at = hole.start.bytes();
    let end = at + hole.len;
    while at < end {
        let above = layers.frozen().iter().rposition(|layer| layer.len() <= at);
        let upper = &layers.all()[above.map_or(0, |position| position + 1)..];
        // That holds up to the end of the next layer above this one.
        let next = upper.iter().map(|layer| layer.len()).filter(|len| *len > at);
        let stop = next.min().unwrap_or(end).min(end);
        let start = GuestOffset::new(at);
        let part = Extent { start, len: stop - at, layer: upper[0].number, ..hole };
        append_hole_of(&upper[0], part, extents).await?;
        at = stop;
    }
    Ok(())
}

/// Reports which parts of a hole lie in clusters of `layer`, which ends the search.
async fn append_hole_of(layer: &Layer, hole: Extent, extents: &mut Vec<Extent>) -> Result<()> {
    let mut at = hole.start;
    for (range, host) in layer.holes_in_clusters(hole.range()).await? {
        push_hole(Extent { start: at, ..hole }, range.start(), extents);
        let kind = ExtentKind::HoleInCluster;
        let (start, len) = (range.start(), range.len());
        Extent::push_joined(extents, Extent { start, len, kind, host, ..hole });
        at = range.end();
    }
    push_hole(Extent { start: at, ..hole }, hole.range().end(), extents);
    Ok(())
}

/// Pushes the hole from the start of `hole` to `end`, if it is not empty.
fn push_hole(hole: Extent, end: GuestOffset, extents: &mut Vec<Extent>) {
    let len = end.bytes() - hole.start.bytes();
    if len > 0 {
        Extent::push_joined(extents, Extent { len, ..hole });
    }
}

/// Splits a data extent at the holes of its file, which become extents of the kind `hole`, up to
/// [`FILE_RUNS_MAX`] of them.
async fn append_file_runs(
    layer: &Layer,
    (extent, hole): (Extent, ExtentKind),
    found: &mut SurveyedExtents,
    pace: &mut Pace,
) -> Result<()> {
    let mut done = 0;
    while done < extent.len && found.file_runs < FILE_RUNS_MAX {
        found.file_runs += 1;
        pace.steps(STEPS_PER_FILE_RUN).await;
        let host = HostOffset::new(extent.host.bytes() + done);
        let left = extent.len - done;
        let run = layer.data.run_at(host, left).map_err(|error| layer.explain(error))?;
        let kind = match run.kind {
            RunKind::Data => ExtentKind::Data,
            RunKind::Hole => hole,
        };
        let len = run.len.clamp(1, left);
        let start = GuestOffset::new(extent.start.bytes() + done);
        let layer = extent.layer;
        Extent::push_joined(&mut found.extents, Extent { start, len, kind, host, layer });
        done += len;
    }
    Ok(())
}

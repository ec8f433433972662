//! Fetches what a boot record names, in its order, some requests at a time.
//!
//! Invariants
//! - F1 It goes on for as long as the boot does, there is room for more, and the store answers;
//!   then it ends, and nobody misses it.

use crate::boot::Boot;
use crate::chunks::Role;
use crate::collect::client::InFlight;
use crate::format::boot::BootRecord;
use crate::place::{BLOCK_BYTES, ExtentId, FramePart, Place};
use crate::put::Patience;
use crate::shared::Shared;
use crate::tree::{Cursor, Tree};
use mica_block::Result;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Parts that are fetched at a time, and how many of them beside guests that wait for the store.
const IN_FLIGHT_MAX: usize = 16;
const BESIDE_GUESTS_MAX: usize = 4;
/// Blocks of a part: a request has 1 MiB at most, if all of them are beside each other.
const PART_BLOCKS: usize = 256;

/// See the module.
///
/// # Errors
/// What the store reports in the end.
pub(super) async fn fetch(
    shared: &Arc<Shared>,
    boot: &Arc<Boot>,
    record: &BootRecord,
) -> Result<()> {
    let tree = shared.tree.with_patience(Patience::VERB).through(&boot.chunks, Role::Ahead);
    let mut in_flight = InFlight::with_max(IN_FLIGHT_MAX);
    for blocks in parts(record) {
        while in_flight.len() > BESIDE_GUESTS_MAX && boot.reads.load(Ordering::Relaxed) > 0 {
            if let Some(has_room) = in_flight.next().await
                && !has_room?
            {
                return Ok(());
            }
        }
        if boot.ended.is_raised() {
            break;
        }
        let (tree, shared, boot) = (Arc::clone(&tree), Arc::clone(shared), Arc::clone(boot));
        let part = async move { fetch_part(&tree, &shared, &boot, &blocks).await };
        if let Some(has_room) = in_flight.push(part).await
            && !has_room?
        {
            break;
        }
    }
    while let Some(has_room) = in_flight.next().await {
        has_room?;
    }
    Ok(())
}

/// The blocks of a record, in order, in parts that are small enough.
fn parts(record: &BootRecord) -> impl Iterator<Item = Range<u64>> {
    record.ranges.iter().flat_map(|range| {
        let end = range.start + u64::from(range.count);
        let starts = (range.start..end).step_by(PART_BLOCKS);
        starts.map(move |start| start..end.min(start + PART_BLOCKS as u64))
    })
}

/// Fetches what no guest has read of `blocks`. Returns false if there was no room for it.
async fn fetch_part(
    tree: &Tree,
    shared: &Shared,
    boot: &Boot,
    blocks: &Range<u64>,
) -> Result<bool> {
    let map = shared.now().state.map;
    let mut cursor = Cursor::new(tree, map);
    let mut spans: Vec<(ExtentId, Range<u64>)> = Vec::new();
    for block in boot.unread(blocks).into_iter().flatten() {
        let Some(place) = cursor.look_up(block).await? else { continue };
        let (extent, bytes) = (place.extent(), stored_bytes(place));
        match spans.last_mut() {
            Some((last, span))
                if *last == extent && (span.start..=span.end).contains(&bytes.start) =>
            {
                span.end = span.end.max(bytes.end);
            }
            _ => spans.push((extent, bytes)),
        }
    }
    for (extent, bytes) in spans {
        if !tree.load(extent, &bytes).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Where what is stored of a block is in its extent.
fn stored_bytes(place: Place) -> Range<u64> {
    let len = place.frame().map_or(BLOCK_BYTES, FramePart::len_max);
    place.offset()..place.offset() + len as u64
}

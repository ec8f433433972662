//! Fetches what a boot record names, in its order, as many parts at a time as `ahead` lets it.
//!
//! Invariants
//! - F1 It goes on for as long as the boot does, there is room for more, and the store answers;
//!   then it ends, and nobody misses it.

use crate::ahead::FETCHES_MAX;
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
    let mut in_flight = InFlight::with_max(FETCHES_MAX);
    for blocks in parts(record) {
        let Some(turn) = boot.ended.unless_raised(boot.ahead.fetch()).await else { break };
        let (tree, shared, boot) = (Arc::clone(&tree), Arc::clone(shared), Arc::clone(boot));
        let part = async move {
            let _turn = turn;
            fetch_part(&tree, &shared, &boot, &blocks).await
        };
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

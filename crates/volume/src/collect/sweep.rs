//! Deletes what a plan says, and gives back parts.
//!
//! Invariants
//! - I1 What fails is counted, and does not keep the rest from being done.
//! - I2 What makes room comes before what needs some: a store may be full.

use super::Collected;
use super::claims::Claims;
use super::client::{Client, InFlight};
use super::extents::{Listed, PAGE_BYTES};
use super::mark::Parts;
use super::plan::Plan;
use crate::format::extent::{self, FrameOf, HEADER_BYTES, Header};
use crate::names;
use crate::place::BLOCK_BYTES;
use crate::put::{decode_header, elsewhere};
use mica_block::{ErrorKind, ObjectName, Result};
use std::ops::Range;

/// Whether the store can give back parts of objects.
pub(crate) async fn can_punch(client: &Client) -> bool {
    client.objects.punch(&names::format(), &[]).await.is_ok()
}

/// Does what `plan` says, unless it is a dry run. What could not be done is counted.
pub(crate) async fn sweep(
    client: &Client,
    dry_run: bool,
    plan: Plan<'_>,
    (claims, boots): (Claims, Vec<ObjectName>),
    mut progress: impl FnMut(u64),
) -> Collected {
    let mut swept = Swept { collected: plan.collected, done: 0 };
    swept.collected.freed_heads = plan.heads.iter().map(|(_, lower)| lower.len() as u64).sum();
    swept.collected.freed_claims = claims.count();
    swept.collected.freed_boots = boots.len() as u64;
    if dry_run {
        return swept.collected;
    }
    let extents = plan.dead.iter().map(|listed| listed.id.name());
    let heads = plan.heads.iter().flat_map(|(name, lower)| lower.iter().map(|n| name.head(*n)));
    swept.delete(client, extents.chain(heads).chain(boots), &mut progress).await;
    let mut in_flight = InFlight::new();
    for (listed, parts) in plan.holes {
        let client = client.clone();
        let punch = async move { punch(&client, listed, &parts).await };
        if let Some(punched) = in_flight.push(punch).await {
            swept.note(punched);
        }
    }
    while let Some(punched) = in_flight.next().await {
        swept.note(punched);
    }
    // A store that is full has room for the boundary now.
    match claims.put_boundary(client).await {
        Ok(()) => swept.delete_claims(client, claims, &mut progress).await,
        Err(error) => {
            swept.collected.freed_claims = 0;
            swept.note(Err(error));
        }
    }
    swept.collected
}

/// What was done so far.
struct Swept {
    collected: Collected,
    done: u64,
}

impl Swept {
    /// Deletes `names`, and counts what fails.
    async fn delete(
        &mut self,
        client: &Client,
        names: impl IntoIterator<Item = ObjectName>,
        progress: &mut impl FnMut(u64),
    ) {
        let mut in_flight = InFlight::new();
        for name in names {
            let client = client.clone();
            if let Some(deleted) = in_flight.push(async move { client.delete(&name).await }).await {
                self.note(deleted.map(|()| 0));
                progress(self.done);
            }
        }
        while let Some(deleted) = in_flight.next().await {
            self.note(deleted.map(|()| 0));
            progress(self.done);
        }
    }

    /// Deletes claims that are void, and then the boundaries that are not needed any more.
    async fn delete_claims(
        &mut self,
        client: &Client,
        claims: Claims,
        progress: &mut impl FnMut(u64),
    ) {
        let (claims, boundaries) = claims.names();
        let failed = self.collected.failed;
        self.delete(client, claims, progress).await;
        if self.collected.failed == failed {
            self.delete(client, boundaries, progress).await;
        }
    }

    fn note(&mut self, outcome: Result<u64>) {
        match outcome {
            Ok(punched) => {
                self.done += 1;
                self.collected.punched_bytes += punched;
            }
            Err(error) => {
                tracing::warn!(error = error.in_one_line(), "something could not be freed");
                self.collected.failed += 1;
                self.collected.failure.get_or_insert(error);
            }
        }
    }
}

/// Gives back what is not among `parts`.
async fn punch(client: &Client, listed: Listed, parts: &Parts) -> Result<u64> {
    let name = listed.id.name();
    let bytes = match client.read(&name, 0, HEADER_BYTES).await {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let header = decode_header(&*client.objects, listed.id, &bytes)?;
    if header.len() as u64 != listed.len {
        return Err(elsewhere(&name, &*client.objects));
    }
    let frames = match frames_of(client, &name, &header).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        frames => frames?,
    };
    let ranges = holes(&header, parts, &frames);
    if ranges.is_empty() { Ok(0) } else { client.punch(&name, &ranges).await }
}

/// The frames of an extent.
async fn frames_of(client: &Client, name: &ObjectName, header: &Header) -> Result<Vec<FrameOf>> {
    if header.frames_len == 0 {
        return Ok(Vec::new());
    }
    let len = header.len() - header.table_at();
    let bytes = client.read(name, header.table_at() as u64, len).await?;
    let table = extent::decode_table(header, &bytes);
    let table = table.map_err(|why| why.explain(name, &*client.objects))?;
    Ok(extent::frames_in(&table).collect())
}

/// The whole pages of an extent's blocks, `frames` and nodes that are not among `parts`, in order.
fn holes(header: &Header, parts: &Parts, frames: &[FrameOf]) -> Vec<Range<u64>> {
    let mut holes: Vec<Range<u64>> = Vec::new();
    let mut push = |range: Range<u64>| match holes.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => holes.push(range),
    };
    for index in (0..header.blocks).filter(|index| !parts.has_block(*index)) {
        let start = (HEADER_BYTES + index * BLOCK_BYTES) as u64;
        push(start..start + BLOCK_BYTES as u64);
    }
    let mut start = header.frames_at() as u64;
    let end = header.table_at() as u64;
    let frames = frames.iter().filter(|frame| parts.has_frame(frame.offset));
    let frames = frames.map(|frame| frame.offset..frame.offset + frame.len);
    let nodes = parts.nodes.iter().rev().cloned();
    for live in frames.chain(nodes).chain(std::iter::once(end..end)) {
        let pages = start.next_multiple_of(PAGE_BYTES)..live.start / PAGE_BYTES * PAGE_BYTES;
        if pages.start < pages.end {
            push(pages);
        }
        start = live.end;
    }
    holes
}

//! Walks a disk from start to end and yields the pieces that have to be read.

use mica_block::{Detail, Disk, Extent, Result};
use mica_units::{GuestOffset, GuestRange};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes planned at a time: the minimum where there is data, growing where there is none. A
/// multiple of every cluster size.
const WINDOW_BYTES_MIN: u64 = 16 << 20;
const WINDOW_BYTES_MAX: u64 = 1 << 52;

/// A part of the disk to copy.
pub(super) struct Piece {
    /// Where it starts.
    pub(super) start: u64,
    /// Its length, at most up to the end of the disk.
    pub(super) len: u64,
    /// Extents of the source.
    pub(super) source: Vec<Extent>,
    /// Extents of the target's backing file for the same range, as far as it reaches.
    pub(super) backing: Vec<Extent>,
}

/// A walk over the source.
pub(super) struct Cursor {
    source: Arc<dyn Disk>,
    backing: Option<Arc<dyn Disk>>,
    piece_bytes: u64,
    /// Whether zeros are copied too.
    with_zeros: bool,
    at: u64,
    window: u64,
    planned_to: u64,
    of_source: VecDeque<Extent>,
    of_backing: VecDeque<Extent>,
}

impl Cursor {
    pub(super) fn new(
        source: Arc<dyn Disk>,
        backing: Option<Arc<dyn Disk>>,
        piece_bytes: u64,
        with_zeros: bool,
    ) -> Self {
        Self {
            source,
            backing,
            piece_bytes,
            with_zeros,
            at: 0,
            window: WINDOW_BYTES_MIN,
            planned_to: 0,
            of_source: VecDeque::new(),
            of_backing: VecDeque::new(),
        }
    }

    /// The current position.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// The next piece to visit; `None` at the end of the disk.
    pub(super) async fn next(&mut self) -> Result<Option<Piece>> {
        let len = self.source.geometry().len;
        while self.at < len {
            if self.at == self.planned_to {
                self.plan_window(len).await?;
                continue;
            }
            let end = (self.at + self.piece_bytes).min(self.planned_to);
            let piece = Piece {
                start: self.at,
                len: end - self.at,
                source: take_until(&mut self.of_source, end),
                backing: take_until(&mut self.of_backing, end),
            };
            self.at = end;
            if self.with_zeros || !is_zero(&piece.source) || !is_zero(&piece.backing) {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    async fn plan_window(&mut self, len: u64) -> Result<()> {
        let end = self.at.saturating_add(self.window).min(len);
        plan(&*self.source, self.at, end, &mut self.of_source).await?;
        if let Some(backing) = &self.backing {
            let end = end.min(backing.geometry().len);
            plan(&**backing, self.at, end, &mut self.of_backing).await?;
        }
        self.planned_to = end;
        let zero =
            |extents: &VecDeque<Extent>| extents.iter().all(|extent| extent.kind.reads_as_zero());
        self.window = WINDOW_BYTES_MIN;
        if !self.with_zeros && zero(&self.of_source) && zero(&self.of_backing) {
            self.window = ((end - self.at) * 2).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX);
            self.of_source.clear();
            self.of_backing.clear();
            self.at = end;
        }
        Ok(())
    }
}

async fn plan(disk: &dyn Disk, start: u64, end: u64, into: &mut VecDeque<Extent>) -> Result<()> {
    let Some(range) = GuestRange::between(GuestOffset::new(start), GuestOffset::new(end)) else {
        return Ok(());
    };
    if range.is_empty() {
        return Ok(());
    }
    // Nobody writes to what is copied: the plan need not be kept.
    let plan = disk.plan(range, Detail::Allocation, Vec::new()).finish().await?;
    into.extend(plan.into_parts().0);
    Ok(())
}

/// Splits off the part before `end`.
fn take_until(extents: &mut VecDeque<Extent>, end: u64) -> Vec<Extent> {
    let mut taken = Vec::new();
    while let Some(extent) = extents.pop_front() {
        let range = extent.range();
        if range.end().bytes() <= end {
            taken.push(extent);
            continue;
        }
        let part = |from: u64, to: u64| {
            let range = GuestRange::between(GuestOffset::new(from), GuestOffset::new(to));
            range.and_then(|range| extent.within(range))
        };
        taken.extend(part(range.start().bytes(), end.max(range.start().bytes())));
        let rest = part(end.max(range.start().bytes()), range.end().bytes());
        rest.into_iter().for_each(|rest| extents.push_front(rest));
        break;
    }
    taken
}

pub(super) fn is_zero(extents: &[Extent]) -> bool {
    extents.iter().all(|extent| extent.kind.reads_as_zero())
}

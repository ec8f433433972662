//! What differs between two states of volumes.

use super::Volumes;
use crate::names::VolumeName;
use crate::place::BLOCK_BYTES;
use mica_block::{Result, Which};
use mica_map::{Diff, DiffStep, Directory};
use mica_units::{GuestOffset, GuestRange};
use std::ops::Range;

impl Volumes {
    /// Passes to `each` the ranges in which two volumes, or snapshots of them, may differ, in
    /// order, and joined where they touch: the blocks that were written or cleared since the states
    /// parted. What was written with the bytes that it had counts as different. What is beyond the
    /// end of the shorter one differs if it has data.
    ///
    /// Costs what differs, however large the volumes are.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume or snapshot; otherwise what the store reports.
    pub async fn diff(
        &self,
        (before, which_before): (&VolumeName, Option<&Which>),
        (after, which_after): (&VolumeName, Option<&Which>),
        mut each: impl FnMut(GuestRange),
    ) -> Result<()> {
        let before = self.content(before, which_before).await?;
        let after = self.content(after, which_after).await?;
        let len = before.len.max(after.len);
        let mut diff = Diff::new(before.map, after.map, 0..=u64::MAX);
        let mut run: Option<Range<u64>> = None;
        let mut tell = |run: Range<u64>| {
            let end = run.end.saturating_mul(BLOCK_BYTES as u64).min(len);
            let [start, end] = [run.start * BLOCK_BYTES as u64, end].map(GuestOffset::new);
            if let Some(range) = GuestRange::between(start, end).filter(|range| !range.is_empty()) {
                each(range);
            }
        };
        loop {
            match diff.next_step() {
                DiffStep::Read(at) => diff.feed(Directory::clone(&*self.tree.node(at).await?)),
                DiffStep::Changed(change) => match &mut run {
                    Some(run) if run.end == change.key => run.end += 1,
                    _ => {
                        if let Some(run) = run.replace(change.key..change.key + 1) {
                            tell(run);
                        }
                    }
                },
                DiffStep::Done => {
                    run.into_iter().for_each(tell);
                    return Ok(());
                }
            }
        }
    }
}

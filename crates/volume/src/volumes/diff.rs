//! What differs between two states of volumes.

use super::Volumes;
use crate::names::VolumeName;
use crate::place::{BLOCK_BYTES, Place};
use crate::state::State;
use crate::tree::Tree;
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
        let mut changes = self.changes(before, after);
        while let Some(range) = changes.next().await? {
            each(range);
        }
        Ok(())
    }

    /// The ranges in which `before` and `after` may differ: see [`Self::diff`].
    pub(crate) fn changes(&self, before: State, after: State) -> Changes<'_> {
        Changes {
            tree: &self.tree,
            diff: Diff::new(before.map, after.map, 0..=u64::MAX),
            run: None,
            len: before.len.max(after.len),
        }
    }
}

/// See [`Volumes::changes`].
pub(crate) struct Changes<'a> {
    tree: &'a Tree,
    diff: Diff<Place>,
    /// The last blocks that differ, to which more may be added.
    run: Option<Range<u64>>,
    /// Length of the longer disk.
    len: u64,
}

impl Changes<'_> {
    /// The next range, behind all that were returned; `None` if there is none.
    ///
    /// # Errors
    /// What the store reports.
    pub(crate) async fn next(&mut self) -> Result<Option<GuestRange>> {
        loop {
            match self.diff.next_step() {
                DiffStep::Read(at) => {
                    self.diff.feed(Directory::clone(&*self.tree.node(at).await?));
                }
                DiffStep::Changed(change) => match &mut self.run {
                    Some(run) if run.end == change.key => run.end += 1,
                    run => {
                        let run = run.replace(change.key..change.key + 1);
                        if let Some(range) = run.and_then(|run| self.range(run)) {
                            return Ok(Some(range));
                        }
                    }
                },
                DiffStep::Done => return Ok(self.run.take().and_then(|run| self.range(run))),
            }
        }
    }

    /// The bytes of `run` that are on the disk.
    fn range(&self, run: Range<u64>) -> Option<GuestRange> {
        let end = run.end.saturating_mul(BLOCK_BYTES as u64).min(self.len);
        let [start, end] = [run.start * BLOCK_BYTES as u64, end].map(GuestOffset::new);
        GuestRange::between(start, end).filter(|range| !range.is_empty())
    }
}

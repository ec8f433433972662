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
        // A map that somebody else made may say that there are blocks which no disk has.
        let last = before.blocks().max(after.blocks()).saturating_sub(1);
        Changes {
            tree: &self.tree,
            diff: Diff::new(before.map, after.map, 0..=last),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::{ExtentId, Writer};
    use crate::state::Root;
    use crate::testing::{memory, run, volumes};
    use mica_block::Objects;
    use mica_map::{Editor, crc32c};
    use std::sync::Arc;

    #[test]
    fn blocks_that_no_disk_has_do_not_differ() {
        run(1, async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let volumes = volumes(&objects, "host").await;
            let extent = ExtentId { writer: Writer::FIRST, sequence: 0 };
            let mut editor = Editor::new(Root::default(), 100);
            for (key, offset) in [(1, 4096), (u64::MAX, 8192)] {
                editor.grow_for(key);
                assert!(editor.missing(key).is_none(), "all of it is in memory");
                editor.set(key, Some(Place::new(extent, offset, 0)));
            }
            let mut offset = 1 << 20;
            let map = editor.write(|directory| {
                offset += 4096;
                let place = Place::new(extent, offset, crc32c(&directory.encode()));
                volumes.tree.keep(place, Arc::new(directory.clone()));
                place
            });
            let hostile = State { map, ..State::empty(1 << 20) };
            let mut changes = volumes.changes(State::empty(0), hostile);
            let found = changes.next().await.expect("read").expect("block 1");
            assert_eq!((found.start().bytes(), found.len()), (4096, 4096));
            assert_eq!(changes.next().await.expect("read"), None);
        });
    }
}

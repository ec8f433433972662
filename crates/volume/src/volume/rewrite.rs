//! Compaction: blocks that are in sparse extents are written again, in the order of the disk, by
//! the volume's own writer. The extents that had them are collected when nothing else needs them.
//!
//! Invariants
//! - I1 A block is written again only while the map has it in the place that it was read from, and
//!   nothing newer is known of it: both are looked at, and it is written, under one lock.
//! - I2 A node of the map in such an extent moves, too: the first block beneath it is written
//!   again.

use super::Volume;
use crate::known::Change;
use crate::place::{BLOCK_BYTES, ExtentId, Place};
use crate::recent::Block;
use crate::shared::Shared;
use crate::tree::follows;
use crate::writing::Step;
use mica_block::Result;
use mica_map::{Directory, Walk, WalkStep};
use mica_rt::Buf;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Blocks that are read at once.
const RUN_BLOCKS_MAX: usize = 256;

/// What became of a block that was to be written again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rewritten {
    Done,
    /// It is something else by now.
    Newer,
    /// The map is another one than the one that was looked at.
    LookAgain,
}

impl Volume {
    /// Writes again what the volume has in `extents`; returns how many blocks that were. A flush
    /// makes it durable. What is written meanwhile is not touched.
    ///
    /// # Errors
    /// As a write; `Corrupt` if something of it is damaged.
    pub async fn rewrite(&self, extents: &BTreeSet<ExtentId>) -> Result<u64> {
        self.shared.putter()?;
        let extents = extents.clone();
        self.request(async move |shared| shared.rewrite(&extents).await).await
    }
}

impl Shared {
    async fn rewrite(self: &Arc<Self>, extents: &BTreeSet<ExtentId>) -> Result<u64> {
        let map = self.now().state.map;
        let mut walk = Walk::new(map, 0..=u64::MAX);
        let (mut run, mut count) = (Vec::new(), 0);
        let mut has_node = false;
        loop {
            match walk.next_step() {
                WalkStep::Read(at) => {
                    has_node |= extents.contains(&at.extent());
                    let node = self.tree.node(at).await?;
                    walk.feed(Directory::clone(&node));
                }
                WalkStep::Leaf(block, at) => {
                    if !std::mem::take(&mut has_node) && !extents.contains(&at.extent()) {
                        continue;
                    }
                    let goes_on = run.last().is_none_or(|(_, last)| follows(*last, at));
                    if !goes_on || run.len() >= RUN_BLOCKS_MAX {
                        count += self.rewrite_run(&run).await?;
                        run.clear();
                    }
                    run.push((block, at));
                }
                WalkStep::Done => return Ok(count + self.rewrite_run(&run).await?),
            }
        }
    }

    /// Writes blocks again that follow each other in one extent; returns how many.
    async fn rewrite_run(self: &Arc<Self>, run: &[(u64, Place)]) -> Result<u64> {
        let Some((_, first)) = run.first() else { return Ok(0) };
        let places = run.iter().map(|(_, place)| *place);
        let room = Buf::new(run.len() * BLOCK_BYTES);
        let bytes = self.tree.read_blocks(*first, places, room).await?;
        let mut count = 0;
        for ((block, place), data) in run.iter().zip(bytes.chunks_exact(BLOCK_BYTES)) {
            let data: Block = Arc::new(data.try_into().expect("a block"));
            count += u64::from(self.rewrite_block(*block, *place, &data).await?);
        }
        Ok(count)
    }

    /// Writes `data` of `block` again, if it is still the one at `place`.
    async fn rewrite_block(
        self: &Arc<Self>,
        block: u64,
        place: Place,
        data: &Block,
    ) -> Result<bool> {
        loop {
            let (generation, map) = {
                let now = self.now();
                (now.generation, now.state.map)
            };
            if self.tree.look_up(map, block).await? != Some(place) {
                return Ok(false);
            }
            let outcome = self
                .change(|recorder| {
                    if recorder.now.recent(block).is_some() {
                        return Step::Done(Rewritten::Newer);
                    }
                    if recorder.now.generation != generation {
                        return Step::Done(Rewritten::LookAgain);
                    }
                    match recorder.record(Change::Data(block, Arc::clone(data))) {
                        true => Step::Done(Rewritten::Done),
                        false => Step::Again,
                    }
                })
                .await?;
            match outcome {
                Rewritten::Done => return Ok(true),
                Rewritten::Newer => return Ok(false),
                Rewritten::LookAgain => {}
            }
        }
    }
}

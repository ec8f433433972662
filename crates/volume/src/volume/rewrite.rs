//! Compaction: blocks that are in sparse extents are written again, in the order of the disk, by
//! the volume's own writer. The extents that had them are collected when nothing else needs them.
//!
//! Invariants
//! - I1 A block is written again only while the map has it in the place that it was read from, and
//!   nothing newer is known of it: both are looked at, and it is written, under one lock.
//! - I2 A node of the map in such an extent moves, too: the first block beneath it is written
//!   again.

use crate::place::{BLOCK_BYTES, ExtentId, Place};
use crate::recent::Block;
use crate::shared::Shared;
use crate::state::State;
use crate::tree::{Tree, follows};
use crate::writing::Is;
use mica_block::{ErrorKind, Result};
use mica_map::{Directory, Walk, WalkStep};
use mica_rt::{Buf, Instant, join_all, now, sleep};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Blocks that are written again together.
const BATCH_BLOCKS_MAX: usize = 512;
/// Reads at a time.
const READS_MAX: usize = 64;

/// How far a rewrite is.
#[derive(Default)]
pub(super) struct Progress {
    /// Blocks below are done.
    from: u64,
    /// Blocks that were written again.
    pub(super) count: u64,
    /// If it yields to guests.
    pacer: Option<Pacer>,
}

impl Progress {
    /// None yet, of a rewrite that yields to guests.
    pub(super) fn paced(bytes_per_second: u64) -> Self {
        Self { pacer: Some(Pacer::new(bytes_per_second)), ..Self::default() }
    }
}

/// How fast blocks are written again.
struct Pacer {
    bytes_per_second: u64,
    /// When the next ones may be.
    next: Option<Instant>,
}

impl Pacer {
    fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1), next: None }
    }

    /// Waits until so many more bytes may be written.
    async fn wait(&mut self, bytes: u64) {
        let takes = bytes.saturating_mul(1_000_000_000) / self.bytes_per_second;
        let start = self.next.map_or(now(), |next| next.max(now()));
        self.next = Some(start.after(Duration::from_nanos(takes)));
        sleep(start.saturating_since(now())).await;
    }
}

impl Shared {
    pub(super) async fn rewrite(
        self: &Arc<Self>,
        extents: &BTreeSet<ExtentId>,
        progress: &mut Progress,
    ) -> Result<()> {
        loop {
            let from = progress.from;
            // What was collected meanwhile is in the map no more: it is gone on in the one of now.
            let some = self.reading(async || {
                let (generation, state) = {
                    let now = self.now();
                    (now.generation, now.state)
                };
                (generation, self.rewrite_from(&state, extents, progress).await)
            });
            match some.await {
                Ok(()) => return Ok(()),
                // It came further before it failed.
                Err(error) if error.kind() == ErrorKind::Corrupt && progress.from > from => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Goes on with what the map of `state` has from `at.from` on.
    async fn rewrite_from(
        self: &Arc<Self>,
        state: &State,
        extents: &BTreeSet<ExtentId>,
        at: &mut Progress,
    ) -> Result<()> {
        let tree = self.tree_for_verbs();
        // A map that somebody else made may say that there are blocks which no disk has.
        let Some(last) = state.blocks().checked_sub(1).filter(|last| at.from <= *last) else {
            return Ok(());
        };
        let mut walk = Walk::new(state.map, at.from..=last);
        let mut batch = Batch::default();
        let mut has_node = false;
        loop {
            match walk.next_step() {
                WalkStep::Read(node) => {
                    has_node |= extents.contains(&node.extent());
                    walk.feed(Directory::clone(&*tree.node(node).await?));
                }
                WalkStep::Leaf(block, place) => {
                    if !std::mem::take(&mut has_node) && !extents.contains(&place.extent()) {
                        continue;
                    }
                    if batch.blocks >= BATCH_BLOCKS_MAX {
                        self.rewrite_batch(&tree, &std::mem::take(&mut batch), at).await?;
                    }
                    batch.push(block, place);
                }
                WalkStep::Done => return self.rewrite_batch(&tree, &batch, at).await,
            }
        }
    }

    /// Reads blocks, some at a time, and writes them again together: waiting for each would take
    /// as long as the log and the store need for a request, for every block.
    async fn rewrite_batch(
        self: &Arc<Self>,
        tree: &Tree,
        batch: &Batch,
        at: &mut Progress,
    ) -> Result<()> {
        let Some((last, _)) = batch.runs.last().and_then(|run| run.last()) else { return Ok(()) };
        if let Some(pacer) = &mut at.pacer {
            self.unthrottled().await;
            pacer.wait((batch.blocks * BLOCK_BYTES) as u64).await;
        }
        for runs in batch.runs.chunks(READS_MAX) {
            let reads = runs.iter().map(|run| read_run(tree, run));
            let read = join_all(reads.collect::<Vec<_>>()).await;
            let mut changes = Vec::new();
            for (run, bytes) in runs.iter().zip(read) {
                let bytes = bytes?;
                for ((block, place), data) in run.iter().zip(Block::all_of(bytes, 0)) {
                    // If it is still the one that was read (I1).
                    let is_same = move |is| match is {
                        Is::Stored(Some(now)) if now == *place => Some(data.clone()),
                        Is::Stored(_) | Is::Recent(_) => None,
                    };
                    changes.push(self.change_block(*block, is_same));
                }
            }
            for changed in join_all(changes).await {
                at.count += u64::from(changed?);
            }
        }
        at.from = last + 1;
        Ok(())
    }
}

/// Blocks that are written again together, in the order of the disk.
#[derive(Default)]
struct Batch {
    /// Of each run the blocks follow each other in one extent.
    runs: Vec<Vec<(u64, Place)>>,
    blocks: usize,
}

impl Batch {
    fn push(&mut self, block: u64, place: Place) {
        self.blocks += 1;
        if let Some(run) = self.runs.last_mut()
            && run.last().is_some_and(|(_, last)| follows(*last, place))
        {
            return run.push((block, place));
        }
        self.runs.push(vec![(block, place)]);
    }
}

async fn read_run(tree: &Tree, run: &[(u64, Place)]) -> Result<Buf> {
    let (_, first) = run.first().expect("a run has blocks");
    let places = run.iter().map(|(_, place)| *place);
    tree.read_blocks(*first, places, Buf::new(run.len() * BLOCK_BYTES)).await
}

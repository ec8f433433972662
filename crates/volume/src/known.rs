//! What a volume is at a moment: the last state that is in the store, and what was done since.
//!
//! Invariants
//! - I1 What is newer hides what is older: the batch that fills, the batch that is being put, the
//!   map of the state.
//! - I2 A batch is dropped in the same step in which the state with it becomes the state.

use crate::recent::{Batch, Block, Known};
use crate::state::State;
use mica_block::Error;
use std::ops::Range;
use std::sync::Arc;

/// See the module. Held under a lock for a few steps in memory.
pub(crate) struct Now {
    /// The last state that is in the store.
    pub(crate) state: State,
    /// Length of the disk in bytes.
    pub(crate) len: u64,
    /// What is being put.
    sealed: Option<Arc<Batch>>,
    /// What was done since.
    filling: Batch,
    /// Counts the states.
    pub(crate) generation: u64,
    /// Why nothing is acknowledged any more.
    pub(crate) latch: Option<Error>,
}

impl Now {
    pub(crate) fn new(state: State) -> Self {
        let filling = Batch::default();
        Self { state, len: state.len, sealed: None, filling, generation: 0, latch: None }
    }

    /// What `block` is, unless only the map of the state says it.
    pub(crate) fn recent(&self, block: u64) -> Option<Known> {
        let sealed = || self.sealed.as_ref().and_then(|sealed| sealed.get(block));
        self.filling.get(block).or_else(sealed)
    }

    /// The weight of what is not being put yet.
    pub(crate) fn filling_weight(&self) -> usize {
        self.filling.weight()
    }

    pub(crate) fn put(&mut self, block: u64, data: Block) {
        self.filling.put(block, data);
    }

    pub(crate) fn clear(&mut self, blocks: Range<u64>) {
        self.filling.clear(blocks);
    }

    /// Whether everything that was done is in the state.
    pub(crate) fn is_stored(&self) -> bool {
        self.filling.is_empty() && self.sealed.is_none() && self.len == self.state.len
    }

    /// Everything that was done and is not being put yet is put from now on.
    ///
    /// # Panics
    /// If something is being put already.
    pub(crate) fn seal(&mut self) -> Arc<Batch> {
        assert!(self.sealed.is_none(), "one batch is put at a time");
        let sealed = Arc::new(std::mem::take(&mut self.filling));
        self.sealed = Some(Arc::clone(&sealed));
        sealed
    }

    /// What was sealed is in the store now: in `state`.
    pub(crate) fn publish(&mut self, state: State) {
        self.state = state;
        self.sealed = None;
        self.generation += 1;
    }
}

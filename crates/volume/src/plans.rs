//! What the map said of the blocks of plans that were made lately: the reads that follow need not
//! ask it again.
//!
//! Invariants
//! - I1 What was found is valid as long as the map is the same. What was written since is newer:
//!   whoever uses a plan looks at that first.

use crate::place::{BLOCK_BYTES, Place};
use crate::tree::follows;
use mica_map::crc32c;
use parking_lot::{Mutex, MutexGuard};
use std::ops::Range;

/// Blocks of one read that are in one object, where the store is not far.
pub(crate) const RUN_BLOCKS_MAX: usize = 64;
/// Plans that are remembered: requests of a few queues.
const PLANS: usize = 16;

/// See the module.
#[derive(Default)]
pub(crate) struct Plans {
    slots: [Mutex<Slot>; PLANS],
}

/// What a plan is of.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PlanOf {
    /// Which map was asked.
    pub(crate) generation: u64,
    /// The first of its blocks.
    pub(crate) first: u64,
}

#[derive(Default)]
struct Slot {
    of: PlanOf,
    /// Of what was in memory, the map was not asked.
    found: Vec<Option<Option<Place>>>,
}

/// Blocks beside each other in an extent, and their sums.
pub(crate) struct Run {
    pub(crate) first: Place,
    /// The sums of those that follow.
    sums: Vec<u32>,
}

impl Run {
    /// Whether `bytes` are these blocks.
    pub(crate) fn is_in(&self, bytes: &[u8]) -> bool {
        let sums = std::iter::once(self.first.sum()).chain(self.sums.iter().copied());
        let blocks = bytes.chunks_exact(BLOCK_BYTES);
        blocks.len() == 1 + self.sums.len()
            && blocks.zip(sums).all(|(block, sum)| crc32c(block) == sum)
    }
}

impl Plans {
    fn slot(&self, first: u64) -> MutexGuard<'_, Slot> {
        let at = usize::try_from(first % PLANS as u64).expect("small");
        self.slots[at].lock()
    }

    /// Remembers what was found for the blocks of this plan.
    pub(crate) fn keep(&self, of: PlanOf, found: impl Iterator<Item = Option<Option<Place>>>) {
        let mut slot = self.slot(of.first);
        slot.of = of;
        slot.found.clear();
        slot.found.extend(found);
    }

    /// Calls `learn` with what was found for the blocks of this plan, if that is remembered. A
    /// block that is in memory now may have been in the map then, but not the other way round while
    /// the map is the same.
    pub(crate) fn recall(&self, of: PlanOf, learn: impl FnOnce(&[Option<Option<Place>>])) {
        let slot = self.slot(of.first);
        if slot.of == of {
            learn(&slot.found);
        }
    }

    /// All of `blocks`, if they were found to be one run in the map of this generation.
    pub(crate) fn run(&self, generation: u64, blocks: &Range<u64>) -> Option<Run> {
        let slot = self.slot(blocks.start);
        if slot.of != (PlanOf { generation, first: blocks.start }) {
            return None;
        }
        let count = usize::try_from(blocks.end.checked_sub(blocks.start)?).ok()?;
        let (first, rest) = slot.found.get(..count)?.split_first()?;
        let first = (*first)??;
        if count > RUN_BLOCKS_MAX {
            return None;
        }
        let mut last = first;
        let mut sums = Vec::with_capacity(rest.len());
        for next in rest {
            let next = (*next)??;
            if !follows(last, next) {
                return None;
            }
            sums.push(next.sum());
            last = next;
        }
        Some(Run { first, sums })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::{ExtentId, Writer};

    const C: usize = BLOCK_BYTES;

    fn place(sequence: u32, block: usize) -> Place {
        let sum = crc32c(&[u8::try_from(block).expect("small"); C]);
        Place::new(ExtentId { writer: Writer::FIRST, sequence }, (1 + block) * C, sum)
    }

    fn plan(found: Vec<Option<Option<Place>>>) -> Plans {
        let plans = Plans::default();
        *plans.slot(5) = Slot { of: PlanOf { generation: 3, first: 5 }, found };
        plans
    }

    #[test]
    fn run_is_what_follows_each_other_in_one_extent_and_nothing_else() {
        let stored = |sequence, block| Some(Some(place(sequence, block)));
        let whole = plan(vec![stored(0, 0), stored(0, 1), stored(0, 2)]);
        let run = whole.run(3, &(5..8)).expect("one run");
        assert_eq!(run.first, place(0, 0));
        let bytes: Vec<_> = [0, 1, 2].into_iter().flat_map(|byte| [byte; C]).collect();
        assert!(run.is_in(&bytes));
        for at in [0, C, 3 * C - 1] {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(!run.is_in(&damaged), "a byte at {at}");
        }
        assert!(!run.is_in(&bytes[..2 * C]) && !run.is_in(&[bytes.as_slice(), &[0; C]].concat()));
        assert!(whole.run(3, &(5..6)).is_some_and(|run| run.is_in(&[0; C])));
        // Another map, other blocks, more than was planned, nothing.
        for (generation, blocks) in [(4, 5..8), (3, 21..24), (3, 5..9), (3, 5..5)] {
            assert!(whole.run(generation, &blocks).is_none(), "{generation}: {blocks:?}");
        }
        for next in [stored(0, 2), stored(1, 1), Some(None), None] {
            assert!(plan(vec![stored(0, 0), next]).run(3, &(5..7)).is_none(), "{next:?}");
        }
    }
}

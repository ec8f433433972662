//! What was read since a volume was opened, in order; and how that changes its image's record.
//!
//! Invariants
//! - I1 A block is in a trace once, where it was read first. Ranges do not overlap.
//! - I2 A trace has no more than a record may have; when it is full, nothing is added.

use crate::format::boot::{BLOCKS_MAX, BootRange, MISSED_MAX, RANGES_MAX};
use std::collections::BTreeMap;
use std::ops::Range;

/// A record is put again only if this part of it, at least, would be another.
const CHANGED_PART: u64 = 16;

/// See the module.
#[derive(Default)]
pub(crate) struct Trace {
    ranges: Vec<Range<u64>>,
    seen: Blocks,
    count: u64,
}

impl Trace {
    /// These blocks are read. Returns whether there is room for more.
    pub(crate) fn note(&mut self, blocks: Range<u64>) -> bool {
        for new in self.seen.outside(&blocks) {
            if self.is_full() {
                return false;
            }
            let end = new.end.min(new.start + (BLOCKS_MAX - self.count));
            self.count += end - new.start;
            self.seen.add(new.start..end);
            match self.ranges.last_mut() {
                Some(last) if last.end == new.start => last.end = end,
                _ => self.ranges.push(new.start..end),
            }
        }
        !self.is_full()
    }

    fn is_full(&self) -> bool {
        self.count >= BLOCKS_MAX || self.ranges.len() >= RANGES_MAX
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Of these blocks, those that were not read.
    pub(crate) fn unread(&self, blocks: &Range<u64>) -> Vec<Range<u64>> {
        self.seen.outside(blocks)
    }

    /// What a record that has `old` has after this: first what was read now, as it was read, then
    /// what others had read. After a whole boot, what was not read comes nearer to its end. `None`
    /// if that is about the same.
    pub(crate) fn merged(
        &self,
        old: Option<&[BootRange]>,
        is_whole: bool,
    ) -> Option<Vec<BootRange>> {
        if self.is_empty() {
            return None;
        }
        let (mut known, mut missed_count, mut count) = (Blocks::default(), 0, self.count);
        let mut merged: Vec<BootRange> = self.ranges.iter().flat_map(|it| pieces(it, 0)).collect();
        for range in old.unwrap_or_default() {
            let blocks = range.start..range.start + u64::from(range.count);
            known.add(blocks.clone());
            for part in self.seen.outside(&blocks) {
                missed_count += part.end - part.start;
                let missed = range.missed + u32::from(is_whole);
                let is_room = |len| count + len <= BLOCKS_MAX && merged.len() < RANGES_MAX;
                if missed < MISSED_MAX && is_room(part.end - part.start) {
                    count += part.end - part.start;
                    merged.extend(pieces(&part, missed));
                }
            }
        }
        merged.truncate(RANGES_MAX);
        let new = self.ranges.iter().flat_map(|range| known.outside(range));
        let new: u64 = new.map(|range| range.end - range.start).sum();
        let changed = new + if is_whole { missed_count } else { 0 };
        (changed > 0 && changed * CHANGED_PART >= self.count).then_some(merged)
    }
}

/// Blocks as ranges of a record.
fn pieces(blocks: &Range<u64>, missed: u32) -> impl Iterator<Item = BootRange> + use<> {
    let (start, count) = (blocks.start, blocks.end - blocks.start);
    // A trace has no more blocks than a count can say.
    u32::try_from(count).ok().map(|count| BootRange { start, count, missed }).into_iter()
}

/// A set of blocks.
#[derive(Default)]
struct Blocks {
    /// Start to end of runs that do not touch.
    runs: BTreeMap<u64, u64>,
}

impl Blocks {
    fn add(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let (mut start, mut end) = (blocks.start, blocks.end);
        while let Some((&first, &last)) = self.runs.range(..=end).next_back() {
            if last < start {
                break;
            }
            self.runs.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        self.runs.insert(start, end);
    }

    /// Of `blocks`, those that are not in it.
    fn outside(&self, blocks: &Range<u64>) -> Vec<Range<u64>> {
        let (mut outside, mut at) = (Vec::new(), blocks.start);
        let before = self.runs.range(..=blocks.start).next_back();
        for (&start, &end) in before.into_iter().chain(self.runs.range(blocks.start + 1..)) {
            if start >= blocks.end {
                break;
            }
            if at < start {
                outside.push(at..start);
            }
            at = at.max(end);
        }
        if at < blocks.end {
            outside.push(at..blocks.end);
        }
        outside
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::Rng;
    use std::collections::BTreeSet;

    /// Of ranges by their first block and their end.
    fn trace(ranges: &[(u64, u64)]) -> Trace {
        let mut trace = Trace::default();
        for (start, end) in ranges.iter().copied() {
            trace.note(start..end);
        }
        trace
    }

    fn range(start: u64, count: u32, missed: u32) -> BootRange {
        BootRange { start, count, missed }
    }

    /// Against a set of single blocks.
    #[test]
    fn trace_has_each_block_once_where_it_was_read_first() {
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let (mut trace, mut order, mut set) = (Trace::default(), Vec::new(), BTreeSet::new());
            for _ in 0..40 {
                let start = rng.below(60);
                let blocks = start..start + rng.below(12);
                let unread = trace.unread(&blocks).into_iter().flatten().collect::<Vec<_>>();
                let new: Vec<_> = blocks.clone().filter(|block| set.insert(*block)).collect();
                assert_eq!(unread, new, "seed {seed}");
                order.extend(new);
                assert!(trace.note(blocks));
            }
            let traced: Vec<_> = trace.ranges.iter().cloned().flatten().collect();
            assert_eq!((traced.len() as u64, &traced), (trace.count, &order), "seed {seed}");
        }
    }

    #[test]
    fn trace_is_full_at_the_bounds_of_a_record() {
        let mut wide = Trace::default();
        assert!(wide.note(0..BLOCKS_MAX - 1) && !wide.note(1 << 30..(1 << 30) + 7));
        assert_eq!(wide.count, BLOCKS_MAX);
        let mut scattered = Trace::default();
        let all = (0..RANGES_MAX as u64).all(|at| scattered.note(at * 2..at * 2 + 1));
        assert!(!all && !scattered.note(1..2));
        assert_eq!(scattered.merged(None, true).map(|merged| merged.len()), Some(RANGES_MAX));
    }

    #[test]
    fn boots_that_read_the_same_leave_the_record_as_it_is() {
        let first = trace(&[(100, 132), (0, 32)]).merged(None, true).expect("new");
        assert_eq!(first, [range(100, 32, 0), range(0, 32, 0)]);
        assert_eq!(trace(&[(0, 32), (100, 132)]).merged(Some(&first), true), None);
        assert_eq!(
            trace(&[(0, 32), (100, 129)]).merged(Some(&first), true),
            None,
            "nearly the same"
        );
        assert_eq!(trace(&[]).merged(Some(&first), true), None, "nobody booted");
        assert_eq!(trace(&[(0, 4)]).merged(Some(&first), false), None, "it was closed early");
    }

    #[test]
    fn what_boots_do_not_read_any_more_leaves_the_record() {
        let mut record = trace(&[(0, 8), (100, 108)]).merged(None, true).expect("new");
        for missed in 1..MISSED_MAX {
            record = trace(&[(102, 108)]).merged(Some(&record), true).expect("changed");
            let old = [range(0, 8, missed), range(100, 2, missed)];
            assert_eq!(record, [&[range(102, 6, 0)][..], &old].concat());
        }
        let read_again = trace(&[(102, 108), (4, 8)]).merged(Some(&record), true).expect("changed");
        assert_eq!(read_again, [range(102, 6, 0), range(4, 4, 0)]);
    }
}

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
/// What a whole boot did not read counts as missed only if it read this part of the record, at
/// least: a server that is started again under guests that run opens their volumes, too.
const READ_PART: u64 = 4;

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

    /// What a record that has `old` has after this; `None` if that is about the same. After a whole
    /// boot it has first what was read now, as it was read, then what others had read. After one
    /// that was cut short, or filled the trace, the old comes first: what was read may be no boot.
    /// What a whole boot did not read comes nearer to its end, unless that one read little of the
    /// record: then its guest had been running before.
    pub(crate) fn merged(
        &self,
        old: Option<&[BootRange]>,
        is_whole: bool,
    ) -> Option<Vec<BootRange>> {
        if self.is_empty() {
            return None;
        }
        let old = old.unwrap_or_default();
        let mut known = Blocks::default();
        old.iter().for_each(|range| known.add(blocks_of(range)));
        let missed: u64 = old.iter().map(|range| self.missed_of(range)).sum();
        let all: u64 = old.iter().map(|range| u64::from(range.count)).sum();
        let is_boot = is_whole && (all - missed) * READ_PART >= all;
        let (mut merged, mut new) = (Merged::default(), 0);
        let is_old_first = self.is_full() || !is_whole;
        if !is_old_first {
            for range in &self.ranges {
                merged.add(range, 0);
                new += known.outside(range).into_iter().map(len).sum::<u64>();
            }
        }
        for range in old {
            let was_missed = range.missed + u32::from(is_boot);
            for (part, is_read) in self.seen.split(&blocks_of(range)) {
                let missed = if is_read { 0 } else { was_missed };
                if missed < MISSED_MAX && (is_old_first || !is_read) {
                    merged.add(&part, missed);
                }
            }
        }
        if is_old_first {
            let parts = self.ranges.iter().flat_map(|range| known.outside(range));
            new = parts.map(|part| merged.add(&part, 0)).sum();
        }
        let changed = new + if is_boot { missed } else { 0 };
        (changed > 0 && changed * CHANGED_PART >= self.count).then_some(merged.ranges)
    }

    /// Blocks of a range that were not read.
    fn missed_of(&self, range: &BootRange) -> u64 {
        self.seen.outside(&blocks_of(range)).into_iter().map(len).sum()
    }
}

/// The ranges of a record, as far as there is room (I2).
#[derive(Default)]
struct Merged {
    ranges: Vec<BootRange>,
    count: u64,
}

impl Merged {
    /// Returns for how many of them there was room.
    fn add(&mut self, blocks: &Range<u64>, missed: u32) -> u64 {
        let is_full = self.ranges.len() >= RANGES_MAX;
        let room = if is_full { 0 } else { BLOCKS_MAX - self.count };
        let added = room.min(blocks.end - blocks.start);
        // A record has no more blocks than a count can say.
        if let Some(count) = u32::try_from(added).ok().filter(|count| *count > 0) {
            self.ranges.push(BootRange { start: blocks.start, count, missed });
        }
        self.count += added;
        added
    }
}

fn blocks_of(range: &BootRange) -> Range<u64> {
    range.start..range.start + u64::from(range.count)
}

fn len(blocks: Range<u64>) -> u64 {
    blocks.end - blocks.start
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

    /// `blocks` in order, as parts that are in it, and such that are not.
    fn split(&self, blocks: &Range<u64>) -> Vec<(Range<u64>, bool)> {
        let (mut parts, mut at) = (Vec::new(), blocks.start);
        for outside in self.outside(blocks) {
            if at < outside.start {
                parts.push((at..outside.start, true));
            }
            at = outside.end;
            parts.push((outside, false));
        }
        if at < blocks.end {
            parts.push((at..blocks.end, true));
        }
        parts
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

    /// A server is started again, again and again, while its guests run.
    #[test]
    fn whoever_reads_little_of_a_record_does_not_age_it() {
        let mut record = trace(&[(0, 400)]).merged(None, true).expect("new");
        for restart in 0..2 * u64::from(MISSED_MAX) {
            let guest = trace(&[(10, 20), (1000 + 100 * restart, 1040 + 100 * restart)]);
            record = guest.merged(Some(&record), true).expect("more is read");
            assert!(record.iter().all(|range| range.missed == 0));
            let of_boot = record.iter().filter(|range| range.start < 400);
            assert_eq!(of_boot.map(|range| range.count).sum::<u32>(), 400);
        }
    }

    /// A backup reads a volume as soon as it is open.
    #[test]
    fn what_fills_a_trace_or_is_cut_short_comes_after_what_boots_read() {
        let far = BLOCKS_MAX + 500;
        let record = trace(&[(far, far + 400), (0, 100)]).merged(None, true).expect("new");
        let all = trace(&[(0, BLOCKS_MAX)]);
        assert!(all.is_full());
        let merged = all.merged(Some(&record), true).expect("more is read");
        assert_eq!(merged[..2], record);
        let room = u32::try_from(BLOCKS_MAX).expect("small") - 500;
        assert_eq!(merged[2..], [range(100, room, 0)]);
        let short = trace(&[(90, 110)]).merged(Some(&record), false).expect("more is read");
        let read = [range(0, 90, 0), range(90, 10, 0), range(100, 10, 0)];
        assert_eq!(short, [&record[..1], &read].concat());
        let full = all.merged(None, true).expect("new");
        let elsewhere = trace(&[(BLOCKS_MAX, 2 * BLOCKS_MAX)]);
        assert_eq!(elsewhere.merged(Some(&full), true), None, "it has no room");
    }
}

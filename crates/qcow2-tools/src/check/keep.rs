//! The purpose of a walk over an image, and what it keeps for a repair besides the counts.

use super::CheckReport;
use super::refcounts::Refcounts;
use crate::references::References;
use mica_block::{Error, ErrorKind, Result};
use mica_units::{ClusterBits, HostCluster, HostOffset};

/// Maximum number of separate ranges that are kept of one kind. A real image has one lost tail
/// beyond its end; only a malicious one names this many.
const RANGES_MAX: usize = 1 << 20;

/// Maximum number of separate places: of tables, of bitmaps, and of refcount blocks, of which the
/// largest refcount table names 2^20.
const PLACES_MAX: usize = 1 << 22;

/// The purpose of a walk.
#[derive(Clone, Copy)]
pub(crate) enum Task<'a> {
    /// To judge the image.
    Judge,
    /// To judge it, and to keep what a repair needs.
    Keep,
    /// To count all references but those of the refcount structure, which is to be replaced.
    WithoutRefcounts,
    /// To mend L2 entries that QEMU mends, but over none of these places.
    MendEntries(&'a Places),
    /// To mend the flags "refcount is one", but over none of these places.
    MendFlags(&'a Places),
}

/// What a walk found.
pub(crate) struct Counted {
    /// The judgement, where it was asked for.
    pub(crate) report: CheckReport,
    /// The references to each cluster.
    pub(crate) references: References,
    /// Where the refcounts are.
    pub(crate) refcounts: Refcounts,
    /// Length of the file in whole sectors.
    pub(crate) file_bytes: u64,
    /// Words that were repaired.
    pub(crate) mended: u64,
    /// What [`Task::Keep`] and [`Task::WithoutRefcounts`] keep; else nothing.
    pub(crate) kept: Kept,
}

/// What is kept for a repair.
#[derive(Default)]
pub(crate) struct Kept {
    /// The places of everything that is neither an L2 table nor the guest's.
    pub(crate) places: Places,
    /// Clusters that are named by something that extends beyond the end of the file. Their
    /// references are not counted.
    pub(crate) beyond: Ranges,
    /// The refcount table and what it names, for [`Task::WithoutRefcounts`].
    pub(crate) structure: Ranges,
    /// A refcount block overlaps something else. Narrow refcounts do not show that.
    pub(crate) shared_block: bool,
}

/// What is being kept.
pub(super) struct Keep {
    wanted: bool,
    places: Vec<Range>,
    beyond: Vec<Range>,
    structure: Vec<Range>,
    pub(super) shared_block: bool,
}

impl Keep {
    pub(super) fn for_task(task: &Task<'_>) -> Self {
        Self {
            wanted: matches!(task, Task::Keep | Task::WithoutRefcounts),
            places: Vec::new(),
            beyond: Vec::new(),
            structure: Vec::new(),
            shared_block: false,
        }
    }

    pub(super) fn place(&mut self, bits: ClusterBits, offset: u64, len: u64) -> Result<()> {
        if !self.wanted || len == 0 {
            return Ok(());
        }
        let (first, last) = clusters(bits, offset, len);
        let is_full = self.places.len() == PLACES_MAX;
        match self.places.last_mut() {
            Some((_, end)) if end.saturating_add(1) == first => *end = last,
            _ if is_full => {
                let what = "tables and bitmaps are in more places than any real image has";
                return Err(Error::new(ErrorKind::Limit, what));
            }
            _ => self.places.push((first, last)),
        }
        Ok(())
    }

    pub(super) fn structure(&mut self, bits: ClusterBits, offset: u64, len: u64) {
        if self.wanted && len > 0 {
            self.structure.push(clusters(bits, offset, len));
        }
    }

    pub(super) fn beyond(&mut self, bits: ClusterBits, offset: u64, len: u64) -> Result<()> {
        if !self.wanted || len == 0 {
            return Ok(());
        }
        let (first, last) = clusters(bits, offset, len);
        // Tails are mostly named in order.
        match self.beyond.last_mut() {
            Some((_, end)) if end.saturating_add(1) == first => *end = last,
            _ => self.beyond.push((first, last)),
        }
        if self.beyond.len() >= RANGES_MAX {
            self.beyond = Ranges::new(std::mem::take(&mut self.beyond)).ranges;
            if self.beyond.len() >= RANGES_MAX / 2 {
                return Err(Error::new(
                    ErrorKind::Limit,
                    "too many places beyond the end of the file are named; this is no lost tail",
                ));
            }
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Kept {
        Kept {
            places: Places::new(&self.places),
            beyond: Ranges::new(self.beyond),
            structure: Ranges::new(self.structure),
            shared_block: self.shared_block,
        }
    }
}

fn clusters(bits: ClusterBits, offset: u64, len: u64) -> Range {
    let last = offset.saturating_add(len - 1);
    (bits.host_cluster(HostOffset::new(offset)), bits.host_cluster(HostOffset::new(last)))
}

/// Clusters in a row: the first and the last.
type Range = (HostCluster, HostCluster);

/// Sets of clusters, sorted and disjoint.
#[derive(Default)]
pub(crate) struct Ranges {
    ranges: Vec<Range>,
}

impl Ranges {
    /// Builds the set from ranges in any order, each with its first and its last cluster.
    pub(crate) fn new(mut ranges: Vec<Range>) -> Self {
        ranges.sort_unstable();
        let mut apart: Vec<Range> = Vec::new();
        for (first, last) in ranges {
            match apart.last_mut() {
                Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
                _ => apart.push((first, last)),
            }
        }
        Self { ranges: apart }
    }

    /// First and last cluster of each range.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range> + '_ {
        self.ranges.iter().copied()
    }

    /// The range that holds `cluster`, else the next one.
    pub(crate) fn at_or_after(&self, cluster: HostCluster) -> Option<Range> {
        let index = self.ranges.partition_point(|&(_, last)| last < cluster);
        self.ranges.get(index).copied()
    }
}

/// How many places cover each cluster.
#[derive(Default)]
pub(crate) struct Places {
    /// From each of these clusters on there are this many, up to the next.
    steps: Vec<(HostCluster, u32)>,
}

impl Places {
    fn new(places: &[Range]) -> Self {
        let starts = places.iter().map(|&(first, _)| (first, true));
        let ends = places.iter().map(|&(_, last)| (last.saturating_add(1), false));
        let mut changes: Vec<(HostCluster, bool)> = starts.chain(ends).collect();
        changes.sort_unstable();
        let mut steps: Vec<(HostCluster, u32)> = Vec::new();
        let mut depth = 0_u32;
        for (cluster, starts) in changes {
            // Ends sort before starts, and each follows its own start: never below zero.
            depth = if starts { depth.saturating_add(1) } else { depth.saturating_sub(1) };
            match steps.last_mut() {
                Some((last, now)) if *last == cluster => *now = depth,
                _ => steps.push((cluster, depth)),
            }
        }
        Self { steps }
    }

    /// How many places cover `cluster`.
    pub(crate) fn covering(&self, cluster: HostCluster) -> u32 {
        let after = self.steps.partition_point(|&(first, _)| first <= cluster);
        after.checked_sub(1).and_then(|index| self.steps.get(index)).map_or(0, |&(_, depth)| depth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range((first, last): (u64, u64)) -> Range {
        (HostCluster::new(first), HostCluster::new(last))
    }

    #[test]
    fn places_that_overlap_are_counted() {
        let places = Places::new(&[(0, 0), (4, 7), (5, 5), (8, 8)].map(range));
        let depths: Vec<_> =
            (0..10).map(|cluster| places.covering(HostCluster::new(cluster))).collect();
        assert_eq!(depths, [1, 0, 0, 0, 1, 2, 1, 1, 1, 0]);
        assert_eq!(Places::default().covering(HostCluster::new(3)), 0);
    }

    #[test]
    fn ranges_are_joined_and_found() {
        let ranges = Ranges::new([(10, 12), (3, 4), (5, 5), (11, 20)].map(range).into());
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(3, 5), (10, 20)].map(range));
        let at_or_after = |cluster| ranges.at_or_after(HostCluster::new(cluster));
        assert_eq!(at_or_after(5), Some(range((3, 5))));
        assert_eq!(at_or_after(6), Some(range((10, 20))));
        assert_eq!(at_or_after(21), None);
    }
}

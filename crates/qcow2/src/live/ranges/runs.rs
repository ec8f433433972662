//! A set of clusters, as runs of eight bytes each.
//!
//! Contiguous tables cost one run, and scattered tables eight bytes each, as much as the entry that
//! names them: the memory that an image can tie up is no more than it spends itself.
//!
//! Invariants
//! - I1 The runs of a chunk, and the chunks, are sorted and disjoint; no chunk is empty.
//! - I2 A chunk has at most [`CHUNK_RUNS_MAX`] runs after a merge, so that a change moves little.

use mica_units::HostCluster;

/// Maximum number of runs of a chunk.
const CHUNK_RUNS_MAX: usize = 2048;

/// Clusters in a row, with a tag: 47 bits of the first, 16 bits of their count less one, 1 bit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct ClusterRun(u64);

const COUNT_SHIFT: u32 = 1;
const FIRST_SHIFT: u32 = 17;
const COUNT_MAX: u64 = 1 << (FIRST_SHIFT - COUNT_SHIFT);
/// Cluster numbers that a run can hold: an address has 56 bits, and a cluster at least 512 bytes.
const FIRST_END: u64 = 1 << (u64::BITS - FIRST_SHIFT);

impl ClusterRun {
    fn new(first: HostCluster, count: u64, tag: bool) -> Self {
        let first = first.number();
        assert!(first < FIRST_END && (1..=COUNT_MAX).contains(&count), "a run that fits");
        Self(first << FIRST_SHIFT | (count - 1) << COUNT_SHIFT | u64::from(tag))
    }

    pub(super) fn first(self) -> HostCluster {
        HostCluster::new(self.0 >> FIRST_SHIFT)
    }

    fn count(self) -> u64 {
        (self.0 >> COUNT_SHIFT & (COUNT_MAX - 1)) + 1
    }

    pub(super) fn end(self) -> HostCluster {
        self.first().saturating_add(self.count())
    }

    pub(super) fn tag(self) -> bool {
        self.0 & 1 != 0
    }

    /// Both as one, where they are neighbours and alike.
    fn joined(self, next: Self) -> Option<Self> {
        let count = self.count() + next.count();
        let joins = self.end() == next.first() && self.tag() == next.tag() && count <= COUNT_MAX;
        joins.then(|| Self::new(self.first(), count, self.tag()))
    }
}

/// A set of clusters.
#[derive(Default)]
pub(super) struct ClusterRuns {
    chunks: Vec<Vec<ClusterRun>>,
}

impl ClusterRuns {
    /// Adds `clusters`, which are sorted, each with this tag; reports those that were there
    /// already, or appear twice.
    pub(super) fn merge(
        &mut self,
        clusters: &[HostCluster],
        tag: bool,
        mut known: impl FnMut(HostCluster),
    ) {
        let mut rest = clusters;
        while let Some(first) = rest.first() {
            // The last chunk that starts at or before the cluster; else the first one.
            let starts = |chunk: &Vec<ClusterRun>| chunk[0].first() <= *first;
            let index = self.chunks.partition_point(starts).saturating_sub(1);
            let end = match self.chunks.get(index + 1) {
                Some(next) => rest.partition_point(|cluster| *cluster < next[0].first()),
                None => rest.len(),
            };
            let (now, later) = rest.split_at(end);
            let chunk = self.chunks.get(index).map_or(&[][..], Vec::as_slice);
            let merged = merge_chunk(chunk, now, tag, &mut known);
            // Equal pieces, so that a full chunk leaves room in both halves.
            let pieces = merged.len().div_ceil(CHUNK_RUNS_MAX);
            let pieces = merged.chunks(merged.len().div_ceil(pieces)).map(<[_]>::to_vec);
            debug_assert!(pieces.clone().all(|piece| piece.len() <= CHUNK_RUNS_MAX), "I2");
            let old = index..self.chunks.len().min(index + 1);
            self.chunks.splice(old, pieces);
            rest = later;
        }
    }

    /// The last run that has a cluster from `first` on and before `end`.
    pub(super) fn overlap(&self, first: HostCluster, end: HostCluster) -> Option<ClusterRun> {
        let chunks = self.chunks.partition_point(|chunk| chunk[0].first() < end);
        let chunk = self.chunks.get(chunks.checked_sub(1)?)?;
        let runs = chunk.partition_point(|run| run.first() < end);
        chunk.get(runs.checked_sub(1)?).copied().filter(|run| run.end() > first)
    }

    pub(super) fn contains(&self, cluster: HostCluster) -> bool {
        self.overlap(cluster, cluster.saturating_add(1)).is_some()
    }

    /// Removes `cluster`, if it is present.
    pub(super) fn remove(&mut self, cluster: HostCluster) {
        let index = self.chunks.partition_point(|chunk| chunk[0].first() <= cluster);
        let Some(index) = index.checked_sub(1) else { return };
        let chunk = &mut self.chunks[index];
        let at = chunk.partition_point(|run| run.first() <= cluster).saturating_sub(1);
        let run = chunk[at];
        if !(run.first()..run.end()).contains(&cluster) {
            return;
        }
        let next = cluster.saturating_add(1);
        let before = (run.first(), cluster.saturating_since(run.first()));
        let after = (next, run.end().saturating_since(next));
        let left = [before, after].into_iter().filter(|(_, count)| *count > 0);
        chunk.splice(at..=at, left.map(|(first, count)| ClusterRun::new(first, count, run.tag())));
        if chunk.is_empty() {
            self.chunks.remove(index);
        }
    }

    /// Asserts the invariants.
    #[cfg(test)]
    pub(super) fn verify(&self) {
        let mut end = HostCluster::ZERO;
        for chunk in &self.chunks {
            assert!(!chunk.is_empty(), "I1: a chunk has runs");
            for run in chunk {
                assert!(run.first() >= end, "I1: {run:?} begins before {end}");
                end = run.end();
            }
        }
    }

    /// Bytes of memory that it holds.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        let chunks = self.chunks.iter().map(|chunk| chunk.capacity() * size_of::<ClusterRun>());
        self.chunks.capacity() * size_of::<Vec<ClusterRun>>() + chunks.sum::<usize>()
    }
}

fn merge_chunk(
    chunk: &[ClusterRun],
    clusters: &[HostCluster],
    tag: bool,
    known: &mut impl FnMut(HostCluster),
) -> Vec<ClusterRun> {
    let mut merged = Vec::with_capacity(chunk.len() + clusters.len());
    let mut runs = chunk.iter().copied().peekable();
    for cluster in clusters {
        while let Some(run) = runs.next_if(|run| run.end() <= *cluster) {
            push_joined(&mut merged, run);
        }
        let is_known = runs.peek().is_some_and(|run| run.first() <= *cluster)
            || merged.last().is_some_and(|last: &ClusterRun| last.end() > *cluster);
        if is_known {
            known(*cluster);
        } else {
            push_joined(&mut merged, ClusterRun::new(*cluster, 1, tag));
        }
    }
    runs.for_each(|run| push_joined(&mut merged, run));
    merged
}

fn push_joined(runs: &mut Vec<ClusterRun>, run: ClusterRun) {
    match runs.last_mut() {
        Some(last) if let Some(joined) = last.joined(run) => *last = joined,
        _ => runs.push(run),
    }
}

//! Sectors of a window in which something may differ.

use crate::index::slice::Runs;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};

/// Sectors, counted from the window's start, as they were found.
#[derive(Default)]
pub(super) struct Ranges {
    found: Vec<(u32, u32)>,
}

impl Ranges {
    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Adds what has an owner in `runs`.
    pub(super) fn add(&mut self, runs: &Runs) {
        self.found.extend(runs.iter().map(|run| (run.start, run.end)));
    }

    /// Adds the part of the disk `range`, which lies in `window`.
    pub(super) fn add_range(&mut self, range: GuestRange, window: GuestRange) {
        let sector = |at: GuestOffset| {
            let since = at.bytes() - window.start().bytes();
            u32::try_from(since.div_ceil(SECTOR_BYTES)).expect("a window has few sectors")
        };
        self.found.push((sector(range.start()), sector(range.end())));
    }

    /// Adds the sectors that `one` and `other`, which name places in one file, do not have at the
    /// same place.
    pub(super) fn add_difference(&mut self, one: &Runs, other: &Runs) {
        let mut edges: Vec<u32> =
            one.iter().chain(other.iter()).flat_map(|run| [run.start, run.end]).collect();
        edges.sort_unstable();
        edges.dedup();
        for edge in edges.windows(2) {
            let (start, end) = (edge[0], edge[1]);
            let [one, other] = [one, other].map(|runs| runs.entry_at(start));
            let is_same = match (one, other) {
                (Some(one), Some(other)) => one.says_the_same(other),
                (None, None) => true,
                _ => false,
            };
            if !is_same {
                self.found.push((start, end));
            }
        }
    }

    /// What was found, in order and joined, as ranges of the disk that end with `window`.
    pub(super) fn finish(mut self, window: GuestRange) -> Vec<GuestRange> {
        self.found.sort_unstable();
        let mut joined: Vec<(u32, u32)> = Vec::new();
        for (start, end) in self.found {
            match joined.last_mut() {
                Some((_, last)) if *last >= start => *last = end.max(*last),
                _ => joined.push((start, end)),
            }
        }
        let at = |sector: u32| {
            let at = window.start().checked_add(u64::from(sector) * SECTOR_BYTES);
            at.map_or(window.end(), |at| at.min(window.end()))
        };
        let range = |(start, end)| GuestRange::between(at(start), at(end));
        joined.into_iter().filter_map(range).filter(|range| !range.is_empty()).collect()
    }
}

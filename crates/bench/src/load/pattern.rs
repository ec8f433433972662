//! Which parts of the disk a load touches.

use mica_gen::Rng;
use mica_gen::owner::{Owner, OwnerMap};

/// The order of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pattern {
    /// Random, but only where some layer has data.
    Hits,
    /// Random over the whole disk.
    Mix,
    /// From the start to the end, once.
    Sequential,
    /// Once in every stretch that one L2 table covers, where possible at a hole, which asks every
    /// layer: afterwards a server that caches tables has them.
    Warm {
        /// Bytes that one L2 table covers.
        table_bytes: u64,
    },
}

/// Offsets of requests of one size.
pub(crate) struct Offsets<'a> {
    pattern: Pattern,
    owners: Option<&'a OwnerMap>,
    /// Starts of what [`Pattern::Hits`] may touch.
    hits: Vec<u64>,
    disk_bytes: u64,
    request_bytes: u64,
    rng: Rng,
    next: u64,
}

impl<'a> Offsets<'a> {
    /// Requests of `request_bytes` on a disk of `disk_bytes` that `owners` describe.
    pub(crate) fn new(
        pattern: Pattern,
        owners: Option<&'a OwnerMap>,
        disk_bytes: u64,
        request_bytes: u64,
        seed: u64,
    ) -> Self {
        let hits = match (pattern, owners) {
            (Pattern::Hits, Some(owners)) => owners.data_units().collect(),
            _ => Vec::new(),
        };
        let rng = Rng::new(seed);
        Self { pattern, owners, hits, disk_bytes, request_bytes, rng, next: 0 }
    }

    fn table_probe(&self, start: u64, table_bytes: u64) -> u64 {
        let Some(owners) = self.owners else { return start };
        let end = (start + table_bytes).min(self.disk_bytes);
        let step = usize::try_from(owners.unit_bytes()).unwrap_or(usize::MAX);
        let hole = (start..end).step_by(step).find(|at| owners.at(*at) == Owner::Hole);
        hole.unwrap_or(start)
    }
}

impl Iterator for Offsets<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        match self.pattern {
            Pattern::Hits => {
                let unit = self.owners?.unit_bytes();
                let at = self.rng.below((self.hits.len() as u64).max(1));
                let start = *self.hits.get(usize::try_from(at).ok()?)?;
                let within = self.rng.below((unit / self.request_bytes).max(1));
                Some(start + within * self.request_bytes)
            }
            Pattern::Mix => {
                Some(self.rng.below(self.disk_bytes / self.request_bytes) * self.request_bytes)
            }
            Pattern::Sequential => {
                let at = self.next;
                self.next += self.request_bytes;
                (self.next <= self.disk_bytes).then_some(at)
            }
            Pattern::Warm { table_bytes } => {
                let start = self.next;
                self.next += table_bytes;
                (start < self.disk_bytes).then(|| self.table_probe(start, table_bytes))
            }
        }
    }
}

//! The pages that the log has changed since its last mark, so that it can be compacted: many
//! changes of one page become one.
//!
//! Invariants
//! - I1 Every page that a record since the mark changes is here, with each stage that one has.
//! - I2 So is every page that a record since the mark expects. Its sums are those of the latest
//!   one, which is what the file has once no group is being written.

use super::Stage;
use super::expected::{Expected, Sums};
use mica_units::HostOffset;
use std::collections::BTreeMap;

#[derive(Default)]
struct Page {
    sums: Option<Sums>,
    is_early: bool,
    is_late: bool,
}

/// The pages, by their place.
pub(super) struct Changed {
    page_bytes: u64,
    pages: BTreeMap<u64, Page>,
}

impl Changed {
    /// None yet, of this size, which is a power of two.
    pub(super) fn new(page_bytes: u64) -> Self {
        assert!(page_bytes.is_power_of_two(), "pages of {page_bytes} bytes");
        Self { page_bytes, pages: BTreeMap::new() }
    }

    /// Something in the page of `at` is being changed.
    pub(super) fn touch(&mut self, at: HostOffset, stage: Stage) {
        let page = self.pages.entry(at.bytes() & !(self.page_bytes - 1)).or_default();
        match stage {
            Stage::Early => page.is_early = true,
            Stage::Late => page.is_late = true,
        }
    }

    /// The file may hold the page at `at` with these `sums`.
    pub(super) fn expect(&mut self, at: u64, sums: Sums) {
        self.pages.entry(at).or_default().sums = Some(sums);
    }

    /// The log has a mark now.
    pub(super) fn clear(&mut self) {
        self.pages.clear();
    }

    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        self.pages.len() as u64 * self.page_bytes
    }

    /// Length of a page.
    pub(super) fn page_len(&self) -> usize {
        usize::try_from(self.page_bytes).expect("4 KiB")
    }

    /// Whether the page at `at` is one.
    pub(super) fn has(&self, at: u64) -> bool {
        self.pages.contains_key(&at)
    }

    /// The pages that are changed, in rising order, each once for each stage.
    pub(super) fn stages(&self) -> impl Iterator<Item = (u64, Stage)> {
        self.pages.iter().flat_map(|(at, page)| {
            let early = page.is_early.then_some((*at, Stage::Early));
            early.into_iter().chain(page.is_late.then_some((*at, Stage::Late)))
        })
    }

    /// What the file has in them.
    pub(super) fn expected(&self) -> Vec<Expected> {
        let mut all = Vec::new();
        for (at, page) in &self.pages {
            if let Some(sums) = page.sums {
                Expected::push(&mut all, *at, self.page_bytes, sums);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::expected::sums_of;
    use super::*;

    #[test]
    fn page_is_there_once_for_each_stage_with_the_latest_sums() {
        let mut changed = Changed::new(512);
        changed.expect(1024, sums_of(&[1; 512]));
        changed.touch(HostOffset::new(1030), Stage::Late);
        changed.touch(HostOffset::new(1400), Stage::Late);
        changed.touch(HostOffset::new(0), Stage::Late);
        changed.touch(HostOffset::new(511), Stage::Early);
        changed.expect(1024, sums_of(&[2; 512]));
        let stages: Vec<_> = changed.stages().collect();
        assert_eq!(stages, [(0, Stage::Early), (0, Stage::Late), (1024, Stage::Late)]);
        let expected = [Expected { at: 1024, pages: 1, sums: sums_of(&[2; 512]) }];
        assert_eq!(changed.expected(), expected);
        assert_eq!(changed.bytes(), 1024);
        changed.clear();
        assert!(!changed.has(1024) && changed.expected().is_empty());
    }
}

//! The labels of an open volume's snapshots, kept so that taking the next one need not read them
//! all.
//!
//! Invariants
//! - I1 Whoever reads or changes them holds the volume's `naming`, and so does whoever gives a
//!   snapshot a label, or drops one that may have one. So they are those that there are.
//! - I2 There are [`LABELS_MAX`] at most. A volume with more has them read each time.

use crate::snapshots::check_new_label;
use mica_block::{Result, SnapshotInfo};
use std::collections::{BTreeMap, BTreeSet};

/// Labels that are kept in memory.
pub(crate) const LABELS_MAX: usize = 1 << 16;

/// See the module.
#[derive(Default, Debug)]
pub(crate) struct Labels {
    /// With the number of the snapshot. Others may have put a store where two have the same.
    numbers: BTreeSet<(String, u64)>,
    of_number: BTreeMap<u64, String>,
}

impl Labels {
    /// Those of `snapshots`, which are all that there are.
    pub(crate) fn of(snapshots: Vec<SnapshotInfo>) -> Self {
        let mut labels = Self::default();
        for SnapshotInfo { number, label, .. } in snapshots {
            labels.set(number, label);
        }
        labels
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.numbers.len()
    }

    /// The first snapshot with `label`.
    pub(crate) fn number(&self, label: &str) -> Option<u64> {
        let (found, number) = self.numbers.range((label.to_owned(), 0)..).next()?;
        (found == label).then_some(*number)
    }

    /// Checks that `label` may be given to a new snapshot, or to snapshot `own`.
    ///
    /// # Errors
    /// `Invalid` if it may not.
    pub(crate) fn check_free(&self, label: &str, own: Option<u64>) -> Result<()> {
        let of_label = self.numbers.range((label.to_owned(), 0)..=(label.to_owned(), u64::MAX));
        let others = of_label.filter(|(_, number)| Some(*number) != own);
        check_new_label(label, others.map(|(other, _)| &**other))
    }

    /// Snapshot `number` has `label` now; none if that is empty, or the snapshot is no more.
    pub(crate) fn set(&mut self, number: u64, label: String) {
        let before = match label.is_empty() {
            true => self.of_number.remove(&number),
            false => self.of_number.insert(number, label.clone()),
        };
        if let Some(before) = before {
            self.numbers.remove(&(before, number));
        }
        if !label.is_empty() {
            self.numbers.insert((label, number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::Rng;

    /// Against a map of all snapshots.
    #[test]
    fn labels_are_those_that_snapshots_have() {
        for seed in 0..50 {
            let mut rng = Rng::new(seed);
            let (mut labels, mut model) = (Labels::default(), BTreeMap::new());
            for _ in 0..100 {
                let (number, label) = (rng.below(12), format!("l{}", rng.below(8)));
                let label = if rng.percent(30) { String::new() } else { label };
                model.insert(number, label.clone());
                labels.set(number, label);
                for label in (0..8).map(|label| format!("l{label}")) {
                    let mut has = model.iter().filter(|(_, has)| **has == label);
                    let first = has.next().map(|(number, _)| *number);
                    let is_alone = has.next().is_none();
                    assert_eq!(labels.number(&label), first, "seed {seed}");
                    assert_eq!(labels.check_free(&label, None).is_ok(), first.is_none());
                    assert_eq!(labels.check_free(&label, first).is_ok(), is_alone);
                }
            }
            assert_eq!(labels.len(), model.values().filter(|label| !label.is_empty()).count());
        }
    }
}

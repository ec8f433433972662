//! What was done to a volume's snapshots and is not in the state yet.

use super::Now;
use crate::segment::{Cut, Segment};
use mica_block::SnapshotInfo;
use std::collections::BTreeMap;

impl Now {
    /// The number of the next snapshot, whatever is still to be put.
    pub(crate) fn next_snapshot(&self) -> u64 {
        let mut cuts = self.sealed.iter().rev().flat_map(|segment| segment.cuts.iter().rev());
        let last = cuts.find_map(|cut| match cut {
            Cut::Take { number, .. } => Some(number.saturating_add(1)),
            _ => None,
        });
        last.unwrap_or_else(|| self.state.next_number())
    }

    /// What was done to snapshots since the state.
    pub(crate) fn recent_cuts(&self) -> RecentCuts {
        let mut recent = RecentCuts::default();
        for segment in &self.sealed {
            for (index, cut) in segment.cuts.iter().enumerate() {
                recent.push(segment, index, cut);
            }
        }
        recent
    }
}

/// Changes of snapshots, one after the other, and what they come to.
#[derive(Clone, Default, Debug)]
pub(crate) struct RecentCuts {
    /// Of each snapshot that they are about: what it is now, or `None` if it was dropped; or only a
    /// new label of one that was there before.
    changed: BTreeMap<u64, Changed>,
}

#[derive(Clone, Debug)]
enum Changed {
    Taken(SnapshotInfo),
    Labelled(String),
    Dropped,
}

impl RecentCuts {
    fn push(&mut self, segment: &Segment, index: usize, cut: &Cut) {
        match cut {
            Cut::Take { number, label, time_ns, .. } => {
                let (number, label, time_ns) = (*number, label.clone(), *time_ns);
                let (len, records) = (segment.len, segment.records_before(index));
                let info = SnapshotInfo { number, label, time_ns, len, records };
                self.changed.insert(number, Changed::Taken(info));
            }
            Cut::Drop { number } => {
                self.changed.insert(*number, Changed::Dropped);
            }
            Cut::Label { number, label } => match self.changed.get_mut(number) {
                Some(Changed::Taken(info)) => info.label.clone_from(label),
                Some(Changed::Dropped) => {}
                Some(Changed::Labelled(_)) | None => {
                    self.changed.insert(*number, Changed::Labelled(label.clone()));
                }
            },
            Cut::Rollback { .. } => {}
        }
    }

    /// What snapshot `number` is, which the state has as `stored`.
    pub(crate) fn apply(&self, number: u64, stored: Option<SnapshotInfo>) -> Option<SnapshotInfo> {
        match self.changed.get(&number) {
            None => stored,
            Some(Changed::Dropped) => None,
            Some(Changed::Taken(info)) => Some(info.clone()),
            Some(Changed::Labelled(label)) => {
                stored.map(|info| SnapshotInfo { label: label.clone(), ..info })
            }
        }
    }

    /// All snapshots, of which the state has `stored`, by number.
    pub(crate) fn apply_to_all(&self, stored: Vec<SnapshotInfo>) -> Vec<SnapshotInfo> {
        let mut all: BTreeMap<_, _> =
            stored.into_iter().map(|info| (info.number, Some(info))).collect();
        for number in self.changed.keys() {
            let stored = all.remove(number).flatten();
            all.insert(*number, self.apply(*number, stored));
        }
        all.into_values().flatten().collect()
    }
}

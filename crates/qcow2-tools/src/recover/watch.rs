//! The findings of a check, as far as a repair needs them.

use crate::check::{Finding, Observer, Progress};

/// What was found.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Found {
    /// Wrong flags "refcount is one".
    pub(super) flags: u64,
    /// References to places beyond the end of the file.
    pub(super) beyond: u64,
    /// Clusters without data at invalid places.
    pub(super) mendable_entries: bool,
    /// Snapshots without the extra data of version 3.
    pub(super) incomplete_snapshots: u64,
    /// Faults of the refcount structure itself.
    pub(super) broken_structure: u64,
    /// QEMU would rebuild all refcounts: it does not raise a refcount of 0 in place.
    pub(super) needs_rebuild: bool,
    /// Clusters that have more users than a refcount can hold.
    overfull: u64,
    /// Refcounts that differ.
    refcounts: u64,
    others: u64,
}

impl Found {
    /// Whether anything but leaks and flags is wrong.
    pub(super) fn more_than_flags(&self) -> bool {
        self.others + self.beyond + self.overfull + self.broken_structure > 0
    }

    /// Whether a write could take a cluster that is in use.
    pub(super) fn unsafe_to_write(&self) -> bool {
        self.beyond + self.overfull + self.broken_structure > 0
    }

    /// Whether a repair of everything would have any effect.
    pub(super) fn repairable(&self) -> bool {
        self.flags + self.refcounts + self.broken_structure > 0 || self.mendable_entries
    }

    fn add(&mut self, finding: &Finding) {
        match finding {
            Finding::Leak { .. } => self.refcounts += 1,
            Finding::CopiedL2 { .. } | Finding::CopiedData { .. } => self.flags += 1,
            Finding::BeyondEnd { .. } => self.beyond += 1,
            Finding::TooManyReferences { .. } => self.overfull += 1,
            Finding::RefcountUnreadable { .. }
            | Finding::RefcountTableReservedBits { .. }
            | Finding::RefcountBlockUnaligned { .. }
            | Finding::RefcountBlockOutside { .. }
            | Finding::RefcountBlockShared { .. } => {
                self.broken_structure += 1;
                self.needs_rebuild = true;
            }
            Finding::RefcountTooLow { refcount, .. } => {
                self.others += 1;
                self.refcounts += 1;
                self.needs_rebuild |= *refcount == 0;
            }
            Finding::ClusterUnaligned { has_data, .. } => {
                self.others += 1;
                self.mendable_entries |= !has_data;
            }
            Finding::SnapshotIncomplete { .. } => {
                self.others += 1;
                self.incomplete_snapshots += 1;
            }
            _ => self.others += 1,
        }
    }
}

/// Observes a check and passes its findings on.
pub(super) struct Watch<'o> {
    pub(super) observer: &'o mut dyn Observer,
    pub(super) found: Found,
}

impl Observer for Watch<'_> {
    fn finding(&mut self, finding: Finding) {
        self.found.add(&finding);
        self.observer.finding(finding);
    }

    fn progress(&mut self, progress: Progress) {
        self.observer.progress(progress);
    }
}

//! Which folder the states of a disk are backed up into.
//!
//! A server cannot see all that other programs did to a state (`docs/formats/backup.md`): once one
//! has changed it, a merge may hide that. So a folder in which that can matter is left.

use std::collections::BTreeSet;

/// Where the exported states of a disk are backed up.
#[derive(Clone, Debug, Default)]
pub(super) struct Target {
    /// Folders so far.
    number: u64,
    /// Files of kept states that QEMU has changed since they were backed up.
    changed: BTreeSet<String>,
}

impl Target {
    /// QEMU has changed the state in `file`.
    pub(super) fn note_change(&mut self, file: &str) {
        self.changed.insert(file.to_owned());
    }

    /// Layers were merged, or may have been.
    pub(super) fn note_merge(&mut self) {
        if !std::mem::take(&mut self.changed).is_empty() {
            self.leave();
        }
    }

    /// The state in `file` was backed up.
    pub(super) fn note_backup(&mut self, file: &str) {
        self.changed.remove(file);
    }

    /// The next backup begins another folder.
    pub(super) fn leave(&mut self) {
        self.number += 1;
    }

    /// The name of the folder.
    pub(super) fn folder(&self, disk: &str) -> String {
        format!("{disk}.backups{}", self.number)
    }
}

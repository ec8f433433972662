//! Which folder the states of a disk are backed up into.
//!
//! A server cannot see all that other programs did to a state (`docs/formats/backup.md`): once one
//! has changed it, a merge may hide that. So a folder in which that can matter is left.

/// Where the exported states of a disk are backed up.
#[derive(Clone, Debug, Default)]
pub(super) struct Target {
    /// Folders so far.
    number: u64,
    /// Whether QEMU has changed a kept state since the last backup.
    is_changed: bool,
}

impl Target {
    /// QEMU has changed a state.
    pub(super) fn note_change(&mut self) {
        self.is_changed = true;
    }

    /// Layers were merged, or may have been.
    pub(super) fn note_merge(&mut self) {
        if std::mem::take(&mut self.is_changed) {
            self.number += 1;
        }
    }

    /// A state was backed up.
    pub(super) fn note_backup(&mut self) {
        self.is_changed = false;
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

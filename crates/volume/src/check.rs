//! What a check of a volume, or of a whole store, found.

use crate::names::VolumeName;
use mica_block::{Error, ErrorKind, Result};

/// Lines about damage that are kept; more are only counted.
const FINDINGS_MAX: usize = 1000;

/// What a check found.
#[derive(Clone, Default, Debug)]
pub struct Findings {
    /// Blocks with data, each counted once.
    pub blocks: u64,
    /// Nodes of maps and of trees of snapshots, each counted once.
    pub nodes: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Extents that something is named in.
    pub extents: u64,
    /// What is damaged: the first thousand.
    pub damaged: Vec<String>,
    /// How much is damaged.
    pub damaged_count: u64,
    /// Volumes of the store that only a newer version of mica can read: nothing was found out about
    /// them.
    pub newer: Vec<(VolumeName, Error)>,
}

impl Findings {
    /// Keeps in mind that something is damaged.
    pub(crate) fn add(&mut self, what: impl FnOnce() -> String) {
        self.count(1);
        if self.damaged.len() < FINDINGS_MAX {
            self.damaged.push(what());
        }
    }

    /// Whether more damage is only counted.
    pub(crate) fn is_full(&self) -> bool {
        self.damaged.len() >= FINDINGS_MAX
    }

    /// Keeps in mind that `count` more are damaged, which are only counted.
    pub(crate) fn count(&mut self, count: u64) {
        self.damaged_count = self.damaged_count.saturating_add(count);
    }

    /// Keeps `outcome` in mind if it is damage.
    ///
    /// # Errors
    /// If it is something else: then nothing is known.
    pub(crate) fn note<T>(
        &mut self,
        outcome: Result<T>,
        what: impl FnOnce(&Error) -> String,
    ) -> Result<Option<T>> {
        match outcome {
            Ok(done) => Ok(Some(done)),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.add(|| what(&error));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

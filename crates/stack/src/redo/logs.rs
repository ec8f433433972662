//! The redo logs of images that the policy permits to be opened.

use super::{RedoFile, RedoPlace};
use crate::policy::Policy;
use crate::written::WrittenImages;
use mica_block::{RedoLogs, RedoMemory, Result};
use mica_store::Locking;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Files in memory, found by the identity of the image.
pub(crate) struct FileRedoLogs {
    place: RedoPlace,
    policy: Arc<Policy>,
    locking: Locking,
    written: Arc<WrittenImages>,
}

impl FileRedoLogs {
    pub(crate) fn new(
        place: RedoPlace,
        policy: Arc<Policy>,
        locking: Locking,
        written: Arc<WrittenImages>,
    ) -> Self {
        Self { place, policy, locking, written }
    }
}

impl RedoLogs for FileRedoLogs {
    fn log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        let identity = self.policy.find(path)?.identity(0);
        let file = RedoFile::new(&self.place, identity);
        Ok(file.map(|file| Arc::new(file) as Arc<dyn RedoMemory>))
    }

    fn unnamed_log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        let identity = self.policy.find(path)?.identity(0);
        let created = created_at(path);
        let file = RedoFile::new(&self.place, identity).filter(|file| file.is_since(created));
        Ok(file.map(|file| Arc::new(file) as Arc<dyn RedoMemory>))
    }

    fn orphaned(&self, path: &Path) -> Result<Vec<Arc<dyn RedoMemory>>> {
        let located = self.policy.find(path)?;
        // The image's lock, which we hold, keeps later writers away. That no writer is left now is
        // proved by the log's own lock: a writer may not have locked the image.
        if self.locking != Locking::On || self.written.has(&located) {
            return Ok(Vec::new());
        }
        let files = RedoFile::orphaned(&self.place, located.identity(0), located.owner())?;
        Ok(files.into_iter().map(|file| Arc::new(file) as Arc<dyn RedoMemory>).collect())
    }

    fn elsewhere(&self, path: &Path) -> Result<Option<PathBuf>> {
        let identity = self.policy.find(path)?.identity(0);
        Ok(RedoFile::elsewhere(&self.place, identity, created_at(path)))
    }

    fn of_another(&self, path: &Path) -> Result<Option<PathBuf>> {
        let located = self.policy.find(path)?;
        Ok(RedoFile::of_another(&self.place, located.identity(0), located.owner()))
    }
}

/// When the file at `path` was made: its number may have been another's before. What no file system
/// knows was long ago.
fn created_at(path: &Path) -> SystemTime {
    let found = std::fs::metadata(path).and_then(|found| found.created());
    found.unwrap_or(SystemTime::UNIX_EPOCH)
}

//! Where a writer keeps what it acknowledged and did not flush, for the next process that opens the
//! image.

use crate::Result;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Finds the redo logs of images.
pub trait RedoLogs: Send + Sync {
    /// Memory for the writer of the image at `path`, the same each time. `None` if there is none.
    ///
    /// # Errors
    /// What the system reports.
    fn log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>>;

    /// As [`Self::log`], for an image that names no log: `None` unless there is one that was
    /// written to since the image at `path` was created.
    ///
    /// # Errors
    /// What the system reports.
    fn unnamed_log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>>;

    /// As [`Self::unnamed_log`], to read what a dead writer left: this user's, and other users' if
    /// this process may read them. Empty also if another process may be writing the image at `path`
    /// now, although it is open here.
    ///
    /// # Errors
    /// What the system reports.
    fn orphaned(&self, path: &Path) -> Result<Vec<Arc<dyn RedoMemory>>>;

    /// Where this user's last writer of the image at `path` left something, if that is not where
    /// [`RedoLogs::log`] looks.
    ///
    /// # Errors
    /// What the system reports.
    fn elsewhere(&self, path: &Path) -> Result<Option<PathBuf>>;

    /// Where another user keeps what a writer of the image at `path` left.
    ///
    /// # Errors
    /// What the system reports.
    fn of_another(&self, path: &Path) -> Result<Option<PathBuf>>;
}

/// Writers have no log, and none is looked for.
pub struct NoRedoLogs;

impl RedoLogs for NoRedoLogs {
    fn log(&self, _path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        Ok(None)
    }

    fn unnamed_log(&self, _path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        Ok(None)
    }

    fn orphaned(&self, _path: &Path) -> Result<Vec<Arc<dyn RedoMemory>>> {
        Ok(Vec::new())
    }

    fn elsewhere(&self, _path: &Path) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    fn of_another(&self, _path: &Path) -> Result<Option<PathBuf>> {
        Ok(None)
    }
}

/// Identifies the memory of one log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RedoOrigin {
    /// The boot of the machine: a different number after each.
    pub boot: u128,
    /// Which memory since then: another number if a copy of the content was put in its place, which
    /// may lack what was written last. 0 if that is unknown.
    pub memory: u128,
}

/// Memory that outlives the process, but not a reboot: a file that is never made durable. Calls do
/// not wait for a device.
pub trait RedoMemory: Send + Sync {
    /// Removes all its content for a new writer, and returns its new origin.
    ///
    /// # Errors
    /// What the system reports.
    fn renew(&self) -> Result<RedoOrigin>;

    /// Its origin since it was last [renewed](Self::renew); if there is none, that of no memory.
    ///
    /// # Errors
    /// What the system reports.
    fn origin(&self) -> Result<RedoOrigin>;

    /// The time of day in nanoseconds, by the clock that [`Self::changed_ns`] goes by.
    fn now_ns(&self) -> i128;

    /// When its content was last changed, by whomever; 0 if there is none.
    ///
    /// # Errors
    /// What the system reports.
    fn changed_ns(&self) -> Result<i128>;

    /// Its size in bytes.
    fn capacity(&self) -> u64;

    /// Fills `buf` from `at` on; what was never written reads as zeros.
    ///
    /// # Errors
    /// What the system reports.
    fn read_at(&self, at: u64, buf: &mut [u8]) -> Result<()>;

    /// Writes `bytes` at `at`. If the process dies meanwhile, any part of them may be there.
    ///
    /// # Errors
    /// What the system reports; also if it was not renewed, or was removed since.
    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Removes all its content.
    fn remove(&self);

    /// As [`Self::remove`], but its content is kept for people to inspect, replacing what was kept
    /// before: it is never read again. Returns where it is, if there was any.
    fn set_aside(&self) -> Option<PathBuf> {
        self.remove();
        None
    }
}

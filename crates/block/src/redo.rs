//! Where a writer keeps what it acknowledged and did not flush, for the next process to open the
//! image.

use crate::Result;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Finds the redo logs of images.
pub trait RedoLogs: Send + Sync {
    /// Memory for whoever writes the image at `path`, the same one each time. `None` where there is
    /// none.
    ///
    /// # Errors
    /// What the system says.
    fn log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>>;

    /// The same, for an image that names no log: `None` if there is none that was written to since
    /// the image at `path` exists.
    ///
    /// # Errors
    /// What the system says.
    fn unnamed_log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        self.log(path)
    }

    /// The same, to read what a writer left that died: this user's, and if this process may read
    /// those, others'. None also where somebody may be writing the image at `path` now, although it
    /// is open here.
    ///
    /// # Errors
    /// What the system says.
    fn orphaned(&self, path: &Path) -> Result<Vec<Arc<dyn RedoMemory>>>;

    /// Where this user's last writer of the image at `path` left something, if that is not where
    /// [`RedoLogs::log`] looks.
    ///
    /// # Errors
    /// What the system says.
    fn elsewhere(&self, path: &Path) -> Result<Option<PathBuf>>;

    /// Where another user keeps what a writer of the image at `path` left.
    ///
    /// # Errors
    /// What the system says.
    fn of_another(&self, path: &Path) -> Result<Option<PathBuf>>;
}

/// Writers have no log, and none is looked for.
pub struct NoRedoLogs;

impl RedoLogs for NoRedoLogs {
    fn log(&self, _path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
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

/// Memory that outlives the process, but not the machine's next start: a file that is never made
/// durable. Calls do not wait for a device.
pub trait RedoMemory: Send + Sync {
    /// The start of the machine: another number after each.
    fn boot(&self) -> u128;

    /// Bytes that fit in.
    fn capacity(&self) -> u64;

    /// Fills `buf` from `at` on; what was never written reads as zeros.
    ///
    /// # Errors
    /// What the system says.
    fn read_at(&self, at: u64, buf: &mut [u8]) -> Result<()>;

    /// Writes `bytes` at `at`. If the process dies meanwhile, any part of them may be there.
    ///
    /// # Errors
    /// What the system says.
    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Forgets all that is in it.
    fn remove(&self);

    /// The same, but that what is in it is kept for people to look at, in place of what was kept
    /// before: it is never read again. Where that is, if there was something.
    fn set_aside(&self) -> Option<PathBuf> {
        self.remove();
        None
    }
}

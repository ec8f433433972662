//! The write logs of volumes on this machine: each file or device is opened once in a process,
//! whatever volumes share it.

use crate::files::{sync_folder_of, unless_denied};
use crate::{FileImages, ImageOptions, MayWrite};
use mica_block::{Error, ErrorKind, Images, Result, Store, wait_for_dead};
use mica_rt::sync::SharedLock;
use mica_store::Handles;
use mica_volume::LogDevice;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// Bytes of a log, at least.
pub const LOG_BYTES_MIN: u64 = LogDevice::LEN_MIN;

/// Where a log is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogPlace {
    /// A file, or a device.
    pub path: PathBuf,
    /// Its length, if it is made. A device has its own.
    pub len: u64,
}

impl LogPlace {
    /// Makes an empty file for it, for this user alone, unless something is there. Returns whether
    /// it did. Its name is durable before anything is in it: what says that a volume has a log
    /// there is durable, too, and nobody goes on with the volume without it.
    ///
    /// # Errors
    /// Those of the system.
    pub fn make(&self) -> Result<bool> {
        self.make_with(sync_folder_of)
    }

    fn make_with(&self, sync: impl FnOnce(&Path) -> Result<()>) -> Result<bool> {
        let path = &self.path;
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(_) => {
                sync(path).inspect_err(|_| {
                    // The first failure is reported.
                    let _ = std::fs::remove_file(path);
                })?;
                Ok(true)
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                // Whoever made it may have been killed before that.
                if path.metadata().is_ok_and(|found| found.is_file() && found.len() == 0) {
                    unless_denied(sync(path))?;
                }
                Ok(false)
            }
            Err(error) => Err(Error::from_io(format!("making the log {}", path.display()), error)),
        }
    }
}

/// The logs that a process has open.
#[derive(Default)]
pub(super) struct Logs {
    /// Held by whoever opens one.
    opening: SharedLock,
    open: Mutex<BTreeMap<PathBuf, Weak<LogDevice>>>,
}

impl Logs {
    /// The log at `place`, which is made if there is none.
    ///
    /// # Errors
    /// `Invalid` if something else is there; `Denied` if another process has it open.
    pub(super) async fn open(
        &self,
        place: &LogPlace,
        handles: &Arc<Handles>,
        random: [u8; 16],
    ) -> Result<Arc<LogDevice>> {
        let _alone = self.opening.alone().await;
        let LogPlace { path, len } = place;
        let is_new = place.make()?;
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        if let Some(log) = self.lock().get(&real).and_then(Weak::upgrade) {
            return Ok(log);
        }
        let options = ImageOptions::new(Arc::clone(handles));
        let images = FileImages::to_write(path, options, MayWrite::new_file())?;
        let open = async || images.open_writable(path);
        let file: Arc<dyn Store> = wait_for_dead(open).await?.store;
        let is_device = path.metadata().is_ok_and(|found| found.file_type().is_block_device());
        let opened = match file.len()? {
            0 => LogDevice::create(file, *len, random).await,
            _ => match LogDevice::open(Arc::clone(&file), random).await {
                // One that has only zeros becomes a log; of anything else it says what it is.
                Err(error) if is_device && error.kind() == ErrorKind::Invalid => {
                    LogDevice::create(file, *len, random).await
                }
                opened => opened,
            },
        };
        let log = opened.map_err(|error| {
            if is_new {
                // In a sandbox it cannot be removed, and stays empty.
                let _ = std::fs::remove_file(path);
            }
            error.wrap("the log")
        })?;
        let mut open = self.lock();
        open.retain(|_, log| log.strong_count() > 0);
        open.insert(real, Arc::downgrade(&log));
        Ok(log)
    }

    /// The log at `path`, which is one already, for this caller alone.
    ///
    /// # Errors
    /// `NotFound` if nothing is there, `Invalid` if it is something else; `Denied` if another
    /// process has it open.
    pub(super) async fn open_existing(
        path: &Path,
        handles: &Arc<Handles>,
        random: [u8; 16],
    ) -> Result<Arc<LogDevice>> {
        let options = ImageOptions::new(Arc::clone(handles));
        let images = FileImages::to_write(path, options, MayWrite::new_file())?;
        let file = wait_for_dead(async || images.open_writable(path)).await?.store;
        let opened = LogDevice::open_existing(file, random).await;
        opened.map_err(|error| error.wrap("the log"))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Weak<LogDevice>>> {
        self.open.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: a machine lost its power soon after a volume had its first log. The volume's lock
    /// named the log, and the log was not there: its folder had never been synced.
    #[test]
    fn name_of_a_log_is_durable_before_anything_is_in_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = LogPlace { path: folder.path().join("log"), len: 1 << 20 };
        let failed = place.make_with(|_| Err(Error::new(ErrorKind::Io, "no")));
        assert_eq!(failed.expect_err("it is said").kind(), ErrorKind::Io);
        assert!(!place.path.exists());
        let make = || {
            let mut synced = Vec::new();
            let made = place.make_with(|path| {
                synced.push(path.to_owned());
                Ok(())
            });
            (made.expect("made"), synced.len())
        };
        assert_eq!(make(), (true, 1));
        assert_eq!(make(), (false, 1), "whoever made it may have been killed");
        std::fs::write(&place.path, [0; 4096]).expect("written");
        assert_eq!(make(), (false, 0));
    }
}

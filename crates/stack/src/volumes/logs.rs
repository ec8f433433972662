//! The write logs of volumes on this machine: each file or device is opened once in a process,
//! whatever volumes share it.

use crate::files::{sync_folder_of, unless_denied};
use crate::{FileImages, ImageOptions, MayWrite};
use mica_block::{Error, ErrorKind, Images, Result, Store, StoreIdentity, wait_for_dead};
use mica_rt::sync::SharedLock;
use mica_store::Handles;
use mica_volume::LogDevice;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::AtFlags;
use std::collections::BTreeMap;
use std::fs::{Metadata, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
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
    /// Makes an empty file for it, for this user alone, unless something is there, for which there
    /// is `None`. Its name is durable before anything is in it: what says that a volume has a log
    /// there is durable, too, and nobody goes on with the volume without it.
    ///
    /// # Errors
    /// Those of the system.
    pub fn make(&self) -> Result<Option<NewLog>> {
        self.make_with(sync_folder_of)
    }

    fn make_with(&self, sync: impl FnOnce(&Path) -> Result<()>) -> Result<Option<NewLog>> {
        let path = &self.path;
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Ok(file) => {
                let made = sync(path).and_then(|()| {
                    let made = file.metadata().map_err(|error| making(path, error))?;
                    let (device, inode) = (made.dev(), made.ino());
                    Ok(NewLog { path: path.clone(), device, inode })
                });
                made.map(Some).inspect_err(|_| {
                    // The first failure is reported.
                    let _ = std::fs::remove_file(path);
                })
            }
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                // Whoever made it may have been killed before that.
                if path.metadata().is_ok_and(|found| found.is_file() && found.len() == 0) {
                    unless_denied(sync(path))?;
                }
                Ok(None)
            }
            Err(error) => Err(making(path, error)),
        }
    }
}

fn making(path: &Path, error: std::io::Error) -> Error {
    Error::from_io(format!("making the log {}", path.display()), error)
}

/// The empty file of a log that was made, and which may be taken back.
///
/// Invariants
/// - N1 It is removed only while it is the one that was made, nothing of another's is in it, and
///   this process alone has it open.
/// - N2 A process that opened it earlier does not go on with an unlinked file: once it holds the
///   lock, it checks the name (`check_name`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewLog {
    /// Where it is.
    pub path: PathBuf,
    /// The device of its file system.
    pub device: u64,
    /// Which file it is there.
    pub inode: u64,
}

impl NewLog {
    /// Has it removed by `remove`, if it may be (N1).
    ///
    /// # Errors
    /// Those of `remove`, and whatever keeps it from being opened: then it stays.
    pub fn take_back(
        &self,
        handles: &Arc<Handles>,
        remove: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        if !self.is_unused() {
            return Ok(());
        }
        let options = ImageOptions::new(Arc::clone(handles));
        let images = FileImages::to_write(&self.path, options, MayWrite::new_file())?;
        let file = images.open_writable(&self.path)?.store;
        let own = StoreIdentity::File { device: self.device, inode: self.inode };
        match file.identity() == own && file.is_empty()? {
            true => remove(self),
            false => Ok(()),
        }
    }

    /// Removes it if it is the one that was made, and empty. For [`Self::take_back`].
    ///
    /// # Errors
    /// Those of the system.
    pub fn remove(&self) -> Result<()> {
        match self.is_unused() {
            true => self.unlink(),
            false => Ok(()),
        }
    }

    /// Removes it if it is the one that was made, whatever is in it.
    fn unlink(&self) -> Result<()> {
        if !self.path.symlink_metadata().is_ok_and(|found| self.is_in(&found)) {
            return Ok(());
        }
        rustix::fs::unlinkat(rustix::fs::CWD, &self.path, AtFlags::empty()).map_err(|error| {
            Error::from_io(format!("removing {}", self.path.display()), error.into())
        })
    }

    fn is_unused(&self) -> bool {
        self.path.symlink_metadata().is_ok_and(|found| self.is_in(&found) && found.len() == 0)
    }

    /// Whether it is what was `found` by its name.
    fn is_in(&self, found: &Metadata) -> bool {
        found.is_file() && found.dev() == self.device && found.ino() == self.inode
    }
}

/// Checks that the file of a log that this process has alone still has its name: a start that was
/// refused may have taken it back just before ([`NewLog`], N2).
///
/// # Errors
/// `Denied` if it has another, or none.
fn check_name(path: &Path, file: &dyn Store) -> Result<()> {
    let StoreIdentity::File { device, inode } = file.identity() else { return Ok(()) };
    let is_it = |found: &Metadata| found.dev() == device && found.ino() == inode;
    if file.identity().is_device() || path.metadata().is_ok_and(|found| is_it(&found)) {
        return Ok(());
    }
    let what = format!("the log {} was removed while it was opened: try again", path.display());
    Err(Error::new(ErrorKind::Denied, what))
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
        let new = place.make()?;
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        if let Some(log) = self.lock().get(&real).and_then(Weak::upgrade) {
            return Ok(log);
        }
        let options = ImageOptions::new(Arc::clone(handles));
        let images = FileImages::to_write(path, options, MayWrite::new_file())?;
        let open = async || images.open_writable(path);
        let file: Arc<dyn Store> = wait_for_dead(open).await?.store;
        check_name(path, &*file)?;
        let is_device = path.metadata().is_ok_and(|found| found.file_type().is_block_device());
        let is_empty = file.is_empty()?;
        let opened = match is_empty {
            true => LogDevice::create(Arc::clone(&file), *len, random).await,
            false => match LogDevice::open(Arc::clone(&file), random).await {
                // One that has only zeros becomes a log; of anything else it says what it is.
                Err(error) if is_device && error.kind() == ErrorKind::Invalid => {
                    LogDevice::create(Arc::clone(&file), *len, random).await
                }
                opened => opened,
            },
        };
        let log = opened.map_err(|error| {
            // While this process alone has it open. One that was not empty is another's log.
            if let Some(new) = new.filter(|_| is_empty) {
                // In a sandbox it cannot be removed, and stays.
                let _ = new.unlink();
            }
            error.wrap("the log")
        })?;
        drop(file);
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
            (made.expect("made").is_some(), synced.len())
        };
        assert_eq!(make(), (true, 1));
        assert_eq!(make(), (false, 1), "whoever made it may have been killed");
        std::fs::write(&place.path, [0; 4096]).expect("written");
        assert_eq!(make(), (false, 0));
    }

    fn new_log(folder: &Path) -> NewLog {
        let place = LogPlace { path: folder.join("log"), len: 1 << 20 };
        place.make().expect("made").expect("nothing was there")
    }

    #[test]
    fn new_log_is_taken_back_and_one_that_was_there_is_not_new() {
        let folder = tempfile::tempdir().expect("a folder");
        let (new, handles) = (new_log(folder.path()), Handles::new(8));
        let again = LogPlace { path: new.path.clone(), len: 1 << 20 }.make().expect("there");
        assert_eq!(again, None);
        new.take_back(&handles, NewLog::remove).expect("taken back");
        assert!(!new.path.exists());
        new.take_back(&handles, NewLog::remove).expect("nothing is left to do");
    }

    #[test]
    fn log_that_somebody_uses_or_that_replaced_the_new_one_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let (new, handles) = (new_log(folder.path()), Handles::new(8));
        let stays = |why| {
            let _ = new.take_back(&handles, NewLog::remove);
            assert!(new.path.exists(), "{why}");
        };
        let images = FileImages::to_write(
            &new.path,
            ImageOptions::new(Arc::clone(&handles)),
            MayWrite::new_file(),
        );
        let user = images.expect("allowed").open_writable(&new.path).expect("free").store;
        stays("somebody has it open, who may be about to make a log of it");
        drop(user);
        std::fs::write(&new.path, "a log").expect("written");
        stays("something is in it");
        std::fs::rename(&new.path, folder.path().join("elsewhere")).expect("renamed");
        std::fs::write(&new.path, "").expect("made");
        stays("it is another file");
    }

    /// Between the moment when it was opened, and the one when it could be locked, a start that was
    /// refused took it back.
    #[test]
    fn log_that_lost_its_name_while_it_was_opened_is_not_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let (new, handles) = (new_log(folder.path()), Handles::new(8));
        let options = ImageOptions::new(handles);
        let images = FileImages::to_write(&new.path, options, MayWrite::new_file());
        let file = images.expect("allowed").open_writable(&new.path).expect("free").store;
        check_name(&new.path, &*file).expect("it is there");
        new.remove().expect("removed");
        for removed in ["and nothing has its name", "and another file has its name"] {
            let refused = check_name(&new.path, &*file).expect_err(removed).to_string();
            assert!(refused.contains("was removed while it was opened"), "{refused}");
            std::fs::write(&new.path, "").expect("made");
        }
    }
}

//! Mounting files for a server, and unmounting them.
//!
//! A server in a sandbox may do neither. So another process may do it, which hands over the
//! descriptor of the mount; the server takes the kernel's requests from there.

use super::attributes::AllowOther;
use super::mount::{self, MountPoint};
use crate::listener::lock_directory;
use mica_block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// A request to mount over a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountRequest {
    /// The regular file.
    pub file: PathBuf,
    /// Whether the disk is written.
    pub is_writable: bool,
    /// Whether others than this user may use it.
    pub allow_other: AllowOther,
    /// Device and inode of the image, which must not be that file.
    pub image: Option<(u64, u64)>,
}

/// A mount.
#[derive(Debug)]
pub struct Mounted {
    /// The source of the kernel's requests.
    pub device: OwnedFd,
    /// Whether others than this user may use it.
    pub is_for_others: bool,
    /// Number of mounts of dead servers that were removed first.
    pub cleared: usize,
}

/// Mounts and unmounts files.
pub trait Mounts: Send + Sync {
    /// Mounts over a file. A mount that a killed server left there is cleared.
    ///
    /// # Errors
    /// `Denied` if a living server is mounted there, or if this user may not mount; `Invalid` if
    /// the file is not a regular file, or is the image itself; else any error of the system.
    fn mount(&self, request: &MountRequest) -> Result<Mounted>;

    /// Removes the mount over `file`, even if it is in use: requests under way and later ones fail.
    /// Not an error if it is already gone. The connection must not have ended: the mount is
    /// identified by numbers that are reused after that.
    ///
    /// # Errors
    /// `Denied` if something else is mounted over it; else any error of the system.
    fn unmount(&self, file: &Path) -> Result<()>;
}

/// This process mounts.
#[derive(Default, Debug)]
pub struct MountsHere(Mutex<BTreeMap<PathBuf, MountPoint>>);

impl Mounts for MountsHere {
    fn mount(&self, request: &MountRequest) -> Result<Mounted> {
        let file = &request.file;
        let failed = |error| Error::from_io(format!("serving a disk as {}", file.display()), error);
        mount::check_name(file)?;
        // Two servers that find no other must not both mount.
        let _alone = lock_directory(file).map_err(failed)?;
        let (path, cleared) = mount::prepare(file)?;
        if request.image.is_some() && request.image == mount::identity(&path).ok() {
            let context =
                format!("{}: an image cannot be mounted over by its disk", path.display());
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let attempt = |is_for_others| {
            let device = mount::mount_over(&path, request.is_writable, is_for_others)?;
            Ok(Mounted { device, is_for_others, cleared })
        };
        let mounted = match request.allow_other {
            AllowOther::On => attempt(true),
            AllowOther::Off => attempt(false),
            AllowOther::Auto => attempt(true).or_else(|_| attempt(false)),
        };
        let mounted = mounted.map_err(failed)?;
        let mut all = self.0.lock();
        all.insert(file.clone(), MountPoint::just_mounted(path));
        Ok(mounted)
    }

    fn unmount(&self, file: &Path) -> Result<()> {
        let mut all = self.0.lock();
        let Some(point) = all.remove(file) else { return Ok(()) };
        drop(all);
        point.unmount()
    }
}

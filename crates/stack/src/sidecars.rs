//! The index files beside the layers.
//!
//! A sidecar is derived data, so that losing one costs time and nothing else. But a false one that
//! fits its seal would show a guest the wrong bytes. So:
//!
//! - I1 A sidecar is read only if it is a regular file, reached without a symbolic link at its end,
//!   that only those who can write the layer could have written: its owner is the layer's owner,
//!   this process, or root, and it is not writable by everyone.
//! - I2 A sidecar is written to a new file in the same directory, made durable and then put in its
//!   place: all of it or nothing, and never through a symbolic link.
//!   Making it durable cannot be left out. Its seal names what it should contain, but only its
//!   header is read to check that; and a file system may show, after a power cut, blocks of a new
//!   file that it never wrote, with what another file had there: an older sidecar of the same
//!   layer, whose nodes have sums that are right at their places. So several are made durable at
//!   the same time, which costs the file system hardly more than one.
//!   What a killed process leaves of it is removed later (module `temporary`).
//! - I3 A block device has no sidecar: nothing shows that its content changed.

mod temporary;

use crate::policy::Policy;
use crate::sidecars::temporary::Temporary;
use mica_block::{Error, ErrorKind, LocalFuture, NewSidecar, Result, Sidecars, Store};
use mica_rt::descriptors::{is_lack, make_room};
use mica_store::{CacheMode, FileKind, FileStore, Handles, Located};
use mica_units::LayerNumber;
use parking_lot::{Mutex, MutexGuard};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, open, openat2, statat, unlinkat};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where sidecars are kept.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum SidecarPlace {
    /// `<layer>.mica-index` beside the layer.
    #[default]
    BesideLayers,
    /// Written in this directory; read there and, if it has none, beside the layer.
    Directory(PathBuf),
}

/// The suffix of a sidecar's name.
pub(crate) const SUFFIX: &str = ".mica-index";

/// Sidecars of the layers that the policy permits to be opened.
pub(crate) struct FileSidecars {
    place: SidecarPlace,
    policy: Arc<Policy>,
    handles: Arc<Handles>,
    /// Where layers were found when they were opened, for the first time that a sidecar is opened.
    /// The seal names the file that was found then, so that nothing is gained by looking again.
    noted: Mutex<HashMap<PathBuf, Place>>,
    /// Directories that have been searched for what killed processes left.
    tidied: Mutex<HashSet<PathBuf>>,
}

/// Where a layer is, and whose.
struct Place {
    /// Its path without symbolic links.
    real: PathBuf,
    owner: u32,
}

/// A directory and the name of a sidecar in it.
struct Spot {
    directory: PathBuf,
    name: OsString,
    /// Whether the directory comes from a layer, so that its path must not contain a symbolic link.
    beside: bool,
}

/// Sidecars that are made durable at the same time.
const AT_ONCE: usize = 16;

impl FileSidecars {
    pub(crate) fn new(
        place: SidecarPlace,
        policy: Arc<Policy>,
        handles: Arc<Handles>,
    ) -> Result<Self> {
        let place = match place {
            SidecarPlace::BesideLayers => SidecarPlace::BesideLayers,
            SidecarPlace::Directory(directory) => {
                let made = std::fs::create_dir_all(&directory);
                let real = made.and_then(|()| directory.canonicalize()).map_err(|error| {
                    Error::from_io(format!("--index-dir {}", directory.display()), error)
                })?;
                SidecarPlace::Directory(real)
            }
        };
        Ok(Self { place, policy, handles, noted: Mutex::default(), tidied: Mutex::default() })
    }

    /// Keeps in mind where the layer at `path` was found.
    pub(crate) fn note(&self, path: &Path, layer: &Located) {
        let mut noted = self.noted();
        if layer.kind() == FileKind::Regular && noted.len() < LayerNumber::COUNT_MAX {
            noted.insert(path.to_owned(), Place::of(layer));
        }
    }

    fn take_noted(&self, path: &Path) -> Option<Place> {
        self.noted().remove(path)
    }

    fn noted(&self) -> MutexGuard<'_, HashMap<PathBuf, Place>> {
        self.noted.lock()
    }

    /// How many layers are kept in mind.
    #[cfg(test)]
    pub(crate) fn noted_count(&self) -> usize {
        self.noted().len()
    }

    /// Writes a few sidecars, which the file system makes durable together.
    async fn write_together(&self, sidecars: &[NewSidecar<'_>]) -> Result<()> {
        // Each needs one for its file and one for its directory.
        let _descriptors = self.handles.set_aside(2 * sidecars.len());
        let mut outcome = Ok(());
        let mut begun = Vec::new();
        for new in sidecars {
            match self.begin(new) {
                Ok(one) => {
                    self.tidy(&one.0, &one.1);
                    begun.push(one);
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        let syncs = begun.iter().map(|(_, temporary)| mica_rt::sync_data(&temporary.file));
        let synced = mica_rt::join_all(syncs).await;
        for ((spot, temporary), synced) in begun.into_iter().zip(synced) {
            let placed = synced.and_then(|()| temporary.put_at(&spot));
            outcome = outcome.and(placed.map_err(|error| self.not_written(&spot, error)));
        }
        outcome
    }

    /// Removes what killed processes left where `new` is about to be written, once for each
    /// directory.
    fn tidy(&self, spot: &Spot, new: &Temporary) {
        let mut tidied = self.tidied.lock();
        if tidied.contains(&spot.directory) {
            return;
        }
        tidied.insert(spot.directory.clone());
        drop(tidied);
        let removed = new.remove_abandoned();
        if removed > 0 {
            let directory = spot.directory.display();
            tracing::info!(
                "{removed} unfinished index files of a killed process removed from {directory}"
            );
        }
    }

    /// Writes a sidecar beside its place.
    fn begin(&self, new: &NewSidecar<'_>) -> Result<(Spot, Temporary)> {
        let layer = &self.policy.find(new.path)?;
        if layer.kind() == FileKind::BlockDevice {
            let what = format!("{} is a block device and has no index", layer.path().display());
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        // The first spot is the one to write to.
        let spot = self.spots(&Place::of(layer))?.swap_remove(0);
        let mut attempts = 0;
        loop {
            match Temporary::create(&spot, layer, new.content) {
                Ok(temporary) => return Ok((spot, temporary)),
                // Clients that came meanwhile have what was set aside.
                Err(error)
                    if is_lack(error.raw_os_error()) && attempts < ATTEMPTS_MAX && make_room() =>
                {
                    attempts += 1;
                }
                Err(error) => return Err(self.not_written(&spot, error)),
            }
        }
    }

    fn not_written(&self, spot: &Spot, error: io::Error) -> Error {
        let hint = match (error.kind(), &self.place) {
            (io::ErrorKind::PermissionDenied, SidecarPlace::BesideLayers)
            | (io::ErrorKind::ReadOnlyFilesystem, SidecarPlace::BesideLayers) => {
                ": --index-dir keeps indexes elsewhere"
            }
            _ => "",
        };
        Error::from_io(format!("writing the index {}{hint}", spot.path().display()), error)
    }

    fn open_at(&self, layer: &Place, path: &Path) -> Result<Option<Arc<dyn Store>>> {
        let ignored = |why: &str| {
            tracing::warn!(path = %path.display(), "index ignored: it is {why}");
            Ok(None)
        };
        let found = match Located::find_no_follow(path) {
            Ok(found) => found,
            Err(error) => {
                return match error.kind() {
                    ErrorKind::NotFound => Ok(None),
                    // Nobody can have created one.
                    _ if error.raw_os_error() == Some(Errno::NAMETOOLONG.raw_os_error()) => {
                        Ok(None)
                    }
                    ErrorKind::Denied => ignored("not readable"),
                    ErrorKind::Invalid => ignored("not a regular file"),
                    _ => Err(error),
                };
            }
        };
        if found.kind() != FileKind::Regular {
            return ignored("not a regular file");
        }
        let me = rustix::process::geteuid().as_raw();
        if ![layer.owner, me, 0].contains(&found.owner()) {
            return ignored("owned by neither the layer's owner, nor this process, nor root");
        }
        if found.mode() & 0o002 != 0 {
            return ignored("writable by everyone");
        }
        match FileStore::new_opened(&found, CacheMode::Writeback, &self.handles) {
            Ok(store) => Ok(Some(Arc::new(store))),
            Err(error) if error.kind() == ErrorKind::Denied => ignored("not readable"),
            Err(error) => Err(error),
        }
    }

    /// Where the layer's sidecar may be, the place to write it to first.
    fn spots(&self, Place { real, .. }: &Place) -> Result<Vec<Spot>> {
        let (Some(directory), Some(file_name)) = (real.parent(), real.file_name()) else {
            let what = format!("{} has no directory", real.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        };
        let mut name = file_name.to_owned();
        name.push(SUFFIX);
        let beside = Spot { directory: directory.to_owned(), name, beside: true };
        Ok(match &self.place {
            SidecarPlace::BesideLayers => vec![beside],
            SidecarPlace::Directory(directory) => {
                let name = name_elsewhere(real, file_name);
                vec![Spot { directory: directory.clone(), name, beside: false }, beside]
            }
        })
    }
}

/// Where the sidecar of the layer at `real`, a path without symbolic links, may be; `None` if that
/// names no file.
pub(crate) fn paths_of_sidecar(place: &SidecarPlace, real: &Path) -> Option<Vec<PathBuf>> {
    let file_name = real.file_name()?;
    let mut name = file_name.to_owned();
    name.push(SUFFIX);
    let beside = real.with_file_name(name);
    Some(match place {
        SidecarPlace::BesideLayers => vec![beside],
        SidecarPlace::Directory(directory) => {
            vec![directory.join(name_elsewhere(real, file_name)), beside]
        }
    })
}

impl Sidecars for FileSidecars {
    fn open(&self, path: &Path) -> Result<Option<Arc<dyn Store>>> {
        let layer = match self.take_noted(path) {
            Some(place) => place,
            None => {
                let layer = self.policy.find(path)?;
                if layer.kind() == FileKind::BlockDevice {
                    return Ok(None);
                }
                Place::of(&layer)
            }
        };
        for spot in self.spots(&layer)? {
            if let Some(store) = self.open_at(&layer, &spot.path())? {
                return Ok(Some(store));
            }
        }
        Ok(None)
    }

    fn write_all<'a>(&'a self, sidecars: &'a [NewSidecar<'a>]) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            for some in sidecars.chunks(AT_ONCE) {
                self.write_together(some).await?;
            }
            Ok(())
        })
    }

    fn chain_is_open(&self) {
        let noted = std::mem::take(&mut *self.noted());
        drop(noted);
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let layer = &self.policy.find(path)?;
        if layer.kind() == FileKind::BlockDevice {
            return Ok(());
        }
        for spot in self.spots(&Place::of(layer))? {
            match spot.remove() {
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG) => {}
                // A file beside the layer is not ours if the user keeps indexes elsewhere.
                Err(Errno::ACCESS | Errno::PERM | Errno::ROFS)
                    if spot.beside && self.place != SidecarPlace::BesideLayers => {}
                Err(error) => {
                    let what = format!("removing the index {}", spot.path().display());
                    return Err(Error::from_io(what, error.into()));
                }
            }
        }
        Ok(())
    }
}

/// How often files that can be opened again are closed for one sidecar.
const ATTEMPTS_MAX: usize = 8;

impl Place {
    fn of(layer: &Located) -> Self {
        // Without /proc only the image that the user named arrives here, by its own name.
        let real = layer.real_path().unwrap_or_else(|_| layer.path().to_owned());
        Self { real, owner: layer.owner() }
    }
}

impl Spot {
    fn path(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    fn open_directory(&self) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = if self.beside { ResolveFlags::NO_SYMLINKS } else { ResolveFlags::empty() };
        match openat2(CWD, &self.directory, flags, Mode::empty(), resolve) {
            // An older kernel, or a sandbox that does not know the call.
            Err(Errno::NOSYS | Errno::PERM) => {
                open(&self.directory, flags | OFlags::NOFOLLOW, Mode::empty())
            }
            result => result,
        }
    }

    fn remove(&self) -> rustix::io::Result<()> {
        let directory = self.open_directory()?;
        statat(&directory, &self.name, AtFlags::SYMLINK_NOFOLLOW)?;
        unlinkat(&directory, &self.name, AtFlags::empty())
    }
}

/// A name for the sidecar of the layer at `real` in a directory shared by the sidecars of several
/// layers: a digest of the path, and the layer's own name for people. The seal inside distinguishes
/// two layers with the same digest.
fn name_elsewhere(real: &Path, file_name: &OsStr) -> OsString {
    /// Longest part of the layer's name: with digest and suffix it must stay within 255 bytes.
    const NAME_BYTES_MAX: usize = 200;
    // FNV-1a of Fowler, Noll and Vo.
    let digest = real.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut name = OsString::from(format!("{digest:016x}-"));
    let bytes = file_name.as_bytes();
    name.push(OsStr::from_bytes(&bytes[..bytes.len().min(NAME_BYTES_MAX)]));
    name.push(SUFFIX);
    name
}

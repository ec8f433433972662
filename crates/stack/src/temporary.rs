//! The names that files beside images have before they get their own, and what killed processes
//! leave of them.
//!
//! | name | what it becomes | whose it is |
//! |---|---|---|
//! | `LAYER.mica-above.tmp` | the mark of a frozen layer | who has it locked |
//! | `LAYER.mica-merged.tmp` | the mark of a layer that is merged | who has it locked |
//! | `LAYER.mica-overlays.tmp` | a layer's note, written again | who has it locked |
//! | `.ACTIVE.mica-new` | the layer above the active one, in its folder | who has ACTIVE locked |
//! | `.LAYER.mica-new` | a new layer LAYER, in a folder without the active one | the same |
//! | `.FILE.mica-unfinished` | what a verb makes, or replaces, at FILE | who has it locked |
//! | `.mica-index-PID-NUMBER.tmp` | a sidecar (`sidecars/temporary.rs`) | who has it locked |
//!
//! Who writes one of them again takes the place of what is left there. What is left beside the
//! layers of a disk goes when that is committed, and beside the uppermost ones when it is opened
//! for serving ([`crate::remove_abandoned`]); the marks of layers that are merged, when it is
//! opened for writing (`merged/ended.rs`); what a verb left, when an image of that name is made
//! ([`make_unfinished`]).
//!
//! Invariants
//! - I1 Only a regular file with exactly such a name is removed, and only by who has it locked and,
//!   of a new layer, has the active one locked.
//! - I2 Where a file system has no locks nothing is removed: nobody knows who is at work.

use crate::files::folder_of;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::Access;
use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Ends the names of layers that have not got theirs yet.
pub(crate) const UNNAMED: &str = ".mica-new";
/// Ends the name of the mark of a frozen layer while it is written.
pub(crate) const NEW_ABOVE: &str = ".mica-above.tmp";
/// The same for the mark of a layer that is merged, and for a note.
pub(crate) const NEW_MERGED: &str = ".mica-merged.tmp";
pub(crate) const NEW_OVERLAYS: &str = ".mica-overlays.tmp";
/// Ends the names of images that a verb makes, until they are complete.
pub(crate) const UNFINISHED: &str = ".mica-unfinished";
/// How often a file that somebody has locked is tried again, and after which time each.
const TRIES: u32 = 50;
const LOOK: Duration = Duration::from_millis(10);

/// The name of a layer that is to be called `new`, on top of the `active` one, before it has that.
pub(crate) fn unnamed(new: &Path, active: &Path) -> PathBuf {
    let is_beside = |active: &PathBuf| {
        let folder = folder_of(new).canonicalize().ok();
        folder.is_some_and(|folder| folder == folder_of(active))
    };
    let owner = active.canonicalize().ok().filter(is_beside);
    new.with_file_name(unnamed_of(owner.as_deref().unwrap_or(new)))
}

/// The name, in its folder, of a layer without a name that is to stand on the one at `owner`.
fn unnamed_of(owner: &Path) -> OsString {
    let mut name = OsString::from(".");
    name.push(owner.file_name().unwrap_or_default());
    name.push(UNNAMED);
    name
}

/// Makes an empty file for the image that is to be at `path`, where there is nothing, under a name
/// of its own; what a killed process left of an image of that name goes. The caller locks it as an
/// image, makes sure that it has got this file, and gives it its name with [`name_new`] when it is
/// complete. It gets this `mode`, as far as the process and the folder let it. `None` if there
/// cannot be such a name: `path` is too long, or ends in no name.
///
/// # Errors
/// `Denied` if another process makes an image there; else what the system reports.
pub fn make_unfinished(path: &Path, mode: u32) -> Result<Option<(PathBuf, File)>> {
    let Some(place) = unfinished_place(path) else { return Ok(None) };
    for _ in 0..TRIES {
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&place) {
            Ok(file) => return Ok(Some((place, file))),
            Err(error) if error.kind() == io::ErrorKind::InvalidFilename => return Ok(None),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::from_io(format!("creating {}", path.display()), error));
            }
            // Whoever was killed over it may have it locked for a moment longer.
            Err(_) if remove_unfinished(&place) => {}
            Err(_) => sleep(LOOK),
        }
    }
    let (path, place) = (path.display(), place.display());
    let what = format!(
        "another process is making {path}, in {place}: wait for it, or remove that file if there \
         is none"
    );
    Err(Error::new(ErrorKind::Denied, what))
}

/// Where an image that is to be at `path` is made; `None` if that ends in no name.
pub fn unfinished_place(path: &Path) -> Option<PathBuf> {
    let mut name = OsString::from(".");
    name.push(path.file_name()?);
    name.push(UNFINISHED);
    Some(path.with_file_name(name))
}

/// Removes what is at `place`, where an image is made, if nobody has it locked. Returns whether it
/// did.
pub fn remove_unfinished(place: &Path) -> bool {
    // Root gives what it replaces another user's image with to that user before it is complete.
    let is_own = |found: &Metadata| found.is_file() && (geteuid().is_root() || is_own_file(found));
    remove_if_abandoned(place.to_owned(), is_own, is_lockable_image).is_some()
}

/// Gives the file at `place` the name `path`, which nothing has.
///
/// # Errors
/// What the system reports; `AlreadyExists` if something has it by now.
pub fn name_new(place: &Path, path: &Path) -> io::Result<()> {
    match renameat_with(CWD, place, CWD, path, RenameFlags::NOREPLACE) {
        // The file system cannot do that in one step.
        Err(Errno::INVAL | Errno::NOSYS) if path.symlink_metadata().is_err() => {
            std::fs::rename(place, path)
        }
        named => named.map_err(io::Error::from),
    }
}

/// Gives the file at `place` the name `path`, and the one that has it that of `place`, in one step.
/// Returns whether it is there: some file systems can only drop it.
///
/// # Errors
/// What the system reports.
pub fn change_places(place: &Path, path: &Path) -> io::Result<bool> {
    match renameat_with(CWD, place, CWD, path, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            std::fs::rename(place, path).map(|()| false)
        }
        changed => changed.map(|()| true).map_err(io::Error::from),
    }
}

/// A file that is being written, locked until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    file: File,
    path: PathBuf,
}

impl Locked {
    /// Makes the file at `path`, durably but for its name. One of a killed process is taken.
    ///
    /// # Errors
    /// `WouldBlock` if somebody else writes it, and goes on doing so; else what the system reports.
    pub(crate) fn write(path: &Path, content: &[u8]) -> io::Result<Self> {
        let this = Self::take(path)?;
        let mut file = &this.file;
        let written = file.set_len(0).and_then(|()| file.write_all(content));
        match written.and_then(|()| file.sync_data()) {
            Ok(()) => Ok(this),
            Err(error) => {
                // The first failure is the one to report.
                this.remove();
                Err(error)
            }
        }
    }

    fn take(path: &Path) -> io::Result<Self> {
        for _ in 0..TRIES {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o644)
                .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
                .open(path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Somebody gave it its name, or removed it, just now.
                Ok(()) if !is_at(path, &file) => {}
                Err(Errno::WOULDBLOCK) => sleep(LOOK),
                // Without locks nobody removes it.
                Ok(()) | Err(_) => return Ok(Self { file, path: path.to_owned() }),
            }
        }
        Err(io::Error::new(io::ErrorKind::WouldBlock, "another process is writing it"))
    }

    /// Gives it the name `at`, durably once the folder is. Returns it, locked until it is closed.
    ///
    /// # Errors
    /// What the system reports. It is gone then.
    pub(crate) fn rename_to(self, at: &Path) -> Result<File> {
        self.name(at).inspect_err(|_| self.remove())?;
        Ok(self.file)
    }

    /// Gives it the name `at`, as [`Self::rename_to`].
    ///
    /// # Errors
    /// What the system reports. It is there still.
    pub(crate) fn name(&self, at: &Path) -> Result<()> {
        std::fs::rename(&self.path, at)
            .map_err(|error| Error::from_io(format!("writing {}", at.display()), error))
    }

    /// Whether it has the name `at`.
    pub(crate) fn is_at(&self, at: &Path) -> bool {
        is_at(at, &self.file)
    }

    /// Removes it, unless it has its name. What is left is taken by the next one.
    pub(crate) fn remove(&self) {
        if is_at(&self.path, &self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes what killed processes left beside these layers, which are really at `real`, from the
/// base to the active one, which the caller has locked. Returns what was removed; what cannot be
/// stays.
pub(crate) fn remove_beside(real: &[Option<PathBuf>]) -> Vec<PathBuf> {
    let mut removed = Vec::new();
    for layer in real.iter().flatten().rev() {
        for ending in [NEW_ABOVE, NEW_MERGED, NEW_OVERLAYS] {
            let mut path = layer.clone().into_os_string();
            path.push(ending);
            removed.extend(remove_mark_if_abandoned(path.into()));
        }
    }
    if let Some(Some(active)) = real.last() {
        let path = active.with_file_name(unnamed_of(active));
        // Its owner has the active one locked, not this: but where there are no locks, the caller
        // only thinks that it has.
        removed.extend(remove_if_abandoned(path, is_own_file, is_lockable_image));
    }
    removed
}

/// Removes the mark at `path` that has not got its name, unless somebody writes it: whoever does
/// has it locked, and makes another one if it is gone by then.
pub(crate) fn remove_mark_if_abandoned(path: PathBuf) -> Option<PathBuf> {
    remove_if_abandoned(path, is_own_file, |_| true)
}

/// Removes the file at `path` if it `is_own`, nobody has it locked, and it `is_free`.
fn remove_if_abandoned(
    path: PathBuf,
    is_own: impl FnOnce(&Metadata) -> bool,
    is_free: impl FnOnce(&File) -> bool,
) -> Option<PathBuf> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&path).ok()?;
    let is_abandoned = is_own(&file.metadata().ok()?)
        && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        && is_free(&file)
        && is_at(&path, &file);
    (is_abandoned && std::fs::remove_file(&path).is_ok()).then_some(path)
}

/// Whether images have locks where `file` is (I2), and nobody has one of it. A file system may have
/// those of whole files only, or the other way round.
fn is_lockable_image(file: &File) -> bool {
    let Ok(file) = file.try_clone() else { return false };
    let file = mica_rt::File::new(file.into(), Access::Buffered);
    // To the end of the file, wherever that is.
    let (start, len) = (0, 0);
    file.lock_shared(start, len).is_ok()
        && file.is_locked_elsewhere(start, len).is_ok_and(|is_locked| !is_locked)
}

/// Whether it is a file that a process of this user may have left.
fn is_own_file(found: &Metadata) -> bool {
    found.is_file() && found.uid() == geteuid().as_raw()
}

/// Whether `file` is what `path` names, and not a symbolic link to it.
pub fn is_at(path: &Path, file: &File) -> bool {
    let node = |found: Metadata| (found.dev(), found.ino());
    let there = path.symlink_metadata().map(node);
    there.is_ok_and(|there| file.metadata().map(node).is_ok_and(|own| own == there))
}

#[expect(clippy::disallowed_methods, reason = "a verb, or a thread that has nothing else to do")]
pub(crate) fn sleep(time: Duration) {
    std::thread::sleep(time);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remove_abandoned;
    use std::fs;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("listed");
        let name = |entry: fs::DirEntry| entry.file_name().into_string().expect("text");
        let mut names: Vec<_> = entries.map(|entry| name(entry.expect("listed"))).collect();
        names.sort();
        names
    }

    #[test]
    fn what_killed_processes_left_beside_own_layers_goes_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let own = [
            "base.mica-merged.tmp",
            "base.mica-above.tmp",
            "disk.mica-above.tmp",
            "disk.mica-overlays.tmp",
            ".disk.mica-new",
        ];
        // Layers, what others have, and what only looks as if.
        let stay = [
            "base",
            "disk",
            "other.mica-above.tmp",
            ".other.mica-new",
            ".base.mica-new",
            "disk.tmp",
            "disk.mica-merged",
        ];
        for name in own.iter().chain(&stay) {
            fs::write(at(name), "left").expect("written");
        }
        std::os::unix::fs::symlink("base", at("base.mica-overlays.tmp")).expect("a link");
        fs::create_dir(at("disk.mica-merged.tmp")).expect("made");
        let removed = remove_abandoned(&[at("base"), at("disk")]);
        assert_eq!(removed.len(), own.len(), "{removed:?}");
        let mut stay: Vec<_> = stay.iter().map(|name| (*name).to_owned()).collect();
        stay.extend(["base.mica-overlays.tmp", "disk.mica-merged.tmp"].map(str::to_owned));
        stay.sort();
        assert_eq!(names(folder.path()), stay);
    }

    #[test]
    fn file_that_somebody_writes_stays_and_is_taken_when_that_one_is_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, new) = (folder.path().join("disk"), folder.path().join("disk.mica-above.tmp"));
        fs::write(&disk, "image").expect("written");
        let writing = Locked::write(&new, b"a long content").expect("written");
        assert!(remove_abandoned(std::slice::from_ref(&disk)).is_empty());
        let said = Locked::write(&new, b"another").expect_err("it is written");
        assert_eq!(said.kind(), io::ErrorKind::WouldBlock);
        drop(writing);
        let taken = Locked::write(&new, b"short").expect("taken");
        assert_eq!(fs::read(&new).expect("there"), b"short");
        taken.name(&disk).expect("named");
        // Another one has the name by now.
        fs::write(&new, "other").expect("written");
        taken.remove();
        assert!(new.exists());
    }

    /// The story: root was killed over the image of another user, and never made one there again.
    #[test]
    fn what_root_left_of_another_users_image_goes_and_nothing_but_a_file_does() {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, place) =
            (folder.path().join("disk"), folder.path().join(".disk.mica-unfinished"));
        let layer = folder.path().join("disk.mica-above.tmp");
        for file in [&disk, &place, &layer] {
            fs::write(file, "left").expect("written");
        }
        fs::create_dir(folder.path().join("folder")).expect("made");
        std::os::unix::fs::symlink("disk", folder.path().join("link")).expect("a link");
        if geteuid().is_root() {
            for file in [&place, &layer] {
                std::os::unix::fs::chown(file, Some(1234), None).expect("given away");
            }
        }
        assert!(remove_unfinished(&place) && !place.exists());
        for name in ["folder", "link"] {
            assert!(!remove_unfinished(&folder.path().join(name)), "{name}");
        }
        assert_eq!(remove_abandoned(&[disk]).is_empty(), geteuid().is_root());
    }

    /// The story: where files cannot be locked, a server removed the layer that another was making.
    #[test]
    fn new_layer_that_cannot_be_locked_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, new) = (folder.path().join("disk"), folder.path().join(".disk.mica-new"));
        fs::write(&disk, "image").expect("written");
        fs::write(&new, "new").expect("written");
        let layers = std::slice::from_ref(&disk);
        let other = File::open(&new).expect("open");
        flock(&other, FlockOperation::NonBlockingLockExclusive).expect("locked");
        assert!(remove_abandoned(layers).is_empty());
        flock(&other, FlockOperation::Unlock).expect("unlocked");
        // As images are locked.
        let other = mica_rt::File::new(other.into(), Access::Buffered);
        other.lock_shared(100, 1).expect("locked");
        assert!(remove_abandoned(layers).is_empty());
        drop(other);
        assert_eq!(remove_abandoned(layers).len(), 1);
        assert!(!new.exists());
    }

    #[test]
    fn new_layer_belongs_to_the_active_one_unless_that_is_elsewhere() {
        let folder = tempfile::tempdir().expect("a folder");
        let (here, there) = (folder.path().join("here"), folder.path().join("there"));
        fs::create_dir(&here).expect("made");
        fs::create_dir(&there).expect("made");
        let active = here.join("disk");
        fs::write(&active, "image").expect("written");
        assert_eq!(unnamed(&here.join("new"), &active), here.join(".disk.mica-new"));
        // Disks of several folders may have the same name.
        assert_eq!(unnamed(&there.join("new"), &active), there.join(".new.mica-new"));
    }
}

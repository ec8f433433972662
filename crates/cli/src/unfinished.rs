//! Files that are not complete yet: a verb that fails removes them, and so does a signal that ends
//! the program. One that is new has a name of its own until it is complete, so that a process that
//! is killed leaves nothing under the name that was wished for (`stack/src/temporary.rs`).
//!
//! - I1 A file is removed only while it is on the list. It leaves the list when it is complete, or
//!   when it is removed, both under the list's lock.
//!   It gets its name under that lock, too. One that this process made is removed, or gets its
//!   name, only if it is still that file: whoever took it for left made another one there.
//! - I2 A signal that ends the program takes that lock and never releases it: from then on no file
//!   is completed, and no failure reported that only the end has caused.
//! - I3 An existing file that was overwritten in place is emptied, not removed, after nothing can
//!   be written to files any more.
//! - I4 A file that another one has taken the place of is removed when that is kept, and gets its
//!   name back if it is not. Where a file system could only drop it, the new one, which is
//!   complete, stays in any case.

use crate::failure::Failure;
use mica_block::ErrorKind::{Denied, Invalid, Unsupported};
use mica_stack::{is_file_at, make_unfinished};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::fs::{File, OpenOptions, hard_link, remove_file, rename};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Once;

static FILES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

struct Entry {
    path: PathBuf,
    /// The file, if this process created it.
    made: Option<File>,
    before: Before,
    /// Whether it is a second name of another file on the list.
    is_link: bool,
}

/// What had the name of a file before it.
enum Before {
    /// Nothing, or the file itself.
    Nothing,
    /// A file that is beside it now.
    Beside(Old),
    /// One that is gone.
    Gone,
}

/// A file, by device and inode, that another one has taken the place of.
struct Old {
    place: PathBuf,
    node: (u64, u64),
}

impl Old {
    fn is_there(&self) -> bool {
        is_node_at(&self.place, self.node)
    }
}

/// A file that is removed on drop, or emptied if it existed before, unless it is kept.
pub(crate) struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    /// The file at `path`, which this process has created (`made`) or is about to overwrite.
    pub(crate) fn new(path: &Path, made: Option<File>) -> Self {
        watch();
        files().push(Entry::new(path, made));
        Self { path: path.to_owned() }
    }

    /// Makes a file at `path`, where none is. No signal comes between that and its place on the
    /// list.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn create_new(path: &Path) -> io::Result<(Self, File)> {
        Self::create_with(path, File::try_clone)
    }

    /// Gives the file at `place`, which this process made, a second name. That goes after all that
    /// may need it, and stays if one of them does.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn link(place: &Path, path: &Path) -> io::Result<Self> {
        watch();
        let mut files = files();
        let made = File::open(place)?;
        hard_link(place, path)?;
        files.insert(0, Entry { is_link: true, ..Entry::new(path, Some(made)) });
        Ok(Self { path: path.to_owned() })
    }

    /// As [`Self::create_new`], with a second descriptor from `clone`: there may be no more.
    fn create_with(
        path: &Path,
        clone: impl FnOnce(&File) -> io::Result<File>,
    ) -> io::Result<(Self, File)> {
        watch();
        let mut files = files();
        let file = File::create_new(path)?;
        let cloned = clone(&file);
        let entry = Entry::new(path, Some(file));
        let file = cloned.inspect_err(|_| entry.discard())?;
        files.push(entry);
        Ok((Self { path: path.to_owned() }, file))
    }

    /// Makes a file for what is to be at `path`, where nothing is or something that it replaces. It
    /// has a name of its own, if it can have one, and is locked, so that nobody takes it for left.
    ///
    /// # Errors
    /// As [`make_unfinished`], and what the system reports.
    pub(crate) fn create_beside(path: &Path) -> Result<(Self, File), Failure> {
        watch();
        let mut files = files();
        let Some((place, file)) = make_unfinished(path, 0o666)? else {
            drop(files);
            let created = Self::create_new(path);
            return created.map_err(|error| Failure::from(error).within(path.display()));
        };
        // Without locks nobody removes it.
        let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
        let cloned = file.try_clone();
        let entry = Entry::new(&place, Some(file));
        let file = cloned.inspect_err(|_| entry.discard())?;
        files.push(entry);
        Ok((Self { path: place }, file))
    }

    /// Gives the file, which is complete and durable, the name `path`, durably, in the place of the
    /// file `old`, by device and inode, if that is there.
    ///
    /// # Errors
    /// As [`Self::replace`], and what the system reports: it is removed then.
    pub(crate) fn finish(mut self, path: &Path, old: Option<(u64, u64)>) -> Result<(), Failure> {
        match old {
            _ if self.path == path => {}
            Some(old) => self.replace(path, old)?,
            None => self.rename_to(path)?,
        }
        sync_name(path)?;
        self.keep();
        Ok(())
    }

    /// Gives the file, which is complete, the name `path`, which nothing has.
    ///
    /// # Errors
    /// What the system reports. It is on the list still, under the name that it had.
    pub(crate) fn rename_to(&mut self, path: &Path) -> io::Result<()> {
        self.named(path, |place| mica_stack::name_new(place, path).map(|()| Before::Nothing))
    }

    /// As [`Self::rename_to`], for the name of the file `old`, by device and inode, which stays
    /// beside it until this one is kept.
    ///
    /// # Errors
    /// As [`Self::rename_to`]; `AlreadyExists` if `path` is another file by now.
    pub(crate) fn replace(&mut self, path: &Path, old: (u64, u64)) -> io::Result<()> {
        self.replace_by(path, old, mica_stack::change_places)
    }

    fn replace_by(
        &mut self,
        path: &Path,
        old: (u64, u64),
        change: impl Fn(&Path, &Path) -> io::Result<bool>,
    ) -> io::Result<()> {
        self.named(path, |place| {
            if !is_node_at(path, old) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            if !change(place, path)? {
                return Ok(Before::Gone);
            }
            let old = Old { place: place.to_owned(), node: old };
            if old.is_there() {
                return Ok(Before::Beside(old));
            }
            // Somebody put it there just now: it is back where that one wants it.
            change(place, path)?;
            Err(io::ErrorKind::AlreadyExists.into())
        })
    }

    /// Gives the file the name `path`, as `give` does, which knows what had it.
    fn named(
        &mut self,
        path: &Path,
        give: impl FnOnce(&Path) -> io::Result<Before>,
    ) -> io::Result<()> {
        let mut files = files();
        let entry = files.iter_mut().find(|entry| entry.path == self.path);
        if entry.as_ref().is_some_and(|entry| !entry.is_ours()) {
            let what = format!("{}: another process removed it", self.path.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
        let before = give(&self.path)?;
        if let Some(entry) = entry {
            path.clone_into(&mut entry.path);
            entry.before = before;
        }
        path.clone_into(&mut self.path);
        Ok(())
    }

    /// Whether the file stays in any case: what it took the place of is gone.
    pub(crate) fn stays(&self) -> bool {
        let files = files();
        let own = files.iter().find(|entry| entry.path == self.path);
        own.is_some_and(|entry| matches!(entry.before, Before::Gone))
    }

    /// Keeps the file: it is complete.
    pub(crate) fn keep(self) {
        let mut files = files();
        let Some(at) = files.iter().position(|entry| entry.path == self.path) else { return };
        let Before::Beside(old) = files.swap_remove(at).before else { return };
        if old.is_there() {
            // Then it is as if this process were killed now.
            if let Err(error) = remove_file(&old.place) {
                let place = old.place.display();
                tracing::warn!(%place, %error, "the file that was replaced stays, and its space");
            }
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let mut files = files();
        if let Some(at) = files.iter().position(|entry| entry.path == self.path) {
            files.swap_remove(at).discard();
        }
    }
}

impl Entry {
    fn new(path: &Path, made: Option<File>) -> Self {
        Self { path: path.to_owned(), made, before: Before::Nothing, is_link: false }
    }

    /// Whether the file is still where it is to be, as far as that is known.
    fn is_ours(&self) -> bool {
        self.made.as_ref().is_none_or(|file| is_file_at(&self.path, file))
    }

    fn discard(&self) {
        if !self.is_ours() {
            return;
        }
        // The failure itself is reported, and what is left is not an image.
        let _ = match (&self.made, &self.before) {
            (_, Before::Gone) => Ok(()),
            (_, Before::Beside(old)) if old.is_there() => rename(&old.place, &self.path),
            (Some(_), _) => remove_file(&self.path),
            (None, _) => OpenOptions::new().write(true).truncate(true).open(&self.path).map(drop),
        };
    }
}

/// Makes the name of the file at `path` durable, as far as its folder lets this process do that.
///
/// # Errors
/// What the system reports.
pub(crate) fn sync_name(path: &Path) -> Result<(), Failure> {
    match mica_stack::sync_folder_of(path) {
        // It may not be read, or its file system syncs no folders.
        Err(error) if matches!(error.kind(), Denied | Invalid | Unsupported) => {
            tracing::debug!(path = %path.display(), %error, "its name may not be durable");
            Ok(())
        }
        synced => Ok(synced?),
    }
}

/// Waits forever if a signal is ending the program (I2).
pub(crate) fn wait_if_ending() {
    drop(files());
}

/// Whether the file with this device and inode is what `path` names.
fn is_node_at(path: &Path, node: (u64, u64)) -> bool {
    path.symlink_metadata().is_ok_and(|found| (found.dev(), found.ino()) == node)
}

fn files() -> MutexGuard<'static, Vec<Entry>> {
    FILES.lock()
}

fn watch() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(watch_signals);
}

/// Removes what is unfinished when the user or the system ends the program. If that cannot be
/// arranged, the signals end it as they would otherwise.
fn watch_signals() {
    let watched = Signals::new(ending_signals()).and_then(|mut signals| {
        let watch = move || {
            if let Some(signal) = signals.forever().next() {
                end(signal);
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(watch)
    });
    if let Err(error) = watched {
        tracing::warn!(%error, "if a signal ends this command, an unfinished file stays");
    }
}

/// Ends the program as `signal` would have.
fn end(signal: i32) {
    let files = files();
    // The kernel judges a write after it has locked the file, as it does a truncation: a write that
    // is still under way can make nothing longer after the truncation.
    let limit = Rlimit { current: Some(0), ..getrlimit(Resource::Fsize) };
    if let Err(error) = setrlimit(Resource::Fsize, limit) {
        tracing::debug!(%error, "writes continue until the end");
    }
    // What came later may need what was there before.
    let stays = files.iter().any(|entry| matches!(entry.before, Before::Gone));
    files.iter().rev().filter(|entry| !entry.is_link || !stays).for_each(Entry::discard);
    // It ends the program, so the lock stays taken. Otherwise the exit code says the same.
    if emulate_default_handler(signal).is_err() {
        std::process::exit(128 + signal);
    }
}

/// By which the user or the system ends the program.
pub(crate) fn ending_signals() -> impl Iterator<Item = i32> {
    [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal))
}

/// Whether the program was started with `signal` ignored, as by nohup: then it stays ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The story: restore removed what another process made in the place of its file.
    #[test]
    fn file_that_another_process_made_in_its_place_stays_and_gets_no_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let (place, name) = (folder.path().join("place"), folder.path().join("name"));
        let own = File::create_new(&place).expect("made");
        let mut unfinished = Unfinished::new(&place, Some(own));
        fs::remove_file(&place).expect("removed");
        fs::write(&place, "of another").expect("written");
        let said = unfinished.rename_to(&name).expect_err("it is another's");
        assert_eq!(said.kind(), io::ErrorKind::NotFound);
        drop(unfinished);
        assert_eq!(fs::read(&place).expect("there"), b"of another");
        assert!(!name.exists());
    }

    #[test]
    fn file_that_cannot_be_listed_for_want_of_descriptors_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("place");
        let none_left = |_: &File| Err(rustix::io::Errno::MFILE.into());
        Unfinished::create_with(&place, none_left).map(drop).expect_err("no descriptor");
        assert!(!place.exists());
        Unfinished::create_new(&place).map(drop).expect("there is one");
        assert!(!place.exists(), "it was not kept");
    }

    #[test]
    fn file_that_is_replaced_is_back_unless_the_new_one_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let (place, name) = (folder.path().join("place"), folder.path().join("name"));
        let read = || fs::read(&name).expect("there");
        let replace = |node| {
            let own = File::create_new(&place).expect("made");
            fs::write(&place, "new").expect("written");
            let mut unfinished = Unfinished::new(&place, Some(own));
            unfinished.replace(&name, node).map(|()| unfinished)
        };
        let node_at = |path: &Path| {
            let found = fs::metadata(path).expect("there");
            (found.dev(), found.ino())
        };
        fs::write(&name, "old").expect("written");
        let old = node_at(&name);
        let new = replace(old).expect("replaced");
        assert_eq!(read(), b"new");
        drop(new);
        assert_eq!((read(), node_at(&name), place.exists()), (b"old".to_vec(), old, false));
        replace(old).expect("replaced").keep();
        assert_eq!((read(), place.exists()), (b"new".to_vec(), false));
        // Somebody has put another one there meanwhile.
        let said = replace(old).map(drop).expect_err("another one");
        assert_eq!(said.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!((read(), place.exists()), (b"new".to_vec(), false));
    }

    /// The story: where files cannot be exchanged a verb that failed late left neither.
    #[test]
    fn file_that_could_only_drop_the_old_one_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let (place, name) = (folder.path().join("place"), folder.path().join("name"));
        fs::write(&name, "old").expect("written");
        let found = fs::metadata(&name).expect("there");
        let own = File::create_new(&place).expect("made");
        fs::write(&place, "new").expect("written");
        let mut unfinished = Unfinished::new(&place, Some(own));
        let drop_it = |place: &Path, path: &Path| rename(place, path).map(|()| false);
        assert!(!unfinished.stays());
        unfinished.replace_by(&name, (found.dev(), found.ino()), drop_it).expect("replaced");
        assert!(unfinished.stays());
        drop(unfinished);
        assert_eq!((fs::read(&name).expect("there"), place.exists()), (b"new".to_vec(), false));
    }

    #[test]
    fn file_that_somebody_puts_there_in_the_last_moment_stays_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let (place, name, other) = (at("place"), at("name"), at("other"));
        fs::write(&name, "old").expect("written");
        fs::write(&other, "of another").expect("written");
        let found = fs::metadata(&name).expect("there");
        let own = File::create_new(&place).expect("made");
        let mut unfinished = Unfinished::new(&place, Some(own));
        let late = |place: &Path, path: &Path| {
            if other.exists() {
                rename(&other, path)?;
            }
            mica_stack::change_places(place, path)
        };
        let said = unfinished.replace_by(&name, (found.dev(), found.ino()), late);
        assert_eq!(said.expect_err("another one").kind(), io::ErrorKind::AlreadyExists);
        drop(unfinished);
        assert_eq!(
            (fs::read(&name).expect("there"), place.exists()),
            (b"of another".to_vec(), false)
        );
    }

    #[test]
    fn file_of_this_process_gets_its_name_and_is_removed_on_drop() {
        let folder = tempfile::tempdir().expect("a folder");
        let (place, name) = (folder.path().join("place"), folder.path().join("name"));
        let own = File::create_new(&place).expect("made");
        let mut unfinished = Unfinished::new(&place, Some(own));
        unfinished.rename_to(&name).expect("named");
        assert!(name.exists() && !place.exists());
        drop(unfinished);
        assert!(!name.exists());
    }
}

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
//! - I3 An existing file that was overwritten is emptied, not removed, after nothing can be written
//!   to files any more.

use mica_stack::is_file_at;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::fs::{File, OpenOptions, remove_file};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

static FILES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

struct Entry {
    path: PathBuf,
    /// The file, if this process created it.
    made: Option<File>,
}

/// A file that is removed on drop, or emptied if it existed before, unless it is kept.
pub(crate) struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    /// The file at `path`, which this process has created (`made`) or is about to overwrite.
    pub(crate) fn new(path: &Path, made: Option<File>) -> Self {
        watch();
        files().push(Entry { path: path.to_owned(), made });
        Self { path: path.to_owned() }
    }

    /// Makes a file at `path`, where none is. No signal comes between that and its place on the
    /// list.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn create_new(path: &Path) -> io::Result<(Self, File)> {
        watch();
        let mut files = files();
        let file = File::create_new(path)?;
        files.push(Entry { path: path.to_owned(), made: Some(file.try_clone()?) });
        Ok((Self { path: path.to_owned() }, file))
    }

    /// Gives the file, which is complete, the name `path`, which nothing has.
    ///
    /// # Errors
    /// What the system reports. It is on the list still, under the name that it had.
    pub(crate) fn rename_to(&mut self, path: &Path) -> io::Result<()> {
        let mut files = files();
        let entry = files.iter_mut().find(|entry| entry.path == self.path);
        if entry.as_ref().is_some_and(|entry| !entry.is_ours()) {
            let what = format!("{}: another process removed it", self.path.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        }
        mica_stack::name_new(&self.path, path)?;
        if let Some(entry) = entry {
            path.clone_into(&mut entry.path);
        }
        path.clone_into(&mut self.path);
        Ok(())
    }

    /// Keeps the file: it is complete.
    pub(crate) fn keep(self) {
        files().retain(|entry| entry.path != self.path);
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
    /// Whether the file is still where it is to be, as far as that is known.
    fn is_ours(&self) -> bool {
        self.made.as_ref().is_none_or(|file| is_file_at(&self.path, file))
    }

    fn discard(&self) {
        if !self.is_ours() {
            return;
        }
        // The failure itself is reported, and what is left is not an image.
        let _ = match self.made {
            Some(_) => remove_file(&self.path),
            None => OpenOptions::new().write(true).truncate(true).open(&self.path).map(drop),
        };
    }
}

/// Waits forever if a signal is ending the program (I2).
pub(crate) fn wait_if_ending() {
    drop(files());
}

fn files() -> MutexGuard<'static, Vec<Entry>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
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
    files.iter().for_each(Entry::discard);
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

//! The file with the number of the serving process, for scripts and supervisors.
//!
//! It appears, complete, once everything is served, and is removed at the end unless another
//! process has replaced it. It is prepared before the sandbox is entered, inside which only its
//! folder's entries can be changed.

use crate::failure::Failure;
use rustix::fs::{CWD, RenameFlags};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The file of this process. Dropping it removes it.
pub(crate) struct PidFile {
    path: PathBuf,
    /// Where it is until everything is served.
    unseen: PathBuf,
    file: File,
}

impl PidFile {
    /// Writes what will be at `path`.
    ///
    /// # Errors
    /// If it cannot be written there.
    pub(crate) fn prepare(path: &Path) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| {
            Failure::from(error).within(format!("--pid-file {}", path.display()))
        };
        // An empty one is what `mktemp` makes.
        if !is_empty(path) && !is_of_process(path).map_err(failed)? {
            let what = "it is there and is not the file of a process: name another";
            return Err(Failure::new(what).within(format!("--pid-file {}", path.display())));
        }
        let path = std::path::absolute(path).map_err(failed)?;
        let process = std::process::id();
        let mut unseen = path.clone().into_os_string();
        unseen.push(format!(".{process}"));
        let unseen = PathBuf::from(unseen);
        let file = create_new(&unseen).map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => {
                let what = "is there and is not the file of a process: remove it, or name another";
                Failure::new(format!("--pid-file: {} {what}", unseen.display()))
            }
            _ => failed(error),
        })?;
        let mut this = Self { path: path.clone(), unseen, file };
        if let Err(error) = writeln!(this.file, "{process}") {
            let _ = std::fs::remove_file(&this.unseen);
            return Err(failed(error));
        }
        // A power cut leaves it with the number, or not at all, where files can be synced.
        let _ = this.file.sync_all();
        Ok(this)
    }

    /// Shows it: everything is served.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn publish(&self) -> Result<(), Failure> {
        std::fs::rename(&self.unseen, &self.path).map_err(|error| {
            Failure::from(error).within(format!("--pid-file {}", self.path.display()))
        })
    }
}

/// Makes the file at `path`. What an earlier process of this number left there goes; nothing else.
fn create_new(path: &Path) -> std::io::Result<File> {
    let create = || File::options().read(true).write(true).create_new(true).open(path);
    match create() {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            if !is_of_process(path)? {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            create()
        }
        made => made,
    }
}

/// Whether there is an empty file at `path`, which nobody misses.
fn is_empty(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.is_file() && found.len() == 0)
}

/// Whether nothing is at `path`, or only the number of a process.
fn is_of_process(path: &Path) -> std::io::Result<bool> {
    let found = match path.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
        found => found?,
    };
    if !found.is_file() || found.len() > NUMBER_BYTES_MAX as u64 {
        return Ok(false);
    }
    let text = std::fs::read(path)?;
    let number = text.trim_ascii();
    Ok(!number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

/// Longest number of a process, with what stands around it.
const NUMBER_BYTES_MAX: usize = 32;

impl PidFile {
    /// Whether what is at `path` is ours, and still says so.
    fn is_ours(&self, path: &Path) -> bool {
        let (Ok(ours), Ok(found)) = (self.file.metadata(), path.symlink_metadata()) else {
            return false;
        };
        let mut text = [0; NUMBER_BYTES_MAX];
        let read = self.file.read_at(&mut text, 0).unwrap_or(0);
        (found.dev(), found.ino()) == (ours.dev(), ours.ino())
            && text[..read] == *format!("{}\n", std::process::id()).as_bytes()
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // If it stays, it names a process that is gone, as after a kill.
        if self.is_ours(&self.path) && std::fs::rename(&self.path, &self.unseen).is_ok() {
            // Another process may have put its own there since.
            if !self.is_ours(&self.unseen) {
                let _ = rustix::fs::renameat_with(
                    CWD,
                    &self.unseen,
                    CWD,
                    &self.path,
                    RenameFlags::NOREPLACE,
                );
                return;
            }
        }
        if self.is_ours(&self.unseen) {
            let _ = std::fs::remove_file(&self.unseen);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_appears_when_all_is_served_and_goes_unless_another_process_replaced_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        let count = || folder.path().read_dir().expect("a folder").count();
        let ours = PidFile::prepare(&path).expect("written");
        assert!(!path.exists());
        ours.publish().expect("shown");
        let text = std::fs::read_to_string(&path).expect("there");
        assert_eq!(text, format!("{}\n", std::process::id()));

        let theirs = PidFile::prepare(&path).expect("written");
        theirs.publish().expect("shown");
        drop(ours);
        assert!(path.exists(), "another process has taken over");
        drop(theirs);
        assert_eq!(count(), 0);

        drop(PidFile::prepare(&path).expect("written"));
        assert_eq!(count(), 0, "it never served");

        let ours = PidFile::prepare(&path).expect("written");
        ours.publish().expect("shown");
        std::fs::write(&path, "1\n").expect("written");
        drop(ours);
        assert_eq!(std::fs::read(&path).expect("there"), b"1\n", "somebody else's now");
        drop(PidFile::prepare(&path).expect("a number is replaced"));
        std::fs::write(&path, "a disk").expect("written");
        assert!(PidFile::prepare(&path).is_err(), "not a number");
        assert_eq!(std::fs::read(&path).expect("there"), b"a disk");
        std::fs::write(&path, " \n").expect("written");
        assert!(PidFile::prepare(&path).is_err(), "no number");
        std::fs::write(&path, "").expect("written");
        let ours = PidFile::prepare(&path).expect("an empty one is replaced");
        ours.publish().expect("shown");
        assert_eq!(std::fs::read_to_string(&path).expect("there"), text);
        drop(ours);
        assert!(PidFile::prepare(&folder.path().join("none/pid")).is_err());
        assert!(PidFile::prepare(folder.path()).is_err());
    }

    /// The story: whatever had the name that the file has at first was emptied, also by a link.
    #[test]
    fn what_has_the_name_that_the_file_has_at_first_stays_unless_it_is_a_number() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, disk) = (folder.path().join("pid"), folder.path().join("disk"));
        let unseen = folder.path().join(format!("pid.{}", std::process::id()));
        std::fs::write(&disk, "a disk").expect("written");
        let stays = || {
            assert!(PidFile::prepare(&path).is_err());
            assert_eq!(std::fs::read(&disk).expect("there"), b"a disk");
            assert_eq!(std::fs::read(&unseen).expect("there"), b"a disk");
        };
        std::os::unix::fs::symlink(&disk, &unseen).expect("linked");
        stays();
        std::fs::remove_file(&unseen).expect("removed");
        std::fs::hard_link(&disk, &unseen).expect("linked");
        stays();
        std::fs::remove_file(&unseen).expect("removed");
        std::fs::write(&unseen, "4711\n").expect("written");
        PidFile::prepare(&path).expect("a number goes").publish().expect("shown");
    }
}

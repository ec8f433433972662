//! The file with the number of the serving process, for scripts and supervisors.
//!
//! It appears, complete, once everything is served, and is removed at the end unless another
//! process has replaced it. It is prepared before the sandbox is entered, inside which only its
//! folder's entries can be changed.

use crate::failure::Failure;
use std::fs::{File, Metadata};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
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
        if path.is_dir() {
            return Err(failed(std::io::ErrorKind::IsADirectory.into()));
        }
        let path = std::path::absolute(path).map_err(failed)?;
        let process = std::process::id();
        let mut unseen = path.clone().into_os_string();
        unseen.push(format!(".{process}"));
        let unseen = PathBuf::from(unseen);
        let file = File::create(&unseen).map_err(failed)?;
        let mut this = Self { path: path.clone(), unseen, file };
        writeln!(this.file, "{process}").map_err(failed)?;
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

impl Drop for PidFile {
    fn drop(&mut self) {
        let Ok(ours) = self.file.metadata() else { return };
        let is_ours = |found: &Metadata| found.dev() == ours.dev() && found.ino() == ours.ino();
        for path in [&self.path, &self.unseen] {
            if path.symlink_metadata().is_ok_and(|found| is_ours(&found)) {
                // If it stays, it names a process that is gone, as after a kill.
                let _ = std::fs::remove_file(path);
            }
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
        assert!(PidFile::prepare(&folder.path().join("none/pid")).is_err());
        assert!(PidFile::prepare(folder.path()).is_err());
    }
}

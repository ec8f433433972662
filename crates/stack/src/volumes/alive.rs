//! What shows that a writer is dead whose store has no locks: a file in memory of this machine that
//! it has locked for as long as it lives. Only for writers without a log, which would know them.
//!
//! Whoever takes a volume over fences its writer in any case: this only says that nobody has to be
//! asked for force.
//!
//! Invariants
//! - I1 A file is of one writer, whose number no other has in its store. It says something only
//!   once its writer has locked it, so that one which is free is that of a writer that ended.
//! - I2 It proves nothing on another kernel than the one that its writer ran on.
//! - I3 Only this user can have put it there, as with redo logs.

use super::machine::Machine;
use crate::redo::folder::{usual_redo_directory, volumes_folder};
use mica_block::{Error, Result};
use mica_rt::sleep;
use mica_volume::Writer;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat, unlink};
use rustix::io::Errno;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the system may take to give up the locks of a process that was killed.
const RELEASE_TRIES: u32 = 50;
const RELEASE_PAUSE: Duration = Duration::from_millis(20);
/// Bytes of the name of a kernel that runs, at most.
const BOOT_BYTES_MAX: usize = 64;

/// The volume and the writer that such a file stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Kept {
    pub(super) store: [u8; 16],
    pub(super) volume: [u8; 16],
    pub(super) writer: Writer,
}

impl Kept {
    fn path_in(&self, folder: &Path) -> PathBuf {
        let mut name = "volume-".to_owned();
        for byte in self.store.iter().chain(&self.volume) {
            // Writing to a string does not fail.
            let _ = write!(name, "{byte:02x}");
        }
        folder.join(format!("{name}-{}", self.writer.number()))
    }
}

/// The file of a writer of this process. It stays when this is dropped, and shows then that the
/// writer has ended.
pub(super) struct AliveNote {
    _file: File,
    path: PathBuf,
}

impl AliveNote {
    /// Keeps one for as long as this is there.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn keep(of: &Kept) -> Result<Self> {
        Self::keep_in(&volumes_folder(usual_redo_directory())?, of)
    }

    fn keep_in(folder: &Path, of: &Kept) -> Result<Self> {
        let path = of.path_in(folder);
        let failed =
            |error: io::Error| Error::from_io(format!("writing {}", path.display()), error);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(CWD, &path, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(file.map_err(|error| failed(error.into()))?);
        let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        let boot = Machine::here().boot.ok_or_else(|| io::ErrorKind::Unsupported.into());
        let written = locked
            .map_err(io::Error::from)
            .and(boot)
            .and_then(|boot| file.write_all_at(boot.as_bytes(), 0));
        match written {
            Ok(()) => Ok(Self { _file: file, path }),
            Err(error) => {
                let error = failed(error);
                let _ = unlink(&path);
                Err(error)
            }
        }
    }

    /// Removes the file: the writer has closed the volume.
    pub(super) fn remove(&self) {
        // If it cannot be removed, it is a small file too many, until the machine restarts.
        let _ = unlink(&self.path);
    }

    /// The writer was dead, and the volume is another's now.
    pub(super) fn forget(of: &Kept) {
        if let Ok(folder) = volumes_folder(usual_redo_directory()) {
            let _ = unlink(of.path_in(&folder));
        }
    }

    /// Whether the writer was on this machine, and is dead.
    pub(super) async fn proves_end_of(of: &Kept) -> bool {
        match volumes_folder(usual_redo_directory()) {
            Ok(folder) => Self::proves_end_in(&folder, of).await,
            Err(_) => false,
        }
    }

    async fn proves_end_in(folder: &Path, of: &Kept) -> bool {
        let path = of.path_in(folder);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = openat(CWD, &path, flags, Mode::empty()).map(File::from) else {
            return false;
        };
        for _ in 0..RELEASE_TRIES {
            match flock(&file, FlockOperation::NonBlockingLockShared) {
                Ok(()) => return is_of_this_kernel(&file),
                Err(Errno::WOULDBLOCK) => sleep(RELEASE_PAUSE).await,
                Err(_) => return false,
            }
        }
        false
    }
}

/// What its writer says once it has locked it (I1, I2).
fn is_of_this_kernel(file: &File) -> bool {
    let mut bytes = [0; BOOT_BYTES_MAX];
    let len = file.read_at(&mut bytes, 0).unwrap_or(0);
    Machine::here().boot.is_some_and(|boot| boot.as_bytes() == &bytes[..len])
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_rt::{Backend, Executor};

    fn of(number: u64) -> Kept {
        Kept { store: [1; 16], volume: [2; 16], writer: Writer::new(number).expect("a writer") }
    }

    fn is_proof(folder: &Path, number: u64) -> bool {
        let executor = Executor::new(Backend::Pool).expect("an executor");
        executor.block_on(AliveNote::proves_end_in(folder, &of(number)))
    }

    #[test]
    fn writer_is_dead_only_if_it_was_here_and_its_file_is_free() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        assert!(!is_proof(folder, 7), "it was never here");
        let alive = AliveNote::keep_in(folder, &of(7)).expect("kept");
        assert!(!is_proof(folder, 7), "it lives");
        assert!(AliveNote::keep_in(folder, &of(7)).is_err(), "no number is used twice");
        drop(alive);
        assert!(is_proof(folder, 7) && !is_proof(folder, 8));
        let closed = AliveNote::keep_in(folder, &of(8)).expect("kept");
        closed.remove();
        drop(closed);
        assert!(!is_proof(folder, 8), "the head says that it has ended");
    }

    /// The story: somebody looks between a writer's making of the file and its locking.
    #[test]
    fn file_that_says_nothing_or_is_of_another_kernel_proves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = of(7).path_in(folder.path());
        for said in ["", "00000000-0000-0000-0000-000000000000"] {
            std::fs::write(&path, said).expect("written");
            assert!(!is_proof(folder.path(), 7), "{said:?}");
        }
    }
}

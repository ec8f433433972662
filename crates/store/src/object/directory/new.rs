//! The file of an object that has no name yet.
//!
//! It is in a folder of its own, `.tmp`, which no object can be in, under a name that nobody ever
//! uses again: what a process that was stopped for hours links is its own file or none. Those that
//! killed processes left are removed after a while.

use super::root::{FOLDER_FLAGS, Root};
use mica_block::Result;
use mica_rt::Parts;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    AtFlags, Dir, FallocateFlags, FileType, Mode, OFlags, Stat, fallocate, fdatasync, fstat,
    linkat, mkdirat, openat, statat, syncfs, unlinkat,
};
use rustix::io::Errno;
use std::ffi::CString;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The folder of new files.
pub(super) const FOLDER: &str = ".tmp";
/// Seconds after which a new file is taken for one that a killed process left. A put that loses its
/// file to this fails.
const ABANDONED_SECONDS: i64 = 3600;

/// Bytes that are written at once. The system makes pages of the cache as long as a write, if it
/// can; for those of a MiB and more it takes memory that nobody used for long, and to fill that
/// costs several times as much, above all in a machine whose host had got it back.
const STEP_BYTES: usize = 256 << 10;
/// How long the device is left to others after each: about as long as it takes for one.
const STEP_PAUSE: Duration = Duration::from_micros(250);
/// Bytes from which on space is allocated in advance, and the device is left to others now and
/// then.
const ALLOCATED_MIN: usize = 1 << 20;

/// A file in [`FOLDER`], which is removed when this is dropped, unless it has a second name.
pub(super) struct NewFile {
    folder: OwnedFd,
    name: String,
    file: File,
    is_kept: bool,
}

/// What an object has.
#[derive(Clone, Copy)]
pub(super) enum Content<'a> {
    Whole(&'a [u8]),
    Parts(&'a Parts),
}

impl Content<'_> {
    fn len(self) -> usize {
        match self {
            Self::Whole(bytes) => bytes.len(),
            Self::Parts(parts) => parts.len(),
        }
    }

    /// Writes its bytes `range` into `file`, where they belong.
    fn write(self, file: &File, range: Range<usize>) -> io::Result<()> {
        let at = range.start as u64;
        match self {
            Self::Whole(bytes) => file.write_all_at(&bytes[range], at),
            Self::Parts(parts) => parts.write(file, range, at),
        }
    }
}

impl NewFile {
    /// Creates an empty one.
    pub(super) fn create(root: &Root) -> Result<Self> {
        let failed = |error: Errno| root.failed("creating a file in", FOLDER, error.into());
        let folder = open_folder(root).map_err(failed)?;
        let name = random_name();
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = openat(&folder, &name, flags, mode).map_err(failed)?.into();
        let new = Self { folder, name, file, is_kept: false };
        new.tidy(root);
        Ok(new)
    }

    /// Writes `content`, and makes it durable.
    pub(super) fn fill(&mut self, content: Content<'_>) -> io::Result<()> {
        let len = content.len();
        if len >= ALLOCATED_MIN {
            self.allocate(len)?;
        }
        for start in (0..len).step_by(STEP_BYTES) {
            let step = start..len.min(start + STEP_BYTES);
            content.write(&self.file, step.clone())?;
            if len >= ALLOCATED_MIN {
                self.give_to_device(start as u64, step.len() as u64);
            }
        }
        Ok(fdatasync(&self.file)?)
    }

    /// Has the device begin with what was just written, and leaves it alone for a moment: a sync of
    /// a write log waits for one step then, and not for all of an object.
    fn give_to_device(&self, at: u64, len: u64) {
        mica_rt::begin_writeback(&self.file, at, len);
        #[expect(
            clippy::disallowed_methods,
            reason = "a thread for what blocks: none is simulated"
        )]
        std::thread::sleep(STEP_PAUSE);
    }

    /// Gives it all its space at once: a sixth less work for ext4 than to reserve each block as it
    /// is written, and to find places for them in the end.
    fn allocate(&self, len: usize) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), 0, len as u64) {
            // It has to do without.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives it the name `name` in `folder`, in addition to its own, which it keeps from then on
    /// until [`Self::remove`].
    pub(super) fn link(&mut self, folder: &OwnedFd, name: &str) -> rustix::io::Result<()> {
        let linked = linkat(&self.folder, &self.name, folder, name, AtFlags::empty());
        // Over a network the answer may have been lost, and the repetition have found our own.
        let is_linked = linked.is_ok() || fstat(&self.file).is_ok_and(|stat| stat.st_nlink > 1);
        self.is_kept = is_linked;
        if is_linked { Ok(()) } else { linked }
    }

    /// Removes its own name.
    pub(super) fn remove(mut self) {
        self.is_kept = false;
    }

    /// Removes what killed processes left, now and then.
    fn tidy(&self, root: &Root) {
        let Ok(now) = fstat(&self.file).map(|stat| stat.st_mtime) else { return };
        let last = root.tidied.load(Ordering::Relaxed);
        let is_due = now.saturating_sub(last) > ABANDONED_SECONDS;
        let exchanged = || {
            let (done, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            root.tidied.compare_exchange(last, now, done, failed)
        };
        if is_due && exchanged().is_ok() {
            let removed = self.remove_abandoned(now);
            if removed > 0 {
                let path = root.path_of(FOLDER);
                tracing::info!(
                    "{removed} unfinished objects of killed processes removed from {}",
                    path.display()
                );
            }
        }
    }

    /// Removes files that nobody can still be writing; returns how many. What cannot be read or
    /// removed stays.
    fn remove_abandoned(&self, now: i64) -> usize {
        let Ok(entries) = Dir::read_from(&self.folder) else { return 0 };
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_owned()));
        let abandoned: Vec<(CString, bool)> = names
            .filter(|name| is_random_name(name.to_bytes()))
            .filter_map(|name| {
                let stat = statat(&self.folder, &name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
                let is_abandoned = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                    && now.saturating_sub(stat.st_mtime) > ABANDONED_SECONDS;
                is_abandoned.then_some((name, stat.st_nlink > 1))
            })
            .collect();
        // Where an object is whose folder was not synced is not known (I2 of `directory.rs`).
        let has_objects = abandoned.iter().any(|(_, is_object)| *is_object);
        let are_durable = !has_objects || syncfs(&self.folder).is_ok();
        let removable = abandoned.iter().filter(|(_, is_object)| are_durable || !is_object);
        removable.filter(|(name, _)| unlinkat(&self.folder, name, AtFlags::empty()).is_ok()).count()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_kept {
            // If that fails, it is removed later.
            let _ = unlinkat(&self.folder, &self.name, AtFlags::empty());
        }
    }
}

/// The folder of new files, which is made if it is not there.
pub(super) fn open_folder(root: &Root) -> rustix::io::Result<OwnedFd> {
    let open = || openat(root.file().as_fd(), FOLDER, FOLDER_FLAGS, Mode::empty());
    match open() {
        Err(Errno::NOENT) => match mkdirat(root.file().as_fd(), FOLDER, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => open(),
            Err(error) => Err(error),
        },
        opened => opened,
    }
}

/// Removes the name in [`FOLDER`] of an object, if `stat` says that it may have one: of a process
/// that was killed, or has not come to that. Its own name is durable, or gone. The caller has the
/// file open.
pub(super) fn remove_second_name(root: &Root, stat: &Stat) -> rustix::io::Result<()> {
    if stat.st_nlink < 2 {
        return Ok(());
    }
    let folder = match openat(root.file().as_fd(), FOLDER, FOLDER_FLAGS, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        opened => opened?,
    };
    for entry in Dir::read_from(&folder)? {
        let entry = entry?;
        if entry.ino() != stat.st_ino || !is_random_name(entry.file_name().to_bytes()) {
            continue;
        }
        return match unlinkat(&folder, entry.file_name(), AtFlags::empty()) {
            // Whoever put it may have come to that.
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        };
    }
    Ok(())
}

/// A name that no file has or had. The keys of the hashes are random numbers of the system.
fn random_name() -> String {
    let random = || RandomState::new().hash_one(std::process::id());
    format!("{:016x}{:016x}", random(), random())
}

/// Whether [`random_name`] makes such names.
fn is_random_name(name: &[u8]) -> bool {
    name.len() == 32 && name.iter().all(u8::is_ascii_hexdigit)
}

//! The lock of a volume that this machine has open: a file beneath the directory of its store.
//!
//! Who owns a volume is decided by its heads, never here. But a head cannot tell whether a writer
//! that did not close is dead; the system can, if it was on this machine: it gives up the locks of
//! a process that ends, however it ends.
//!
//! ```text
//! 1234                                  the process that has the lock, or had it
//! log /var/lib/mica/log                 what the last writer had, until the volume is closed
//! import                                it was making the volume of an image
//! host web1                             where the last writer was
//! machine 4cd0...
//! boot 53d1...
//! passed .web.4321.0                    the file of a lock that was passed by (I5)
//! ```
//!
//! Invariants
//! - I1 A lock is held from before the volume is opened for writing until after it is closed.
//!   Except by compaction, which gives way to whoever opens the volume.
//! - I2 Whoever has the lock has that of the file which has the name: one that was removed since it
//!   was opened counts for nothing. It is read and written through the descriptor that has it.
//! - I3 As long as a volume was not closed, its file names the log in which the last writer had
//!   what the store may lack, durably. Nobody goes on without that log unless somebody wants it by
//!   force.
//! - I4 A volume whose import did not end is not opened: it is part of an image.
//! - I5 By force, a lock that another process has is passed by: a new file, which is locked and
//!   says what the old one did, changes places with it. By I2 the other process has none then.
//!   Whose the volume is, the fence decides; if that fails, the file is moved back. At no time the
//!   name has no file, or one that nobody has locked.
//! - I6 The new file names the old one. Whoever takes the lock of a process that was killed before
//!   it fenced moves that back if somebody has it: that one's time is not over.
//! - I7 Files change places while one process holds the gate, and no other does: each looks at what
//!   has which name first, and removes nothing but its own file.

use super::machine::Machine;
use crate::temporary::{is_at, sleep as sleep_here};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::sleep;
use mica_volume::VolumeName;
use rustix::fs::{
    CWD, FlockOperation, Mode, OFlags, RenameFlags, flock, link, mkdirat, openat, rename,
    renameat_with, unlink,
};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The folder of locks in a store's directory: no object can be in it.
const FOLDER: &str = ".locks";
/// The lock of whoever collects the store, in that folder.
const COLLECTOR: &str = ".collector";
/// The lock of whoever compacts volumes that nobody has open, in that folder.
const COMPACTOR: &str = ".compactor";
/// The gate (I7), in that folder. It stays there.
const GATE: &str = ".gate";
/// How long somebody else may take to change places. It is a few calls, but some of them sync.
const GATE_TRIES: u32 = 500;
const GATE_PAUSE: Duration = Duration::from_millis(10);
/// Ends the name of the old file while it has no other, where files cannot change places at once.
const OLD: &str = ".old";
/// How long the system may take to give up the locks of a process that was killed.
const RELEASE_TRIES: u32 = 50;
const RELEASE_PAUSE: Duration = Duration::from_millis(20);
/// Bytes of the file, at most.
const NOTE_BYTES_MAX: usize = 8192;
/// What the values in the file follow.
const LOG: &[u8] = b"log ";
const IMPORT: &[u8] = b"import";
const HOST: &[u8] = b"host ";
const MACHINE: &[u8] = b"machine ";
const BOOT: &[u8] = b"boot ";
const PASSED: &[u8] = b"passed ";
/// Files of one process that are aside, at most.
const ASIDE_MAX: u32 = 64;

/// A lock that is held.
#[derive(Debug)]
pub(super) struct VolumeLock {
    file: File,
    path: PathBuf,
    /// What the file said of the last writer.
    found: Writer,
    /// The file of a lock that was passed by (I5).
    passed_by: Option<PathBuf>,
}

/// The right to collect a store in a directory, among processes that see each other's locks.
pub(super) struct CollectorLock(#[expect(dead_code, reason = "it is held")] File);

impl CollectorLock {
    /// Takes it, unless another process has it.
    pub(super) fn try_take(directory: &Path) -> Option<Self> {
        // No volume has a name that begins with a dot.
        let file = open(directory, &directory.join(FOLDER).join(COLLECTOR)).ok()?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
        Some(Self(file))
    }
}

/// The right to compact volumes of a store in a directory, as [`CollectorLock`]. Who has it holds
/// no lock of a volume that it compacts (I1): this one shows that it lives.
pub(super) struct CompactorLock(#[expect(dead_code, reason = "it is held")] File);

impl CompactorLock {
    /// Takes it, unless another process has it that lives.
    ///
    /// # Errors
    /// Any error of the system.
    pub(super) async fn take(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join(FOLDER).join(COMPACTOR);
        let failed =
            |error: Errno| Error::from_io(format!("locking {}", path.display()), error.into());
        let file = open(directory, &path).map_err(failed)?;
        for _ in 0..RELEASE_TRIES {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Self(file))),
                Err(Errno::WOULDBLOCK) => sleep(RELEASE_PAUSE).await,
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(None)
    }

    /// Whether a process has it. Whoever wants it in this moment tries again.
    pub(super) fn is_held(directory: &Path) -> bool {
        File::open(directory.join(FOLDER).join(COMPACTOR)).is_ok_and(|file| {
            flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
        })
    }
}

/// What a file says of the last writer.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Writer {
    /// Its log, until the volume is closed (I3).
    pub(super) log: Option<PathBuf>,
    /// Whether it was making the volume of an image, and has not ended that (I4).
    pub(super) is_import: bool,
    /// Where it was; older versions did not say.
    machine: Option<Machine>,
}

impl Writer {
    /// Whether it was on this machine, if it is the one whose head names `host`.
    pub(super) fn was_here_as(&self, host: &str) -> bool {
        let here = Machine::here();
        match &self.machine {
            Some(machine) => machine.host == host && here.proves_end_on(machine),
            None => here.host == host,
        }
    }
}

impl VolumeLock {
    /// Takes the lock of `name` in the store at `directory`.
    ///
    /// # Errors
    /// `Denied` if another process has it; any error of the system.
    pub(super) async fn take(directory: &Path, name: &VolumeName) -> Result<Self> {
        Self::try_take(directory, name).await?.map_err(|holder| {
            let (name, holder) = (name.as_str(), holder_text(holder));
            let what = format!("volume {name} is open: {holder} has it; end that first");
            Error::new(ErrorKind::Denied, what)
        })
    }

    /// As [`Self::take`], by force: if another process has it, that one has it no more (I5).
    ///
    /// # Errors
    /// Any error of the system.
    pub(super) async fn take_by_force(directory: &Path, name: &VolumeName) -> Result<Self> {
        let holder = match Self::try_take(directory, name).await? {
            Ok(lock) => return Ok(lock),
            Err(holder) => holder,
        };
        let (path, volume) = (path_of(directory, name), name.as_str());
        let failed = |error: io::Error| {
            Error::from_io(format!("bypassing the lock {}", path.display()), error)
        };
        let lock = Self::pass_by(&path, volume, File::sync_all).map_err(failed)?;
        let Some(lock) = lock else {
            let what = format!("volume {volume} was just taken by another process");
            return Err(Error::new(ErrorKind::Denied, what));
        };
        let holder = holder_text(holder);
        tracing::warn!(volume, "{holder} has it open: taking it over by force");
        Ok(lock)
    }

    /// A lock in the place of the one at `path`, which another process has; none if another process
    /// was faster. The folder of locks is made durable by `sync`.
    fn pass_by(
        path: &Path,
        volume: &str,
        sync: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<Option<Self>> {
        // Before the files change places, so that little can fail once they have.
        let folder = File::open(path.parent().expect("the folder of locks"))?;
        let old = File::open(path)?;
        let _gate = Gate::take(path)?;
        if !is_at(path, &old) {
            return Ok(None);
        }
        let (file, aside) = new_aside(path, volume)?;
        let found = Note::read(&old).writer;
        let lock = Self { file, path: path.to_owned(), found, passed_by: Some(aside.clone()) };
        let swapped = flock(&lock.file, FlockOperation::NonBlockingLockExclusive)
            .map_err(io::Error::from)
            .and_then(|()| lock.write(&lock.found))
            .and_then(|()| lock.file.sync_data())
            .and_then(|()| swap(&aside, path))
            .and_then(|()| sync(&folder));
        if let Err(error) = swapped {
            // The first failure is the one to report.
            lock.undo(&old, &aside);
            return Err(error);
        }
        if !is_at(&aside, &old) {
            // An older version does not know the gate.
            swap(&aside, path)?;
            lock.remove_own(&aside);
            return Ok(None);
        }
        Ok(Some(lock))
    }

    /// After a failure: `old`, which another process has locked, has its name again, and nothing is
    /// left `aside`. If that cannot be done the files stay, and who is next moves it back (I6).
    fn undo(&self, old: &File, aside: &Path) {
        if !is_at(&self.path, old)
            && let Some(place) = places_of(aside).into_iter().find(|place| is_at(place, old))
            && let Err(error) = rename(&place, &self.path)
        {
            tracing::warn!(%error, "cannot move {} back", place.display());
            return;
        }
        self.remove_own(aside);
    }

    /// Removes what is at `aside`, if it is the file of this lock.
    fn remove_own(&self, aside: &Path) {
        if is_at(aside, &self.file) {
            let _ = unlink(aside);
        }
    }

    /// The process whose lock was passed by, if there is one, has it again: the volume was not
    /// taken from it.
    pub(super) fn give_back(&mut self) {
        let Some(aside) = self.passed_by.take() else { return };
        let moved = Gate::take(&self.path).and_then(|_gate| match self.place() {
            Some(place) => Ok(rename(&aside, &place)?),
            // Who passed this one by has the volume.
            None => Ok(unlink(&aside)?),
        });
        if let Err(error) = moved {
            tracing::warn!(%error, "cannot move {} back", aside.display());
        }
    }

    /// Where the file of this lock is: at its path, or aside if this one was passed by, too.
    fn place(&self) -> Option<PathBuf> {
        let mut place = self.path.clone();
        for _ in 0..ASIDE_MAX {
            if is_at(&place, &self.file) {
                return Some(place);
            }
            let passed = Note::read(&File::open(&place).ok()?).passed?;
            place = aside_of(&self.path, &passed)?;
        }
        None
    }

    /// The process whose lock was passed by, if there is one, writes the volume no more.
    pub(super) fn keep(&mut self) {
        if let Some(aside) = self.passed_by.take() {
            // If it cannot be removed, it is a small file too many.
            let _ = unlink(&aside);
        }
    }

    /// The lock, or the process that has it, as far as its file says.
    async fn try_take(
        directory: &Path,
        name: &VolumeName,
    ) -> Result<std::result::Result<Self, Option<u32>>> {
        let path = path_of(directory, name);
        let failed = |error: Errno| {
            Error::from_io(format!("locking the volume: {}", path.display()), error.into())
        };
        let mut holder = None;
        for _ in 0..RELEASE_TRIES {
            let file = open(directory, &path).map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_at(&path, &file) => {
                    let Note { writer: found, passed, .. } = Note::read(&file);
                    if moved_back(&file, &path, passed.as_deref()).map_err(failed)? {
                        continue;
                    }
                    let lock = Self { file, path, found, passed_by: None };
                    lock.restore();
                    return Ok(Ok(lock));
                }
                // Removed meanwhile.
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    holder = Note::read(&file).process;
                    sleep(RELEASE_PAUSE).await;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(Err(holder))
    }

    /// What the file of a lock says that is not taken: it may be another's, which is said, too.
    pub(super) fn look(directory: &Path, name: &VolumeName) -> (Writer, bool) {
        let Ok(file) = File::open(path_of(directory, name)) else {
            return (Writer::default(), false);
        };
        // Whoever wants it in this moment tries again.
        let tried = flock(&file, FlockOperation::NonBlockingLockShared);
        let is_held = tried == Err(Errno::WOULDBLOCK);
        (Note::read(&file).writer, is_held)
    }

    /// Removes the lock of a volume that is no more.
    pub(super) fn remove(self) {
        // If it cannot be removed, it is a small file too many.
        if is_at(&self.path, &self.file) {
            let _ = unlink(&self.path);
        }
        if let Some(aside) = &self.passed_by {
            let _ = unlink(aside);
        }
    }

    /// What the file said of the last writer.
    pub(super) fn found(&self) -> &Writer {
        &self.found
    }

    /// Whether this lock proves that the last writer, which was on `host`, is dead. It does not if
    /// another process had it and was passed by: that one may live. Nor if this one was (I2): the
    /// last writer may be whoever did it.
    pub(super) fn proves_end_on(&self, host: &str) -> bool {
        let is_sole = self.passed_by.is_none() && is_at(&self.path, &self.file);
        is_sole && self.found.was_here_as(host)
    }

    /// Says in the file that this process is the last writer, with `log`; durably if there is one,
    /// or an import is under way.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn sign(&self, log: Option<&Path>, is_import: bool) -> Result<()> {
        let log = log.map(Path::to_path_buf);
        let writer = Writer { log, is_import, machine: Some(Machine::here()) };
        let written = self.write(&writer).and_then(|()| match writer {
            Writer { log: None, is_import: false, .. } => Ok(()),
            _ => self.sync(),
        });
        written.map_err(|error| Error::from_io(format!("writing {}", self.path.display()), error))
    }

    /// The last writer is the one that there was. For messages, who has the lock is said, too.
    pub(super) fn restore(&self) {
        self.write_or_warn(&self.found);
    }

    /// The volume was closed: nobody needs a log of it.
    pub(super) fn clear(&self) {
        self.write_or_warn(&Writer { machine: Some(Machine::here()), ..Writer::default() });
    }

    fn write_or_warn(&self, writer: &Writer) {
        if let Err(error) = self.write(writer) {
            tracing::warn!(%error, "cannot write {}", self.path.display());
        }
    }

    fn write(&self, writer: &Writer) -> io::Result<()> {
        let passed = self.passed_by.as_deref().and_then(Path::file_name).map(OsStr::to_owned);
        let new = Note { process: Some(std::process::id()), writer: writer.clone(), passed };
        let note = new.encode();
        // Paths may have any bytes.
        if note.len() > NOTE_BYTES_MAX || Note::decode(&note) != new {
            let what = "the path of the log is too long, or has a line break";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        // At no time the file has less than it had.
        self.file.write_all_at(&note, 0)?;
        self.file.set_len(note.len() as u64)
    }

    /// The file, and its name.
    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()?;
        let folder = self.path.parent().expect("the folder of locks");
        File::open(folder)?.sync_all()?;
        File::open(folder.parent().expect("the directory of the store"))?.sync_all()
    }
}

/// What the file says.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
struct Note {
    process: Option<u32>,
    writer: Writer,
    /// The name of the file of a lock that was passed by (I6).
    passed: Option<OsString>,
}

impl Note {
    fn read(file: &File) -> Self {
        let mut bytes = vec![0; NOTE_BYTES_MAX];
        let mut len = 0;
        while let Some(rest) = bytes.get_mut(len..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, len as u64) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Self::default(),
            }
        }
        bytes.truncate(len);
        Self::decode(&bytes)
    }

    fn encode(&self) -> Vec<u8> {
        let Self { process, writer: Writer { log, is_import, machine }, passed } = self;
        let mut lines = vec![process.unwrap_or_default().to_string().into_bytes()];
        let mut add = |key: &[u8], value: &[u8]| lines.push([key, value].concat());
        if let Some(log) = log {
            add(LOG, log.as_os_str().as_bytes());
        }
        if *is_import {
            add(IMPORT, b"");
        }
        if let Some(Machine { host, id, boot }) = machine {
            add(HOST, host.as_bytes());
            id.iter().for_each(|id| add(MACHINE, id.as_bytes()));
            boot.iter().for_each(|boot| add(BOOT, boot.as_bytes()));
        }
        if let Some(passed) = passed {
            add(PASSED, passed.as_bytes());
        }
        lines.push(Vec::new());
        lines.join(&b'\n')
    }

    fn decode(bytes: &[u8]) -> Self {
        let mut lines = bytes.split(|byte| *byte == b'\n');
        let number = lines.next().and_then(|line| std::str::from_utf8(line).ok());
        let process = number.and_then(|text| text.parse().ok());
        let lines: Vec<_> = lines.collect();
        let value = |key: &[u8]| lines.iter().find_map(|line| line.strip_prefix(key));
        let text = |key: &[u8]| value(key).map(|text| String::from_utf8_lossy(text).into_owned());
        let machine = text(HOST).map(|host| Machine { host, id: text(MACHINE), boot: text(BOOT) });
        let log = value(LOG).map(|log| PathBuf::from(OsStr::from_bytes(log)));
        let is_import = lines.contains(&IMPORT);
        let passed = value(PASSED).map(|name| OsStr::from_bytes(name).to_owned());
        Self { process, writer: Writer { log, is_import, machine }, passed }
    }
}

fn holder_text(holder: Option<u32>) -> String {
    match holder {
        Some(number) => format!("process {number} of this machine"),
        None => "another process".to_owned(),
    }
}

fn path_of(directory: &Path, name: &VolumeName) -> PathBuf {
    directory.join(FOLDER).join(name.as_str())
}

/// Opens the file of a lock, which is made if it is not there.
fn open(directory: &Path, path: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || openat(CWD, path, flags, Mode::RUSR | Mode::WUSR).map(File::from);
    match open() {
        Err(Errno::NOENT) => match mkdirat(CWD, directory.join(FOLDER), Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => open(),
            Err(error) => Err(error),
        },
        opened => opened,
    }
}

/// A new file beside that of the lock of `volume`. No volume has a name that begins with a dot.
fn new_aside(path: &Path, volume: &str) -> io::Result<(File, PathBuf)> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for number in 0..ASIDE_MAX {
        let aside = path.with_file_name(format!(".{volume}.{}.{number}", std::process::id()));
        match openat(CWD, &aside, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => return Ok((File::from(file), aside)),
            // It may be that of a process which was killed.
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(Errno::EXIST.into())
}

/// What is at `aside` gets the name `path`, and what was there is at `aside` then. After an error
/// it may be at the other one of [`places_of`].
fn swap(aside: &Path, path: &Path) -> io::Result<()> {
    match renameat_with(CWD, aside, CWD, path, RenameFlags::EXCHANGE) {
        // Not every file system can do that, such as those of other hosts.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            let [_, third] = places_of(aside);
            link(path, &third)?;
            if let Err(error) = rename(aside, path) {
                let _ = unlink(&third);
                return Err(error.into());
            }
            Ok(rename(&third, aside)?)
        }
        done => Ok(done?),
    }
}

/// Where the file is that [`swap`] moved `aside`: there, or on the way.
fn places_of(aside: &Path) -> [PathBuf; 2] {
    let mut third = aside.as_os_str().to_owned();
    third.push(OLD);
    [aside.to_owned(), third.into()]
}

/// The file beside that at `path` that a note calls `passed`.
fn aside_of(path: &Path, passed: &OsStr) -> Option<PathBuf> {
    let name = passed.as_bytes();
    // It is a name, and not a path to somewhere else.
    let is_name = name.first() == Some(&b'.') && !name.contains(&b'/');
    is_name.then(|| path.with_file_name(passed))
}

/// Gives the lock at `path`, which `own` is, back to whom it was taken from, if somebody has that
/// file (I6). Returns whether another file has the name now.
fn moved_back(own: &File, path: &Path, passed: Option<&OsStr>) -> rustix::io::Result<bool> {
    let Some(aside) = passed.and_then(|name| aside_of(path, name)) else {
        return Ok(false);
    };
    for aside in places_of(&aside) {
        let Ok(file) = File::open(&aside) else { continue };
        let _gate = Gate::take(path)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
        if !is_at(path, own) {
            return Ok(true);
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return rename(&aside, path).map(|()| true),
            // Its process has ended.
            Ok(()) if is_at(&aside, &file) => {
                let _ = unlink(&aside);
            }
            Ok(()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// The right to let files of locks change places (I7).
struct Gate(#[expect(dead_code, reason = "it is held")] File);

impl Gate {
    /// Takes it, in the folder of the lock at `path`.
    ///
    /// # Errors
    /// `WouldBlock` if somebody has it for long; any error of the system.
    fn take(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // It is never removed. No volume has a name that begins with a dot.
        let mode = Mode::RUSR | Mode::WUSR;
        let file = File::from(openat(CWD, path.with_file_name(GATE), flags, mode)?);
        for _ in 0..GATE_TRIES {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(file)),
                Err(Errno::WOULDBLOCK) => sleep_here(GATE_PAUSE),
                Err(error) => return Err(error.into()),
            }
        }
        let what = "another process has been taking a lock of the store by force for too long";
        Err(io::Error::new(io::ErrorKind::WouldBlock, what))
    }
}

#[cfg(test)]
mod tests;

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
//! - I5 By force, a lock that another process has is passed by: the file is moved aside, and a new
//!   one is made in its place, which says what the old one did. By I2 the other process has none
//!   then. Whose the volume is, the fence decides; if that fails, the file is moved back.

use super::machine::Machine;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::sleep;
use mica_volume::VolumeName;
use rustix::fs::{
    CWD, FlockOperation, Mode, OFlags, flock, fstat, mkdirat, openat, rename, stat, unlink,
};
use rustix::io::Errno;
use std::ffi::OsStr;
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
        // No volume has a name that begins with a dot.
        let aside = path.with_file_name(format!(".{volume}.{}", std::process::id()));
        rename(&path, &aside).map_err(|error| {
            Error::from_io(format!("passing by the lock {}", path.display()), error.into())
        })?;
        let holder = holder_text(holder);
        tracing::warn!(volume, "{holder} has it open: by force, it is taken from there");
        match Self::try_take(directory, name).await? {
            Ok(mut lock) => {
                if let Ok(file) = File::open(&aside) {
                    lock.found = Note::read(&file).writer;
                }
                lock.restore();
                lock.passed_by = Some(aside);
                Ok(lock)
            }
            // Another process was faster.
            Err(_) => {
                let what = format!("volume {volume} was just taken by another process");
                Err(Error::new(ErrorKind::Denied, what))
            }
        }
    }

    /// The process whose lock was passed by, if there is one, has it again: the volume was not
    /// taken from it.
    pub(super) fn give_back(&mut self) {
        if let Some(aside) = self.passed_by.take()
            && let Err(error) = rename(&aside, &self.path)
        {
            tracing::warn!(%error, "cannot move {} back", aside.display());
        }
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
                Ok(()) if has_name(&file, &path) => {
                    let Note { writer: found, .. } = Note::read(&file);
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
        if has_name(&self.file, &self.path) {
            let _ = unlink(&self.path);
        }
        if let Some(aside) = &self.passed_by {
            let _ = unlink(aside);
        }
    }

    /// Whether another process had it, and was passed by.
    pub(super) fn was_held(&self) -> bool {
        self.passed_by.is_some()
    }

    /// What the file said of the last writer.
    pub(super) fn found(&self) -> &Writer {
        &self.found
    }

    /// Whether this lock proves that the last writer, which was on `host`, is dead.
    pub(super) fn proves_end_on(&self, host: &str) -> bool {
        self.found.was_here_as(host)
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
        let new = Note { process: Some(std::process::id()), writer: writer.clone() };
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
        let Self { process, writer: Writer { log, is_import, machine } } = self;
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
        Self { process, writer: Writer { log, is_import, machine } }
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

/// Whether this file is the one that has the name (I2).
fn has_name(file: &File, path: &Path) -> bool {
    match (fstat(file), stat(path)) {
        (Ok(own), Ok(named)) => (own.st_dev, own.st_ino) == (named.st_dev, named.st_ino),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_is_read_as_it_was_written() {
        let machine = Machine { host: "web 1".to_owned(), id: Some("4cd0".to_owned()), boot: None };
        for writer in [
            Writer::default(),
            Writer { log: Some("/a b/log".into()), ..Writer::default() },
            Writer { log: None, is_import: true, machine: Some(machine.clone()) },
            Writer { log: Some("/log".into()), is_import: true, machine: Some(machine) },
        ] {
            let note = Note { process: Some(17), writer };
            assert_eq!(Note::decode(&note.encode()), note);
        }
    }

    #[test]
    fn note_of_an_older_version_and_no_note_are_understood() {
        let note = Note::decode(b"17\nlog /a/log\n");
        assert_eq!((note.process, note.writer.log), (Some(17), Some("/a/log".into())));
        assert_eq!(note.writer.machine, None);
        assert_eq!(Note::decode(b""), Note::default());
    }
}

//! A folder with states of one disk.
//!
//! ```text
//! .lock                 held while a state is written
//! STATE.KEY.data        the step of the state: what is whole of it stays after a kill
//! STATE.manifest        what the state is, and where its extents are: it is there from now on
//! STATE.manifest.gone   what the state was: it is not there any more
//! ```
//!
//! Invariants
//! - I1 A state is in the folder if and only if its manifest is. That gets its name when the data
//!   and it itself are durable, in one step.
//! - I2 No byte of a state that is there is changed; its step may be replaced by another that makes
//!   the same state ([`prune`]). One process at a time writes here.
//! - I3 A step that was cut off is gone on with only if it is of the same content: its name says of
//!   which. What of it does not match its sums is written again.

mod prune;

pub use prune::Pruned;

use crate::content::Content;
use crate::format::{
    BEGIN_BYTES, Begin, ENTRIES_MAX, ENTRY_BYTES, HEAD_BYTES, Malformed, Manifest, SUM_BYTES, Total,
};
use crate::names::check_state;
use crate::reader::StepReader;
use crate::writer::{StepWriter, Written};
use mica_block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const LOCK: &str = ".lock";
const MANIFEST: &str = ".manifest";
/// The ending of a manifest that is written.
const NEW: &str = ".manifest.new";
/// The ending of what was the manifest of a state that is removed.
const GONE: &str = ".manifest.gone";
const DATA: &str = ".data";
/// Bytes that are written at once.
const BUFFER_BYTES: usize = 1 << 20;
/// How many states an error names.
const NAMED_MAX: usize = 16;

/// A folder with states.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

/// A state that is in a folder.
#[derive(Clone, Debug)]
pub struct Stored {
    folder: PathBuf,
    /// Without its entries.
    head: Manifest,
}

/// The states of a folder.
#[derive(Clone, Default, Debug)]
pub struct States {
    /// From the oldest.
    pub whole: Vec<Stored>,
    /// What is wrong with the manifests of the others.
    pub damaged: Vec<Error>,
}

/// A state that is written into a folder.
pub struct Pending {
    folder: Folder,
    key: u64,
    content: u32,
    number: u64,
    /// Writes its step.
    pub writer: StepWriter<BufWriter<File>>,
    resumed_bytes: u64,
    _lock: File,
}

/// What there is of a state that is to be written.
pub enum Begun {
    /// All of it, from an earlier try.
    Whole(Stored),
    /// Nothing, or a part.
    Pending(Box<Pending>),
}

impl Folder {
    /// The folder at `path`, which is there.
    ///
    /// # Errors
    /// `NotFound` if it is not; `Invalid` if it is no folder.
    pub fn open(path: &Path) -> Result<Self> {
        let found = fs::metadata(path)
            .map_err(|error| Error::from_io(format!("the folder {}", path.display()), error))?;
        if !found.is_dir() {
            let what = format!("{} is not a folder with backups", path.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(Self { path: path.to_owned() })
    }

    /// The folder at `path`, which is made if it is not there.
    ///
    /// # Errors
    /// As [`Self::open`]; why it cannot be made.
    pub fn make(path: &Path) -> Result<Self> {
        match fs::create_dir(path) {
            Ok(()) => sync_folder(path.parent().unwrap_or(Path::new("/")))?,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("making the folder", path, error)),
        }
        Self::open(path)
    }

    /// The states that are there.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn states(&self) -> Result<States> {
        let mut states = States::default();
        for name in self.names()? {
            let Some(state) = name.strip_suffix(MANIFEST) else { continue };
            match self.stored(state) {
                Ok(stored) => states.whole.push(stored),
                Err(error) => states.damaged.push(error),
            }
        }
        states.whole.sort_by_key(|stored| stored.head.number);
        Ok(states)
    }

    /// The state of this name.
    ///
    /// # Errors
    /// `NotFound` naming those that are there; `Corrupt` if its manifest is damaged.
    pub fn find(&self, state: &str) -> Result<Stored> {
        check_state(state)?;
        if self.has_manifest(state)? {
            return self.stored(state);
        }
        let what = format!("there is no state {state:?} in {}", self.path.display());
        Err(Error::new(ErrorKind::NotFound, what + &self.there_is()?))
    }

    /// The state, and those that it goes on from: from the whole one.
    ///
    /// # Errors
    /// As [`Self::find`], of each of them; `Corrupt` if they go on from each other.
    pub fn line(&self, state: &str) -> Result<Vec<Stored>> {
        let mut line = vec![self.find(state)?];
        while let Some(base) = line.last().and_then(|stored| stored.head.begin.base.clone()) {
            let found = self.find(&base).map_err(|error| {
                let needed_by = &line.last().expect("not empty").head.begin.state;
                error.wrap(format!("the state {needed_by:?} is based on {base:?}"))
            })?;
            let above = line.last().expect("not empty");
            // Numbers fall, so that this ends.
            if found.head.number >= above.head.number || found.head.begin.len > above.len() {
                return Err(Malformed::Content.of(above.manifest_path().display()));
            }
            line.push(found);
        }
        line.reverse();
        Ok(line)
    }

    /// Begins to write a state, or goes on with what an earlier try left, if that is of the same
    /// `content`; `None` if that may be another the next time.
    ///
    /// # Errors
    /// `Denied` if another backup into the folder is under way, the state is there with other
    /// content, or the folder has states of another disk; `NotFound` if what the state goes on from
    /// is not there; `Invalid` if that is longer, or `begin` has a name or a length that nothing in
    /// a backup can have; what the system reports.
    pub fn begin(&self, begin: Begin, content: Option<&Content>) -> Result<Begun> {
        begin.check()?;
        let lock = self.lock()?;
        let states = self.states()?;
        if let Some(other) = states.whole.iter().find(|other| other.begin().disk != begin.disk) {
            let what = format!(
                "{} has states of the disk {:?}: a folder is for one disk, and this is {:?}",
                self.path.display(),
                other.begin().disk,
                begin.disk
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        let key = content.map(|content| content.key(&begin));
        if self.has_manifest(&begin.state)? {
            let there = self.find(&begin.state)?;
            let is_it = match content {
                // What it stood on when it was written may have gone into it since.
                Some(content) if !content.beneath.is_empty() => {
                    let begun = Begin { time_ns: begin.time_ns, ..there.begin().clone() };
                    begun == begin
                        && there.is_of(content)
                        && !there.was_changed(content, begin.time_ns)
                }
                _ => Some(there.head.key) == key,
            };
            if is_it {
                return Ok(Begun::Whole(there));
            }
            let what = format!(
                "there is a state {:?} in {} already: choose another name",
                begin.state,
                self.path.display()
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        if let Some(base) = &begin.base {
            let base = self.find(base)?;
            if base.len() > begin.len {
                let what = format!(
                    "the disk is shorter than at {:?}: make a full backup",
                    base.begin().state
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        }
        let number = states.whole.iter().map(|stored| stored.head.number).max().unwrap_or(0) + 1;
        // Nobody knows the content: what is left is of no use.
        let is_known = key.is_some();
        let unknown = Content::default();
        let key = key.unwrap_or_else(|| unknown.key(&begin));
        let content = content.unwrap_or(&unknown).sum();
        self.remove_leftovers(&begin.state, key, is_known)?;
        let (writer, resumed_bytes) = self.open_step(begin, key)?;
        let folder = self.clone();
        let pending = Pending { folder, key, content, number, writer, resumed_bytes, _lock: lock };
        Ok(Begun::Pending(Box::new(pending)))
    }

    fn lock(&self) -> Result<File> {
        let path = self.path.join(LOCK);
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(|error| failed("opening", &path, error))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(Errno::WOULDBLOCK) => {
                let path = self.path.display();
                let what = format!("another backup into {path} is under way: wait until it ends");
                Err(Error::new(ErrorKind::Denied, what))
            }
            Err(error) => Err(failed("locking", &path, error.into())),
        }
    }

    /// Removes data files of the state that are of something else, or are of no use.
    fn remove_leftovers(&self, state: &str, key: u64, is_known: bool) -> Result<()> {
        for name in self.names()? {
            let of_state = name.strip_prefix(state).and_then(|name| name.strip_prefix('.'));
            let found = of_state.and_then(|name| name.strip_suffix(DATA)).and_then(parse_key);
            if found.is_some_and(|found| found != key || !is_known) {
                let path = self.path.join(&name);
                fs::remove_file(&path).map_err(|error| failed("removing", &path, error))?;
            }
        }
        Ok(())
    }

    /// Opens the data file of a state behind what is whole of it. Returns how much that is, too.
    fn open_step(&self, begin: Begin, key: u64) -> Result<(StepWriter<BufWriter<File>>, u64)> {
        let path = data_path(&self.path, &begin.state, key);
        let failed = |error| failed("opening", &path, error);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = file.map_err(failed)?;
        let found = whole_of(&file, &begin);
        let (begin, written) = found.unwrap_or_else(|| (begin, Written::default()));
        let resumed_bytes = written.position - BEGIN_BYTES as u64;
        // A file that is new has nothing yet.
        let is_new = resumed_bytes == 0;
        let at = if is_new { 0 } else { written.position };
        file.set_len(at).and_then(|()| file.seek(SeekFrom::Start(at))).map_err(failed)?;
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, file);
        if is_new {
            out.write_all(&begin.encode()).map_err(failed)?;
        }
        Ok((StepWriter::resumed(out, begin, written), resumed_bytes))
    }

    fn stored(&self, state: &str) -> Result<Stored> {
        let path = self.manifest_path(state);
        let file = File::open(&path).map_err(|error| failed("opening", &path, error))?;
        let mut bytes = Vec::new();
        file.take((HEAD_BYTES + BEGIN_BYTES) as u64)
            .read_to_end(&mut bytes)
            .map_err(|error| failed("reading", &path, error))?;
        let head = Manifest::decode_head(&bytes).and_then(|(head, _)| {
            if head.begin.state == state { Ok(head) } else { Err(Malformed::Content) }
        });
        let head = head.map_err(|why| why.of(damaged_manifest(&path)))?;
        Ok(Stored { folder: self.path.clone(), head })
    }

    fn names(&self) -> Result<Vec<String>> {
        let failed = |error| failed("reading the folder", &self.path, error);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        names.sort();
        Ok(names)
    }

    /// What is there, for an error that misses something.
    fn there_is(&self) -> Result<String> {
        let states = self.states()?.whole;
        let names = states.iter().rev().take(NAMED_MAX).map(|stored| &*stored.begin().state);
        let names = names.collect::<Vec<_>>().join(", ");
        Ok(match states.len() {
            0 => ", which has none".to_owned(),
            count @ ..=NAMED_MAX => format!(", which has {names} ({count})"),
            count => format!(", which has {names} and {} older ones", count - NAMED_MAX),
        })
    }

    fn manifest_path(&self, state: &str) -> PathBuf {
        self.path.join(format!("{state}{MANIFEST}"))
    }

    fn has_manifest(&self, state: &str) -> Result<bool> {
        let path = self.manifest_path(state);
        path.try_exists().map_err(|error| failed("looking for", &path, error))
    }
}

impl Pending {
    /// Bytes that an earlier try had written.
    pub fn resumed_bytes(&self) -> u64 {
        self.resumed_bytes
    }

    /// Up to where on the disk it was written by an earlier try.
    pub fn resumed_to(&self) -> u64 {
        self.writer.written.end
    }

    /// The step has all of the state: makes that durable, and the state be there.
    ///
    /// # Errors
    /// What the system reports: the state is not there then, and can be written on.
    pub fn complete(self) -> Result<Stored> {
        let Self { folder, key, content, number, writer, _lock, .. } = self;
        let begin = writer.begin().clone();
        let path = data_path(&folder.path, &begin.state, key);
        let (out, written) = writer.into_finished()?;
        let file =
            out.into_inner().map_err(|error| failed("writing", &path, error.into_error()))?;
        file.sync_all().map_err(|error| failed("syncing", &path, error))?;
        let Written { total, position: file_bytes, entries, .. } = written;
        let manifest = Manifest { begin, number, key, content, total, file_bytes, entries };
        let (state, named) = (&manifest.begin.state, folder.manifest_path(&manifest.begin.state));
        let new = folder.path.join(format!("{state}{NEW}"));
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(&manifest.encode())?;
            file.sync_all()
        });
        written.map_err(|error| failed("writing", &new, error))?;
        // The names of the data and of the manifest.
        sync_folder(&folder.path)?;
        fs::rename(&new, &named).map_err(|error| failed("renaming", &new, error))?;
        sync_folder(&folder.path)?;
        let head = Manifest { entries: Vec::new(), ..manifest };
        Ok(Stored { folder: folder.path, head })
    }
}

impl Stored {
    /// What it is.
    pub fn begin(&self) -> &Begin {
        &self.head.begin
    }

    /// Bytes of the disk.
    #[expect(clippy::len_without_is_empty, reason = "a length of a disk, which may be zero")]
    pub fn len(&self) -> u64 {
        self.head.begin.len
    }

    /// What its step had.
    pub fn total(&self) -> Total {
        self.head.total
    }

    /// Bytes that its data takes in the folder.
    pub fn file_bytes(&self) -> u64 {
        self.head.file_bytes
    }

    /// Whether it was written of this `content`, as [`Folder::begin`] takes it. If it was not, it
    /// may be the same all the same.
    pub fn is_of(&self, content: &Content) -> bool {
        let Manifest { begin, key, content: sum, .. } = &self.head;
        let lasting = Content::lasting(&*content.lasting);
        *sum == content.sum() || *key == lasting.key(begin)
    }

    /// Whether another program has changed the state since it was written here, by its present
    /// `content` and the time when its file was changed last: that is another time, and nothing
    /// that lay beneath the state was merged into it. False if nobody knows that, and of a step
    /// that [`Folder::prune`] made.
    pub fn was_changed(&self, content: &Content, time_ns: u64) -> bool {
        let Manifest { begin, key, .. } = &self.head;
        let stood_on_the_same = !content.beneath.is_empty() && *key == content.key(begin);
        begin.time_ns != time_ns && stood_on_the_same
    }

    /// Whether nothing proves of which content it is: an older mica wrote it, and knew.
    pub fn is_unproved(&self) -> bool {
        let Manifest { begin, key, content, .. } = &self.head;
        *content == 0 && *key != Content::default().key(begin)
    }

    pub(crate) fn data_path(&self) -> PathBuf {
        data_path(&self.folder, &self.head.begin.state, self.head.key)
    }

    fn manifest_path(&self) -> PathBuf {
        self.folder.join(format!("{}{MANIFEST}", self.head.begin.state))
    }

    /// All of its manifest.
    pub(crate) fn manifest(&self) -> Result<Manifest> {
        let path = self.manifest_path();
        let bytes = read_manifest(&path)?;
        Manifest::decode(&bytes).map_err(|why| why.of(damaged_manifest(&path)))
    }
}

/// The bytes of the manifest at `path`, as far as its head says that there are any: a folder may be
/// anybody's.
fn read_manifest(path: &Path) -> Result<Vec<u8>> {
    let failed = |error| failed("reading", path, error);
    let mut file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    (&mut file).take((HEAD_BYTES + BEGIN_BYTES) as u64).read_to_end(&mut bytes).map_err(failed)?;
    let head = Manifest::decode_head(&bytes).map_err(|why| why.of(damaged_manifest(path)));
    let (_, entries) = head?;
    // One more than there should be tells that it is longer.
    let rest = entries * ENTRY_BYTES as u64 + SUM_BYTES as u64 + 1;
    file.take(rest).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// What is whole of the step `begin` in `file`; `None` if nothing is.
fn whole_of(file: &File, begin: &Begin) -> Option<(Begin, Written)> {
    let mut stream = StepReader::new(BufReader::with_capacity(BUFFER_BYTES, file));
    let found = stream.begin().ok()??;
    // Only the time may be another: that of the first try counts.
    if (Begin { time_ns: begin.time_ns, ..found.clone() }) != *begin {
        return None;
    }
    stream.keep_entries();
    // What is not whole, and the end, are written again.
    while let Ok(Some(_)) = stream.next_piece() {
        // No manifest has so many: it cannot be completed, however it goes on.
        if stream.parts() > ENTRIES_MAX {
            return None;
        }
    }
    Some((found, stream.into_read()?))
}

fn parse_key(text: &str) -> Option<u64> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_key = text.len() == 16 && text.bytes().all(is_hex);
    is_key.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

fn data_path(folder: &Path, state: &str, key: u64) -> PathBuf {
    folder.join(format!("{state}.{key:016x}{DATA}"))
}

fn sync_folder(path: &Path) -> Result<()> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let synced = File::open(path).and_then(|folder| folder.sync_all());
    synced.map_err(|error| failed("syncing", path, error))
}

fn damaged_manifest(path: &Path) -> impl Display {
    format!("the manifest {} is damaged", path.display())
}

fn failed(doing: &str, path: &Path, error: std::io::Error) -> Error {
    Error::from_io(format!("{doing} {}", path.display()), error)
}

#[cfg(test)]
pub(crate) mod tests;

//! The marks of layers that a commit merges.
//!
//! A commit changes its base while the layers that go into it are still there, and from then on
//! these show something else if they are read by themselves. An image that is made to stand on one
//! of them meanwhile would be damaged; one that still stands there is why a later commit into the
//! same base has to be refused. So a small file beside each layer, `LAYER.mica-merged`, says what
//! becomes of it. docs/formats/merged.md has its bytes.
//!
//! | who | does, in this order |
//! |---|---|
//! | a commit | marks all its layers, durably; looks for images on them; changes the base |
//! | whoever makes an overlay | writes the name of what it stands on; looks for a mark there |
//!
//! Of two that do so at once at least one sees the other.
//!
//! The layer of a kept state that is dropped is marked as going into the one above it; its mark
//! also says that its file is to be removed after that (`dropped.rs`). The layer above has no mark:
//! it shows what it did at every instant, so that images may stand on it meanwhile.
//!
//! Until a commit changes something its marks say that it is planned, and it has them locked. One
//! that nobody has locked is of a process that died before it changed anything: it does not count,
//! and whoever meets it takes it back. With its first step a commit makes its marks count, the one
//! of the base first, durably.
//!
//! When the commit is done, the mark of the base goes, and the others stay: they tell the next
//! commit that nobody needs these images, whose headers still name the base. After one that did not
//! end, all stay until it is done: until then the base has only a part of what goes into it. That
//! of the base says by what one knows that it was done, for the next process to open the chain for
//! writing, if this one dies before it has taken the mark away ([`ended`]).
//!
//! Another merge of the chain may follow one that did not end. A commit that puts less into the
//! base than that was to, or what another base has only a part of, leaves the mark of its base,
//! which says what is missing ([`pending`]); and if a layer is about to leave by whose place one
//! knows that an earlier commit was done, the mark of that says something else before ([`named`]).
//!
//! Invariants
//! - I1 A mark counts only for the file that it was made for, and that of a layer that went into
//!   another only while that file is unchanged: an image that has its name now, or a copy, is
//!   another one.
//! - I2 A mark counts only if [`read_trusted`] trusts it: it may make a commit overlook an image.
//! - I3 An image that was merged does not keep its base from being changed, but images that stand
//!   on it do.
//! - I4 A mark is taken back only by who has it locked while it says that it is planned, and has
//!   its name. It is replaced only by who has it locked, and gets its name locked.
//! - I5 A mark that counted before a merge was planned stays as it is until that changes something,
//!   and then counts on: the base may have a part of what an earlier one put there.
//! - I6 The mark of a base goes only when every layer of which that has a part has gone into it
//!   whole: what it shows by itself is what a layer showed.

mod ended;
mod named;
mod pending;
mod planned;

pub(crate) use ended::{Unended, settle_bases};
pub(crate) use named::NamedMarks;

use crate::files::sync_folder_of;
use crate::mark::{open_trusted, place, read_trusted};
use crate::temporary::{Locked, NEW_MERGED};
use mica_block::{Error, ErrorKind, LocalFuture, MergeControl, MergeProgress, Merged, Result};
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::UNIX_EPOCH;

/// The ending of a mark's name.
const SUFFIX: &str = ".mica-merged";
/// What stands before the name of the base.
const INTO: &[u8] = b"into: ";
/// What stands before that of the layer above, for a state that is dropped: its file goes, too.
const DROPPED_INTO: &[u8] = b"dropped into: ";
/// The first line of the mark of a base; what stands there before the layer that stands on it when
/// the commit is done, or else before the one that is empty then.
const BASE: &[u8] = b"base";
const BENEATH: &[u8] = b"base until beneath: ";
const EMPTY: &[u8] = b"base until empty: ";
/// What stands before what is known of the file.
const FILE: &[u8] = b"file: ";
/// The last line of the mark of a merge that has changed nothing yet.
const PLANNED: &[u8] = b"planned\n";
/// Longest content, in bytes: a path, and what is around it.
const CONTENT_BYTES_MAX: u64 = 4096 + 128;

/// What a mark says.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Content {
    /// The layer goes, or went, into this one, as long as it is unchanged since `changed_ns`.
    Source { into: OsString, file: FileMark, changed_ns: i128, then: Then },
    /// Others go into the layer.
    Base { file: FileMark, until: Until },
}

/// Until when the base of a commit has only a part of what goes into it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Until {
    /// Nothing but the end of its mark shows.
    Unsaid,
    /// Until this layer stands on it, as those in between have left.
    Beneath(FileMark),
    /// Until this layer is right above it, and the active one, and has nothing of its own; or until
    /// it went into the base itself.
    Empty(FileMark),
}

/// What becomes of the file of a layer that went into another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Then {
    /// It is the user's.
    Stays,
    /// It is removed: it kept a state that was dropped.
    Goes,
}

/// Which file a mark is for: its inode, and when it was made, or 0 if the file system does not
/// know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileMark {
    inode: u64,
    made_ns: u128,
}

impl FileMark {
    fn of(found: &Metadata) -> Self {
        let made = found.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok());
        Self { inode: found.ino(), made_ns: made.map_or(0, |made| made.as_nanos()) }
    }

    /// That of the file at `path`.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn at(path: &Path) -> Result<Self> {
        let found = std::fs::metadata(path);
        found
            .map(|found| Self::of(&found))
            .map_err(|error| Error::from_io(path.display().to_string(), error))
    }

    fn encode(self) -> String {
        format!("{} {}", self.inode, self.made_ns)
    }

    /// The next two of `numbers`.
    fn decode<'a>(numbers: &mut impl Iterator<Item = &'a str>) -> Option<Self> {
        let (inode, made_ns) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
        Some(Self { inode, made_ns })
    }
}

fn changed_ns(found: &Metadata) -> i128 {
    i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec())
}

impl Content {
    fn encode(&self) -> Vec<u8> {
        let (first, file, changed) = match self {
            Self::Source { into, file, changed_ns, then } => {
                let before = if *then == Then::Goes { DROPPED_INTO } else { INTO };
                ([before, into.as_bytes()].concat(), file, format!(" {changed_ns}"))
            }
            Self::Base { file, until } => {
                let first = match until {
                    Until::Unsaid => BASE.to_vec(),
                    Until::Beneath(above) => [BENEATH, above.encode().as_bytes()].concat(),
                    Until::Empty(above) => [EMPTY, above.encode().as_bytes()].concat(),
                };
                (first, file, String::new())
            }
        };
        let last = format!("{}{changed}", file.encode());
        [&first, &b"\n"[..], FILE, last.as_bytes(), b"\n"].concat()
    }

    /// `None` if these `bytes` are no mark.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let lines = bytes.strip_suffix(b"\n")?;
        // A name may have newlines in it, and what is known of a file has none.
        let end = lines.iter().rposition(|byte| *byte == b'\n')?;
        let (first, last) = (&lines[..end], &lines[end + 1..]);
        let last = std::str::from_utf8(last.strip_prefix(FILE)?).ok()?;
        let mut numbers = last.split(' ');
        let file = FileMark::decode(&mut numbers)?;
        let changed = numbers.next();
        if numbers.next().is_some() {
            return None;
        }
        let source = |before, then| first.strip_prefix(before).map(|name: &[u8]| (name, then));
        let source = source(INTO, Then::Stays).or_else(|| source(DROPPED_INTO, Then::Goes));
        match (source, changed) {
            (Some((name, then)), Some(changed)) if !name.is_empty() && !name.contains(&0) => {
                let into = OsString::from_vec(name.to_vec());
                Some(Self::Source { into, file, changed_ns: changed.parse().ok()?, then })
            }
            (None, None) => Some(Self::Base { file, until: Until::decode(first)? }),
            _ => None,
        }
    }

    /// Until when the layer has only a part, if it is the base of a commit.
    fn until(&self) -> Option<Until> {
        match self {
            Self::Base { until, .. } => Some(*until),
            Self::Source { .. } => None,
        }
    }

    /// Whether it counts only once something was changed. The layer of a state that is dropped may
    /// leave the chain at any time, and only its mark says then that its file is to go, too.
    fn is_planned_first(&self) -> bool {
        !matches!(self, Self::Source { then: Then::Goes, .. })
    }

    /// Whether it is for the file that was `found` (I1).
    fn is_for(&self, found: &Metadata) -> bool {
        match self {
            Self::Source { file, changed_ns: changed, .. } => {
                *file == FileMark::of(found) && *changed == changed_ns(found)
            }
            Self::Base { file, .. } => *file == FileMark::of(found),
        }
    }
}

impl Until {
    /// What the `first` line of the mark of a base says.
    fn decode(first: &[u8]) -> Option<Self> {
        if first == BASE {
            return Some(Self::Unsaid);
        }
        let ways = [(BENEATH, Self::Beneath as fn(FileMark) -> Self), (EMPTY, Self::Empty)];
        let (rest, says) = ways
            .into_iter()
            .find_map(|(before, says)| Some((first.strip_prefix(before)?, says)))?;
        let mut numbers = std::str::from_utf8(rest).ok()?.split(' ');
        let above = FileMark::decode(&mut numbers)?;
        numbers.next().is_none().then(|| says(above))
    }
}

/// Reads `bytes` as what a mark has in it; for those who test what it makes of anything.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn is_merge_mark(bytes: &[u8]) -> bool {
    let Some(content) = Content::decode(bytes) else { return false };
    assert_eq!(Content::decode(&content.encode()).as_ref(), Some(&content), "it reads as written");
    true
}

/// What is said of the layer at `path`, if anything is that counts.
fn mark_of(path: &Path) -> Result<Option<Content>> {
    mark_at(path, || place(path, SUFFIX))
}

/// As [`mark_of`], for a mark that is `at` this place.
fn mark_at(path: &Path, at: impl FnOnce() -> Result<PathBuf>) -> Result<Option<Content>> {
    let failed = |error: io::Error| Error::from_io(path.display().to_string(), error);
    let found = std::fs::metadata(path).map_err(failed)?;
    if !found.is_file() {
        return Ok(None);
    }
    let at = at()?;
    let Some(file) = open_trusted(&at, found.uid())? else { return Ok(None) };
    let reading = |error| Error::from_io(format!("reading {}", at.display()), error);
    let mut bytes = planned::content_of(&file).map_err(reading)?;
    if let Some(counts) = bytes.strip_suffix(PLANNED) {
        if planned::is_dead(&file).map_err(reading)? {
            planned::take_back(&at, &file);
            return Ok(None);
        }
        bytes = counts.to_vec();
    }
    Ok(Content::decode(&bytes).filter(|content| content.is_for(&found)))
}

/// Whether the image at `path` was merged into another one and is of no use by itself, or is about
/// to be. What cannot be told is not.
pub(crate) fn was_merged(path: &Path) -> bool {
    matches!(mark_of(path), Ok(Some(Content::Source { .. })))
}

/// Takes back the mark of the layer that is really at `real`, if it is of a merge that died before
/// it changed anything.
pub(crate) fn take_back_planned(real: &Path) {
    let mut at = real.as_os_str().to_owned();
    at.push(SUFFIX);
    // What cannot be read is reported by who needs it.
    let _ = mark_at(real, || Ok(at.into()));
}

/// Refuses to let an image stand on the one at `base`, if that is being merged. To be asked when
/// the image names it, so that whoever begins a merge later finds it.
///
/// # Errors
/// `Denied` if it is, or was and is not used any more, or if that cannot be told.
pub fn refuse_merged(base: &Path) -> Result<()> {
    let name = base.display();
    let what = match mark_of(base)? {
        None => return Ok(()),
        Some(Content::Base { .. }) => format!(
            "layers are being merged into {name}, or an earlier merge was interrupted: wait for \
             the end, or merge them again"
        ),
        Some(Content::Source { into, .. }) => format!(
            "{name} was merged into {}, or is being merged: what stands on it would not show what \
             it showed; use {} when that is done",
            into.display(),
            into.display()
        ),
    };
    // Both may be of a merge of which nothing else is known any more.
    let mark = place(base, SUFFIX)?;
    let what = format!("{what}; {} says so, to be removed if it is out of date", mark.display());
    Err(Error::new(ErrorKind::Denied, what))
}

/// Where the mark of `layer` is, if it has one.
///
/// # Errors
/// What the system reports.
pub(crate) fn place_beside(layer: &Path) -> Result<PathBuf> {
    place(layer, SUFFIX)
}

/// The layer whose mark the file at `path` would be, by its name.
pub(crate) fn layer_marked_by(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.as_bytes().strip_suffix(SUFFIX.as_bytes())?;
    (!name.is_empty()).then(|| path.with_file_name(std::ffi::OsStr::from_bytes(name)))
}

/// The layer into which the one at `path` went, or is about to go, if that kept a state that is
/// dropped, so that its file goes, too.
///
/// # Errors
/// As for reading the mark.
pub(crate) fn dropped_into(path: &Path) -> Result<Option<PathBuf>> {
    Ok(match mark_of(path)? {
        Some(Content::Source { into, then: Then::Goes, .. }) => Some(into.into()),
        _ => None,
    })
}

/// Removes the mark of `layer` if that says that it is dropped.
///
/// # Errors
/// As for reading it; what the system reports.
pub(crate) fn forget_drop(layer: &Path) -> Result<()> {
    match dropped_into(layer)? {
        Some(_) => remove_mark(&place(layer, SUFFIX)?),
        None => Ok(()),
    }
}

/// Removes the mark that is `at`, unless somebody else did.
fn remove_mark(at: &Path) -> Result<()> {
    match std::fs::remove_file(at) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::from_io(format!("removing {}", at.display()), error))
        }
        _ => Ok(()),
    }
}

/// Removes what is `at` if it is the mark of a state that was dropped, whose file is gone. Returns
/// whether it is.
///
/// # Errors
/// As for reading it; what the system reports.
pub(crate) fn remove_lone_mark(at: &Path) -> Result<bool> {
    let me = rustix::process::geteuid().as_raw();
    let content = read_trusted(at, me, CONTENT_BYTES_MAX)?;
    let content = content.as_deref().and_then(Content::decode);
    let is_dropped = matches!(content, Some(Content::Source { then: Then::Goes, .. }));
    if is_dropped {
        remove_mark(at)?;
    }
    Ok(is_dropped)
}

/// The marks of the layers of a commit. Dropping this takes those back that it put.
#[must_use = "the layers are marked until this is dropped"]
#[derive(Default, Debug)]
pub(crate) struct MergeMarks {
    /// That of the base, if it has one.
    base: Option<Put>,
    /// Whether the base has only a part of something when this merge is done, too.
    stays_a_part: bool,
    sources: Vec<Put>,
    /// Whether anything may have been changed.
    has_begun: AtomicBool,
}

/// A mark that was put.
#[derive(Debug)]
struct Put {
    at: PathBuf,
    /// Its file, locked; that of what was there before, if the mark takes its place later.
    file: File,
    /// What counted before, of a merge that did not end.
    before: Option<Content>,
    /// What takes the place of that with the first change (I5).
    waiting: Option<Locked>,
}

impl Put {
    /// Marks `layer`; a device has no place for one, and is found by its locks only. The `content`
    /// may depend on what counted before.
    fn beside(
        layer: &Path,
        content: impl FnOnce(&Metadata, Option<&Content>) -> Content,
    ) -> Result<Option<Self>> {
        let failed = |error: io::Error| Error::from_io(layer.display().to_string(), error);
        let found = std::fs::metadata(layer).map_err(failed)?;
        if found.file_type().is_block_device() {
            return Ok(None);
        }
        let at = place(layer, SUFFIX)?;
        // Nobody takes it back, and no other merge is under way.
        mark_of(layer)?;
        let old = planned::lock_old(&at)?;
        let before = mark_of(layer)?;
        let content = content(&found, before.as_ref());
        let mut bytes = content.encode();
        if before.is_none() && content.is_planned_first() {
            bytes.extend(PLANNED);
        }
        let new = Locked::write(&place(layer, NEW_MERGED)?, &bytes)
            .map_err(|error| Error::from_io(format!("writing {}", at.display()), error))?;
        if content.is_planned_first()
            && before.is_some()
            && let Some(file) = old
        {
            return Ok(Some(Self { at, file, before, waiting: Some(new) }));
        }
        let file = new.rename_to(&at)?;
        Ok(Some(Self { at, file, before, waiting: None }))
    }

    /// Has it count from now on, durably.
    fn begin(&self) -> Result<()> {
        let failed = |error| Error::from_io(format!("writing {}", self.at.display()), error);
        match &self.waiting {
            Some(new) if !new.is_at(&self.at) => {
                new.name(&self.at)?;
                sync_folder_of(&self.at)
            }
            Some(_) => Ok(()),
            None => planned::make_count(&self.file).map_err(failed),
        }
    }

    /// The merge changes nothing: what counted before does.
    fn take_back(&self) {
        match (&self.waiting, &self.before) {
            (Some(new), _) => new.remove(),
            (None, None) => self.remove(),
            // That of a state counted at once.
            (None, Some(before)) => named::put_back(&self.at, before),
        }
    }

    /// Until when the layer had only a part, before.
    fn part_before(&self) -> Option<Until> {
        self.before.as_ref().and_then(Content::until)
    }

    /// The merge is done, of which this is the base.
    fn end(&self) {
        self.waiting.iter().for_each(Locked::remove);
        self.remove();
    }

    fn remove(&self) {
        if let Err(error) = std::fs::remove_file(&self.at)
            && error.kind() != io::ErrorKind::NotFound
        {
            // It keeps images from standing on the layer, and says so.
            tracing::warn!(mark = %self.at.display(), %error, "could not remove a mark");
        }
    }
}

impl MergeMarks {
    /// Marks the layer at `base`, which has only a part `until` then, and the frozen layers at
    /// `sources` that go into it. Durable when this returns: look for images that stand on them
    /// only now.
    ///
    /// # Errors
    /// What the system reports. Nothing new is marked then.
    pub(crate) fn put(base: &Path, sources: &[PathBuf], until: Until) -> Result<Self> {
        let mut marks = Self::default();
        marks.add_sources(base, sources, Then::Stays)?;
        let mut parts: Vec<Until> = marks.sources.iter().filter_map(Put::part_before).collect();
        let went = sources.iter().map(|source| FileMark::at(source)).collect::<Result<Vec<_>>>()?;
        let mut is_left = false;
        marks.base = Put::beside(base, |found, before| {
            parts.extend(before.and_then(Content::until));
            let left = pending::left_by((until, &went), &parts);
            is_left = left.is_some();
            Content::Base { file: FileMark::of(found), until: left.unwrap_or(until) }
        })?;
        marks.stays_a_part = is_left;
        marks.settle()?;
        Ok(marks)
    }

    /// Marks the layer at `state`, which keeps a state that is dropped, as going into the one
    /// `above` before its file is removed.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub(crate) fn put_dropped(above: &Path, state: &Path) -> Result<Self> {
        let mut marks = Self::default();
        marks.add_sources(above, &[state.to_owned()], Then::Goes)?;
        marks.settle()?;
        Ok(marks)
    }

    fn add_sources(&mut self, into: &Path, sources: &[PathBuf], then: Then) -> Result<()> {
        let real = into.canonicalize();
        let real = real.map_err(|error| Error::from_io(into.display().to_string(), error))?;
        for source in sources {
            let put = Put::beside(source, |found, _| Content::Source {
                into: real.clone().into_os_string(),
                file: FileMark::of(found),
                changed_ns: changed_ns(found),
                then,
            });
            self.sources.extend(put?);
        }
        Ok(())
    }

    /// Makes all of them durable.
    fn settle(&self) -> Result<()> {
        let mut folders: Vec<_> = self.all().filter_map(|put| put.at.parent()).collect();
        folders.sort_unstable();
        folders.dedup();
        folders.iter().try_for_each(|folder| sync_folder_of(&folder.join("any")))
    }

    fn all(&self) -> impl Iterator<Item = &Put> {
        self.base.iter().chain(&self.sources)
    }

    /// Has them count: the merge is about to change something. That of the base is the first, so
    /// that no layer counts as merged whose base says nothing.
    fn begin(&self) -> Result<()> {
        if self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        self.all().try_for_each(Put::begin)?;
        self.has_begun.store(true, Ordering::Release);
        Ok(())
    }

    /// `control`, and has the marks count when the merge begins to change something.
    pub(crate) fn watch<'a>(&'a self, control: &'a dyn MergeControl) -> impl MergeControl {
        Watched { marks: self, control }
    }

    /// The merge has ended so, or failed.
    pub(crate) fn end(mut self, merged: Option<&Merged>) {
        match merged {
            Some(Merged::Done { .. }) => {
                // Where nobody watched they do not yet.
                let base = self.base.iter().filter(|_| self.stays_a_part);
                if let Err(error) = base.chain(&self.sources).try_for_each(Put::begin) {
                    tracing::warn!("a layer that was merged: {}", error.in_one_line());
                }
                if !self.stays_a_part {
                    self.base.iter().for_each(Put::end);
                }
                self.forget();
            }
            _ if self.has_begun.load(Ordering::Acquire) => self.forget(),
            _ => {}
        }
    }

    fn forget(&mut self) {
        (self.base, self.sources) = (None, Vec::new());
    }
}

impl Drop for MergeMarks {
    fn drop(&mut self) {
        // After a panic in the middle: the base has a part of what it is to get.
        if self.has_begun.load(Ordering::Acquire) {
            return;
        }
        self.all().for_each(Put::take_back);
    }
}

struct Watched<'a> {
    marks: &'a MergeMarks,
    control: &'a dyn MergeControl,
}

impl MergeControl for Watched<'_> {
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        Box::pin(async move {
            let goes_on = self.control.step(progress).await;
            if goes_on.is_continue()
                && let Err(error) = self.marks.begin()
            {
                tracing::error!("a merge does not begin: {}", error.in_one_line());
                return ControlFlow::Break(());
            }
            goes_on
        })
    }
}

#[cfg(test)]
mod tests;

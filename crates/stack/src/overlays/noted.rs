//! Which images in other folders stand on a layer: the note beside it.
//!
//! Images in a layer's own folder are found by looking there. Where others are nobody can tell from
//! the layer, so whoever makes an image that stands on a layer in another folder, or has one stand
//! on another layer from now on, adds its path to `LAYER.mica-overlays`. docs/formats/overlays.md
//! has its bytes.
//!
//! | who | does, in this order |
//! |---|---|
//! | a verb that makes an image | writes it; adds its path; names it; looks for a mark, the path |
//! | a verb that rebases one | writes its header; adds its path; looks for a mark, the path |
//! | a merge | marks its layers; reads their notes; looks at what they name |
//!
//! A note is evidence of nothing but where to look. What it names is asked what it stands on; if it
//! may not be read, it counts as standing on the layer.
//!
//! Invariants
//! - I1 A note is read only if [`read_trusted`] trusts it: it decides which files are looked at.
//! - I2 What is not known keeps a layer from being changed: an image that may not be read, whose
//!   folder may only not be mounted now, or that is gone. Nothing tells one that was removed from
//!   one that was moved, and would show something else.
//! - I3 A path leaves a note only if its image was given up, was merged into the layer, stands on
//!   another one, was removed by mica, or is gone while the user says that it was removed.
//!   One that is added while a note is being rewritten stays: the process that rewrites a note has
//!   it locked alone, one that adds to it has it locked, too, and each looks whether what it locked
//!   still has the name. Without locks nothing leaves a note. Whoever only holds the lock keeps
//!   nobody from adding for long: nothing leaves a note that has become longer meanwhile.
//! - I4 An image is made also where the note cannot be written; that is said.

use crate::files::{folder_of, sync_folder_of};
use crate::mark::{place, read_trusted};
use crate::merged::refuse_merged;
use crate::temporary::{Locked, NEW_OVERLAYS, is_at, sleep};
use mica_block::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, Gid, OFlags, Uid, fchown, flock};
use rustix::io::Errno;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The ending of a note's name.
const SUFFIX: &str = ".mica-overlays";
/// Longest note, in bytes: the paths of some 200,000 images.
const CONTENT_BYTES_MAX: u64 = 16 << 20;
/// What is put behind a line that was cut short: it names nothing then.
const CUT_SHORT: &[u8; 2] = b"\0\n";
/// How often a path is added, at most: an older mica, which locks nothing, may rewrite the note at
/// that instant.
const TIMES_MAX: usize = 8;
/// How often a note that somebody has locked is tried again, and after which time each.
const TRIES: u32 = 100;
const LOOK: Duration = Duration::from_millis(10);

/// An image that stood on a layer when it was noted.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Noted {
    /// The inode of its folder, or 0 if that is on the file system of the layer, and so there
    /// whenever the layer is.
    folder_inode: u64,
    /// An absolute path.
    pub(super) path: PathBuf,
}

/// What has become of a noted image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// It can be asked what it stands on.
    Readable,
    /// It is there, or may be, and may not be read.
    Hidden,
    /// It is not there any more.
    Gone,
    /// Nor is its folder, which may not be mounted.
    Unreachable,
}

impl Noted {
    /// Of the image at `image` for a layer in `folder`; `None` if it is in that folder itself.
    fn of(image: &Path, folder: &Metadata) -> io::Result<Option<Self>> {
        let path = std::path::absolute(image)?;
        let its = fs::metadata(folder_of(&path))?;
        if (its.dev(), its.ino()) == (folder.dev(), folder.ino()) {
            return Ok(None);
        }
        let folder_inode = if its.dev() == folder.dev() { 0 } else { its.ino() };
        Ok(Some(Self { folder_inode, path }))
    }

    fn encode(&self) -> Vec<u8> {
        let mut line = format!("{} ", self.folder_inode).into_bytes();
        for byte in self.path.as_os_str().as_bytes() {
            match byte {
                b'\n' => line.extend(b"\\n"),
                b'\\' => line.extend(b"\\\\"),
                byte => line.push(*byte),
            }
        }
        line.push(b'\n');
        line
    }

    /// `None` if this `line`, which has no newline, names no image: its writer was killed.
    fn decode(line: &[u8]) -> Option<Self> {
        let at = line.iter().position(|byte| *byte == b' ')?;
        let folder_inode = std::str::from_utf8(&line[..at]).ok()?.parse().ok()?;
        let mut path = Vec::with_capacity(line.len());
        let mut bytes = line[at + 1..].iter();
        while let Some(byte) = bytes.next() {
            path.push(match byte {
                b'\\' => match bytes.next()? {
                    b'n' => b'\n',
                    b'\\' => b'\\',
                    _ => return None,
                },
                0 => return None,
                byte => *byte,
            });
        }
        let path = PathBuf::from(OsString::from_vec(path));
        path.is_absolute().then_some(Self { folder_inode, path })
    }

    pub(super) fn find(&self) -> Found {
        let is_absent = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        };
        // Only this is allowed in a sandbox.
        match fs::metadata(&self.path) {
            Ok(_) => {}
            Err(error) if is_absent(&error) => {
                let folder = fs::metadata(folder_of(&self.path));
                let is_same = || folder.is_ok_and(|its| its.ino() == self.folder_inode);
                return match self.folder_inode == 0 || is_same() {
                    true => Found::Gone,
                    false => Found::Unreachable,
                };
            }
            Err(_) => return Found::Hidden,
        }
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        match OpenOptions::new().read(true).custom_flags(flags).open(&self.path) {
            Ok(_) => Found::Readable,
            Err(_) => Found::Hidden,
        }
    }
}

/// The images that the bytes of a note name. A line that does not end was cut short.
fn decode(bytes: &[u8]) -> impl Iterator<Item = Noted> {
    let lines = bytes.split_inclusive(|byte| *byte == b'\n');
    lines.filter_map(|line| Noted::decode(line.strip_suffix(b"\n")?))
}

/// Reads `bytes` as what a note has in it; for those who test what it makes of anything.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_note(bytes: &[u8]) {
    let all: Vec<_> = decode(bytes).collect();
    let again: Vec<u8> = all.iter().flat_map(Noted::encode).collect();
    assert!(decode(&again).eq(all), "it reads as written");
}

/// The images that the note of `layer` names.
///
/// # Errors
/// `Denied` if a stranger may have written it; `Limit` if it is longer than may be; else what the
/// system reports.
pub(super) fn noted_on(layer: &Path) -> Result<HashSet<Noted>> {
    let Some((_, content)) = content_of(layer)? else { return Ok(HashSet::new()) };
    Ok(decode(&content).collect())
}

/// Where the note of `layer` is, and what it has in it, if the layer has one.
fn content_of(layer: &Path) -> Result<Option<(PathBuf, Vec<u8>)>> {
    let found =
        fs::metadata(layer).map_err(|error| Error::from_io(layer.display().to_string(), error))?;
    // Beside a device nothing outlives a restart.
    if !found.is_file() {
        return Ok(None);
    }
    let at = place(layer, SUFFIX)?;
    let content = read_trusted(&at, found.uid(), CONTENT_BYTES_MAX + 1)?;
    content.iter().try_for_each(|content| check_len(&at, content))?;
    Ok(content.map(|content| (at, content)))
}

/// Checks that the note at `at` is not longer than what is read of it.
fn check_len(at: &Path, content: &[u8]) -> Result<()> {
    if content.len() as u64 <= CONTENT_BYTES_MAX {
        return Ok(());
    }
    let what = format!(
        "{} is longer than {} MiB, and may name images that need the layer: remove the lines of \
         those that are gone",
        at.display(),
        CONTENT_BYTES_MAX >> 20
    );
    Err(Error::new(ErrorKind::Limit, what))
}

/// What to do about the note of `layer` if it keeps that from being changed for nothing.
pub(super) fn cure(layer: &Path) -> String {
    let at = place(layer, SUFFIX).unwrap_or_else(|_| layer.to_owned());
    format!(
        "mount it, and the image is asked, or is known to be gone, which --ignore-gone takes as \
         removed; only if the folder itself is gone for good, take the line out of {}",
        at.display()
    )
}

/// Images that are about to get their names, and whose lines were added for that.
#[must_use = "the lines stay otherwise"]
#[derive(Debug)]
pub struct ExpectedOverlays {
    base: PathBuf,
    added: HashSet<Noted>,
}

impl ExpectedOverlays {
    /// The images get no names: they stand on nothing.
    pub fn forget(self) {
        if !self.added.is_empty() {
            forget(&self.base, &self.added);
        }
    }
}

/// Adds the `images`, which have no names yet, to the note of the layer at `base`, so that one that
/// has its name is never without its line. Once they have their names, [`announce_overlays`] says
/// whether they may stay; what fails here is told then.
pub fn expect_overlays(base: &Path, images: &[&Path]) -> ExpectedOverlays {
    let added = note(base, images).map(|noted| noted.added).unwrap_or_default();
    ExpectedOverlays { base: base.to_owned(), added: added.into_iter().collect() }
}

/// Makes sure that whoever is about to merge the layer at `base` finds the `images`, which exist
/// and stand on it; refuses that if the layer is being merged.
///
/// # Errors
/// As [`refuse_merged`].
pub fn announce_overlays(base: &Path, images: &[&Path]) -> Result<()> {
    announce(base, images, Noting::Done)
}

/// As [`announce_overlays`], for an `image` that was `noted` when it was about to stand on the
/// layer: what was told then is not told again.
///
/// # Errors
/// As [`refuse_merged`].
pub fn announce_noted_overlay(base: &Path, image: &Path, noted: Noting) -> Result<()> {
    announce(base, &[image], noted)
}

fn announce(base: &Path, images: &[&Path], before: Noting) -> Result<()> {
    let tell = |error: &Error| match before {
        Noting::Done => tell(base, images, error),
        Noting::Failed => {}
    };
    for _ in 0..TIMES_MAX {
        let is_noted = note(base, images);
        // Their lines stay: what was noted before may be another image, or one that stays.
        refuse_merged(base)?;
        match is_noted.and_then(|noted| are_there(base, &noted.wanted)) {
            Ok(true) => return Ok(()),
            // Another process rewrote it meanwhile.
            Ok(false) => {}
            Err(error) => {
                tell(&error);
                return Ok(());
            }
        }
    }
    tell(&kept_being_rewritten());
    Ok(())
}

/// Whether an image was noted beside the layer that it is to stand on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Noting {
    /// It was, or does not have to be.
    Done,
    /// It could not be, and that was told.
    Failed,
}

/// The `image`, which exists, is about to stand on the layer at `base`: from now on whoever would
/// merge that finds it.
pub fn note_overlay(base: &Path, image: &Path) -> Noting {
    let mut failure = kept_being_rewritten();
    for _ in 0..TIMES_MAX {
        match note(base, &[image]).and_then(|noted| are_there(base, &noted.wanted)) {
            Ok(true) => return Noting::Done,
            Ok(false) => {}
            Err(error) => {
                failure = error;
                break;
            }
        }
    }
    tell(base, &[image], &failure);
    Noting::Failed
}

fn kept_being_rewritten() -> Error {
    Error::new(ErrorKind::Io, "other processes kept rewriting its note; try again")
}

/// The image is made all the same (I4).
fn tell(base: &Path, images: &[&Path], error: &Error) {
    let (base, image) = (base.display(), images.first().map_or(Path::new(""), |image| image));
    tracing::warn!(
        "{}: could not be noted beside {base} as its overlay ({}): a merge of that layer will not \
         find it",
        image.display(),
        error.in_one_line()
    );
}

fn are_there(base: &Path, noted: &[Noted]) -> Result<bool> {
    if noted.is_empty() {
        return Ok(true);
    }
    let there = noted_on(base)?;
    Ok(noted.iter().all(|one| there.contains(one)))
}

/// What a note should have in it now, and what of that was added.
#[derive(Default)]
struct Added {
    wanted: Vec<Noted>,
    added: Vec<Noted>,
}

/// Adds what of `images` is in other folders to the note of `base`, durably.
fn note(base: &Path, images: &[&Path]) -> Result<Added> {
    let failed =
        |error: io::Error| Error::from_io(format!("noting it of {}", base.display()), error);
    let layer = fs::metadata(base).map_err(failed)?;
    let real = base.canonicalize().map_err(failed)?;
    if !layer.is_file() {
        return Ok(Added::default());
    }
    let folder = fs::metadata(folder_of(&real)).map_err(failed)?;
    let mut wanted = Vec::new();
    for image in images {
        wanted.extend(Noted::of(image, &folder).map_err(failed)?);
    }
    if wanted.is_empty() {
        return Ok(Added::default());
    }
    let content = content_of(base)?.map(|(_, content)| content).unwrap_or_default();
    let there: HashSet<_> = decode(&content).collect();
    let added: Vec<_> = wanted.iter().filter(|one| !there.contains(one)).cloned().collect();
    if added.is_empty() {
        return Ok(Added { wanted, added });
    }
    let mut lines: Vec<u8> = added.iter().flat_map(Noted::encode).collect();
    if content.last().is_some_and(|byte| *byte != b'\n') {
        lines.splice(0..0, *CUT_SHORT);
    }
    if (content.len() + lines.len()) as u64 > CONTENT_BYTES_MAX {
        return Err(Error::new(
            ErrorKind::Limit,
            "its note has reached its maximum length; `mica clone --ignore-gone` drops images that \
             were removed",
        ));
    }
    match append(&place(base, SUFFIX)?, &layer, &lines) {
        Ok(()) => Ok(Added { wanted, added }),
        // Nor can anybody change the layer there.
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => Ok(Added::default()),
        Err(error) => Err(failed(error)),
    }
}

fn append(at: &Path, layer: &Metadata, lines: &[u8]) -> io::Result<()> {
    let (mut file, is_new) =
        lock(at, FlockOperation::NonBlockingLockShared, || open_to_append(at, layer))?;
    file.write_all(lines)?;
    file.sync_data()?;
    match is_new {
        true => File::open(folder_of(at))?.sync_all(),
        false => Ok(()),
    }
}

/// The note at `at`, and whether it was made.
fn open_to_append(at: &Path, layer: &Metadata) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    // To be locked over a network it has to be readable, too.
    options.read(true).append(true);
    options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    // Whoever may write the layer may write this, but for everyone.
    let mode = layer.mode() & 0o664 | 0o600;
    let (file, is_new) = match options.clone().create_new(true).mode(mode).open(at) {
        Ok(file) => (file, true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (options.open(at)?, false),
        Err(error) => return Err(error),
    };
    if is_new && rustix::process::geteuid().is_root() {
        let owner = (Uid::from_raw(layer.uid()), Gid::from_raw(layer.gid()));
        // If it stays root's, it is trusted, too.
        let _ = fchown(&file, Some(owner.0), Some(owner.1));
    }
    Ok((file, is_new))
}

/// Locks the note at `at`, which `open` opens, so that it is the one that has the name (I3). Where
/// there are no locks one that is shared is none, nor is it where somebody keeps the note locked:
/// that may be a process that is stopped, or anybody who may read it.
fn lock<T>(
    at: &Path,
    how: FlockOperation,
    mut open: impl FnMut() -> io::Result<(File, T)>,
) -> io::Result<(File, T)> {
    let is_shared = how == FlockOperation::NonBlockingLockShared;
    for left in (0..TRIES).rev() {
        let (file, more) = match open() {
            // Another process removed it just now: one that adds makes it again.
            Err(error) if is_shared && error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened?,
        };
        match flock(&file, how) {
            Ok(()) if !is_at(at, &file) => {}
            Ok(()) => return Ok((file, more)),
            Err(Errno::WOULDBLOCK) if is_shared && left == 0 && is_at(at, &file) => {
                return Ok((file, more));
            }
            Err(Errno::WOULDBLOCK) => sleep(LOOK),
            Err(_) if is_shared => return Ok((file, more)),
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "another process is changing it"))
}

/// The `images` do not stand on the layer at `base` any more, or nobody needs them: they were
/// merged into it, or removed (I3).
pub fn forget_overlays(base: &Path, images: &[PathBuf]) {
    let paths = images.iter().filter_map(|image| std::path::absolute(image).ok());
    let paths: HashSet<_> = paths.collect();
    forget_if(base, |noted| paths.contains(&noted.path));
}

/// Layers that were `dropped` have left the chain that has these `layers` now, and went down into
/// the one at `base`, if there is one: what stood on the uppermost of them stands on another one.
pub(crate) fn settle_notes(layers: &[PathBuf], dropped: &[PathBuf], base: Option<&Path>) {
    if let Some(top) = dropped.last() {
        forget_overlays(top, layers);
    }
    if let Some(base) = base {
        forget_overlays(base, dropped);
    }
}

fn forget_if(base: &Path, is_to_go: impl Fn(&Noted) -> bool) {
    // What cannot be read keeps the layer as it is, and that is said then.
    let Ok(all) = noted_on(base) else { return };
    let gone: HashSet<_> = all.into_iter().filter(is_to_go).collect();
    if !gone.is_empty() {
        forget(base, &gone);
    }
}

/// Removes what is `gone` from the note of `layer` (I3). What fails is tried again another time.
pub(super) fn forget(layer: &Path, gone: &HashSet<Noted>) {
    if let Err(error) = forget_amid(layer, gone, || ()) {
        tracing::debug!(
            layer = %layer.display(),
            %error,
            "could not drop missing images from a note"
        );
    }
}

/// As [`forget`]; `amid` is called once the note was read, for those who test what comes
/// meanwhile.
fn forget_amid(layer: &Path, gone: &HashSet<Noted>, amid: impl FnOnce()) -> Result<()> {
    let Some((at, _)) = content_of(layer)? else { return Ok(()) };
    let failed = |error: io::Error| Error::from_io(at.display().to_string(), error);
    let open = || {
        let flags = OFlags::NOFOLLOW.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&at)?;
        Ok((file, ()))
    };
    // Until this has its end nobody adds to it, nor to what takes its place, unless it takes long.
    let file = match lock(&at, FlockOperation::NonBlockingLockExclusive, open) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        locked => locked.map_err(failed)?.0,
    };
    let mut content = Vec::new();
    (&file).take(CONTENT_BYTES_MAX + 1).read_to_end(&mut content).map_err(failed)?;
    check_len(&at, &content)?;
    let stay: Vec<_> = decode(&content).filter(|noted| !gone.contains(noted)).collect();
    amid();
    let lines: Vec<u8> = stay.iter().flat_map(Noted::encode).collect();
    let new = match stay.is_empty() {
        true => None,
        false => Some(Locked::write(&place(layer, NEW_OVERLAYS)?, &lines).map_err(failed)?),
    };
    if file.metadata().map_err(failed)?.len() != content.len() as u64 {
        new.iter().for_each(Locked::remove);
        return Err(Error::new(ErrorKind::Io, "something was added to it meanwhile"));
    }
    match new {
        Some(new) => new.rename_to(&at).map(drop)?,
        None => fs::remove_file(&at).map_err(failed)?,
    }
    sync_folder_of(&at)
}

/// Where the note of `layer` would be.
///
/// # Errors
/// If the layer is not there.
pub(crate) fn note_beside(layer: &Path) -> Result<PathBuf> {
    place(layer, SUFFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_says_what_the_code_does() {
        const PAGE: &str = include_str!("../../../../docs/formats/overlays.md");
        for (name, value) in [("SUFFIX", SUFFIX), ("NEW_OVERLAYS", NEW_OVERLAYS)] {
            assert!(PAGE.contains(&format!("| `{name}` | `{value}` |")), "{name}");
        }
        assert!(PAGE.contains(&format!("| `CONTENT_BYTES_MAX` | {CONTENT_BYTES_MAX} |")));
    }

    #[test]
    fn any_path_reads_as_it_was_written() {
        for path in ["/a", "/a b", "/a\\nb", "/a\nb", "/ends in \\"] {
            let noted = Noted { folder_inode: 7, path: path.into() };
            let line = noted.encode();
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1, "{path:?}");
            assert_eq!(decode(&line).collect::<Vec<_>>(), [noted]);
        }
        for line in ["", "7", "7 ", "7 relative", "x /a", "7 /a\0b", "7 /a\\", "7 /a\\x"] {
            assert_eq!(Noted::decode(line.as_bytes()), None, "{line:?}");
        }
    }

    /// A note of a layer that names these.
    fn noted(names: &[&str]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let base = folder.path().join("base");
        fs::write(&base, "layer").expect("written");
        let lines: Vec<u8> = names.iter().flat_map(|name| named(name).encode()).collect();
        fs::write(note_beside(&base).expect("there"), lines).expect("written");
        (folder, base)
    }

    fn named(name: &str) -> Noted {
        Noted { folder_inode: 0, path: name.into() }
    }

    fn all(names: &[&str]) -> HashSet<Noted> {
        names.iter().map(|name| named(name)).collect()
    }

    fn add(base: &Path, name: &str) {
        let at = note_beside(base).expect("there");
        let layer = fs::metadata(base).expect("there");
        append(&at, &layer, &named(name).encode()).expect("added");
    }

    /// Begins to `forget` something of a note; when it was read others do `meanwhile`, or wait.
    fn forget_while(base: &Path, gone: &[&str], meanwhile: impl FnOnce() + Send) {
        std::thread::scope(|scope| {
            forget_amid(base, &all(gone), || {
                let others = scope.spawn(meanwhile);
                // They wait, unless nothing keeps them from going on.
                (0..10).take_while(|_| !others.is_finished()).for_each(|_| sleep(LOOK));
            })
            .expect("it is rewritten");
        });
    }

    /// The story: a note is rewritten by two, and somebody adds to what the first one made, which
    /// the second one replaces.
    #[test]
    fn what_is_added_while_two_rewrite_a_note_stays() {
        let (_folder, base) = noted(&["/gone", "/gone too", "/stays"]);
        forget_while(&base, &["/gone"], || {
            forget(&base, &all(&["/gone too"]));
            add(&base, "/late");
        });
        assert_eq!(noted_on(&base).expect("read"), all(&["/stays", "/late"]));
        forget(&base, &all(&["/stays", "/late"]));
        assert!(!note_beside(&base).expect("there").exists());
    }

    /// The story: a note that named nothing more was removed by its name, which another one had.
    #[test]
    fn note_that_another_process_made_stays() {
        let (_folder, base) = noted(&["/gone"]);
        forget_while(&base, &["/gone"], || {
            forget(&base, &all(&["/gone"]));
            add(&base, "/late");
        });
        assert_eq!(noted_on(&base).expect("read"), all(&["/late"]));
    }

    /// The story: a process was killed that had rewritten a note, and not yet copied what somebody
    /// had added to the old one.
    #[test]
    fn what_is_added_while_the_process_dies_that_rewrites_a_note_stays() {
        use std::panic::{AssertUnwindSafe, catch_unwind};
        let (_folder, base) = noted(&["/gone", "/stays"]);
        std::thread::scope(|scope| {
            let killed = catch_unwind(AssertUnwindSafe(|| {
                forget_amid(&base, &all(&["/gone"]), || {
                    let others = scope.spawn(|| add(&base, "/late"));
                    (0..10).take_while(|_| !others.is_finished()).for_each(|_| sleep(LOOK));
                    panic!("killed");
                })
            }));
            killed.expect_err("it was killed");
        });
        assert!(noted_on(&base).expect("read").is_superset(&all(&["/stays", "/late"])));
    }

    /// The story: an overlay was made while something had the note of its base locked for more than
    /// a second, and was not noted: a merge of the base did not find it.
    #[test]
    fn line_is_added_to_a_note_that_somebody_keeps_locked() {
        let (_folder, base) = noted(&["/stays"]);
        let kept = File::open(note_beside(&base).expect("there")).expect("opened");
        flock(&kept, FlockOperation::NonBlockingLockExclusive).expect("locked");
        add(&base, "/late");
        assert_eq!(noted_on(&base).expect("read"), all(&["/stays", "/late"]));
    }

    #[test]
    fn what_is_added_while_a_note_is_rewritten_for_long_stays() {
        for names in [&["/gone", "/stays"][..], &["/gone"]] {
            let (folder, base) = noted(names);
            std::thread::scope(|scope| {
                let rewritten = forget_amid(&base, &all(&["/gone"]), || {
                    scope.spawn(|| add(&base, "/late")).join().expect("added");
                });
                rewritten.expect_err("it has become longer");
            });
            let noted = noted_on(&base).expect("read");
            assert!(noted.contains(&named("/late")), "{noted:?}");
            assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 2, "nothing is left");
            forget(&base, &all(&["/gone"]));
            assert!(!noted_on(&base).expect("read").contains(&named("/gone")));
        }
    }

    /// The story: what was beyond 16 MiB of a note was not read, and so its images did not count.
    #[test]
    fn note_that_is_too_long_keeps_the_layer_as_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let base = folder.path().join("base");
        fs::write(&base, "layer").expect("written");
        let at = note_beside(&base).expect("there");
        let line = Noted { folder_inode: 0, path: format!("/{}", "a".repeat(4000)).into() };
        let len = usize::try_from(CONTENT_BYTES_MAX).expect("it fits");
        let count = len / line.encode().len();
        let mut content = line.encode().repeat(count);
        fs::write(&at, &content).expect("written");
        assert_eq!(noted_on(&base).expect("read").len(), 1);
        let there = folder.path().join("a".repeat(240));
        fs::create_dir(&there).expect("made");
        // Longer than what is left.
        let said = note(&base, &[&there.join("b".repeat(240))]).map(drop);
        let said = said.expect_err("there is no room").to_string();
        assert!(said.contains("mica clone --ignore-gone"), "{said}");
        content.extend(line.encode());
        fs::write(&at, &content).expect("written");
        let said = crate::overlays::check_no_overlays(
            std::slice::from_ref(&base),
            &base,
            crate::GoneImages::Removed,
        );
        assert_eq!(said.expect_err("not all is read").kind(), ErrorKind::Limit);
        forget(&base, &HashSet::from([line]));
        assert!(at.exists());
    }
}

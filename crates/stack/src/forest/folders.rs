//! The names of all files in folders, one after the other.
//!
//! A folder is read to its end before the next one is opened. Links to folders are not followed,
//! and no folder is read twice, so that a walk ends.

use super::record::file_of;
use super::{Outcome, Problem, ScanDepth};
use crate::temporary::{UNFINISHED, UNNAMED};
use mica_block::{Error, Result};
use std::collections::{HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Ends the names of layers that older versions were about to add to keep a state.
const OLD_KEPT_NEW: &[u8] = b".new";

/// The name of a file.
pub(super) struct FileName {
    pub(super) path: PathBuf,
    /// Whether it is a symbolic link.
    pub(super) is_link: bool,
}

/// A walk through folders.
pub(super) struct Walk {
    depth: ScanDepth,
    folders: VecDeque<PathBuf>,
    seen: HashSet<(u64, u64)>,
    /// The files of the folder that was read last, the next one at the end.
    files: Vec<FileName>,
    /// Folders that could not be read.
    pub(super) problems: Vec<Problem>,
}

/// What is in a folder.
#[derive(Default)]
struct Listing {
    folders: Vec<OsString>,
    /// With whether each is a link.
    files: Vec<(OsString, bool)>,
}

impl Walk {
    /// A walk through `places`: folders, and single files.
    pub(super) fn new(places: &[PathBuf], depth: ScanDepth) -> Result<Self> {
        let (mut folders, mut files) = (VecDeque::new(), Vec::new());
        for place in places {
            let found = fs::metadata(place).map_err(|error| {
                Error::from_io(format!("looking for images in {}", place.display()), error)
            })?;
            match found.is_dir() {
                true => folders.push_back(place.clone()),
                false => files.push(FileName { path: place.clone(), is_link: place.is_symlink() }),
            }
        }
        files.reverse();
        Ok(Self { depth, folders, seen: HashSet::new(), files, problems: Vec::new() })
    }

    /// The next file.
    pub(super) fn next_file(&mut self) -> Option<FileName> {
        loop {
            if let Some(file) = self.files.pop() {
                return Some(file);
            }
            let folder = self.folders.pop_front()?;
            if let Err(error) = self.enter(&folder) {
                let outcome = Outcome::LeftOut;
                self.problems.push(Problem { path: folder, what: error.to_string(), outcome });
            }
        }
    }

    fn enter(&mut self, folder: &Path) -> Result<()> {
        if !self.seen.insert(file_of(folder)?) {
            return Ok(());
        }
        let mut listing =
            list(folder).map_err(|error| Error::from_io("reading the folder", error))?;
        if self.depth == ScanDepth::All {
            listing.folders.sort_unstable();
            self.folders.extend(listing.folders.iter().map(|name| folder.join(name)));
        }
        listing.files.sort_unstable_by(|one, other| other.cmp(one));
        let named =
            |(name, is_link): (OsString, bool)| FileName { path: folder.join(name), is_link };
        self.files = listing.files.into_iter().map(named).collect();
        Ok(())
    }
}

/// Whether `name` is that of a layer that a server is about to add, or was when it was killed. Who
/// adds one holds the disk, so that one on a layer of a disk that somebody else holds, to merge it,
/// say, is of no use any more. Or that of an image that a verb makes: before that gets its own
/// name, nobody uses it.
fn is_unfinished(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    // Older versions called a layer that was to keep a state `.DISK@STATE.qcow2.new`.
    let is_of_old = name.ends_with(OLD_KEPT_NEW) && name.contains(&b'@');
    let endings = [UNNAMED, UNFINISHED].map(str::as_bytes);
    name.starts_with(b".") && (endings.iter().any(|ending| name.ends_with(ending)) || is_of_old)
}

fn list(folder: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // What is gone by now is not there.
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            listing.folders.push(entry.file_name());
        } else if (kind.is_file() || kind.is_symlink()) && !is_unfinished(&entry.file_name()) {
            listing.files.push((entry.file_name(), kind.is_symlink()));
        }
    }
    Ok(listing)
}

//! Which images there are in folders, and which stands on which: by their headers alone.
//!
//! ```text
//! folders: names ─▶ record: a header each ─▶ links: what it names ─▶ shape: a forest
//! ```
//!
//! Invariants
//! - I1 Only headers are read: 4 KiB of nearly every file. No lock is taken and nothing is changed,
//!   so images that are in use are seen as well.
//! - I2 What cannot be read or understood is named ([`Forest::problems`]) and left out; only a
//!   folder that the user named and that is not there is an error.
//! - I3 One folder and one file are open at a time. Memory is a few hundred bytes for each image,
//!   of which there are at most [`IMAGES_MAX`]; files that are no images take none.
//! - I4 Only files in the folders that were scanned, or that the user allowed, are opened. What is
//!   named elsewhere is not, unless it is a file that was scanned under another name; whether it
//!   exists is not said.
//! - I5 Whatever the names say, the outcome is a forest: a loop is cut, and named.
//!
//! A file is its inode: names that lead to the same one, by links of either kind, are one image.

mod folders;
mod links;
mod record;
mod seals;
mod shape;
#[cfg(test)]
mod tests;

pub use record::Qcow2Facts;

use crate::sidecars::SidecarPlace;
use links::Linker;
use mica_block::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Most images that a forest has.
pub const IMAGES_MAX: usize = 4 << 20;

/// How folders are scanned.
#[derive(Clone, Debug, Default)]
pub struct ScanOptions {
    /// Directories in which images may name files, besides those that are scanned.
    pub allow_paths: Vec<PathBuf>,
    /// Files that are looked at first, wherever they are, because the user named them.
    pub files: Vec<PathBuf>,
    /// Whether folders in folders are scanned, too.
    pub depth: ScanDepth,
    /// Where the sidecars of layers are; `None` if they are of no interest.
    pub sidecars: Option<SidecarPlace>,
}

/// Whether folders in folders are scanned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ScanDepth {
    /// They are.
    #[default]
    All,
    /// Only what is in the folders themselves.
    OneLevel,
}

/// An image of a forest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ImageId(u32);

impl ImageId {
    fn new(index: usize) -> Self {
        Self(u32::try_from(index).expect("at most IMAGES_MAX"))
    }

    /// For use as an index into [`Forest::images`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What is known of an image.
#[derive(Clone, Debug)]
pub struct ForestImage {
    /// Its names, at least one; the first is the one that messages use.
    pub names: Vec<PathBuf>,
    /// The device and the inode of its file.
    pub file: (u64, u64),
    /// What its header says; `None` for a raw image, or one of LUKS.
    pub qcow2: Option<Qcow2Facts>,
    /// Whether it is a LUKS image, as one that stands on it says: nothing else tells it from a raw
    /// image whose guest encrypts.
    pub is_luks: bool,
    /// Bytes of the disk.
    pub virtual_bytes: u64,
    /// Length of its file in bytes.
    pub file_bytes: u64,
    /// Bytes that its file, and its data file if it has one, occupy.
    pub disk_bytes: u64,
    /// When its content and its inode last changed, in nanoseconds since the epoch.
    pub changed_ns: (i128, i128),
    /// When its file was created, if the file system knows, in nanoseconds since the epoch.
    pub created_ns: Option<i128>,
    /// What it stands on.
    pub below: Below,
    /// How many layers are beneath it.
    pub depth: usize,
    /// The images that stand on it, by name.
    pub overlays: Vec<ImageId>,
    /// How many images on which nothing stands have it in their chain, itself included.
    pub chains: usize,
    /// Bytes that it and all beneath it occupy.
    pub chain_bytes: u64,
    /// Whether the index covers it and all beneath it, judging by seals that are read without the
    /// layers' tables; `false`, too, if that was not asked for.
    pub is_indexed: bool,
}

impl ForestImage {
    /// The name that messages use.
    pub fn path(&self) -> &Path {
        &self.names[0]
    }

    /// Whether nothing stands on it.
    pub fn is_active(&self) -> bool {
        self.overlays.is_empty()
    }
}

/// What an image stands on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Below {
    /// Nothing.
    Nothing,
    /// An image of the forest.
    Image(ImageId),
    /// Something that could not be found, or was not looked for.
    Lost {
        /// As its header names it.
        name: OsString,
        /// Why.
        why: Lost,
    },
}

/// Why what an image stands on is not in the forest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Lost {
    /// There is no such file.
    Missing,
    /// It is in none of the folders that were scanned or allowed, and was not looked at.
    Outside,
    /// It stands on this image, directly or not.
    Loop,
    /// Something else, in words.
    Other(String),
}

impl Lost {
    /// In a few words.
    pub fn text(&self) -> &str {
        match self {
            Self::Missing => "missing",
            Self::Outside => "in another folder, not looked at",
            Self::Loop => "a loop",
            Self::Other(what) => what,
        }
    }
}

/// Something that was left out, or is odd.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong.
    pub what: String,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a problem.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The file or folder is not in the forest.
    LeftOut,
    /// The image is in the forest, but a chain with it does not open, or not as it looks.
    Odd,
}

/// The images of some folders.
#[derive(Debug, Default)]
pub struct Forest {
    images: Vec<ForestImage>,
    roots: Vec<ImageId>,
    problems: Vec<Problem>,
    files_seen: u64,
    /// Images that stand on another one under a name that is not their first.
    by_other_names: Vec<(ImageId, ImageId)>,
}

impl Forest {
    /// Scans `places`: folders, or images. `progress` is called now and then with the number of
    /// files that were looked at, and ends the scan.
    ///
    /// # Errors
    /// If one of `places` is not there, or an allowed path; `Limit` if there are too many images;
    /// `Invalid` if `progress` ended the scan.
    pub fn scan(
        places: &[PathBuf],
        options: &ScanOptions,
        mut progress: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        const FILES_PER_REPORT: u64 = 256;
        let mut linker = Linker::new(places, options)?;
        for file in &options.files {
            linker.take_named(file)?;
        }
        let mut seen = 0;
        let mut walk = folders::Walk::new(places, options.depth)?;
        while let Some(name) = walk.next_file() {
            linker.take(&name)?;
            seen += 1;
            if seen % FILES_PER_REPORT == 0 && progress(seen).is_break() {
                return Err(Error::new(ErrorKind::Invalid, "the scan was ended"));
            }
        }
        linker.problems.append(&mut walk.problems);
        let mut forest = linker.finish()?;
        forest.files_seen = seen;
        shape::cut_loops(&mut forest);
        shape::measure(&mut forest);
        if let Some(place) = &options.sidecars {
            seals::judge(&mut forest, place);
        }
        Ok(forest)
    }

    /// All images; an [`ImageId`] is an index into them.
    pub fn images(&self) -> &[ForestImage] {
        &self.images
    }

    /// One of them.
    ///
    /// # Panics
    /// If it is of another forest.
    pub fn get(&self, id: ImageId) -> &ForestImage {
        &self.images[id.index()]
    }

    /// The images that stand on nothing that is in the forest, by name.
    pub fn roots(&self) -> &[ImageId] {
        &self.roots
    }

    /// The images on which nothing stands, by name: one for each chain.
    pub fn active(&self) -> impl Iterator<Item = ImageId> {
        let ids = (0..self.images.len()).map(ImageId::new);
        ids.filter(|id| self.get(*id).is_active())
    }

    /// The layers of the chain of `id`, from itself down.
    pub fn chain(&self, id: ImageId) -> impl Iterator<Item = ImageId> {
        let below = |id: &ImageId| match self.get(*id).below {
            Below::Image(below) => Some(below),
            _ => None,
        };
        std::iter::successors(Some(id), below)
    }

    /// What was left out, and what is odd.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// How many files were looked at.
    pub fn files_seen(&self) -> u64 {
        self.files_seen
    }

    /// The image of the file with this device and inode.
    fn of_file(&self, file: (u64, u64)) -> Option<ImageId> {
        let at = self.images.iter().position(|image| image.file == file);
        at.map(ImageId::new)
    }

    /// The images whose header names `id` as what they stand on, under any of their names.
    fn named_by(&self, id: ImageId) -> impl Iterator<Item = ImageId> {
        let others = self.by_other_names.iter().filter(move |(_, below)| *below == id);
        self.get(id).overlays.iter().copied().chain(others.map(|(upper, _)| *upper))
    }
}

/// The images that stand on some layers.
#[derive(Debug, Default)]
pub struct ImagesOn {
    /// Each image with the layer that its header names.
    pub found: Vec<(PathBuf, PathBuf)>,
    /// What could not be judged: it may stand on one of the layers, too.
    pub unknown: Vec<Problem>,
}

/// The image at `path`, and what it stands on, as far as headers tell.
///
/// # Errors
/// If it is not there, or no image.
pub fn chain_of(path: &Path) -> Result<Vec<PathBuf>> {
    let places = [path.to_owned()];
    let forest = Forest::scan(&places, &ScanOptions::default(), |_| ControlFlow::Continue(()))?;
    let found = forest.of_file(record::file_of(path)?);
    let none = || Error::new(ErrorKind::Invalid, format!("{} is no image", path.display()));
    let chain = forest.chain(found.ok_or_else(none)?);
    Ok(chain.map(|id| forest.get(id).path().to_owned()).collect())
}

/// Which images in `folders`, and with [`ScanDepth::All`] below them, stand directly on one of
/// `layers`: whoever changes or removes a layer asks this first.
///
/// # Errors
/// If a layer or a folder is not there; `Limit` if there are too many images.
pub fn images_on(layers: &[PathBuf], folders: &[PathBuf], depth: ScanDepth) -> Result<ImagesOn> {
    let options = ScanOptions { files: layers.to_vec(), depth, ..ScanOptions::default() };
    let forest = Forest::scan(folders, &options, |_| ControlFlow::Continue(()))?;
    let left_out = forest.problems.iter().filter(|one| one.outcome == Outcome::LeftOut);
    let mut answer = ImagesOn { found: Vec::new(), unknown: left_out.cloned().collect() };
    for image in &forest.images {
        if let Below::Lost { name, why: Lost::Other(why) } = &image.below {
            let what = format!("it stands on {}: {why}", name.display());
            let (path, outcome) = (image.path().to_owned(), Outcome::LeftOut);
            answer.unknown.push(Problem { path, what, outcome });
        }
    }
    for layer in layers {
        let file = record::file_of(layer)?;
        let Some(id) = forest.of_file(file) else { continue };
        for upper in forest.named_by(id) {
            answer.found.push((forest.get(upper).path().to_owned(), layer.clone()));
        }
    }
    Ok(answer)
}

//! The files that a new file is made from, which it must not replace, whatever they are called, and
//! whatever device they are a part of, or consists of them.

use crate::failure::Failure;
use mica_block::Manage;
use rustix::fs::{major, makedev, minor};
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// How many devices may stand on each other.
const DEPTH_MAX: u32 = 16;

/// Those files.
#[derive(Default)]
pub(crate) struct Sources(Vec<Makeup>);

impl Sources {
    /// Adds `disk`, which was opened at `path`, with all of its layers and data files.
    pub(crate) fn add(&mut self, path: &Path, disk: &dyn Manage) {
        self.add_file(path);
        disk.layer_paths().iter().for_each(|path| self.add_file(path));
        disk.data_paths().iter().for_each(|path| self.add_file(path));
    }

    /// Adds the file at `path`, if there is one.
    pub(crate) fn add_file(&mut self, path: &Path) {
        self.0.extend(Makeup::of(path));
    }

    /// # Errors
    /// If the file at `path` is one of them.
    pub(crate) fn check(&self, path: &Path) -> Result<(), Failure> {
        match self.has(path) {
            true => {
                let what = "is a part of the source: give the new image another name";
                Err(Failure::new(format!("{} {what}", path.display())))
            }
            false => Ok(()),
        }
    }

    /// Whether the file at `path` is one of them, or shares bytes with one.
    pub(crate) fn has(&self, path: &Path) -> bool {
        Makeup::of(path).is_some_and(|made| self.0.iter().any(|source| source.overlaps(&made)))
    }
}

/// A file by device and inode: a link is the file that it names. All nodes of one device are one
/// file; no regular file has inode 0.
type Identity = (u64, u64);

/// What a file consists of.
#[derive(Default)]
struct Makeup {
    /// Itself, and what has the same bytes: of a loop device its file.
    same: Vec<Identity>,
    /// That, and what it is a part of: of a partition its disk.
    around: Vec<Identity>,
}

impl Makeup {
    fn of(path: &Path) -> Option<Self> {
        let mut made = Self::default();
        made.add(&path.metadata().ok()?, true, 0);
        Some(made)
    }

    /// Whether the two share bytes, as far as that is known. Two parts of the same need not.
    fn overlaps(&self, other: &Self) -> bool {
        let is_in = |some: &[Identity], all: &[Identity]| some.iter().any(|one| all.contains(one));
        is_in(&self.same, &other.around) || is_in(&other.same, &self.around)
    }

    fn add(&mut self, found: &Metadata, is_same: bool, depth: u32) {
        match found.file_type().is_block_device() {
            true => self.add_device(found.rdev(), is_same, depth),
            false => self.push((found.dev(), found.ino()), is_same),
        }
    }

    fn push(&mut self, identity: Identity, is_same: bool) {
        self.around.push(identity);
        self.same.extend(is_same.then_some(identity));
    }

    fn add_device(&mut self, device: u64, is_same: bool, depth: u32) {
        self.push((device, 0), is_same);
        if depth == DEPTH_MAX {
            return;
        }
        let at = PathBuf::from(format!("/sys/dev/block/{}:{}", major(device), minor(device)));
        if let Some(found) = loop_file(&at).and_then(|file| file.metadata().ok()) {
            let is_zero = |name: &str| text(&at.join("loop").join(name)).is_none_or(|it| it == "0");
            let is_whole = is_zero("offset") && is_zero("sizelimit");
            self.add(&found, is_same && is_whole, depth + 1);
        }
        let slaves = fs::read_dir(at.join("slaves")).into_iter().flatten().flatten();
        let mut beneath: Vec<_> = slaves.map(|slave| slave.path()).collect();
        if at.join("partition").exists() {
            beneath.extend(at.canonicalize().ok().and_then(|at| Some(at.parent()?.to_owned())));
        }
        for device in beneath.iter().filter_map(|at| number_of(at)) {
            self.add_device(device, false, depth + 1);
        }
    }
}

/// The file of the loop device that sysfs has `at` that place, if it is one.
fn loop_file(at: &Path) -> Option<PathBuf> {
    let mut name = fs::read(at.join("loop/backing_file")).ok()?;
    name.pop_if(|last| *last == b'\n');
    Some(OsString::from_vec(name).into())
}

/// The number of the device that sysfs has `at` that place.
fn number_of(at: &Path) -> Option<u64> {
    let text = text(&at.join("dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim_end().to_owned())
}

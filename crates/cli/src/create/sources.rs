//! The files that a new file is made from, which it must not replace, whatever they are called.

use crate::failure::Failure;
use mica_block::Manage;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Those files, by device and inode: a link is the file that it names.
#[derive(Default)]
pub(crate) struct Sources(Vec<(u64, u64)>);

impl Sources {
    /// Adds `disk`, which was opened at `path`, with all of its layers and data files.
    pub(crate) fn add(&mut self, path: &Path, disk: &dyn Manage) {
        self.add_file(path);
        disk.layer_paths().iter().for_each(|path| self.add_file(path));
        disk.data_paths().iter().for_each(|path| self.add_file(path));
    }

    /// Adds the file at `path`, if there is one.
    pub(crate) fn add_file(&mut self, path: &Path) {
        self.0.extend(identity_of(path));
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

    /// Whether the file at `path` is one of them.
    pub(crate) fn has(&self, path: &Path) -> bool {
        identity_of(path).is_some_and(|identity| self.0.contains(&identity))
    }
}

fn identity_of(path: &Path) -> Option<(u64, u64)> {
    path.metadata().ok().map(|found| match found.file_type().is_block_device() {
        // All nodes of one device are one file; no regular file has inode 0.
        true => (found.rdev(), 0),
        false => (found.dev(), found.ino()),
    })
}

//! The names of files: a file can have two, and a name can pass from one file to another. Like
//! content, that is lost with the power unless it was made durable.

use super::file::SharedFile;
use super::{World, normal};
use std::path::{Path, PathBuf};

/// What a name stood for before it was changed.
pub(super) type Before = (PathBuf, Option<SharedFile>);

impl World {
    /// Gives the file at `from` the name `to` as well.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn link(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) {
        let file = self.file(from.as_ref()).expect("the scenario named a file that is there");
        self.name(to.as_ref(), Some(file));
    }

    /// Gives the file at `from` the name `to` instead. A file that had it loses it.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) {
        self.link(from.as_ref(), to);
        self.name(from.as_ref(), None);
    }

    /// Makes the names of all files durable.
    pub fn sync_names(&self) {
        self.state.lock().names_before.clear();
    }

    fn name(&self, path: &Path, file: Option<SharedFile>) {
        let path = normal(path);
        let state = &mut *self.state.lock();
        let before = match file {
            Some(file) => state.files.insert(path.clone(), file),
            None => state.files.remove(&path),
        };
        state.names_before.push((path, before));
    }

    /// The power went: all changes of names since they were last durable are lost, or none is.
    pub(super) fn lose_names(&self) {
        let is_lost = self.random_below(2) == 0;
        let state = &mut *self.state.lock();
        for (path, before) in std::mem::take(&mut state.names_before).into_iter().rev() {
            match before {
                _ if !is_lost => {}
                Some(file) => drop(state.files.insert(path, file)),
                None => drop(state.files.remove(&path)),
            }
        }
    }
}

//! The name that a new file gets once it is complete, and where it is until then.

use super::replaced::Replaced;
use crate::failure::Failure;
use crate::unfinished::{Unfinished, sync_name};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A file that is not complete, and the name that it gets.
pub(super) struct NewName {
    unfinished: Unfinished,
    /// Where it is until it has its name; `None` if it has that.
    place: Option<PathBuf>,
    path: PathBuf,
    /// What has the name until then.
    replaced: Option<Replaced>,
    /// The data file that an image named which a killed process left in its place.
    left: Option<OsString>,
    /// Whether this process has given it its name, which may not be durable yet.
    is_new: bool,
}

impl NewName {
    /// The file at `path`, which has its name already: `made` by this process, or another one that
    /// is about to be overwritten.
    pub(super) fn had(path: &Path, made: Option<File>) -> Self {
        let is_new = made.is_some();
        let unfinished = Unfinished::new(path, made);
        Self { unfinished, place: None, path: path.to_owned(), replaced: None, left: None, is_new }
    }

    /// The file that was `made` at `place`, and gets the name `path`, perhaps in the place of
    /// another one.
    pub(super) fn to_give(
        path: &Path,
        place: PathBuf,
        made: File,
        replaced: Option<Replaced>,
    ) -> Self {
        let unfinished = Unfinished::new(&place, Some(made));
        let (place, path) = (Some(place), path.to_owned());
        Self { unfinished, place, path, replaced, left: None, is_new: true }
    }

    /// The same, in whose place was an image that named the data file `left`.
    pub(super) fn where_was(self, left: Option<OsString>) -> Self {
        Self { left, ..self }
    }

    /// The data file that an image named which a killed process left in its place.
    pub(super) fn left(&self) -> Option<&OsStr> {
        self.left.as_deref()
    }

    /// Whether it is under another name yet.
    pub(super) fn is_aside(&self) -> bool {
        self.place.is_some()
    }

    /// Where the file is now.
    pub(super) fn place(&self) -> &Path {
        self.place.as_deref().unwrap_or(&self.path)
    }

    /// Gives the file, which is complete and durable, its name.
    ///
    /// # Errors
    /// What the system reports, or if something has the name by now.
    pub(super) fn give(&mut self) -> Result<(), Failure> {
        if self.place.is_some() {
            let path = self.path.display();
            let named = match &self.replaced {
                Some(old) => self.unfinished.replace(old.path(), old.node()),
                None => self.unfinished.rename_to(&self.path),
            };
            named.map_err(|error| match error.kind() {
                ErrorKind::AlreadyExists => Failure::new(format!(
                    "{path}: another file was created under this name meanwhile"
                )),
                _ => Failure::from(error).within(path),
            })?;
            self.place = None;
        }
        Ok(())
    }

    /// Makes the name that the file has durable, as far as its folder lets this process do that.
    ///
    /// # Errors
    /// What the system reports.
    pub(super) fn sync(&self) -> Result<(), Failure> {
        if !self.is_new {
            return Ok(());
        }
        let path = self.replaced.as_ref().map_or(&*self.path, Replaced::path);
        sync_name(path)
    }

    /// Keeps the file, which has its name.
    pub(super) fn keep(self) {
        debug_assert!(self.place.is_none(), "what is kept has its name");
        self.unfinished.keep();
    }

    /// Where it is once it has its name.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What has its name until then.
    pub(super) fn replaced(&self) -> Option<&Replaced> {
        self.replaced.as_ref()
    }

    /// Whether the file stays in any case: what it took the place of is gone.
    pub(super) fn stays(&self) -> bool {
        self.unfinished.stays()
    }
}

/// Removes a second name that nobody needs any more: what has it has another one.
pub(super) fn remove_second(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        let path = path.display();
        tracing::warn!(%path, %error, "the second name of a data file stays");
    }
}

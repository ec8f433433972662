//! How the file of a new image is begun: under which name, and what becomes of a file that has that
//! already. A file with content is not overwritten unless the user says so.
//!
//! ```text
//! nothing has the name ─┬▶ under another one                         named when it is complete
//!                       └▶ under its own, if it can have no other
//! a file has it ─▶ locked ─▶ may go ─┬▶ beside it, the same          they change places then
//!                                    └▶ in place, if it is empty or cannot be replaced
//! ```
//!
//! Invariants
//! - I1 An old file is locked before it is looked at, until the new one has its place or it is
//!   overwritten: nobody else writes to it meanwhile.
//! - I2 A file that this process made, and another one locked first, is that one's.

use super::device::is_block_device;
use super::new_file::{NewFile, open, options_of};
use super::new_name::NewName;
use super::replaced::Replaced;
use super::second_name;
use super::sources::Sources;
use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::unfinished::Unfinished;
use mica_block::Store;
use mica_stack::{ImageOptions, MayWrite, has_mark, is_file_at, make_unfinished, unfinished_place};
use mica_store::Locking;
use std::ffi::OsString;
use std::fs::{File, remove_file};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What becomes of a file with content that has the name of a new one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Existing {
    /// It stays: the verb overwrites nothing.
    Stays,
    /// It stays, as the user did not say --force.
    NeedsForce,
    /// The new one takes its place.
    Replaced,
}

impl Existing {
    /// For a verb that has --force.
    pub(crate) fn unless_forced(is_forced: bool) -> Self {
        if is_forced { Self::Replaced } else { Self::NeedsForce }
    }
}

/// A new file that is wished for.
pub(super) struct Wish<'a> {
    pub(super) path: &'a Path,
    pub(super) existing: Existing,
    /// The new image whose data file it will be, if it is one.
    pub(super) image: Option<&'a NewFile>,
    pub(super) sources: &'a Sources,
    pub(super) options: ImageOptions,
}

impl NewFile {
    /// Creates the file at `path`, which is none of `sources`.
    pub(crate) async fn create(
        path: &Path,
        existing: Existing,
        sources: &Sources,
        images: &ImageArgs,
    ) -> Result<Self, Failure> {
        Self::create_with(path, existing, sources, options_of(images)?).await
    }

    /// As [`Self::create`], with other options for opening it.
    pub(crate) async fn create_with(
        path: &Path,
        existing: Existing,
        sources: &Sources,
        options: ImageOptions,
    ) -> Result<Self, Failure> {
        Wish { path, existing, image: None, sources, options }.begin().await
    }

    /// As [`Self::create_with`], for the data file of the new `image`.
    pub(crate) async fn create_data(
        path: &Path,
        (existing, image): (Existing, &Self),
        sources: &Sources,
        options: ImageOptions,
    ) -> Result<Self, Failure> {
        Wish { path, existing, image: Some(image), sources, options }.begin().await
    }
}

impl Wish<'_> {
    /// Begins the file, which is empty and locked then.
    ///
    /// # Errors
    /// If something is there that stays, or that others have; whatever prevents it.
    pub(super) async fn begin(&self) -> Result<NewFile, Failure> {
        self.sources.check(self.path)?;
        if let Some(image) = self.image
            && let Some(stray) = second_name::settle(image, self.path).await?
        {
            image.note_stray(stray);
        }
        self.check_target()?;
        if let Some(new) = self.under_another_name().await? {
            return Ok(new);
        }
        match self.take_name()? {
            Some(made) => self.under_its_name(made).await,
            None => self.where_another_is().await,
        }
    }

    fn check_target(&self) -> Result<(), Failure> {
        if is_block_device(self.path) {
            let what = "is a block device: `mica convert` writes a disk onto one";
            return Err(Failure::new(format!("{} {what}", self.path.display())));
        }
        if let Ok(target) = std::fs::read_link(self.path)
            && self.path.metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound)
        {
            let (link, target) = (self.path.display(), target.display());
            let what = "which is not there: remove the link, or name the file itself";
            return Err(Failure::new(format!("{link} is a symbolic link to {target}, {what}")));
        }
        Ok(())
    }

    /// Begins it under another name, if nothing has its own, and it can have another.
    async fn under_another_name(&self) -> Result<Option<NewFile>, Failure> {
        let is_new = self.path.symlink_metadata().is_err() && !has_mark(self.path);
        if !is_new || !self.has_locks() {
            return Ok(None);
        }
        self.refuse_place(unfinished_place(self.path))?;
        match make_unfinished(self.path, 0o666)? {
            Some(made) => self.open_made(made, None).await.map(Some),
            None => Ok(None),
        }
    }

    /// Makes a file that has its name; `None` if another one has it.
    fn take_name(&self) -> Result<Option<File>, Failure> {
        match File::create_new(self.path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(Failure::new(format!("creating {}: {error}", self.path.display()))),
        }
    }

    /// Begins it in the file that was just `made` under its own name.
    async fn under_its_name(&self, made: File) -> Result<NewFile, Failure> {
        let store = match open(self.path, self.options.clone(), MayWrite::new_file()).await {
            Ok(store) => store,
            Err(failure) => {
                if has_mark(self.path) {
                    // An image of this name is gone, and its mark is not.
                    drop(Unfinished::new(self.path, Some(made)));
                }
                return Err(failure);
            }
        };
        self.check_content(&*store)?;
        self.emptied(store, Some(made)).await
    }

    /// Begins it where another file is, which may go.
    async fn where_another_is(&self) -> Result<NewFile, Failure> {
        let may_write = MayWrite::check(self.path, &self.options).await?;
        let old = open(self.path, self.options.clone(), may_write).await?;
        self.check_content(&*old)?;
        if let Some(new) = self.beside(&old).await? {
            return Ok(new);
        }
        if let Some(image) = self.image {
            // For good: the data that it had is gone.
            image.spoil_old(self.path).await?;
        }
        if old.len()? > 0 {
            let path = self.path.display();
            tracing::warn!(
                "{path}: no other file can take its place: its old content is overwritten, and is \
                 lost if the new one cannot be completed"
            );
        }
        self.emptied(old, None).await
    }

    /// Begins it beside the `old` file, if it can take the place of that.
    async fn beside(&self, old: &Arc<dyn Store>) -> Result<Option<NewFile>, Failure> {
        if !self.has_locks() {
            return Ok(None);
        }
        let Some(old) = Replaced::of(self.path, old)? else { return Ok(None) };
        self.refuse_place(old.place())?;
        let left = old.place().and_then(|place| second_name::data_name_in(&place));
        let Some((place, file)) = make_unfinished(old.path(), 0o600)? else { return Ok(None) };
        if !old.describe(&file) {
            remove_own(&place, &file);
            return Ok(None);
        }
        self.open_made((place, file), Some((old, left))).await.map(Some)
    }

    /// Opens the `file` that was made at `place`, and locks it. It takes the place of a file, and
    /// is where an image with a data file of this name had been left.
    async fn open_made(
        &self,
        (place, file): (PathBuf, File),
        replaced: Option<(Replaced, Option<OsString>)>,
    ) -> Result<NewFile, Failure> {
        let opened = open(&place, self.options.clone(), MayWrite::new_file()).await;
        // Before it was locked another process may have taken it for left.
        let is_own = is_file_at(&place, &file);
        match opened {
            Ok(store) if is_own => {
                let (replaced, left) = replaced.unzip();
                let name = NewName::to_give(self.path, place, file, replaced);
                Ok(NewFile::of(name.where_was(left.flatten()), store))
            }
            Ok(_) => {
                let what = format!("another process is making {}", self.path.display());
                Err(Failure::new(what))
            }
            Err(failure) => {
                remove_own(&place, &file);
                Err(failure)
            }
        }
    }

    /// Empties the file that has its name, which this process has `made` or may overwrite.
    async fn emptied(&self, store: Arc<dyn Store>, made: Option<File>) -> Result<NewFile, Failure> {
        let name = NewName::had(self.path, made);
        store.set_len(0).await.map_err(|error| error.wrap(self.path.display().to_string()))?;
        Ok(NewFile::of(name, store))
    }

    /// Whether others see that it is being made: without locks nobody knows what was left.
    fn has_locks(&self) -> bool {
        !matches!(self.options.locking, Locking::Off)
    }

    /// Refuses a file with content that is to stay. It is locked.
    fn check_content(&self, store: &dyn Store) -> Result<(), Failure> {
        let cure = match self.existing {
            Existing::Replaced => return Ok(()),
            Existing::Stays => "choose another name",
            Existing::NeedsForce => "--force overwrites it",
        };
        if store.len()? == 0 {
            return Ok(());
        }
        let path = self.path.display();
        Err(Failure::new(format!("{path} exists and is not empty: {cure}")))
    }

    /// Refuses to make it where another file of its own is.
    fn refuse_place(&self, place: Option<PathBuf>) -> Result<(), Failure> {
        if place.is_none_or(|place| !self.sources.has(&place)) {
            return Ok(());
        }
        let what = "is the new image itself: give its data file another name";
        Err(Failure::new(format!("{} {what}", self.path.display())))
    }
}

/// Removes the `file` at `place`, which this process has made, and may have given away.
fn remove_own(place: &Path, file: &File) {
    if is_file_at(place, file) {
        // What is left is taken for that of a killed process.
        let _ = remove_file(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn begun(path: &Path, existing: Existing) -> Result<NewFile, Failure> {
        let images = ImageArgs::default();
        let executor = images.executor().expect("an executor");
        executor.block_on(NewFile::create(path, existing, &Sources::default(), &images))
    }

    #[test]
    fn file_is_begun_where_a_kill_leaves_nothing_under_its_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.qcow2");
        let new = begun(&path, Existing::Stays).expect("nothing is there");
        assert!(new.place() != path && new.place().exists() && !path.exists());
        let twice = begun(&path, Existing::Replaced).err().expect("it is being made");
        assert!(twice.message().contains("another process"), "{twice:?}");
        drop(new);
        assert_eq!(fs::read_dir(folder.path()).expect("read").count(), 0);

        // No other name is as long as that of the image may be.
        let long = folder.path().join("x".repeat(255));
        let new = begun(&long, Existing::Stays).expect("nothing is there");
        assert_eq!(new.place(), long);
        drop(new);
        assert_eq!(fs::read_dir(folder.path()).expect("read").count(), 0);
    }

    #[test]
    fn old_file_stays_until_the_new_one_has_its_name_and_an_empty_one_is_used() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.qcow2");
        fs::write(&path, "precious").expect("written");
        for (existing, cure) in
            [(Existing::Stays, "choose another name"), (Existing::NeedsForce, "--force overwrites")]
        {
            let refused = begun(&path, existing).err().expect("it has content");
            assert!(refused.message().contains(cure), "{refused:?}");
        }
        let new = begun(&path, Existing::Replaced).expect("it may go");
        assert_ne!(new.place(), path);
        drop(new);
        assert_eq!(fs::read(&path).expect("it is there"), b"precious");

        let empty = folder.path().join("empty");
        fs::write(&empty, "").expect("written");
        let new = begun(&empty, Existing::Stays).expect("it has no content");
        assert_eq!(new.place(), empty);
        drop(new);
        assert!(empty.exists(), "it is not ours to remove");
    }
}

//! A file that a verb creates, from when it is begun (`begin.rs`) until it is kept: an unfinished
//! one is removed.
//!
//! ```text
//! begun, locked ─▶ complete ─▶ expected ─▶ named, durably ─▶ announced ─▶ kept
//! ```
//!
//! Naming it is where it takes the place of an old file, which is removed when it is kept.

use super::device::{Device, zero};
use super::new_name::{NewName, remove_second};
use super::replaced::Replaced;
use super::sources::Sources;
use super::spoiled::Spoiled;
use super::{beside, node_at};
use crate::failure::Failure;
use crate::images::ImageArgs;
use mica_block::{Images, Store, wait_for_dead};
use mica_qcow2::read_header;
use mica_stack::{FileImages, ImageOptions, MayWrite};
use mica_store::CacheMode;
use mica_units::SECTOR_BYTES;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A new, empty file. It is removed on drop unless it is kept.
pub(crate) struct NewFile {
    // Removed before it is closed: whoever finds it unlocked takes it for left.
    name: NewName,
    store: Arc<dyn Store>,
    /// A second name of a data file, which only the image needs that this one replaces.
    stray: OnceLock<PathBuf>,
}

impl NewFile {
    /// The file that gets this name, and is opened and locked.
    pub(super) fn of(name: NewName, store: Arc<dyn Store>) -> Self {
        Self { name, store, stray: OnceLock::new() }
    }

    /// A device, which is to be an image of at most `most` bytes: what they held is zeros from now
    /// on, first of all what made it an image. A device is none if the copy fails.
    pub(crate) async fn on_device(
        device: &Device,
        sources: &Sources,
        options: ImageOptions,
        most: u64,
    ) -> Result<Self, Failure> {
        let path = device.path();
        sources.check(path)?;
        let may_write = MayWrite::check(path, &options).await?;
        let store = open(path, options, may_write).await?;
        let name = NewName::had(path, None);
        let zeroed = zero(&*store, most.min(store.len()?)).await;
        zeroed.map_err(|error| error.wrap(path.display().to_string()))?;
        Ok(Self::of(name, store))
    }

    /// The `failure` that followed when the file was complete. A device is no image after that: a
    /// file is removed.
    pub(crate) async fn given_up(&self, failure: Failure) -> Failure {
        match self.device() {
            Some(device) => device.given_up(failure).await,
            None => failure,
        }
    }

    /// The device that it is, if it is one: no file whose end undoes anything.
    pub(super) fn device(&self) -> Option<NewOnDevice> {
        let is_device = self.store.identity().is_device();
        is_device.then(|| NewOnDevice(Arc::clone(&self.store)))
    }

    /// Whether the image that this one replaces would lose its data file if that at `data` became
    /// another one.
    pub(crate) async fn takes_data_of_old(&self, data: &Path) -> bool {
        let Some(old) = self.name.replaced() else { return false };
        let header = read_header(&**old.store()).await;
        header.is_ok_and(|header| header.incompatible.external_data_file)
            && !self.has_other_data(old, data).await
    }

    /// The file that this one replaces.
    pub(super) fn replaced_store(&self) -> Option<&Arc<dyn Store>> {
        self.name.replaced().map(Replaced::store)
    }

    /// The data file that an image named which a killed process left where this one is made.
    pub(super) fn left(&self) -> Option<&OsStr> {
        self.name.left()
    }

    /// Where it really is once it has its name.
    pub(super) fn real_path(&self) -> &Path {
        self.name.replaced().map_or(self.path(), Replaced::path)
    }

    /// Whether it has a name of its own until it is complete.
    pub(super) fn is_made_aside(&self) -> bool {
        self.name.is_aside()
    }

    /// Whether it stays in any case: what it took the place of is gone.
    pub(super) fn stays(&self) -> bool {
        self.name.stays()
    }

    /// Notes that only the image which this one replaces needs the second name of a data file at
    /// `stray`.
    pub(super) fn note_stray(&self, stray: PathBuf) {
        // One that is there already is the same.
        let _ = self.stray.set(stray);
    }

    /// Makes the image that this one replaces none, if the file at `data`, which is about to be
    /// another one, is, or may be, its data file.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) async fn spoil_old(&self, data: &Path) -> Result<Option<Spoiled>, Failure> {
        match self.name.replaced() {
            Some(old) if !self.has_other_data(old, data).await => {
                Ok(Spoiled::new(old.store()).await?)
            }
            _ => Ok(None),
        }
    }

    /// Whether the `old` image has a data file that is there, and is not the one at `data`.
    async fn has_other_data(&self, old: &Replaced, data: &Path) -> bool {
        let header = read_header(&**old.store()).await.ok();
        let Some(name) = header.and_then(|header| header.data_file_name) else { return false };
        // An image that a link leads to may be opened by either name.
        let places = [self.path(), old.path()].map(|image| beside(image, Path::new(&name)));
        let (there, own) = (node_at(data), places.map(|place| node_at(&place)));
        own.iter().any(Option::is_some) && !own.contains(&there)
    }

    /// Where the file is now.
    pub(crate) fn place(&self) -> &Path {
        self.name.place()
    }

    /// Where it is once it has its name.
    pub(crate) fn path(&self) -> &Path {
        self.name.path()
    }

    /// Gives the file, which is complete and durable, its name.
    ///
    /// # Errors
    /// What the system reports, or if something has the name by now.
    pub(crate) fn name(&mut self) -> Result<(), Failure> {
        self.name.give()
    }

    /// Makes its name durable.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn sync_name(&self) -> Result<(), Failure> {
        self.name.sync()
    }

    /// Gives the file, which is complete and durable, its name, durably. It is passed on.
    ///
    /// # Errors
    /// As [`Self::name`] and [`Self::sync_name`].
    pub(crate) fn named(mut self) -> Result<Self, Failure> {
        match self.name().and_then(|()| self.sync_name()) {
            Ok(()) => Ok(self),
            Err(failure) => Err(self.say_if_it_stays(failure)),
        }
    }

    /// The same failure, with that the new file stays, if it does.
    pub(crate) fn say_if_it_stays(&self, failure: Failure) -> Failure {
        if !self.stays() {
            return failure;
        }
        let path = self.path().display();
        failure.and(format!(
            "{path} is the new file all the same: its file system could not keep the old one"
        ))
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Keeps the file, which has its name.
    pub(crate) fn keep(self) {
        // Before the image that needs it.
        self.stray.get().into_iter().for_each(|stray| remove_second(stray));
        self.name.keep();
    }
}

/// An image on a device that is not kept yet.
pub(super) struct NewOnDevice(Arc<dyn Store>);

impl NewOnDevice {
    /// Undoes the image, which is not kept because of this `failure`: the device has none then.
    pub(super) async fn given_up(self, failure: Failure) -> Failure {
        let Self(store) = self;
        match zero(&*store, SECTOR_BYTES).await {
            Ok(()) => failure,
            Err(error) => failure.and(format!("the device has an unfinished image: {error}")),
        }
    }
}

/// Opens the file at `path` for writing, through the page cache.
pub(crate) async fn open_writable(
    path: &Path,
    images: &ImageArgs,
) -> Result<Arc<dyn Store>, Failure> {
    let options = options_of(images)?;
    let may_write = MayWrite::check(path, &options).await?;
    open(path, options, may_write).await
}

/// Options for opening files for writing, through the page cache.
pub(crate) fn options_of(images: &ImageArgs) -> Result<ImageOptions, Failure> {
    Ok(ImageOptions { cache: CacheMode::Writeback, ..images.image_options()? })
}

pub(super) async fn open(
    path: &Path,
    options: ImageOptions,
    may_write: MayWrite,
) -> Result<Arc<dyn Store>, Failure> {
    let images = FileImages::to_write(path, options, may_write)?;
    Ok(wait_for_dead(async || images.open_writable(path)).await?.store)
}

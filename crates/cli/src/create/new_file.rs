//! A file that a verb creates: an existing one is not overwritten without --force, and an
//! unfinished one is removed.
//!
//! ```text
//! nothing has the name ─▶ made under another one, locked ─▶ complete ─▶ expected
//!   ─▶ named, durably ─▶ announced ─▶ kept
//! a file has it, and --force ─▶ made beside it, the same ─▶ complete ─▶ they change places,
//!   durably ─▶ announced ─▶ kept: the old one is removed
//! an empty one has it, or one that cannot be replaced ─▶ overwritten there (`replaced.rs`)
//! ```

use super::device::{Device, is_block_device};
use super::replaced::Replaced;
use super::sources::Sources;
use super::spoiled::Spoiled;
use super::{beside, node_at, second_name};
use crate::failure::Failure;
use crate::images::ImageArgs;
use crate::unfinished::{Unfinished, sync_name};
use mica_block::{Images, Space, Store, write_all};
use mica_qcow2::read_header;
use mica_rt::Buf;
use mica_stack::{
    FileImages, ImageOptions, MayWrite, has_mark, is_file_at, make_unfinished, unfinished_place,
    wait_for_dead,
};
use mica_store::{CacheMode, Locking};
use mica_units::HostOffset;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions, remove_file};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// A new, empty file. It is removed on drop unless it is kept.
pub(crate) struct NewFile {
    // Removed before it is closed: whoever finds it unlocked takes it for left.
    unfinished: NewName,
    store: Arc<dyn Store>,
    /// A second name of a data file, which only the image needs that this one replaces.
    stray: OnceLock<PathBuf>,
}

/// What a file is that a verb makes, until it is opened.
struct Made {
    place: PathBuf,
    file: File,
    replaced: Option<Replaced>,
    left: Option<OsString>,
}

/// A file that is not complete, and the name that it gets.
struct NewName {
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
    fn new((path, place): (&Path, Option<PathBuf>), made: Option<File>) -> Self {
        let is_new = made.is_some();
        let unfinished = Unfinished::new(place.as_deref().unwrap_or(path), made);
        Self { unfinished, place, path: path.to_owned(), replaced: None, left: None, is_new }
    }

    /// Where the file is now.
    fn place(&self) -> &Path {
        self.place.as_deref().unwrap_or(&self.path)
    }

    /// Gives the file, which is complete and durable, its name.
    ///
    /// # Errors
    /// What the system reports, or if something has the name by now.
    fn give(&mut self) -> Result<(), Failure> {
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
    fn sync(&self) -> Result<(), Failure> {
        if !self.is_new {
            return Ok(());
        }
        let path = self.replaced.as_ref().map_or(&*self.path, Replaced::path);
        sync_name(path)
    }

    /// Keeps the file, which has its name.
    fn keep(self) {
        debug_assert!(self.place.is_none(), "what is kept has its name");
        self.unfinished.keep();
    }
}

impl NewFile {
    /// Creates the file at `path`, or replaces it if `force` permits and it is none of `sources`.
    /// `None` is that of a verb that has no `--force`.
    pub(crate) async fn create(
        path: &Path,
        force: Option<bool>,
        sources: &Sources,
        images: &ImageArgs,
    ) -> Result<Self, Failure> {
        Self::create_with(path, force, sources, options_of(images)?).await
    }

    /// As [`Self::create`], with other options for opening it.
    pub(crate) async fn create_with(
        path: &Path,
        force: Option<bool>,
        sources: &Sources,
        options: ImageOptions,
    ) -> Result<Self, Failure> {
        Self::create_for(path, (force, None), sources, options).await
    }

    /// As [`Self::create_with`], for the data file of the new `image`.
    pub(crate) async fn create_data(
        path: &Path,
        (force, image): (bool, &Self),
        sources: &Sources,
        options: ImageOptions,
    ) -> Result<Self, Failure> {
        Self::create_for(path, (Some(force), Some(image)), sources, options).await
    }

    async fn create_for(
        path: &Path,
        (force, image): (Option<bool>, Option<&Self>),
        sources: &Sources,
        options: ImageOptions,
    ) -> Result<Self, Failure> {
        sources.check(path)?;
        if let Some(image) = image
            && let Some(stray) = second_name::settle(image, path).await?
        {
            // One that is there already is the same.
            let _ = image.stray.set(stray);
        }
        if is_block_device(path) {
            let what = "is a block device: `mica convert` writes a disk onto one";
            return Err(Failure::new(format!("{} {what}", path.display())));
        }
        if let Some(new) = Self::make(path, sources, &options).await? {
            return Ok(new);
        }
        let made = match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(file) => Some(file),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => None,
            Err(error) => {
                return Err(Failure::new(format!("creating {}: {error}", path.display())));
            }
        };
        let may_write = match made {
            Some(_) => MayWrite::new_file(),
            None => MayWrite::check(path, &options).await?,
        };
        // If another process has locked it meanwhile, the file is that one's, whoever made it.
        let store = match open(path, options.clone(), may_write).await {
            Err(failure) if made.is_some() && has_mark(path) => {
                // An image of this name is gone, and its mark is not.
                drop(Unfinished::new(path, made));
                return Err(failure);
            }
            opened => opened?,
        };
        // Checked under the lock, so that nobody else writes to it meanwhile.
        if force != Some(true) && store.len()? > 0 {
            let cure = force.map_or("choose another name", |_| "--force overwrites it");
            let what = format!("{} exists and is not empty: {cure}", path.display());
            return Err(Failure::new(what));
        }
        if made.is_none()
            && let Some(new) = Self::make_beside(path, &store, (sources, &options)).await?
        {
            return Ok(new);
        }
        if made.is_none()
            && let Some(image) = image
        {
            // For good: the data that it had is gone.
            image.spoil_old(path).await?;
        }
        let unfinished = NewName::new((path, None), made);
        store.set_len(0).await.map_err(|error| error.wrap(path.display().to_string()))?;
        Ok(Self::of(unfinished, store))
    }

    fn of(unfinished: NewName, store: Arc<dyn Store>) -> Self {
        Self { unfinished, store, stray: OnceLock::new() }
    }

    /// As [`Self::create_for`], for a `path` at which nothing is, under another name, if it can
    /// have one.
    async fn make(
        path: &Path,
        sources: &Sources,
        options: &ImageOptions,
    ) -> Result<Option<Self>, Failure> {
        // Without locks nobody knows what was left.
        let is_new = path.symlink_metadata().is_err() && !has_mark(path);
        if !is_new || matches!(options.locking, Locking::Off) {
            return Ok(None);
        }
        refuse_place(unfinished_place(path), path, sources)?;
        let Some((place, file)) = make_unfinished(path, 0o666)? else { return Ok(None) };
        let made = Made { place, file, replaced: None, left: None };
        Self::open_made(path, made, options).await.map(Some)
    }

    /// As [`Self::make`], beside the file at `path`, which `old` has locked, if the new one can
    /// take its place.
    async fn make_beside(
        path: &Path,
        old: &Arc<dyn Store>,
        (sources, options): (&Sources, &ImageOptions),
    ) -> Result<Option<Self>, Failure> {
        if matches!(options.locking, Locking::Off) {
            return Ok(None);
        }
        let Some(old) = Replaced::of(path, old)? else { return Ok(None) };
        refuse_place(old.place(), path, sources)?;
        let left = old.place().and_then(|place| second_name::data_name_in(&place));
        let Some((place, file)) = make_unfinished(old.path(), 0o600)? else { return Ok(None) };
        if !old.describe(&file) {
            remove_own(&place, &file);
            return Ok(None);
        }
        let made = Made { place, file, replaced: Some(old), left };
        Self::open_made(path, made, options).await.map(Some)
    }

    /// Opens the file that was `made` for the image at `path`, and locks it.
    async fn open_made(path: &Path, made: Made, options: &ImageOptions) -> Result<Self, Failure> {
        let Made { place, file, replaced, left } = made;
        let opened = open(&place, options.clone(), MayWrite::new_file()).await;
        // Before it was locked another process may have taken it for left.
        let is_own = is_file_at(&place, &file);
        match opened {
            Ok(store) if is_own => {
                let mut unfinished = NewName::new((path, Some(place)), Some(file));
                (unfinished.replaced, unfinished.left) = (replaced, left);
                Ok(Self::of(unfinished, store))
            }
            Ok(_) => {
                let what = format!("another process is making {}", path.display());
                Err(Failure::new(what))
            }
            Err(failure) => {
                remove_own(&place, &file);
                Err(failure)
            }
        }
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
        let unfinished = NewName::new((path, None), None);
        let zeroed = zero(&*store, most.min(store.len()?)).await;
        zeroed.map_err(|error| error.wrap(path.display().to_string()))?;
        Ok(Self::of(unfinished, store))
    }

    /// Whether the image that this one replaces would lose its data file if that at `data` became
    /// another one.
    pub(crate) async fn takes_data_of_old(&self, data: &Path) -> bool {
        let Some(old) = &self.unfinished.replaced else { return false };
        let header = read_header(&**old.store()).await;
        header.is_ok_and(|header| header.incompatible.external_data_file)
            && !self.has_other_data(old, data).await
    }

    /// The file that this one replaces.
    pub(super) fn replaced_store(&self) -> Option<&Arc<dyn Store>> {
        self.unfinished.replaced.as_ref().map(Replaced::store)
    }

    /// The data file that an image named which a killed process left where this one is made.
    pub(super) fn left(&self) -> Option<&OsStr> {
        self.unfinished.left.as_deref()
    }

    /// Where it really is once it has its name.
    pub(super) fn real_path(&self) -> &Path {
        self.unfinished.replaced.as_ref().map_or(self.path(), Replaced::path)
    }

    /// Whether it has a name of its own until it is complete.
    pub(super) fn is_made_aside(&self) -> bool {
        self.unfinished.place.is_some()
    }

    /// Whether it stays in any case: what it took the place of is gone.
    pub(super) fn stays(&self) -> bool {
        self.unfinished.unfinished.stays()
    }

    /// Makes the image that this one replaces none, if the file at `data`, which is about to be
    /// another one, is, or may be, its data file.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) async fn spoil_old(&self, data: &Path) -> Result<Option<Spoiled>, Failure> {
        match &self.unfinished.replaced {
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
        self.unfinished.place()
    }

    /// Where it is once it has its name.
    pub(crate) fn path(&self) -> &Path {
        &self.unfinished.path
    }

    /// Gives the file, which is complete and durable, its name.
    ///
    /// # Errors
    /// What the system reports, or if something has the name by now.
    pub(crate) fn name(&mut self) -> Result<(), Failure> {
        self.unfinished.give()
    }

    /// Makes its name durable.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn sync_name(&self) -> Result<(), Failure> {
        self.unfinished.sync()
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
        self.stray.get().into_iter().for_each(|stray| second_name::remove_second(stray));
        self.unfinished.keep();
    }
}

/// Removes the `file` at `place`, which this process has made, and may have given away.
fn remove_own(place: &Path, file: &File) {
    if is_file_at(place, file) {
        // What is left is taken for that of a killed process.
        let _ = remove_file(place);
    }
}

/// Refuses to make the image at `path` where another file of its own is.
fn refuse_place(place: Option<PathBuf>, path: &Path, sources: &Sources) -> Result<(), Failure> {
    if place.is_none_or(|place| !sources.has(&place)) {
        return Ok(());
    }
    let what = "is the new image itself: give its data file another name";
    Err(Failure::new(format!("{} {what}", path.display())))
}

/// Makes the first `len` bytes of a device read as zeros, durably.
async fn zero(device: &dyn Store, len: u64) -> mica_block::Result<()> {
    let mut at = 0;
    while at < len {
        let piece = ZEROED_BYTES_MAX.min(len - at);
        if device.space(Space::Zero, HostOffset::new(at), piece).await.is_err() {
            return write_zeros(device, at, len).await;
        }
        at += piece;
    }
    device.sync().await
}

/// As [`zero`], for a device that only takes them as data.
async fn write_zeros(device: &dyn Store, mut at: u64, len: u64) -> mica_block::Result<()> {
    while at < len {
        let piece = (len - at).min(WRITTEN_BYTES as u64);
        let zeros = Buf::zeroed(usize::try_from(piece).unwrap_or(WRITTEN_BYTES));
        write_all(device, zeros, HostOffset::new(at)).await?;
        at += piece;
    }
    device.sync().await
}

/// Bytes that a device zeroes at a time: it may take long over them.
const ZEROED_BYTES_MAX: u64 = 1 << 30;
/// Bytes of zeros that are written at a time.
const WRITTEN_BYTES: usize = 1 << 20;

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

async fn open(
    path: &Path,
    options: ImageOptions,
    may_write: MayWrite,
) -> Result<Arc<dyn Store>, Failure> {
    let images = FileImages::to_write(path, options, may_write)?;
    Ok(wait_for_dead(async || images.open_writable(path)).await?.store)
}

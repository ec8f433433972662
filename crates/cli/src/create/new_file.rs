//! A file that a verb creates: an existing one is not overwritten without --force, and an
//! unfinished one is removed.

use super::sources::Sources;
use crate::failure::Failure;
use crate::images::ImageArgs;
use mica_block::{Images, Store};
use mica_stack::{FileImages, ImageOptions, wait_for_dead};
use mica_store::CacheMode;
use std::fs::{OpenOptions, remove_file};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A new, empty file. It is removed on drop unless it is kept.
pub(crate) struct NewFile {
    path: PathBuf,
    store: Arc<dyn Store>,
    /// Whether this process created the file.
    made: bool,
    keep: bool,
}

impl NewFile {
    /// Creates the file at `path`, or truncates it if `force` permits and it is none of `sources`.
    pub(crate) async fn create(
        path: &Path,
        force: bool,
        sources: &Sources,
        images: &ImageArgs,
    ) -> Result<Self, Failure> {
        sources.check(path)?;
        let options = options_of(images)?;
        let made = match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            Err(error) => {
                return Err(Failure::new(format!("creating {}: {error}", path.display())));
            }
        };
        // If another process has locked it meanwhile, the file is that one's, whoever made it.
        let store = open(path, options).await?;
        let mut file = Self { path: path.to_owned(), store, made, keep: true };
        // Checked under the lock, so that nobody else writes to it meanwhile.
        if !force && file.store.len()? > 0 {
            let what = format!("{} exists and is not empty: --force overwrites it", path.display());
            return Err(Failure::new(what));
        }
        file.keep = false;
        file.store.set_len(0).await.map_err(|error| error.wrap(path.display().to_string()))?;
        Ok(file)
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Keeps the file: it is complete.
    pub(crate) fn keep(mut self) {
        self.keep = true;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        // The error is already reported, and what is left is not an image.
        let _ = match self.made {
            true => remove_file(&self.path),
            false => OpenOptions::new().write(true).truncate(true).open(&self.path).map(drop),
        };
    }
}

/// Opens the file at `path` for writing, through the page cache.
pub(crate) async fn open_writable(
    path: &Path,
    images: &ImageArgs,
) -> Result<Arc<dyn Store>, Failure> {
    open(path, options_of(images)?).await
}

fn options_of(images: &ImageArgs) -> Result<ImageOptions, Failure> {
    Ok(ImageOptions { cache: CacheMode::Writeback, ..images.image_options()? })
}

async fn open(path: &Path, options: ImageOptions) -> Result<Arc<dyn Store>, Failure> {
    let images = FileImages::new(path, options)?;
    Ok(wait_for_dead(async || images.open_writable(path)).await?.store)
}

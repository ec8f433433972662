//! A file that a verb makes: what was there is not overwritten unasked, and what was not finished
//! does not stay.

use crate::failure::Failure;
use crate::images::ImageArgs;
use mica_block::{Images, Store};
use mica_stack::FileImages;
use mica_store::CacheMode;
use std::fs::{OpenOptions, remove_file};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A new, empty file. Unless it is kept, it goes when this is dropped.
pub(crate) struct NewFile {
    path: PathBuf,
    store: Arc<dyn Store>,
    /// Whether there was no file of this name.
    made: bool,
    keep: bool,
}

impl NewFile {
    /// Makes the file at `path`, or empties it where `force` allows that.
    pub(crate) async fn create(
        path: &Path,
        force: bool,
        images: &ImageArgs,
    ) -> Result<Self, Failure> {
        let made = match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            Err(error) => {
                return Err(Failure::new(format!("creating {}: {error}", path.display())));
            }
        };
        let opened = open_writable(path, images);
        let mut file = match opened {
            Ok(store) => Self { path: path.to_owned(), store, made, keep: true },
            Err(failure) => {
                if made {
                    // The failure that brought us here says more than one of this would.
                    let _ = remove_file(path);
                }
                return Err(failure);
            }
        };
        // Looked at behind the lock, so that nobody else writes to it meanwhile.
        if !made && !force && file.store.len()? > 0 {
            let what = format!("{} is there and not empty: --force overwrites it", path.display());
            return Err(Failure::new(what));
        }
        file.keep = false;
        file.store.set_len(0).await.map_err(|error| error.wrap(path.display().to_string()))?;
        Ok(file)
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// It is finished.
    pub(crate) fn keep(mut self) {
        self.keep = true;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        // An error has been told already, and what is left is no image.
        let _ = match self.made {
            true => remove_file(&self.path),
            false => OpenOptions::new().write(true).truncate(true).open(&self.path).map(drop),
        };
    }
}

/// Opens the file at `path` for writing, through the page cache.
pub(crate) fn open_writable(path: &Path, images: &ImageArgs) -> Result<Arc<dyn Store>, Failure> {
    let mut options = images.image_options()?;
    options.cache = CacheMode::Writeback;
    Ok(FileImages::new(path, options)?.open_writable(path)?.store)
}

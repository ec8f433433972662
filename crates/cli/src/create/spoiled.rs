//! An old image that is no image any more, because its data file is about to be another one.
//!
//! The two files of an image cannot be replaced in one step. Between the two the old image would
//! show what the new data file has at the old places. Where the new data file can have a second
//! name (`second_name.rs`) the old image need not be spoiled.

use mica_block::{Result, Store, read_exact, write_all};
use mica_qcow2_format::{MAGIC, field};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// Where the number of the version is.
const VERSION: usize = 4;
/// A version that nobody reads: whoever opens the image is told.
const NO_VERSION: [u8; 4] = [0xff; 4];
/// The lowest bits of the word of incompatible features, and which of them says that the image has
/// a data file.
const FEATURES: usize = field::INCOMPATIBLE + 7;
const DATA_FILE: u8 = 1 << 2;

/// An image that has another version than it says.
pub(crate) struct Spoiled {
    store: Arc<dyn Store>,
    version: Buf,
}

impl Spoiled {
    /// Makes what `store` holds, which is locked, no image, durably; `None` if it is none that has
    /// a data file.
    ///
    /// # Errors
    /// What the system reports.
    pub(super) async fn new(store: &Arc<dyn Store>) -> Result<Option<Self>> {
        let start = read_exact(&**store, HostOffset::ZERO, FEATURES + 1).await?;
        let has_version_2 = start[VERSION..VERSION + 4] <= [0, 0, 0, 2][..];
        if !start.starts_with(&MAGIC) || has_version_2 || start[FEATURES] & DATA_FILE == 0 {
            return Ok(None);
        }
        let version = Buf::from_slice(&start[VERSION..VERSION + 4]);
        put_version(&**store, Buf::from_slice(&NO_VERSION)).await?;
        Ok(Some(Self { store: Arc::clone(store), version }))
    }

    /// Makes it the image again that it was: it has the data file that it had.
    pub(super) async fn mend(self) {
        let Self { store, version } = self;
        if let Err(error) = put_version(&*store, version).await {
            let file = store.name();
            tracing::warn!(%file, %error, "the old image is there still, but cannot be opened");
        }
    }
}

async fn put_version(store: &dyn Store, version: Buf) -> Result<()> {
    write_all(store, version, HostOffset::new(VERSION as u64)).await?;
    store.sync().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_store::{CacheMode, Handles, Located, Locking, WritableFile};
    use std::fs;

    #[test]
    fn only_an_image_with_a_data_file_is_none_for_a_while() {
        let mut image = vec![0; 512];
        image[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        image[FEATURES] = DATA_FILE;
        let (mut alone, mut older, mut raw) = (image.clone(), image.clone(), image.clone());
        alone[FEATURES] = 1;
        older[7] = 2;
        raw[0] = 0;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("image");
        let executor = mica_rt::Executor::new(mica_rt::Backend::Pool).expect("made");
        for (bytes, is_spoiled) in [(&image, true), (&alone, false), (&older, false), (&raw, false)]
        {
            fs::write(&path, bytes).expect("written");
            let mut located = Located::find(&path).expect("there");
            let (cache, handles) = (CacheMode::Writeback, Handles::new(4));
            let store = WritableFile::open(&mut located, cache, Locking::On, &handles);
            let store: Arc<dyn Store> = Arc::new(store.expect("opened"));
            let spoiled = executor.block_on(Spoiled::new(&store)).expect("tried");
            assert_eq!(spoiled.is_some(), is_spoiled);
            assert_eq!(fs::read(&path).expect("there") != *bytes, is_spoiled);
            if let Some(spoiled) = spoiled {
                executor.block_on(spoiled.mend());
            }
            assert_eq!(fs::read(&path).expect("there"), *bytes);
        }
    }
}

//! A longer disk together with other changes of the header.
//!
//! ```text
//! what can be refused is refused ─▶ room for the longer disk ─▶ the other changes ─▶ the new size
//! ```
//!
//! Invariant
//! - I5 What a file system is most likely to refuse is done before the first change that shows, and
//!   taken back if a later one fails. Should the new size fail after the other changes all the
//!   same, the error says so.

use super::data::DataFile;
use super::{ResizedBitmaps, Resizer};
use crate::amend::{Amender, Amendment};
use crate::recover::open_for_change;
use mica_block::{Error, ErrorKind, Images, Result};
use mica_qcow2::check_resizable;
use mica_qcow2_format::Header;
use std::path::Path;
use std::sync::Arc;

impl Resizer {
    /// As [`Self::open`], for an image that is to be amended as `wanted`, too.
    ///
    /// # Errors
    /// As [`Self::open`], and if the image cannot be what is wanted.
    pub async fn open_to_amend(
        images: Arc<dyn Images>,
        path: &Path,
        wanted: &Amendment,
    ) -> Result<Self> {
        let (image, header) = open_for_change(&*images, path).await?;
        let step = async {
            let next = wanted.applied_to(&header)?;
            check_resizable(&next)?;
            // Behind a raw disk there may be what is not ours, as long as it is said to be one.
            let named = Header { data_file_name: next.data_file_name, ..header.clone() };
            DataFile::open(&*images, path, &named)
        };
        let data = step.await.map_err(|error: Error| error.wrap(path.display().to_string()))?;
        Ok(Self { images, path: path.to_owned(), image, header, data })
    }

    /// Makes all changes that are `wanted`, and the disk `size` bytes long, a multiple of a sector
    /// and not less than it is. Returns the header.
    ///
    /// # Errors
    /// As [`amend`] and [`Self::resize`]. The disk has its old length, and unless the error says
    /// something else, the other changes were not made either.
    ///
    /// [`amend`]: crate::amend::amend
    pub async fn resize_amended(&mut self, size: u64, wanted: &Amendment) -> Result<Header> {
        let step = self.try_resize_amended(size, wanted).await;
        step.map_err(|error| error.wrap(self.path.display().to_string()))
    }

    async fn try_resize_amended(&mut self, size: u64, wanted: &Amendment) -> Result<Header> {
        let old = self.disk_bytes();
        if size < old {
            return Err(Error::new(ErrorKind::Invalid, "the disk is longer"));
        }
        let next = wanted.applied_to(&self.header)?;
        if size > old {
            next.l1_entries_for(size)?;
            ResizedBitmaps::check(&self.image.store, &self.header, size).await?;
        }
        let checked = self.amender().check(&next).await?;
        let room = match size > old {
            true => Some(self.reserve(size).await?),
            false => None,
        };
        // Tables may have moved.
        let amended = async {
            let next = wanted.applied_to(&self.header)?;
            self.amender().make(next, checked).await
        };
        match amended.await {
            Ok(header) => self.header = header,
            Err(error) => {
                self.give_up(room).await;
                return Err(error);
            }
        }
        if room.is_some() {
            let resized = self.use_room(size, room).await;
            resized.map_err(|error| {
                error.wrap("the other options are changed, but the disk keeps its length")
            })?;
        }
        Ok(self.header.clone())
    }

    fn amender(&self) -> Amender {
        Amender { image: self.image.clone(), header: self.header.clone() }
    }
}

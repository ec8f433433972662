//! The contents of an image's header and tables. Opens that one file and nothing that it names.

use mica_block::{Error, Images, OpenImage, Result};
use mica_crypt::luks::LuksHeader;
use mica_qcow2::snapshots;
use mica_qcow2::{read_header, read_header_as};
use mica_qcow2::{read_luks_header, read_over};
use mica_qcow2_format::{BitmapEntry, Header, ImageName, SnapshotEntry, parse_image_name};
use std::path::{Path, PathBuf};

/// Snapshots that are listed; any more are only counted, so that a small file cannot produce a
/// large answer.
pub const SNAPSHOTS_LISTED_MAX: usize = 1024;

/// What an image records about itself.
pub struct ImageInfo {
    /// The open file.
    pub image: OpenImage,
    /// Its header.
    pub header: Header,
    /// Its internal snapshots, up to [`SNAPSHOTS_LISTED_MAX`].
    pub snapshots: Vec<SnapshotEntry>,
    /// Its bitmaps.
    pub bitmaps: Vec<BitmapEntry>,
    /// Its LUKS header, if it has one.
    pub luks: Option<LuksHeader>,
}

/// Reads what the qcow2 image at `path` records about itself.
///
/// # Errors
/// If it is not a qcow2 image that mica reads.
pub async fn inspect(images: &dyn Images, path: &Path) -> Result<ImageInfo> {
    // What keeps it from being opened is said with its name.
    let image = images.open(path)?;
    let step = async {
        let header = read_header(&*image.store).await?;
        let snapshots = snapshots::list(&*image.store, &header, SNAPSHOTS_LISTED_MAX).await?;
        let bitmaps = snapshots::list_bitmaps(&*image.store, &header).await?;
        let luks = read_luks_header(&header, &*image.store).await?.map(|(luks, _)| luks);
        Ok(ImageInfo { image, header, snapshots, bitmaps, luks })
    };
    step.await.map_err(|error: Error| error.wrap(path.display().to_string()))
}

/// Opens the image at `path` for [`check`](crate::check::check).
///
/// # Errors
/// If it is not a qcow2 image that can be checked.
pub async fn open_for_check(images: &dyn Images, path: &Path) -> Result<(OpenImage, Header)> {
    let image = images.open(path)?;
    let step = async {
        let image = read_over(images, path, image).await?;
        let header = read_header_as(&*image.store, Header::decode_for_check).await?;
        Ok((image, header))
    };
    step.await.map_err(|error: Error| error.wrap(path.display().to_string()))
}

impl ImageInfo {
    /// The path of the backing file as its name resolves from `path`, and the format that the image
    /// states for it.
    ///
    /// # Errors
    /// If mica does not follow such a name, or the policy forbids it.
    pub fn backing(
        &self,
        images: &dyn Images,
        path: &Path,
    ) -> Result<Option<(PathBuf, Option<String>)>> {
        let Some(backing) = &self.header.backing else { return Ok(None) };
        let ImageName { path: name, format } = parse_image_name(&backing.name)?;
        let resolved = images.resolve(path, &name)?;
        Ok(Some((resolved, backing.format.clone().or(format))))
    }
}

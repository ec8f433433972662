//! The overlay in which a disk goes on when a state of it is kept.

use crate::settings::ImageSettings;
use mica_block::{Images, Result};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_stack::FileImages;
use mica_store::Handles;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

/// An overlay that is to be made in an empty file.
pub(super) struct NewOverlay {
    /// The file.
    pub(super) path: PathBuf,
    /// The name of the layer beneath it.
    pub(super) backing_name: OsString,
    pub(super) cluster_bytes: u64,
    /// Bytes of the disk.
    pub(super) len: u64,
    /// How its images are opened.
    pub(super) images: ImageSettings,
    pub(super) handles: Arc<Handles>,
}

impl NewOverlay {
    /// Makes it, durably. It has subclusters if its clusters are large enough: guests that write
    /// parts of clusters do not wait for the rest to be copied from beneath.
    ///
    /// # Errors
    /// As for creating an image.
    pub(super) async fn create(self) -> Result<()> {
        let Self { path, backing_name, cluster_bytes, len, images, handles } = self;
        let wish = ImageWish {
            cluster_bytes: Some(cluster_bytes),
            backing_name: Some(backing_name),
            backing_format: Some("qcow2".to_owned()),
            ..ImageWish::default()
        };
        let plan = wish.plan(len)?;
        let image = FileImages::new(&path, images.image_options(handles)?)?.open_writable(&path)?;
        create(plan, Stores { image: &*image.store, data: None }).await
    }
}

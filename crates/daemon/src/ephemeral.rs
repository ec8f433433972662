//! `--ephemeral`: disks whose changes end with the server.
//!
//! Clients write into an overlay in a temporary file, which has no name: the system frees it when
//! the process ends, also if it is killed.
//!
//! Invariants
//! - I1 The image of such a disk is only read. Without an overlay the disk is read-only
//!   ([`DiskSettings::writes`](crate::settings::DiskSettings)).
//! - I2 The file is made outside of the sandbox, where temporary files are; the overlay in it
//!   inside, because that reads the image.
//! - I3 The overlay may name the image and what the image itself may name, and nothing else.
//! - I4 It is there for as long as its disk is one of the server: a disk that is drained, or could
//!   not be opened, goes on with it, also if a reload gives it other settings. A disk of another
//!   name, image or format begins with an empty one.
//! - I5 It can never be given a name.

mod abandoned;

use crate::config::Config;
use crate::overlay::{Overlay, nameless_file};
use crate::servers::Resources;
use crate::settings::{ImageSettings, NO_REDO_LOGS};
use mica_block::{Error, ErrorKind, Images, Result};
use mica_qcow2::{IndexUse, read_header};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_stack::{FileImages, Format, ImageOptions, MayWrite};
use mica_store::{Handles, NamelessFile};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Gives each disk that is to have an overlay one, and removes what older versions left. Called
/// outside of the sandbox.
///
/// # Errors
/// If there is no place for temporary files.
pub(crate) fn prepare(config: &mut Config) -> Result<()> {
    if config.disks.iter().any(|disk| disk.settings.ephemeral) {
        abandoned::remove(&std::env::temp_dir());
    }
    for disk in &mut config.disks {
        let Some(overlay) = Overlay::wanted(disk.settings.ephemeral) else { continue };
        // Also on file systems where files begin with a name.
        let made = overlay.file(|| {
            let place = std::env::temp_dir();
            if let Ok(file) = nameless_file(&place) {
                return Ok(file);
            }
            let file = tempfile::tempfile().map_err(|error| {
                let context = format!(
                    "disk {:?}: making a file to be thrown away in {} (TMPDIR)",
                    disk.name,
                    place.display()
                );
                Error::from_io(context, error)
            })?;
            Ok(file.into())
        });
        made?;
        disk.settings.overlay = Some(overlay);
    }
    Ok(())
}

/// The overlay of `image`, made if it is not there yet, and how it is opened.
///
/// # Errors
/// As for opening the image, and for creating another.
pub(crate) fn made(
    overlay: &Overlay,
    image: &Path,
    images: &ImageSettings,
    resources: &Resources,
) -> Result<(PathBuf, ImageSettings)> {
    let image = std::path::absolute(image)
        .map_err(|error| Error::from_io(format!("finding {}", image.display()), error))?;
    let file = overlay.file(|| resources.outside.temporary_file())?;
    let (names, given) = images.named_files()?;
    let mut names = mica_stack::allowed_places(&image, names, &given)?;
    names.push(image.clone());
    let above = ImageSettings {
        format: Format::Qcow2,
        names,
        allow_path: Vec::new(),
        // Nobody opens it again.
        redo_dir: NO_REDO_LOGS.into(),
        ..images.clone()
    };
    let path = file.path().to_owned();
    if file.is_empty()? {
        let new = NewOverlay { image, file, images: images.clone() };
        let (handles, options) = (Arc::clone(&resources.handles), above.clone());
        resources.workers.run(move || async move {
            let options = options.image_options(Arc::clone(&handles))?;
            new.create(options, handles).await
        })??;
    }
    Ok((path, above))
}

struct NewOverlay {
    image: PathBuf,
    file: Arc<NamelessFile>,
    /// How the image is opened.
    images: ImageSettings,
}

impl NewOverlay {
    async fn create(self, options: ImageOptions, handles: Arc<Handles>) -> Result<()> {
        let Self { image, file, images } = self;
        let path = file.path();
        let (format, chain) = (images.format, images.chain_options(IndexUse::Ignore)?);
        let options_beneath = images.image_options(handles)?;
        let beneath = mica_stack::open(&image, format, options_beneath.clone(), &chain).await?;
        let len = beneath.geometry().len;
        let wish = ImageWish {
            backing_name: Some(image.clone().into_os_string()),
            backing_format: Some(format.name().to_owned()),
            ..ImageWish::default()
        };
        if format == Format::Luks {
            let what = "ephemeral: an overlay of a LUKS image has no key: make one with `mica create \
                        -b IMAGE -F luks -o encrypt.format=luks`, and serve that";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let mut plan = wish.plan(len)?;
        if beneath.is_encrypted(beneath.layer_count() - 1) {
            let images = FileImages::new(&image, options_beneath)?;
            let store = images.open(&image)?.store;
            let header = read_header(&*store).await?;
            plan = mica_stack::encrypted_as(&images, plan, (&header, &*store), path).await?;
        }
        let created = async {
            let images = FileImages::to_write(path, options, MayWrite::new_file())?;
            let store = images.open_writable(path)?.store;
            create(plan, Stores { image: &*store, data: None }).await
        };
        created.await.inspect_err(|_| {
            // The first failure is the one to report.
            let _ = file.clear();
        })
    }
}

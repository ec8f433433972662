//! Opening the image of a disk, as its settings say.

use crate::ephemeral;
use crate::servers::Resources;
use crate::settings::{DiskSettings, ImageSettings, IndexMode, VolumeSettings};
use mica_block::{Error, Manage, Result};
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2::{ChainOptions, IndexUse, MapCache, Sharing};
use mica_rt::{Backend, Executor};
use mica_stack::{StoreFaults, VolumeOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What is opened, and how.
pub(crate) struct Opening<'a> {
    /// The image of the configuration, whose place says what else may be opened.
    pub(crate) image: &'a Path,
    pub(crate) settings: &'a DiskSettings,
    pub(crate) images: &'a ImageSettings,
    pub(crate) volume: &'a VolumeSettings,
    /// Whether another writer of the volume is fenced.
    pub(crate) force: bool,
}

/// Opens an image or a volume on the calling thread, which may wait for its storage in system
/// calls: a worker would keep the clients of other disks waiting meanwhile.
///
/// Returns which image it is, too: for a chain that got layers while it was served, the active one.
///
/// # Errors
/// Whatever prevents that.
pub(crate) fn open(
    opening: &Opening<'_>,
    resources: &Resources,
) -> Result<(Arc<dyn Manage>, PathBuf)> {
    let executor =
        Executor::new(Backend::Pool).map_err(|error| Error::from_io("opening an image", error))?;
    let Opening { image, settings, images, volume, force } = *opening;
    let Some(url) = volume.url()? else {
        return open_image(&executor, (image, settings, images), resources);
    };
    let is_written = settings.writes() && url.snapshot.is_none();
    let (force, faults) = (force && is_written, StoreFaults::new(&images.inject)?);
    let boot_fetch = volume.boot_fetch(&url);
    let options = VolumeOptions { force, faults, boot_fetch, ..volume.options(is_written) };
    let opened = executor.block_on(resources.stores.open_volume(&url, &options))?;
    Ok((opened, image.to_owned()))
}

fn open_image(
    executor: &Executor,
    (named, settings, images): (&Path, &DiskSettings, &ImageSettings),
    resources: &Resources,
) -> Result<(Arc<dyn Manage>, PathBuf)> {
    let (image, images) = match &settings.overlay {
        Some(overlay) => ephemeral::made(overlay, named, images, resources)?,
        None => (named.to_owned(), images.clone()),
    };
    let chain = chain_options(settings, &images, &resources.cache)?;
    let (options, format) = (images.image_options(Arc::clone(&resources.handles))?, images.format);
    let writes = settings.writes();
    let has_locks = matches!(options.locking, mica_store::Locking::On);
    let open = async move || {
        let (opened, image) = match writes {
            true => mica_stack::open_active(&image, format, options, &chain).await?,
            false => (mica_stack::open(&image, format, options, &chain).await?, image),
        };
        mica_stack::warn_of_luks(named, format, &*opened).await;
        Ok::<_, Error>((opened, image))
    };
    let (opened, image) = executor.block_on(open())?;
    if opened.is_writable() {
        // Nobody has written to it yet.
        let layers = opened.layer_paths();
        mica_stack::settle_names(&image, &layers)?;
        if let Err(error) = mica_stack::forget_drops(&layers) {
            tracing::warn!(%error, "could not clear the mark of an interrupted drop");
        }
        if has_locks {
            let begun = layers.len().saturating_sub(LAYERS_AT_START);
            remove_abandoned(&layers[begun..]);
        }
    }
    if writes && !opened.is_writable() {
        tracing::warn!("{} is served read-only", image.display());
    }
    // The user who disabled redo logs knows this.
    if images.redo_dir().is_some()
        && let Some(weakness) = opened.weakness()
    {
        tracing::warn!("{}: {weakness}", image.display());
    }
    let is_overlay = settings.overlay.is_some();
    Ok((opened, if is_overlay { named.to_owned() } else { image }))
}

/// Layers, from the uppermost, beside which a start looks for what was left: what a killed server
/// was about to add or to freeze is there. What is beside others whoever changes them meets.
const LAYERS_AT_START: usize = 2;

/// Removes what killed processes left unfinished beside these `layers`.
fn remove_abandoned(layers: &[PathBuf]) {
    for path in mica_stack::remove_abandoned(layers) {
        tracing::info!("removed {}, which a killed process had left", path.display());
    }
}

/// How the chain of a disk is opened, with its map in `cache`, which all disks share.
///
/// # Errors
/// As [`ImageSettings::chain_options`].
pub(crate) fn chain_options(
    settings: &DiskSettings,
    images: &ImageSettings,
    cache: &MapCache,
) -> Result<ChainOptions> {
    let index = match settings.index {
        IndexMode::Auto | IndexMode::Read => IndexUse::Read,
        IndexMode::Off => IndexUse::Ignore,
    };
    cache.grow_to(images.cache_bytes()?);
    let (cache, snapshot) = (cache.clone(), settings.load_snapshot.clone());
    let snapshot = snapshot.map(|word| word.parse::<SnapshotSelector>()).transpose()?;
    // What another disk found in sidecars that this one does not trust, or in files that others may
    // write, is not for it.
    let sharing = match index == IndexUse::Ignore || images.force_share {
        true => Sharing::Alone,
        false => Sharing::WithClones,
    };
    Ok(ChainOptions { cache, sharing, index, snapshot, writable: false, repair: None })
}

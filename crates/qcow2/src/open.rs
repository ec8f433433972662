//! Opening the images of a chain: from the active layer down by their backing names, in a loop,
//! reading only the header of each.
//!
//! Invariants
//! - I1 No format is guessed: the user states the active layer's, each overlay its base's.
//! - I2 A name is followed only if [`Images::resolve`] permits it.
//! - I3 A file appears in a chain only once: loops are found by identity.

use crate::cipher::LayerCipher;
use crate::header_io::{open_data_file, read_header, read_start};
use crate::layer::{Layer, Tables};
use crate::layers::Layers;
use crate::redo::{read_over, replay_redo_log, warn_of_log};
use crate::snapshots::SnapshotSelector;
use crate::unclosed::{close_frozen_at, is_unclosed};
use crate::write::overlay::MetadataStore;
use crate::write::pages::Metadata;
use mica_block::{Error, ErrorKind, Identity, Images, OpenImage, Result};
use mica_crypt::luks::MAGIC as LUKS_MAGIC;
use mica_qcow2_format::{Encryption, Header, ImageName, MAGIC, SnapshotEntry, parse_image_name};
use mica_units::{GuestOffset, HostOffset, LayerNumber, SECTOR_BYTES};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// An image that was opened on the way down.
pub(crate) struct Opened {
    pub(crate) path: PathBuf,
    pub(crate) image: OpenImage,
    kind: OpenedKind,
    /// What it was unlocked with, if that is done.
    cipher: Option<LayerCipher>,
}

impl Opened {
    /// How it is read.
    pub(crate) fn format(&self) -> ImageFormat {
        match &self.kind {
            OpenedKind::Raw => ImageFormat::Raw,
            OpenedKind::Luks => ImageFormat::Luks,
            OpenedKind::Qcow2(_) => ImageFormat::Qcow2,
        }
    }

    fn is_encrypted(&self) -> bool {
        match &self.kind {
            OpenedKind::Raw => false,
            OpenedKind::Luks => true,
            OpenedKind::Qcow2(header) => header.encryption != Encryption::None,
        }
    }

    /// Whether a writer has not closed it.
    fn is_unclosed(&self) -> bool {
        matches!(&self.kind, OpenedKind::Qcow2(header) if is_unclosed(header))
    }

    /// Unlocks it, if it is encrypted.
    async fn unlock(&mut self, images: &dyn Images) -> Result<()> {
        self.unlock_as(images, &self.path.clone()).await
    }

    /// As [`Self::unlock`], with the passphrase of the image that is called `name`.
    async fn unlock_as(&mut self, images: &dyn Images, name: &Path) -> Result<()> {
        if self.cipher.is_some() {
            return Ok(());
        }
        let store = &*self.image.store;
        self.cipher = match &self.kind {
            OpenedKind::Raw => None,
            OpenedKind::Luks => Some(LayerCipher::unlock_luks(images, name, store).await?),
            OpenedKind::Qcow2(header) => LayerCipher::unlock(images, name, (header, store)).await?,
        };
        Ok(())
    }
}

/// Unlocks those of `opened` that are encrypted, several at a time: each takes seconds.
async fn unlock_all(images: &dyn Images, opened: &mut [Opened]) -> Result<()> {
    let encrypted = opened.iter_mut().filter(|opened| opened.is_encrypted());
    let unlocking = encrypted.map(async |opened| {
        let name = opened.path.display().to_string();
        opened.unlock(images).await.map_err(|error| error.wrap(name))
    });
    mica_rt::join_all(unlocking).await.into_iter().collect()
}

enum OpenedKind {
    Raw,
    Luks,
    Qcow2(Box<Header>),
}

/// As what a layer is opened.
#[derive(Clone, Copy)]
pub(crate) struct OpenAs<'a> {
    /// The internal snapshot that it is to show, if any.
    pub(crate) snapshot: Option<&'a SnapshotSelector>,
    pub(crate) writable: bool,
}

/// The layers of the chain whose active layer is at `path`, from the base; for the active layer the
/// internal snapshot, if one is named. With the metadata of the active layer, if that is written.
pub(crate) async fn open_layers(
    images: &dyn Images,
    path: &Path,
    OpenAs { snapshot, writable }: OpenAs<'_>,
) -> Result<(Vec<Arc<Layer>>, Option<Arc<Metadata>>)> {
    let mut opened = open_all(images, path, writable).await?;
    unlock_all(images, &mut opened).await?;
    let count = opened.len();
    let mut layers = Vec::with_capacity(count);
    let mut metadata = None;
    for (number, opened) in opened.into_iter().rev().enumerate() {
        let number = LayerNumber::new(number).expect("bounded by open_all");
        let is_active = number.index() + 1 == count;
        let snapshot = snapshot.filter(|_| is_active);
        let context = opened.path.display().to_string();
        let as_what = OpenAs { snapshot, writable: writable && is_active };
        let layer = build_layer(images, opened, number, as_what).await;
        let (layer, written) = layer.map_err(|error| error.wrap(context))?;
        layers.push(Arc::new(layer));
        metadata = written;
    }
    Ok((layers, metadata))
}

/// Opens all images of a chain, from the active layer down.
async fn open_all(images: &dyn Images, path: &Path, writable: bool) -> Result<Vec<Opened>> {
    let mut opened: Vec<Opened> = Vec::new();
    let mut seen = HashSet::new();
    let mut next = Some((path.to_path_buf(), ImageFormat::Qcow2));
    while let Some((path, format)) = next {
        let named_by = opened.last().map(|upper| upper.path.display().to_string());
        let name = path.display().to_string();
        let image = match writable && opened.is_empty() {
            true => images.open_writable(&path),
            false => images.open(&path),
        };
        // Whoever opens files names them.
        let image = image.map_err(|error| match &named_by {
            Some(upper) => error.wrap(format!("the backing file of {upper}")),
            None => error,
        })?;
        let image = match opened.is_empty() {
            true if writable => replay_redo_log(images, &path, &*image.store).await.map(|()| image),
            true => read_over(images, &path, image).await,
            false => Ok(image),
        };
        let step = match image {
            Ok(image) => open_one(images, image, path, format).await,
            Err(error) => Err(error),
        };
        let step = match step {
            Ok((layer, _)) if writable && !opened.is_empty() && layer.is_unclosed() => {
                open_closed(images, layer, format).await
            }
            step => step,
        };
        let (layer, below) = step.map_err(|error| match named_by {
            Some(upper) => error.wrap(format!("{name}, the backing file of {upper}")),
            None => error.wrap(name.clone()),
        })?;
        if let OpenedKind::Qcow2(header) = &layer.kind
            && !opened.is_empty()
        {
            warn_of_log(images, &layer.path, header);
        }
        let Identity { device, inode, .. } = layer.image.identity;
        if !seen.insert((device, inode)) {
            return Err(loop_error(&layer.path));
        }
        opened.push(layer);
        if opened.len() > LayerNumber::COUNT_MAX {
            let context = format!("the chain has more than {} layers", LayerNumber::COUNT_MAX);
            return Err(Error::new(ErrorKind::Limit, context));
        }
        next = below;
    }
    Ok(opened)
}

/// Closes the frozen `layer`, which a killed writer left as it is, if that can be done, and opens
/// it again.
async fn open_closed(
    images: &dyn Images,
    layer: Opened,
    format: ImageFormat,
) -> Result<(Opened, Option<(PathBuf, ImageFormat)>)> {
    let path = layer.path.clone();
    drop(layer);
    close_frozen_at(images, &path).await?;
    open_one(images, images.open(&path)?, path, format).await
}

/// The format of an image, as it is stated.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ImageFormat {
    Raw,
    /// A LUKS header, and a raw image behind it.
    Luks,
    Qcow2,
    /// Unstated: raw, unless that would surely be wrong.
    Unstated,
}

/// Reads what there is to know of `image`; with it, what it stands on.
pub(crate) async fn open_one(
    images: &dyn Images,
    image: OpenImage,
    path: PathBuf,
    format: ImageFormat,
) -> Result<(Opened, Option<(PathBuf, ImageFormat)>)> {
    if format == ImageFormat::Unstated {
        refuse_unstated_qcow2(&path, &image).await?;
    }
    if format != ImageFormat::Qcow2 {
        let kind = match format {
            ImageFormat::Luks => OpenedKind::Luks,
            _ => OpenedKind::Raw,
        };
        return Ok((Opened { path, image, kind, cipher: None }, None));
    }
    let header = read_header(&*image.store).await?;
    let below = match &header.backing {
        None => None,
        Some(backing) => {
            let ImageName { path: name, format } = parse_image_name(&backing.name)?;
            // Either only one of the two states a format, or both must agree.
            let stated = match (&backing.format, &format) {
                (Some(one), Some(other)) if one != other => {
                    let context =
                        format!("its backing format is {one}, and its backing name says {other}");
                    return Err(Error::new(ErrorKind::Corrupt, context));
                }
                (Some(format), _) | (None, Some(format)) => Some(format.as_str()),
                (None, None) => None,
            };
            let format = match stated {
                Some("qcow2") => ImageFormat::Qcow2,
                Some("luks") => ImageFormat::Luks,
                Some("raw" | "file" | "host_device") => ImageFormat::Raw,
                None => ImageFormat::Unstated,
                Some(other) => {
                    let context = format!(
                        "its backing file has the format \"{other}\", which mica does not read: \
                         convert it to qcow2 or raw"
                    );
                    return Err(Error::new(ErrorKind::Unsupported, context));
                }
            };
            Some((images.resolve(&path, &name)?, format))
        }
    };
    let kind = OpenedKind::Qcow2(Box::new(header));
    Ok((Opened { path, image, kind, cipher: None }, below))
}

/// An overlay that does not state its base's format means raw; if the base looks like qcow2, that
/// is either an old overlay or a guest that wrote a header to trick us. Neither is guessed.
async fn refuse_unstated_qcow2(path: &Path, image: &OpenImage) -> Result<()> {
    // A raw base may be shorter than that.
    let magic = read_start(&*image.store, image.store.len()?, LUKS_MAGIC.len()).await?;
    if *magic == LUKS_MAGIC {
        tracing::warn!(
            "{} begins as a LUKS image does, and is shown as it is stored, as the overlay does not \
             state its format: if it is to be decrypted, state that with `qemu-img rebase -u -b \
             BASE -F luks OVERLAY`, and give --secret FILE",
            path.display()
        );
    }
    if !magic.starts_with(&MAGIC) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Denied,
        "the overlay does not state this file's format, and it begins like a qcow2 image: state it \
         with `qemu-img rebase -u -b BASE -F qcow2 OVERLAY` (or -F raw)",
    ))
}

/// The layer that was `opened`: of an internal snapshot, if one is named.
pub(crate) async fn build_layer(
    images: &dyn Images,
    mut opened: Opened,
    number: LayerNumber,
    OpenAs { snapshot, writable }: OpenAs<'_>,
) -> Result<(Layer, Option<Arc<Metadata>>)> {
    opened.unlock(images).await?;
    let Opened { path, image, kind, cipher } = opened;
    let OpenImage { store, identity, content } = image;
    let mut layer = Layer {
        number,
        path: path.into(),
        data: Arc::clone(&store),
        data_is_device: false,
        cipher,
        data_path: None,
        store,
        identity,
        content,
        len: AtomicU64::new(0),
        tables: None,
        live: None,
        may_write: AtomicBool::new(false),
    };
    let mut written = None;
    match kind {
        OpenedKind::Luks => {
            layer.data = LayerCipher::over(layer.cipher.as_ref(), layer.data);
            layer.set_len(layer.data.len()?.next_multiple_of(SECTOR_BYTES));
        }
        OpenedKind::Raw => layer.set_len(layer.store.len()?.next_multiple_of(SECTOR_BYTES)),
        OpenedKind::Qcow2(header) => {
            if header.incompatible.external_data_file {
                let (path, data) = open_data_file(images, &layer.path, &header, writable)?;
                layer.data_is_device = data.store.identity().is_device();
                (layer.data_path, layer.data) = (Some(path.into()), data.store);
            }
            layer.data = LayerCipher::over(layer.cipher.as_ref(), layer.data);
            let (l1_offset, l1_entries, disk_bytes) = match snapshot {
                None => (header.l1_offset, header.l1_entries, header.disk_bytes()),
                Some(wanted) => {
                    let found = crate::snapshots::find(&*layer.store, &header, wanted).await?;
                    snapshot_l1(&header, &found)?
                }
            };
            let mut tables =
                Tables::new(header.l2_format(), l1_offset, l1_entries, header.compression);
            if writable {
                if header.encryption == Encryption::Aes {
                    return Err(written_with_aes());
                }
                warn_of_bitmaps(&layer, &header).await;
                tables.is_live = true;
                let metadata = Metadata::new(Arc::clone(&layer.store), header.cluster_bits);
                layer.store = Arc::new(MetadataStore::new(Arc::clone(&metadata)));
                layer.live = Some(metadata.live());
                written = Some(metadata);
            }
            layer.tables = Some(tables);
            layer.set_len(disk_bytes);
        }
    }
    Ok((layer, written))
}

/// The error for writing an image with the oldest encryption.
pub(crate) fn written_with_aes() -> Error {
    let context = "an image with the old AES encryption is only read: `mica convert` makes another \
                   of it, with -o encrypt.format=luks";
    Error::new(ErrorKind::Unsupported, context)
}

/// Bitmaps that a writer did not save say nothing any more.
async fn warn_of_bitmaps(layer: &Layer, header: &Header) {
    let image = layer.path.display();
    let bitmaps = match crate::snapshots::list_bitmaps(&*layer.store, header).await {
        Ok(bitmaps) => bitmaps,
        Err(error) => return tracing::warn!(%image, %error, "cannot read its bitmaps"),
    };
    let names = bitmaps.iter().filter(|bitmap| bitmap.in_use).map(|bitmap| bitmap.name.as_str());
    let names: Vec<_> = names.collect();
    if names.is_empty() {
        return;
    }
    let shown = named_bitmaps(&names);
    tracing::warn!(
        %image,
        "its dirty bitmaps {shown} are inconsistent, as a writer has not saved them: `mica bitmap \
         --remove` removes them, and the next backup must be a full one"
    );
}

/// The bitmaps of these names, as a warning names them.
pub(crate) fn named_bitmaps(names: &[&str]) -> String {
    let shown = names.iter().take(BITMAPS_NAMED_MAX).map(|name| format!("{name:?}"));
    let shown = shown.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(BITMAPS_NAMED_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Most bitmaps that a warning names.
const BITMAPS_NAMED_MAX: usize = 8;

/// Opens the image at `path` to be written on top of `beneath`, as an empty overlay of the active
/// layer of that, whose name it may be about to get.
pub(crate) async fn open_overlay(
    images: &dyn Images,
    path: &Path,
    (beneath, gets_its_name): (&Layers, bool),
) -> Result<(Layer, Arc<Metadata>)> {
    let opened = async {
        let refuse = |what: &str| Err(Error::new(ErrorKind::Invalid, what));
        let Some(number) = beneath.free_number() else {
            let context = format!("the chain already has {} layers", LayerNumber::COUNT_MAX);
            return Err(Error::new(ErrorKind::Limit, context));
        };
        let image = images.open_writable(path)?;
        replay_redo_log(images, path, &*image.store).await?;
        let is_it = |layer: &Arc<Layer>| same_file(layer.identity, image.identity);
        if beneath.all().iter().any(is_it) {
            return Err(loop_error(path));
        }
        let (mut opened, below) =
            open_one(images, image, path.to_owned(), ImageFormat::Qcow2).await?;
        let active = beneath.active();
        let has_own = !gets_its_name && images.passphrase(path)?.is_some();
        if opened.is_encrypted() && !has_own {
            opened.unlock_as(images, &active.path).await?;
        }
        match below {
            Some((below, ImageFormat::Qcow2))
                if same_file(images.identify(&below)?, active.identity) => {}
            _ => return refuse("it is not an overlay of the active layer"),
        }
        let as_active = OpenAs { snapshot: None, writable: true };
        let (layer, metadata) = build_layer(images, opened, number, as_active).await?;
        let Some(metadata) = metadata else { return refuse("it is not a qcow2 image") };
        check_length(&layer, active)?;
        let end = GuestOffset::new(layer.len());
        if layer.unowned_until(GuestOffset::ZERO, end).await? != end {
            return refuse("it already has data");
        }
        Ok((layer, metadata))
    };
    opened.await.map_err(|error| error.wrap(path.display().to_string()))
}

/// # Errors
/// `Invalid` if `overlay` is not as long as the `active` layer that it is put on.
pub(crate) fn check_length(overlay: &Layer, active: &Layer) -> Result<()> {
    if overlay.len() == active.len() {
        return Ok(());
    }
    let context = "its length differs from that of the active layer";
    Err(Error::new(ErrorKind::Invalid, context))
}

pub(crate) fn same_file(one: Identity, other: Identity) -> bool {
    (one.device, one.inode) == (other.device, other.inode)
}

/// The layer `written`, whose writer has closed its file, which is at `path` now, as one that is no
/// longer written: other programs may read it, too.
pub(crate) fn freeze(images: &dyn Images, written: &Layer, path: &Path) -> Result<Layer> {
    let OpenImage { store, identity, content } = images.open_frozen(path)?;
    if !same_file(identity, written.identity) {
        return Err(another_file(path));
    }
    let data = match &written.data_path {
        None => Arc::clone(&store),
        Some(path) => images.open_frozen(path)?.store,
    };
    let data = LayerCipher::over(written.cipher.as_ref(), data);
    Ok(Layer { store, data, identity, content, ..as_frozen(written, path) })
}

/// The layer `written`, which is at `path` now, as one that changes no more, and is read through
/// the file of its writer, which has yet to close it.
///
/// # Errors
/// `Denied` if it is another file that is called so.
pub(crate) fn freeze_open(images: &dyn Images, written: &Layer, path: &Path) -> Result<Layer> {
    let identity = images.identify(path)?;
    if !same_file(identity, written.identity) {
        return Err(another_file(path));
    }
    // A sidecar from before it was written would still fit the identity from before.
    Ok(Layer { identity, ..as_frozen(written, path) })
}

fn as_frozen(written: &Layer, path: &Path) -> Layer {
    let tables = written.tables.as_ref().map(|tables| {
        let (l1_offset, l1_entries) = tables.l1_place.get();
        Tables::new(tables.l2, l1_offset, l1_entries, tables.compression)
    });
    Layer {
        number: written.number,
        path: path.into(),
        store: Arc::clone(&written.store),
        data: Arc::clone(&written.data),
        data_is_device: written.data_is_device,
        cipher: written.cipher.clone(),
        data_path: written.data_path.clone(),
        identity: written.identity,
        content: written.content.clone(),
        len: AtomicU64::new(written.len()),
        tables,
        live: None,
        may_write: AtomicBool::new(false),
    }
}

fn another_file(path: &Path) -> Error {
    let context = format!("{}: another file has its name now", path.display());
    Error::new(ErrorKind::Denied, context)
}

/// Where the L1 table of a snapshot is, and the length of its disk.
fn snapshot_l1(header: &Header, snapshot: &SnapshotEntry) -> Result<(HostOffset, u32, u64)> {
    // The same rules as for the image itself: the arithmetic of everything above rests on them.
    let mut as_active = header.clone();
    as_active.l1_offset = snapshot.l1_offset;
    as_active.l1_entries = snapshot.l1_entries;
    as_active.size = snapshot.disk_bytes.unwrap_or(header.size);
    as_active
        .check_active_l1()
        .map_err(|error| error.wrap(format!("snapshot {:?}", snapshot.name)))?;
    Ok((as_active.l1_offset, as_active.l1_entries, as_active.disk_bytes()))
}

/// The error for a chain whose images name each other in a circle.
pub fn loop_error(path: &Path) -> Error {
    let name = path.display();
    let context = format!("{name} is in the chain twice: its backing files form a loop");
    Error::new(ErrorKind::Corrupt, context)
}

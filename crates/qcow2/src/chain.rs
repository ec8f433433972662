//! A chain of images as one disk.
//!
//! Opening walks the backing names from the active layer down, reads each header, and keeps of a
//! layer only what reading needs. No step recurses by layer, and nothing of a layer but its header is
//! read before a guest asks for it.

use crate::decoded::DecodedClusters;
use crate::format::{
    HEADER_READ_BYTES, Header, ImageName, SnapshotEntry, parse_data_file_name, parse_image_name,
};
use crate::index::{Index, count};
use crate::inspect::loop_error;
use crate::layer::{Layer, Tables};
use crate::notify::Notify;
use mica_block::{
    Detail, Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, Identity, Images, IoFuture,
    MapStats, OpenImage, Planned, Result, RunKind, read_exact,
};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber, SECTOR_BYTES};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Least budget of a chain's cache: below it the cache holds no slice of a usual disk.
pub const CACHE_BYTES_MIN: u64 = 64 << 10;
/// Budget of a chain's cache unless the user says otherwise.
pub const CACHE_BYTES_DEFAULT: u64 = 32 << 20;

/// Whether the sidecars are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexUse {
    /// Read where they fit; see [`Chain::build_index`] for how they are written.
    Read,
    /// Not at all: every slice is resolved by a walk.
    Ignore,
}

/// How a chain is opened.
#[derive(Clone, Debug)]
pub struct ChainOptions {
    /// Most bytes that the chain's cache holds; at least [`CACHE_BYTES_MIN`] are taken.
    pub cache_bytes: u64,
    /// Whether the sidecars are used.
    pub index: IndexUse,
    /// An internal snapshot of the active layer, by id or name, to read instead of its present.
    pub snapshot: Option<String>,
}

impl Default for ChainOptions {
    fn default() -> Self {
        Self { cache_bytes: CACHE_BYTES_DEFAULT, index: IndexUse::Read, snapshot: None }
    }
}

/// How far the building of an index has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexProgress {
    /// Layers done.
    pub layer: usize,
    /// Layers in all.
    pub layers: usize,
}

/// A chain of images, base to active, opened for reading.
pub struct Chain {
    pub(crate) images: Arc<dyn Images>,
    /// From the base.
    pub(crate) layers: Vec<Arc<Layer>>,
    /// Bytes of the disk.
    pub(crate) len: u64,
    pub(crate) index: Index,
    pub(crate) index_call: Notify,
    decoded: Arc<DecodedClusters>,
    /// Whether a layer is shorter than the one above: holes then have to be told apart.
    has_short_layer: bool,
}

/// An image that was opened while walking down.
struct Opened {
    path: PathBuf,
    image: OpenImage,
    kind: OpenedKind,
}

enum OpenedKind {
    Raw,
    Qcow2(Box<Header>),
}

impl Chain {
    /// Opens the chain whose active layer is the qcow2 image at `path`.
    ///
    /// # Errors
    /// What makes an image unusable, with its path; the policy's refusal of a name; a loop.
    pub async fn open(
        images: Arc<dyn Images>,
        path: &Path,
        options: &ChainOptions,
    ) -> Result<Self> {
        let opened = open_all(&*images, path).await?;
        let count = opened.len();
        let mut layers = Vec::with_capacity(count);
        for (number, opened) in opened.into_iter().rev().enumerate() {
            let number = LayerNumber::new(number).expect("bounded by open_all");
            let is_active = number.index() + 1 == count;
            let snapshot = options.snapshot.as_deref().filter(|_| is_active);
            let context = opened.path.display().to_string();
            let layer = build_layer(&*images, opened, number, snapshot).await;
            layers.push(Arc::new(layer.map_err(|error| error.wrap(context))?));
        }
        let len = layers.last().map_or(0, |layer| layer.len);
        let has_short_layer = layers.windows(2).any(|pair| pair[0].len < pair[1].len);
        let chain = Self {
            images,
            layers,
            len,
            index: Index::new(options.cache_bytes.max(CACHE_BYTES_MIN)),
            index_call: Notify::default(),
            decoded: Arc::default(),
            has_short_layer,
        };
        if options.index == IndexUse::Read {
            chain.adopt_sidecars().await;
        }
        Ok(chain)
    }

    /// Number of layers.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// How many layers, from the base, the index speaks for.
    pub fn indexed_layers(&self) -> usize {
        self.index.tree().covered()
    }

    /// The paths of the layers, from the base.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.layers.iter().map(|layer| &*layer.path)
    }

    /// Waits until someone calls for the index: a reader to whom a sidecar turned out to be damaged,
    /// so that [`Self::build_index`] has work, or [`Self::call_for_index`].
    pub async fn index_called_for(&self) {
        self.index_call.wait().await;
    }

    /// Ends the wait of [`Self::index_called_for`].
    pub fn call_for_index(&self) {
        self.index_call.set();
    }

    /// Removes the sidecars of all frozen layers.
    ///
    /// # Errors
    /// What the system says; the others are removed all the same.
    pub fn drop_index(&self) -> Result<()> {
        self.index.publish(crate::index::Tree::default());
        let mut outcome = Ok(());
        for layer in self.frozen() {
            let removed = self.images.remove_sidecar(&layer.path);
            outcome = outcome.and(removed);
        }
        outcome
    }

    pub(crate) fn frozen(&self) -> &[Arc<Layer>] {
        &self.layers[..self.layers.len() - 1]
    }

    fn active(&self) -> &Layer {
        self.layers.last().expect("a chain has a layer")
    }

    fn check_range(&self, range: GuestRange) -> Result<()> {
        if range.end().bytes() <= self.len {
            return Ok(());
        }
        let end = range.end();
        let context = format!("the disk ends at {:#x}, before {end}", self.len);
        Err(Error::new(ErrorKind::Invalid, context))
    }

    /// Plans from cached slices; how much of `range` was planned before one was missing.
    #[inline]
    fn plan_cached(&self, range: GuestRange, extents: &mut Vec<Extent>) -> u64 {
        let mut done = 0;
        while done < range.len() {
            let at = GuestOffset::new(range.start().bytes() + done);
            let (number, base) = slice_of(at);
            let Some(slice) = self.index.cache.get(number) else { break };
            let len = left_in_slice(base, at).min(range.len() - done);
            slice.append_extents(base, at, len, extents);
            done += len;
            count(&self.index.counters.hits, 1);
        }
        done
    }

    async fn plan_rest(
        &self,
        range: GuestRange,
        detail: Detail,
        mut done: u64,
        (extents, from): (&mut Vec<Extent>, usize),
    ) -> Result<()> {
        while done < range.len() {
            let at = GuestOffset::new(range.start().bytes() + done);
            let (number, base) = slice_of(at);
            count(&self.index.counters.misses, 1);
            let slice = self.slice(number).await?;
            let len = left_in_slice(base, at).min(range.len() - done);
            slice.append_extents(base, at, len, extents);
            done += len;
            let rest =
                GuestRange::new(GuestOffset::new(range.start().bytes() + done), range.len() - done);
            done += self.plan_cached(rest.expect("a part of the range"), extents);
        }
        self.add_detail(detail, extents, from)
    }

    /// Tells of each hole which layer ends the search, and of a raw layer's data which is a hole.
    fn add_detail(&self, detail: Detail, extents: &mut Vec<Extent>, from: usize) -> Result<()> {
        let has_raw_base = self.layers[0].tables.is_none();
        if detail == Detail::Read || !(has_raw_base || self.has_short_layer) {
            return Ok(());
        }
        let planned = extents.split_off(from);
        for extent in planned {
            let layer = &self.layers[extent.layer.index()];
            match extent.kind {
                ExtentKind::Hole => self.append_holes(extent, extents),
                ExtentKind::Data if layer.tables.is_none() => {
                    append_raw_runs(layer, extent, extents)?;
                }
                _ => extents.push(extent),
            }
        }
        Ok(())
    }

    /// A hole ends at the layer above the uppermost one that is too short to reach it.
    fn append_holes(&self, hole: Extent, extents: &mut Vec<Extent>) {
        let mut at = hole.start.bytes();
        let end = at + hole.len;
        while at < end {
            let too_short = |layer: &&Arc<Layer>| layer.len <= at;
            let above = self.frozen().iter().rev().find(too_short);
            let number = above.map_or(0, |layer| layer.number.index() + 1);
            // That holds up to where the next layer above this one ends.
            let next = self.layers[number..].iter().map(|layer| layer.len).filter(|len| *len > at);
            let stop = next.min().unwrap_or(end).min(end);
            let layer = LayerNumber::new(number).expect("a layer of the chain");
            let start = GuestOffset::new(at);
            extents.push(Extent { start, len: stop - at, layer, ..hole });
            at = stop;
        }
    }
}

impl Disk for Chain {
    fn geometry(&self) -> Geometry {
        let preferred = self.active().tables.as_ref().map(|tables| tables.l2.subcluster_bits());
        let preferred_bytes = 1 << preferred.unwrap_or(12).max(12);
        Geometry { len: self.len, preferred_bytes }
    }

    #[inline]
    fn plan<'a>(
        &'a self,
        range: GuestRange,
        detail: Detail,
        extents: &'a mut Vec<Extent>,
    ) -> Planned<'a> {
        if let Err(error) = self.check_range(range) {
            return Planned::Ready(Err(error));
        }
        let from = extents.len();
        let done = self.plan_cached(range, extents);
        if done == range.len() {
            return Planned::Ready(self.add_detail(detail, extents, from));
        }
        Planned::Pending(Box::pin(self.plan_rest(range, detail, done, (extents, from))))
    }

    #[inline]
    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        assert_eq!(extent.len, buf.len() as u64, "a buffer as long as the extent");
        match extent.kind {
            ExtentKind::Data => self.layers[extent.layer.index()].data.read_at(buf, extent.host),
            ExtentKind::Hole | ExtentKind::Zero | ExtentKind::ZeroAllocated => {
                buf.fill(0);
                mica_block::ready(Ok(()), buf)
            }
            ExtentKind::Encoded => {
                let layer = Arc::clone(&self.layers[extent.layer.index()]);
                let decoded = Arc::clone(&self.decoded);
                let start = extent.start;
                IoFuture::boxed(async move { layer.read_deferred(start, buf, &decoded).await })
            }
        }
    }

    fn map_stats(&self) -> MapStats {
        let counters = &self.index.counters;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        MapStats {
            hits: get(&counters.hits),
            misses: get(&counters.misses),
            index_loads: get(&counters.index_loads),
            walks: get(&counters.walks),
            layers_walked: get(&counters.layers_walked),
            cached_bytes: self.index.cache.held_bytes(),
            budget_bytes: self.index.cache.budget_bytes(),
        }
    }
}

fn slice_of(at: GuestOffset) -> (u64, GuestOffset) {
    use crate::index::slice::SLICE_BITS;
    let number = at.bytes() >> SLICE_BITS;
    (number, GuestOffset::new(number << SLICE_BITS))
}

fn left_in_slice(base: GuestOffset, at: GuestOffset) -> u64 {
    crate::index::slice::SLICE_BYTES - (at.bytes() - base.bytes())
}

fn append_raw_runs(layer: &Layer, extent: Extent, extents: &mut Vec<Extent>) -> Result<()> {
    let mut done = 0;
    while done < extent.len {
        let host = HostOffset::new(extent.host.bytes() + done);
        let left = extent.len - done;
        let run = layer.data.run_at(host, left).map_err(|error| layer.explain(error))?;
        let len = run.len.clamp(1, left);
        let kind = match run.kind {
            RunKind::Data => ExtentKind::Data,
            // Zeros by the file's word: it is this layer that owns them, and they have a place.
            RunKind::Hole => ExtentKind::ZeroAllocated,
        };
        let start = GuestOffset::new(extent.start.bytes() + done);
        Extent::push_joined(extents, Extent { start, len, kind, host, layer: extent.layer });
        done += len;
    }
    Ok(())
}

/// Opens all images of a chain, from the active layer down.
async fn open_all(images: &dyn Images, path: &Path) -> Result<Vec<Opened>> {
    let mut opened: Vec<Opened> = Vec::new();
    let mut seen = HashSet::new();
    let mut next = Some((path.to_path_buf(), ImageFormat::Qcow2));
    while let Some((path, format)) = next {
        let named_by = opened.last().map(|upper| upper.path.display().to_string());
        let name = path.display().to_string();
        let step = open_one(images, path, format).await;
        let (layer, below) = step.map_err(|error| match named_by {
            Some(upper) => error.wrap(format!("{name}, the backing file of {upper}")),
            None => error.wrap(name.clone()),
        })?;
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum ImageFormat {
    Raw,
    Qcow2,
    /// Nobody said: raw, unless that would surely be wrong.
    Unstated,
}

async fn open_one(
    images: &dyn Images,
    path: PathBuf,
    format: ImageFormat,
) -> Result<(Opened, Option<(PathBuf, ImageFormat)>)> {
    let image = images.open(&path)?;
    if format == ImageFormat::Unstated {
        refuse_unstated_qcow2(&image).await?;
    }
    if format != ImageFormat::Qcow2 {
        return Ok((Opened { path, image, kind: OpenedKind::Raw }, None));
    }
    let header = read_header(&image).await?;
    let below = match &header.backing {
        None => None,
        Some(backing) => {
            let ImageName { path: name, format } = parse_image_name(&backing.name)?;
            // Only one of the two says a format, or both must agree.
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
    Ok((Opened { path, image, kind: OpenedKind::Qcow2(Box::new(header)) }, below))
}

/// An overlay that does not state its base's format means raw; if the base looks like qcow2, that is
/// either an old overlay or a guest that wrote a header to trick us. Neither is guessed.
async fn refuse_unstated_qcow2(image: &OpenImage) -> Result<()> {
    let magic = read_exact(&*image.store, HostOffset::ZERO, 4).await?;
    if *magic != *b"QFI\xfb" {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Denied,
        "the overlay does not state this file's format, and it begins like a qcow2 image: state it \
         with `qemu-img rebase -u -b BASE -F qcow2 OVERLAY` (or -F raw)",
    ))
}

/// Reads and decodes the header of an image.
pub(crate) async fn read_header(image: &OpenImage) -> Result<Header> {
    let file_len = image.store.len()?;
    let mut bytes = read_start(image, file_len, HEADER_READ_BYTES).await?;
    // A long header or name says so in what was read; each round reads more, up to a cluster.
    loop {
        let needed = Header::bytes_needed(&bytes)?;
        if needed <= bytes.len() || bytes.len() as u64 >= file_len {
            return Header::decode(&bytes, file_len);
        }
        bytes = read_start(image, file_len, needed).await?;
    }
}

async fn read_start(image: &OpenImage, file_len: u64, len: usize) -> Result<Buf> {
    let len = usize::try_from(file_len).unwrap_or(usize::MAX).min(len);
    read_exact(&*image.store, HostOffset::ZERO, len).await
}

async fn build_layer(
    images: &dyn Images,
    opened: Opened,
    number: LayerNumber,
    snapshot: Option<&str>,
) -> Result<Layer> {
    let Opened { path, image, kind } = opened;
    let OpenImage { store, identity } = image;
    let mut layer = Layer {
        number,
        path: path.into(),
        data: Arc::clone(&store),
        store,
        identity,
        len: 0,
        tables: None,
    };
    match kind {
        OpenedKind::Raw => layer.len = layer.store.len()?.next_multiple_of(SECTOR_BYTES),
        OpenedKind::Qcow2(header) => {
            if header.incompatible.external_data_file {
                layer.data = open_data_file(images, &layer.path, &header)?;
            }
            let mut l1 = (header.l1_offset, header.l1_entries);
            let mut disk_bytes = header.disk_bytes();
            if let Some(wanted) = snapshot {
                let found = crate::snapshots::find(&*layer.store, &header, wanted).await?;
                l1 = snapshot_l1(&header, &found)?;
                disk_bytes = found.disk_bytes.unwrap_or(disk_bytes);
            }
            let tables = Tables::new(header.l2_format(), l1.0, l1.1, header.compression);
            layer.tables = Some(tables);
            layer.len = disk_bytes / SECTOR_BYTES * SECTOR_BYTES;
        }
    }
    Ok(layer)
}

fn snapshot_l1(header: &Header, snapshot: &SnapshotEntry) -> Result<(HostOffset, u32)> {
    let bytes = u64::from(snapshot.l1_entries) * 8;
    if bytes > crate::format::L1_BYTES_MAX
        || !snapshot.l1_offset.is_aligned(header.cluster_bits.bytes())
    {
        let name = &snapshot.name;
        let context = format!("snapshot {name:?} has a malformed L1 table");
        return Err(Error::new(ErrorKind::Corrupt, context));
    }
    Ok((snapshot.l1_offset, snapshot.l1_entries))
}

fn open_data_file(
    images: &dyn Images,
    path: &Path,
    header: &Header,
) -> Result<Arc<dyn mica_block::Store>> {
    let Some(name) = &header.data_file_name else {
        let context = "the image keeps its data in an external file and does not name it";
        return Err(Error::new(ErrorKind::Corrupt, context));
    };
    let resolved = images.resolve(path, &parse_data_file_name(name)?)?;
    let opened = images.open(&resolved);
    Ok(opened.map_err(|error| error.wrap(format!("{}, its data file", resolved.display())))?.store)
}

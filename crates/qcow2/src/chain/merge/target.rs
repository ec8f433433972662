//! The layer that a commit writes: frozen before and after.

use crate::chain::{Chain, writable_header};
use crate::cipher::LayerCipher;
use crate::header_io::read_header;
use crate::index::cache::Sharing;
use crate::layer::{Layer, Tables};
use crate::map::Map;
use crate::open::{freeze, same_file, written_with_aes};
use crate::unclosed::close_frozen;
use crate::write::Writer;
use crate::write::overlay::MetadataStore;
use crate::write::pages::Metadata;
use mica_block::{
    Error, ErrorKind, MergeControl, MergeProgress, Result, Space, Store, Upgradable, Zeroes,
    wait_for_dead,
};
use mica_qcow2_format::{Encryption, Header};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber, SECTOR_BYTES};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How often the locks of a layer are tried, and the pause in between: stores of this chain that
/// read the file are closed by whoever had them last.
const LOCK_TRIES: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(2);
/// Zeros that are written to a raw image at a time.
const ZEROS_BYTES_MAX: u64 = 512 << 10;

/// The layer that is written.
pub(super) enum Target {
    Qcow2(Arc<Writer>),
    Raw { layer: Arc<Layer>, store: Arc<dyn Store> },
}

/// What `lock` gives, once nobody of this chain has the file locked otherwise, nor a process that
/// was killed just now.
async fn locked<T>(lock: impl Fn() -> Result<T>) -> Result<T> {
    let of_this_chain = async || {
        for _ in 0..LOCK_TRIES {
            match lock() {
                Err(error) if error.kind() == ErrorKind::Denied => {
                    mica_rt::sleep(LOCK_PAUSE).await;
                }
                locked => return locked,
            }
        }
        lock()
    };
    wait_for_dead(of_this_chain).await
}

impl Chain {
    /// Opens the file of the frozen layer `number` so that it can be written; the chain reads it
    /// through the same store from now on. Waits until nobody reads it otherwise.
    ///
    /// # Errors
    /// `Denied` if somebody else has the file open: then the chain only reads it, as before.
    pub(super) async fn borrow_for_writing(&self, number: LayerNumber) -> Result<Arc<dyn Store>> {
        let map = &self.map;
        let layers = map.layers();
        let layer = Arc::clone(layers.get(number));
        check_is_written(&layer)?;
        // One that this chain has written before is still open for that.
        if layer.may_write.load(Ordering::Acquire) {
            return Ok(Arc::clone(&layer.store));
        }
        // The file of an earlier writer of ours may be closed only now.
        let opened = locked(|| map.images.open_upgradable(&layer.path)).await?;
        if !same_file(opened.image.identity, layer.identity) {
            let context = "another file has its name now";
            return Err(layer.explain(Error::new(ErrorKind::Denied, context)));
        }
        let store = Arc::clone(&opened.image.store);
        let plain = Arc::new(frozen_in(&layer, &opened, Arc::clone(&store)));
        map.replace_layers(layers.replaced(Arc::clone(&plain)));
        drop((layer, layers));
        self.gate.grace().await;
        locked(|| opened.upgrade()).await?;
        plain.may_write.store(true, Ordering::Release);
        Ok(store)
    }

    /// Opens the frozen layer `number`, which is at position `base`, for writing.
    ///
    /// # Errors
    /// As [`Self::borrow_for_writing`]; `Denied` or `Corrupt` if nobody may write it as it is.
    pub(super) async fn open_target(&self, number: LayerNumber, base: usize) -> Result<Target> {
        let store = self.borrow_for_writing(number).await?;
        let map = &self.map;
        let layers = map.layers();
        let layer = layers.get(number);
        if layer.tables.is_none() {
            let store = Arc::clone(&layer.data);
            return Ok(Target::Raw { layer: Arc::clone(layer), store });
        }
        let opened = async {
            let header = read_header(&*store).await?;
            let header = close_frozen(&*map.images, &layer.path, &*store, header).await?;
            check_cipher(&header)?;
            let header = writable_header(&store, header, self.repair).await?;
            let metadata = Metadata::new(Arc::clone(&store), header.cluster_bits);
            let (l1_offset, l1_entries) = (header.l1_offset, header.l1_entries);
            let mut tables =
                Tables::new(header.l2_format(), l1_offset, l1_entries, header.compression);
            tables.is_live = true;
            let twin = tables.twin();
            let live = |tables| Layer {
                number,
                path: Arc::clone(&layer.path),
                store: Arc::new(MetadataStore::new(Arc::clone(&metadata))),
                data: LayerCipher::over(layer.cipher.as_ref(), Arc::clone(&store)),
                data_is_device: false,
                cipher: layer.cipher.clone(),
                data_path: None,
                identity: layer.identity,
                content: layer.content.clone(),
                len: AtomicU64::new(layer.len()),
                tables: Some(tables),
                live: Some(metadata.live()),
                may_write: AtomicBool::new(true),
            };
            // Each has a length of its own: the chain does not see it grow.
            let (written, read) = (Arc::new(live(tables)), Arc::new(live(twin)));
            let mut below = layers.all()[..base].to_vec();
            below.push(Arc::clone(&written));
            let cache = map.index.cache.shared().clone();
            let of_base = Map::new(
                Arc::clone(&map.images),
                below,
                cache,
                (map.images.now_ns(), Sharing::Alone),
            );
            of_base.index.publish((*map.index.tree()).clone());
            of_base.set_above(map);
            let (gate, now_ns) = (Arc::clone(&self.gate), map.images.now_ns());
            // I5: no redo log.
            let writer =
                Writer::open(of_base, written, &header, metadata, gate, (None, now_ns)).await?;
            // At most the layer just beneath the active one is not durable: at most this one,
            // whose own flushes see to it.
            writer.takes_beneath_as_durable();
            map.replace_layers(layers.replaced(read));
            Ok(Target::Qcow2(Arc::new(writer)))
        };
        opened.await.map_err(|error| layer.explain(error))
    }
}

/// Refuses a frozen layer of which not even the header is written here.
///
/// # Errors
/// `Unsupported` if it keeps its data elsewhere.
pub(super) fn check_is_written(layer: &Layer) -> Result<()> {
    if layer.data_path.is_none() {
        return Ok(());
    }
    let context = "it keeps its data in an external file: a frozen layer like that is not written";
    Err(layer.explain(Error::new(ErrorKind::Unsupported, context)))
}

/// Refuses a frozen layer that is of no form which is written here.
///
/// # Errors
/// As [`check_is_written`], and for one with the oldest encryption.
pub(super) async fn check_target(layer: &Layer) -> Result<()> {
    check_is_written(layer)?;
    if layer.tables.is_none() {
        return Ok(());
    }
    let checked = read_header(&*layer.store).await.and_then(|header| check_cipher(&header));
    checked.map_err(|error| layer.explain(error))
}

fn check_cipher(header: &Header) -> Result<()> {
    match header.encryption {
        Encryption::Aes => Err(written_with_aes()),
        _ => Ok(()),
    }
}

impl Target {
    /// Bytes of the disk that it covers.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Qcow2(writer) => writer.layer_len(),
            Self::Raw { layer, store } => store
                .len()
                .map_or(layer.len(), |len| len.next_multiple_of(SECTOR_BYTES).max(layer.len())),
        }
    }

    /// Whether it may be changed: asked before the first change, also of its length or its bitmaps,
    /// so that whoever controls the merge into it, which is to be `len` bytes long, can say so
    /// before.
    pub(super) async fn may_change(&self, len: u64, control: &dyn MergeControl) -> ControlFlow<()> {
        let total = len.max(self.len());
        control.step(MergeProgress { total, ..MergeProgress::default() }).await
    }

    /// Makes it at least `len` bytes long; the new part is zeros.
    pub(super) async fn grow_to(&self, len: u64) -> Result<()> {
        if self.len() >= len {
            return Ok(());
        }
        match self {
            Self::Qcow2(writer) => {
                Arc::clone(writer).complete(async |writer| writer.grow(len).await).await
            }
            Self::Raw { store, .. } => {
                let grown = grow_raw(&**store, len).await;
                grown.map_err(|error| error.wrap(store.name()))
            }
        }
    }

    /// Writes `buf` at the start of `range`, which is as long.
    pub(super) async fn write(&self, range: GuestRange, buf: Buf) -> Result<()> {
        match self {
            Self::Qcow2(writer) => {
                let at = range.start();
                let write = async |writer: Arc<Writer>| writer.write_allocating(at, buf).await.0;
                Arc::clone(writer).complete(write).await
            }
            Self::Raw { store, .. } => {
                let at = HostOffset::new(range.start().bytes());
                let written = mica_block::write_all(&**store, buf, at).await;
                written.map_err(|error| error.wrap(store.name()))
            }
        }
    }

    /// Makes `range` read as zeros, as far as it is not beyond the end.
    pub(super) async fn zero(&self, range: GuestRange) -> Result<()> {
        let end = range.end().min(GuestOffset::new(self.len()));
        let range = GuestRange::between(range.start(), end).filter(|range| !range.is_empty());
        let Some(range) = range else { return Ok(()) };
        match self {
            Self::Qcow2(writer) => {
                let how = Zeroes { may_unmap: true, fast: false };
                let zero = async |writer: Arc<Writer>| writer.zero_range(range, how).await;
                Arc::clone(writer).complete(zero).await
            }
            Self::Raw { store, .. } => {
                let zeroed = zero_raw(&**store, range).await;
                zeroed.map_err(|error| error.wrap(store.name()))
            }
        }
    }

    /// Makes everything durable that was written so far.
    pub(super) async fn flush(&self) -> Result<()> {
        match self {
            Self::Qcow2(writer) => {
                Arc::clone(writer).complete(async |writer| writer.flush().await).await
            }
            Self::Raw { store, .. } => store.sync().await.map_err(|error| error.wrap(store.name())),
        }
    }

    /// Ends the writing: everything is durable. Returns the layer, frozen, and read through a file
    /// of its own. After an error the chain reads what is in the file, as before.
    pub(super) async fn close(&self, chain: &Chain) -> Result<Layer> {
        let images = &*chain.map.images;
        let (closed, frozen) = match self {
            Self::Qcow2(writer) => {
                let close = async |writer: Arc<Writer>| writer.close().await;
                let closed = Arc::clone(writer).complete(close).await;
                (closed, freeze(images, writer.layer(), &writer.layer().path)?)
            }
            Self::Raw { layer, store } => {
                let closed = store.sync().await.map_err(|error| error.wrap(store.name()));
                let frozen = freeze(images, layer, &layer.path)?;
                frozen.set_len(self.len());
                (closed, frozen)
            }
        };
        if let Err(error) = closed {
            chain.map.replace_layers(chain.map.layers().replaced(Arc::new(frozen)));
            chain.map.index.cache.retain(|_| false);
            return Err(error);
        }
        Ok(frozen)
    }
}

async fn grow_raw(store: &dyn Store, len: u64) -> Result<()> {
    let before = store.len()?;
    if store.reads_unwritten_as_zeros() {
        return store.set_len(len).await;
    }
    // The file gets longer by what is written: whatever of it is there after a power cut is zeros.
    let zeroed = write_zeros(store, before, len).await;
    if zeroed.is_err() {
        store.set_len(before).await?;
    }
    zeroed
}

async fn zero_raw(store: &dyn Store, range: GuestRange) -> Result<()> {
    let (start, file_end) = (range.start().bytes(), store.len()?);
    let end = range.end().bytes().min(file_end);
    if start >= end {
        return Ok(());
    }
    for change in [Space::Punch, Space::Zero] {
        match store.space(change, HostOffset::new(start), end - start).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => {}
            done => return done,
        }
    }
    write_zeros(store, start, end).await
}

async fn write_zeros(store: &dyn Store, mut at: u64, end: u64) -> Result<()> {
    while at < end {
        let len = (end - at).min(ZEROS_BYTES_MAX);
        let zeros = Buf::zeroed(usize::try_from(len).expect("512 KiB"));
        mica_block::write_all(store, zeros, HostOffset::new(at)).await?;
        at += len;
    }
    Ok(())
}

/// `layer`, as it is in `store`.
fn frozen_in(layer: &Layer, opened: &Upgradable, store: Arc<dyn Store>) -> Layer {
    let tables = layer.tables.as_ref().map(|tables| {
        let (l1_offset, l1_entries) = tables.l1_place.get();
        Tables::new(tables.l2, l1_offset, l1_entries, tables.compression)
    });
    Layer {
        number: layer.number,
        path: Arc::clone(&layer.path),
        data: LayerCipher::over(layer.cipher.as_ref(), Arc::clone(&store)),
        data_is_device: false,
        cipher: layer.cipher.clone(),
        store,
        data_path: None,
        identity: opened.image.identity,
        content: opened.image.content.clone(),
        len: AtomicU64::new(layer.len()),
        tables,
        live: None,
        may_write: AtomicBool::new(false),
    }
}

//! Layers that a test fully knows, a walk of them, and the comparison.

use mica_block::{Disk, Extent, ExtentKind, Images, Result};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, IndexUse, MapCache};
use mica_qcow2_format::{L1Entry, L2Entry, RawL2Entry, Version};
use mica_rt::Buf;
use mica_sim::{TinyImage, TinySpec, World};
use mica_units::{GuestOffset, GuestRange, HostOffset};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) const SECTOR: u64 = 512;
/// Host offsets from here on are read by asking the layer again.
const FAR_BYTES: u64 = 1 << 53;

pub(crate) enum Image {
    Raw(Vec<u8>),
    Qcow2(TinyImage),
}

pub(crate) struct ModelLayer {
    pub(crate) len: u64,
    pub(crate) image: Image,
}

/// What the naive walk finds for a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    Hole,
    Zero(usize),
    ZeroAllocated(usize, u64),
    Data(usize, u64),
    Compressed(usize),
    Malformed(usize),
}

pub(crate) fn u64_at(bytes: &[u8], at: u64) -> u64 {
    let mut word = [0; 8];
    let there = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
    for (to, from) in word.iter_mut().zip(there) {
        *to = *from;
    }
    u64::from_be_bytes(word)
}

/// What layer `number` itself says of the sector at `at`; `None` if the one below has to be asked.
fn ask(image: &TinyImage, number: usize, at: u64) -> Option<Found> {
    let l2 = image.l2();
    let malformed = Some(Found::Malformed(number));
    let l1 = L1Entry(u64_at(image.bytes(), image.l1_at(at >> l2.table_bits()) as u64));
    let table = match l1.decode(l2.cluster_bits) {
        Ok(table) => table?,
        Err(_) => return malformed,
    };
    let entry_at = table.bytes() + l2.l2_index(GuestOffset::new(at)) * l2.entry_bytes() as u64;
    let entry = u64_at(image.bytes(), entry_at);
    let bitmap = if l2.extended { u64_at(image.bytes(), entry_at + 8) } else { 0 };
    let within = l2.cluster_bits.offset_within(at);
    let Ok(entry) = l2.interpret(RawL2Entry { entry, bitmap }) else { return malformed };
    let placed = |host: HostOffset| host.bytes() + within;
    match entry {
        L2Entry::Unallocated => None,
        L2Entry::Zero => Some(Found::Zero(number)),
        L2Entry::ZeroAllocated(host) => Some(Found::ZeroAllocated(number, placed(host))),
        L2Entry::Data(host) => Some(Found::Data(number, placed(host))),
        L2Entry::Compressed(_) => Some(Found::Compressed(number)),
        L2Entry::Subclusters { host, allocated, zero } => {
            let bit = 1_u32 << (within >> l2.subcluster_bits());
            match host {
                Some(host) if allocated & bit != 0 => Some(Found::Data(number, placed(host))),
                Some(host) if zero & bit != 0 => Some(Found::ZeroAllocated(number, placed(host))),
                None if zero & bit != 0 => Some(Found::Zero(number)),
                _ => None,
            }
        }
    }
}

pub(crate) fn walk(layers: &[ModelLayer], at: u64) -> Found {
    for (number, layer) in layers.iter().enumerate().rev() {
        if at >= layer.len {
            return Found::Hole;
        }
        let found = match &layer.image {
            Image::Raw(_) => Some(Found::Data(number, at)),
            Image::Qcow2(image) => ask(image, number, at),
        };
        if let Some(found) = found {
            return found;
        }
    }
    Found::Hole
}

pub(crate) fn path(number: usize, layer: &ModelLayer) -> PathBuf {
    let suffix = if matches!(layer.image, Image::Raw(_)) { "raw" } else { "qcow2" };
    format!("/chain/{number}.{suffix}").into()
}

impl Image {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Raw(bytes) => bytes,
            Self::Qcow2(image) => image.bytes(),
        }
    }
}

/// Puts the layers in the world, just now.
pub(crate) fn put_now(world: &World, layers: &[ModelLayer]) {
    for (number, layer) in layers.iter().enumerate() {
        world.put(path(number, layer), layer.image.bytes().to_vec());
    }
}

/// Puts the layers in the world, long ago.
pub(crate) fn put(world: &World, layers: &[ModelLayer]) {
    put_now(world, layers);
    world.pass_time(std::time::Duration::from_secs(60));
}

pub(crate) async fn open(world: &World, layers: &[ModelLayer], index: IndexUse) -> Arc<Chain> {
    let images: Arc<dyn Images> = Arc::new(world.clone());
    let options =
        ChainOptions { cache: MapCache::new(CACHE_BYTES_MIN), index, ..ChainOptions::default() };
    let top = path(layers.len() - 1, layers.last().unwrap());
    Arc::new(Chain::open(images, &top, &options).await.unwrap())
}

/// Whether an extent of a plan says about the sector at `at` what the walk found there.
fn agrees(extent: &Extent, at: u64, found: Found) -> bool {
    let (kind, layer) = (extent.kind, extent.layer.index());
    let host = extent.host.bytes() + (at - extent.start.bytes());
    match found {
        Found::Hole => kind == ExtentKind::Hole,
        Found::Zero(owner) => kind == ExtentKind::Zero && layer == owner,
        Found::Compressed(owner) | Found::Malformed(owner) => {
            kind == ExtentKind::Encoded && layer == owner
        }
        Found::ZeroAllocated(owner, place) | Found::Data(owner, place) => {
            let expected = match found {
                Found::Data(..) => ExtentKind::Data,
                _ => ExtentKind::ZeroAllocated,
            };
            let is_far = place >= FAR_BYTES && kind == ExtentKind::Encoded;
            layer == owner && (is_far || (kind == expected && host == place))
        }
    }
}

pub(crate) async fn compare(chain: &Chain, layers: &[ModelLayer]) {
    let len = chain.geometry().len;
    assert_eq!(len, layers.last().unwrap().len);
    let whole = GuestRange::new(GuestOffset::ZERO, len).unwrap();
    let extents = chain.plan(whole, Vec::new()).finish().await.unwrap();
    let mut at = 0;
    for extent in extents.iter() {
        assert_eq!(extent.start.bytes(), at);
        for sector in (at..at + extent.len).step_by(SECTOR as usize) {
            let found = walk(layers, sector);
            assert!(agrees(extent, sector, found), "{sector:#x}: {found:?}, and {extent:?}");
        }
        at += extent.len;
    }
    assert_eq!(at, len);
    for extent in extents.iter() {
        read_some(chain, layers, extent).await;
    }
}

/// Reads sectors of an extent: its first and its last.
async fn read_some(chain: &Chain, layers: &[ModelLayer], extent: &Extent) {
    let start = extent.start.bytes();
    for at in [start, start + extent.len - SECTOR] {
        let one = GuestRange::new(GuestOffset::new(at), SECTOR).unwrap();
        let part = extent.within(one).unwrap();
        let (result, buf) = chain.read(&part, Buf::new(SECTOR as usize)).await;
        match walk(layers, at) {
            Found::Hole | Found::Zero(_) => result.unwrap(),
            Found::ZeroAllocated(_, place) if place < FAR_BYTES => result.unwrap(),
            Found::Data(owner, place) if place < FAR_BYTES => {
                result.unwrap();
                let bytes = layers[owner].image.bytes();
                let there = bytes.get(place as usize..).unwrap_or_default();
                let count = there.len().min(buf.len());
                assert_eq!(buf[..count], there[..count], "{at:#x}");
                assert!(buf[count..].iter().all(|byte| *byte == 0));
                continue;
            }
            Found::Malformed(_) => {
                assert!(result.is_err(), "{at:#x} is malformed and was read");
                continue;
            }
            // Garbage may decompress or not; what is far beyond the end may be read or not.
            Found::Compressed(_) | Found::ZeroAllocated(..) | Found::Data(..) => continue,
        }
        assert!(buf.iter().all(|byte| *byte == 0), "{at:#x} reads as zeros");
    }
}

/// Builds the index of at most `layers` layers.
pub(crate) async fn build(chain: &Chain, layers: usize) -> Result<usize> {
    chain
        .build_index(&mut |progress| match progress.layer < layers {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        })
        .await
}

/// A layer of `clusters` clusters that owns those in `owned`.
pub(crate) struct Plain {
    cluster_bits: u32,
    clusters: u64,
    owned: std::ops::Range<u64>,
}

pub(crate) fn plain(cluster_bits: u32, clusters: u64, owned: std::ops::Range<u64>) -> Plain {
    Plain { cluster_bits, clusters, owned }
}

pub(crate) fn plain_chain(layers: &[Plain]) -> Vec<ModelLayer> {
    let mut chain: Vec<ModelLayer> = Vec::new();
    for (number, Plain { cluster_bits, clusters, owned }) in layers.iter().enumerate() {
        let backing = number.checked_sub(1).map(|below| {
            let name = path(below, &chain[below]).file_name().unwrap().to_str().unwrap().to_owned();
            (name, "qcow2")
        });
        let len = clusters << cluster_bits;
        let (version, extended) = (Version::V3, false);
        let spec =
            TinySpec { cluster_bits: *cluster_bits, version, extended, disk_bytes: len, backing };
        let mut image = TinyImage::new(&spec);
        for cluster in owned.clone() {
            let host = image.allocate();
            image.put(host.bytes() as usize, &(cluster + 1).to_be_bytes());
            image.set(cluster, L2Entry::Data(host));
        }
        chain.push(ModelLayer { len, image: Image::Qcow2(image) });
    }
    chain
}

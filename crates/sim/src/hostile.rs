//! Untrusted bytes as each of the files that mica reads. The fuzz targets in `fuzz/` pass random
//! bytes, a test passes the corpus. Every function here returns, whatever the bytes are, or the
//! bytes have found a bug.

use crate::{TinyImage, TinySpec, World};
use mica_block::{Disk, Extent, Images, Survey, read_whole};
use mica_qcow2::snapshots::SnapshotSelector;
use mica_qcow2::{Chain, ChainOptions, IndexUse, find_bitmap};
use mica_qcow2_format::{
    Header, L2Entry, SnapshotDecoded, SnapshotEntry, Version, parse_data_file_name,
    parse_image_name,
};
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::check::{self, Finding};
use mica_qcow2_tools::{inspect, open_for_check};
use mica_rt::{Backend, Buf, Executor};
use mica_store::MemoryStore;
use mica_store::object::MemoryObjects;
use mica_units::{GuestOffset, GuestRange};
use mica_volume::{
    Environment, LogDevice, ReceiveOptions, Received, Record, VolumeName, Volumes, Writer,
};
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const IMAGE: &str = "/chain/image.qcow2";
const TOP: &str = "/chain/top.qcow2";
const RAW: &str = "/chain/base.raw";
/// Extents of a plan that are read, and bytes of each.
const EXTENTS_READ_MAX: usize = 64;
const EXTENT_BYTES_MAX: u64 = 64 << 10;
/// Bitmaps that are read, and bytes of the disk for which each is.
const BITMAPS_READ_MAX: usize = 8;
const BITMAP_BYTES_MAX: u64 = 1 << 30;
/// A log may grow to this length.
const LOG_LEN_MAX: u64 = 1 << 20;
/// A larger plan asks layers where they end; a smaller one does not.
const LONG_PLAN_BYTES: u64 = (1 << 30) + (8 << 20);

/// A header: what decodes, encodes; and what was encoded decodes to the same.
///
/// # Panics
/// If that is not so.
pub fn header(bytes: &[u8]) {
    let file_len = bytes.len() as u64;
    let _ = Header::decode_for_check(bytes, file_len);
    // A malicious image's snapshots may follow anything.
    if let Ok(SnapshotDecoded::Entry { len, .. }) = SnapshotEntry::decode(bytes) {
        assert!(len <= bytes.len());
    }
    let Ok(mut header) = Header::decode(bytes, file_len) else { return };
    let Ok(mut encoded) = header.encode() else { return };
    // In a file it is within a cluster.
    encoded.resize(1 << header.cluster_bits.bits(), 0);
    let again = Header::decode(&encoded, file_len.max(encoded.len() as u64));
    let mut again = again.expect("what mica encodes it decodes");
    // Documented as not encoded.
    header.stale_bitmaps = false;
    for side in [&mut header, &mut again] {
        side.feature_names.clear();
        side.unknown_tail.clear();
    }
    assert_eq!(header, again);
}

/// A backup: its stream, and the manifest of a state in a folder.
///
/// # Panics
/// If what is decoded is beyond its bounds, or has a second form.
pub fn backup(bytes: &[u8]) {
    mica_backup::decode_anything(bytes);
}

/// The log of volumes: looked at, gone on with, ended.
///
/// # Panics
/// If its records are not in order, or what is found cannot be read.
pub fn log(bytes: &[u8]) {
    simulated(async |_| {
        let file = MemoryStore::new_writable("log", bytes.to_vec()).limited(LOG_LEN_MAX);
        let Ok(device) = LogDevice::open(Arc::new(file), [1; 16]).await else { return };
        for found in device.volumes() {
            let looked = device.look(&found, |_, _| Ok(())).await;
            if looked.is_err() || found.is_set_aside {
                continue;
            }
            let (from, writer) = (found.freed, Writer::FIRST);
            let Ok(log) = device.go_on(found.volume, (Writer::FIRST, writer), from).await else {
                continue;
            };
            let mut next = from;
            let read = log.read(from, |number, _| {
                assert_eq!(number, next, "records are in order");
                next += 1;
                Ok(())
            });
            read.await.expect("what is found can be read");
            assert_eq!(log.recovered(), from..next);
            if log.push(Record::Drop { number: 1 }).is_ok() {
                log.sync().await.expect("memory has no faults");
            }
            // There may be no segment left to note that in.
            if log.end().await.is_ok() {
                assert!(device.found(found.volume) != Some(found), "it is over");
            }
        }
    });
}

/// A stream of `volume receive`, into a store that has nothing: as it is, and with the sums that it
/// should have.
///
/// # Panics
/// If a volume is left that cannot be read, or what was received is not there.
pub fn stream(bytes: &[u8]) {
    let mut mended = bytes.to_vec();
    mica_volume::hostile::mend_stream(&mut mended);
    for bytes in [bytes, &mended] {
        simulated(async |_| received(bytes).await);
    }
}

async fn received(mut bytes: &[u8]) {
    let next = AtomicU64::new(1);
    let random = move || u128::from(next.fetch_add(1, Ordering::Relaxed)).to_le_bytes();
    let environment = Environment::new("host-1", || 1, random);
    let objects = Arc::new(MemoryObjects::new("memory"));
    let volumes = Volumes::open_or_make(objects, environment, 1 << 20).await.expect("a store");
    let web = VolumeName::new("web").expect("a name");
    let mut count = 0;
    let each = |_: &Received| count += 1;
    let received = volumes.receive(&web, ReceiveOptions::default(), &mut bytes, each).await;
    match volumes.snapshots(&web).await {
        Ok(snapshots) => {
            assert!(count >= snapshots.len(), "each snapshot was told of");
            let volume = volumes.open_readable(&web).await.expect("a volume that is whole");
            let head = GuestRange::new(GuestOffset::ZERO, 512).expect("the beginning");
            let plan = volume.plan(head, Vec::new()).finish().await.expect("planned");
            read_whole(&volume, &plan).await.expect("read");
        }
        // What failed in its first step left nothing.
        Err(_) => assert!(count == 0 || received.is_err(), "what was received is there"),
    }
}

/// An image: alone, as a snapshot's, and under another one, with an index and without, which must
/// show the same.
///
/// # Panics
/// If they do not.
pub fn open_read(bytes: &[u8]) {
    simulated(async |world| {
        world.put(IMAGE, bytes.to_vec());
        world.put(RAW, vec![0x5a; 5000]);
        world.put(TOP, top().bytes().to_vec());
        world.pass_time(Duration::from_secs(60));
        let images: Arc<dyn Images> = Arc::new(world.clone());
        if let Ok(info) = inspect(&*images, Path::new(IMAGE)).await {
            for wanted in info.snapshots.iter().take(2) {
                let snapshot = Some(SnapshotSelector::Id(wanted.id.clone()));
                let options = ChainOptions { snapshot, ..ChainOptions::default() };
                if let Ok(chain) = Chain::open(Arc::clone(&images), IMAGE.as_ref(), &options).await
                {
                    read_here_and_there(&chain).await;
                }
            }
        }
        let options = ChainOptions::default();
        let Ok(alone) = Chain::open(Arc::clone(&images), IMAGE.as_ref(), &options).await else {
            return;
        };
        read_here_and_there(&alone).await;
        let walked = read_over(&world, IndexUse::Ignore, false).await;
        let indexed = read_over(&world, IndexUse::Read, true).await;
        let adopted = read_over(&world, IndexUse::Read, false).await;
        assert!(walked == indexed, "the index shows something else");
        assert!(walked == adopted, "the sidecar shows something else");
    });
}

/// An image, checked.
pub fn check(bytes: &[u8]) {
    simulated(async |world| {
        world.put(IMAGE, bytes.to_vec());
        let Ok((image, header)) = open_for_check(&world, Path::new(IMAGE)).await else { return };
        let mut findings = 0_u64;
        let mut observer = |finding: Finding| {
            findings += 1;
            assert!(!finding.to_string().is_empty());
        };
        let _ = check::check(image.store, &header, &mut observer).await;
    });
}

/// A sidecar of a chain: the chain shows the right bytes all the same. The first byte selects the
/// layer (bits 0 and 1) and the meaning of the rest: the sidecar itself, or (bit 2) changes of the
/// good one, three bytes each. With bit 3 its checksums are corrected, which only the layer's owner
/// can do: then the chain may show wrong bytes, and must not fail.
///
/// # Panics
/// If the chain shows something else.
pub fn sidecar(bytes: &[u8]) {
    let Some((&mode, bytes)) = bytes.split_first() else { return };
    static GOOD: OnceLock<GoodChain> = OnceLock::new();
    let good = GOOD.get_or_init(GoodChain::new);
    simulated(async |world| {
        good.put(&world);
        let (paths, right) = (&good.paths, &good.shown);
        let top = good.top();
        let number = u16::from(mode & 3).min(2);
        world.change_sidecar(&paths[usize::from(number)], |sidecar| {
            if mode & 4 == 0 {
                *sidecar = bytes.to_vec();
            }
            for change in bytes.as_chunks::<3>().0.iter().filter(|_| mode & 4 != 0) {
                let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % sidecar.len();
                sidecar[at] = change[2];
            }
            if mode & 8 != 0 {
                fix_checksums(sidecar, number);
            }
        });
        if mode & 8 == 0 {
            let shown = read_chain(&world, top, IndexUse::Read).await;
            assert!(shown == *right, "a bad sidecar was trusted");
        }
        let images: Arc<dyn Images> = Arc::new(world.clone());
        let chain = Chain::open(images, top.as_ref(), &ChainOptions::default()).await;
        let chain = chain.expect("a good chain");
        read_here_and_there(&chain).await;
        build(&chain).await;
        read_here_and_there(&chain).await;
        if mode & 8 == 0 {
            let shown = read_chain(&world, top, IndexUse::Read).await;
            assert!(shown == *right, "what was rebuilt is wrong");
        }
    });
}

/// An image: its dirty bitmaps, read and edited.
///
/// # Panics
/// If a bitmap does not cover the disk, or one that was added is not there.
pub fn bitmaps(bytes: &[u8]) {
    simulated(async |world| {
        let path = Path::new(IMAGE);
        world.put(path, bytes.to_vec());
        read_bitmaps(&world, path).await;
        for (name, action) in [
            ("fuzz", BitmapAction::Add(None)),
            ("a", BitmapAction::Merge("b".to_owned())),
            ("a", BitmapAction::Clear),
            ("b", BitmapAction::Remove),
        ] {
            let is_new = matches!(action, BitmapAction::Add(_));
            let edited = edit_bitmap(&world, path, name, vec![action]).await;
            if edited.is_ok() && is_new {
                find_bitmap(&world, &[path.to_owned()], name).await.expect("it was added");
            }
            read_bitmaps(&world, path).await;
        }
    });
}

async fn read_bitmaps(world: &World, path: &Path) {
    let Ok(info) = inspect(world, path).await else { return };
    for entry in info.bitmaps.iter().take(BITMAPS_READ_MAX) {
        let Ok(bitmap) = find_bitmap(world, &[path.to_owned()], &entry.name).await else {
            continue;
        };
        let len = bitmap.disk_bytes().min(BITMAP_BYTES_MAX);
        let Some(range) = GuestRange::new(GuestOffset::ZERO, len) else { continue };
        if let Ok(runs) = bitmap.runs(range).await {
            assert_eq!(runs.iter().map(|(len, _)| len).sum::<u64>(), len, "the whole range");
        }
    }
}

/// The name of a backing file or of a data file.
///
/// # Panics
/// If a name is taken for anything other than a path.
pub fn image_name(bytes: &[u8]) {
    let name = OsStr::from_bytes(bytes);
    for path in [parse_image_name(name).map(|name| name.path), parse_data_file_name(name)] {
        let Ok(path) = path else { continue };
        let path = path.as_os_str().as_bytes();
        assert!(!path.contains(&0) && !path.is_empty());
        let mark = path.iter().find(|byte| matches!(byte, b':' | b'/'));
        assert!(mark != Some(&b':'), "a protocol was followed");
    }
}

fn simulated(body: impl AsyncFnOnce(World)) {
    let executor = Executor::new(Backend::Sim { seed: 0 }).expect("the simulator starts");
    executor.block_on(body(World::new(0)));
}

async fn build(chain: &Chain) {
    // A malformed image gets no index.
    let _ = chain.build_index(&mut |_| ControlFlow::Continue(())).await;
}

fn spec(cluster_bits: u32, disk_bytes: u64, backing: Option<&str>) -> TinySpec {
    let backing = backing.map(|name| (name.to_owned(), "qcow2"));
    TinySpec { cluster_bits, version: Version::V3, extended: false, disk_bytes, backing }
}

/// An active layer over the image.
fn top() -> TinyImage {
    let mut top = TinyImage::new(&spec(12, 6 << 20, Some("image.qcow2")));
    let host = top.allocate();
    top.set(3, L2Entry::Data(host));
    top.set(1030, L2Entry::Zero);
    top
}

/// A chain of four layers with its sidecars, and what it shows.
struct GoodChain {
    paths: Vec<String>,
    images: Vec<Vec<u8>>,
    sidecars: Vec<Vec<u8>>,
    shown: Vec<(Extent, Vec<u8>)>,
}

impl GoodChain {
    fn new() -> Self {
        let name = |number: u64| format!("{number}.qcow2");
        let mut paths = Vec::new();
        let mut images = Vec::new();
        for number in 0..4_u64 {
            let below = number.checked_sub(1).map(name);
            let len = if number == 1 { 4 << 20 } else { (5 << 20) + 512 };
            let mut image = TinyImage::new(&spec(12, len, below.as_deref()));
            for cluster in (number * 3..len >> 12).step_by(307) {
                let host = image.allocate();
                let at = usize::try_from(host.bytes()).expect("a small image");
                image.put(at, &(cluster << 8 | number).to_be_bytes());
                image.set(cluster, L2Entry::Data(host));
                image.set(cluster + 1, L2Entry::Zero);
            }
            paths.push(format!("/chain/{}", name(number)));
            images.push(image.bytes().to_vec());
        }
        let mut this = Self { paths, images, sidecars: Vec::new(), shown: Vec::new() };
        simulated(async |world| {
            this.put(&world);
            this.shown = read_chain(&world, this.top(), IndexUse::Ignore).await;
            let images: Arc<dyn Images> = Arc::new(world.clone());
            let options = ChainOptions::default();
            let chain = Chain::open(images, this.top().as_ref(), &options).await;
            build(&chain.expect("a good chain")).await;
            let frozen = &this.paths[..this.paths.len() - 1];
            let sidecars = frozen.iter().map(|path| world.sidecar(path).expect("it was built"));
            this.sidecars = sidecars.collect();
        });
        simulated(async |world| {
            this.put(&world);
            let images: Arc<dyn Images> = Arc::new(world);
            let options = ChainOptions::default();
            let chain = Chain::open(images, this.top().as_ref(), &options).await;
            let indexed = chain.expect("a good chain").indexed_layers();
            assert_eq!(indexed, this.sidecars.len(), "the sidecars are trusted as they are");
        });
        this
    }

    fn top(&self) -> &str {
        self.paths.last().expect("layers")
    }

    /// The same files have the same identities in every new world, so that seals hold.
    fn put(&self, world: &World) {
        for (path, image) in self.paths.iter().zip(&self.images) {
            world.put(path, image.clone());
        }
        world.pass_time(Duration::from_secs(60));
        for (path, sidecar) in self.paths.iter().zip(&self.sidecars) {
            world.write_sidecar(path.as_ref(), sidecar).expect("nobody forbids it");
        }
    }
}

/// All of a small chain: its extents, with the bytes of those that are not zeros.
async fn read_chain(world: &World, top: &str, index: IndexUse) -> Vec<(Extent, Vec<u8>)> {
    let images: Arc<dyn Images> = Arc::new(world.clone());
    let options = ChainOptions { index, ..ChainOptions::default() };
    let chain = Chain::open(images, top.as_ref(), &options).await.expect("a good chain");
    let mut extents = Vec::new();
    assert!(plan(&chain, 0, chain.geometry().len, &mut extents).await);
    let mut shown = Vec::new();
    for extent in extents {
        let len = if extent.kind.reads_as_zero() { 0 } else { extent.len };
        let part = Extent { len, ..extent };
        let buf = Buf::new(usize::try_from(len).expect("a small chain"));
        let (result, buf) = chain.read(&part, buf).await;
        result.expect("a good disk");
        shown.push((extent, buf.to_vec()));
    }
    shown
}

/// What the layer over the image shows: for each extent that is read its bytes, or that it failed.
async fn read_over(world: &World, index: IndexUse, is_built: bool) -> Vec<Option<Vec<u8>>> {
    let images: Arc<dyn Images> = Arc::new(world.clone());
    let options = ChainOptions { index, ..ChainOptions::default() };
    let chain = Chain::open(images, TOP.as_ref(), &options).await;
    let Ok(chain) = chain else { return Vec::new() };
    if is_built {
        build(&chain).await;
    }
    read_here_and_there(&chain).await
}

async fn read_here_and_there(chain: &Chain) -> Vec<Option<Vec<u8>>> {
    let len = chain.geometry().len;
    let mut shown = Vec::new();
    let places = [(0, 4 << 20), (len / 3, 70_000), (len.saturating_sub(3 << 20), 3 << 20)];
    for (start, most) in places {
        let len = most.min(len - start);
        for is_survey in [false, true] {
            let mut extents = Vec::new();
            let is_known = match is_survey {
                true => survey(chain, start, len, &mut extents).await,
                false => plan(chain, start, len, &mut extents).await,
            };
            if !is_known {
                shown.push(None);
            }
            for extent in extents.iter().take(EXTENTS_READ_MAX) {
                let part = Extent { len: extent.len.min(EXTENT_BYTES_MAX), ..*extent };
                let buf = Buf::new(usize::try_from(part.len).expect("64 KiB"));
                let (result, buf) = chain.read(&part, buf).await;
                shown.push(result.ok().map(|()| buf.to_vec()));
            }
        }
    }
    plan(chain, 0, len.min(LONG_PLAN_BYTES), &mut Vec::new()).await;
    shown
}

/// Plans a range; returns whether that succeeded. A plan is sorted, has no gap, and covers the
/// range.
async fn plan(chain: &Chain, start: u64, len: u64, extents: &mut Vec<Extent>) -> bool {
    let range = GuestRange::new(GuestOffset::new(start), len).expect("a range of the disk");
    extents.clear();
    match chain.plan(range, std::mem::take(extents)).finish().await {
        Ok(plan) => (*extents, _) = plan.into_parts(),
        Err(_) => return false,
    }
    let mut at = range.start();
    for extent in extents.iter() {
        assert!(extent.start == at && extent.len > 0, "a plan has no gap: {extent:?}");
        at = extent.range().end();
    }
    assert_eq!(at, range.end());
    true
}

/// Surveys a range to its end; returns whether that succeeded.
async fn survey(chain: &Chain, start: u64, len: u64, extents: &mut Vec<Extent>) -> bool {
    let range = GuestRange::new(GuestOffset::new(start), len).expect("a range of the disk");
    let mut survey = Survey::new(chain, range);
    loop {
        match survey.next().await {
            Ok(None) => return true,
            Ok(Some(part)) => extents.extend(part),
            Err(_) => return false,
        }
    }
}

const SIDECAR_HEADER_BYTES: usize = 256;
const NODE_HEADER_BYTES: usize = 8;

/// Corrects the checksums in the header and nodes of the sidecar of `layer`, as far as the nodes'
/// lengths make sense.
pub fn fix_checksums(sidecar: &mut [u8], layer: u16) {
    let Some((header, _)) = sidecar.split_at_mut_checked(SIDECAR_HEADER_BYTES) else { return };
    let (fields, sum) = header.split_at_mut(SIDECAR_HEADER_BYTES - 4);
    sum.copy_from_slice(&crc32c(&[fields]).to_le_bytes());
    let mut at = SIDECAR_HEADER_BYTES;
    while let Some(len) = sidecar.get(at..).and_then(|rest| rest.first_chunk()) {
        let len = u32::from_le_bytes(*len) as usize;
        let start = at + NODE_HEADER_BYTES;
        let Some(payload) = sidecar.get(start..).and_then(|rest| rest.get(..len)) else { return };
        let place = u64::from(layer) << 48 | at as u64;
        let sum = crc32c(&[&place.to_le_bytes(), payload]);
        sidecar[at + 4..start].copy_from_slice(&sum.to_le_bytes());
        at = start + len;
    }
}

/// CRC-32C, bit by bit.
fn crc32c(parts: &[&[u8]]) -> u32 {
    let mut sum = u32::MAX;
    for byte in parts.iter().copied().flatten() {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = sum >> 1 ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !sum
}

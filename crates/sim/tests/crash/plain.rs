//! One plain image, and helpers to write to it, to read it and to change its tables.

use crate::chain::{ChainSubject, FOLDER, Shape};
use mica_block::{Disk as _, Images as _, Result, write_all};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_format::bits::CORRUPT;
use mica_qcow2_tools::create::{ImagePlan, ImageWish, Stores, create, finish};
use mica_qcow2_tools::layout::{CompressionLevel, Compressor, Content, ImageWriter};
use mica_rt::Buf;
use mica_sim::World;
use mica_sim::crash::{Mode, Subject as _};
use mica_units::{GuestOffset, GuestRange};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the L1 table's offset is in a header.
pub(crate) const L1_AT: u64 = 40;
/// Where the refcount table's offset is in a header.
pub(crate) const REFCOUNT_TABLE_AT: u64 = 48;
const INCOMPATIBLE_AT: u64 = 72;
const AUTOCLEAR_AT: u64 = 88;
/// The bits of an address in an entry of an L1 or L2 table.
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// An image in a world.
pub(crate) struct Plain {
    pub(crate) world: World,
    subject: ChainSubject,
}

impl Plain {
    /// Where it is.
    pub(crate) fn top() -> PathBuf {
        Path::new(FOLDER).join("plain.qcow2")
    }

    /// An empty image.
    pub(crate) async fn new(world: &World, wish: &ImageWish, size: u64) -> Self {
        let this = Self::without_content(world, wish.plan(size).unwrap());
        let image = world.open_writable(&Self::top()).unwrap().store;
        create(wish.plan(size).unwrap(), Stores { image: &*image, data: None }).await.unwrap();
        this
    }

    /// An image each of whose `clusters` is compressed and holds `byte`.
    pub(crate) async fn packed(world: &World, wish: &ImageWish, clusters: usize, byte: u8) -> Self {
        let cluster_len = usize::try_from(wish.plan(0).unwrap().l2.cluster_bits.bytes()).unwrap();
        let plan = wish.plan((clusters * cluster_len) as u64).unwrap();
        let mut compressor = Compressor::new(plan.compression, CompressionLevel::Usual).unwrap();
        let packed = compressor.compress(&vec![byte; cluster_len]).unwrap().unwrap();
        let this = Self::without_content(world, plan.clone());
        let image = world.open_writable(&Self::top()).unwrap().store;
        let mut writer = ImageWriter::new(plan).unwrap();
        let piece = Buf::zeroed(clusters * cluster_len);
        let contents = vec![Content::Packed(packed); clusters];
        for write in writer.place(GuestOffset::new(0), piece, contents).unwrap() {
            write_all(&*image, write.bytes, write.at).await.unwrap();
        }
        finish(writer, Stores { image: &*image, data: None }).await.unwrap();
        this
    }

    fn without_content(world: &World, plan: ImagePlan) -> Self {
        world.put(Self::top(), Vec::new());
        let shape = Shape {
            files: Vec::new(),
            top: Self::top(),
            cluster_bytes: plan.l2.cluster_bits.bytes(),
            version: if plan.l2.version == mica_qcow2_format::Version::V2 { 2 } else { 3 },
            has_snapshot: false,
            initial: Vec::new(),
            about: format!("{plan:?}"),
        };
        Self { world: world.clone(), subject: ChainSubject { shape } }
    }

    /// The same file in another world, where nothing names its log.
    pub(crate) fn in_another_world(&self) -> Self {
        let world = World::new(self.world.seed());
        world.put(Self::top(), self.file());
        let shape = self.subject.shape.clone();
        let elsewhere = Self { world, subject: ChainSubject { shape } };
        elsewhere.put(AUTOCLEAR_AT, elsewhere.word(AUTOCLEAR_AT) & u64::from(u32::MAX));
        elsewhere
    }

    /// The file gets the content of `other`, but names the log that it named, and is as long as it
    /// was.
    pub(crate) fn become_as(&self, other: &Self) {
        let (name, mut content) = (self.word(AUTOCLEAR_AT), other.file());
        self.world.change(Self::top(), |file| {
            content.resize(content.len().max(file.len()), 0);
            *file = content;
        });
        self.put(AUTOCLEAR_AT, name);
    }

    /// All its bytes.
    pub(crate) fn file(&self) -> Vec<u8> {
        self.world.inspect(Self::top(), <[u8]>::to_vec)
    }

    /// Opens it.
    pub(crate) async fn open(&self, mode: Mode) -> Chain {
        let writable = mode == Mode::Write;
        let options = ChainOptions {
            cache: MapCache::new(CACHE_BYTES_MIN),
            writable,
            ..ChainOptions::default()
        };
        Chain::open(Arc::new(self.world.clone()), &Self::top(), &options).await.unwrap()
    }

    /// Checks that nothing is wrong with it, and nothing leaks.
    pub(crate) async fn expect_sound(&self) {
        let leaks = self.subject.check(&self.world).await.expect("the image is sound");
        assert_eq!(leaks, 0, "{}", self.subject.shape.about);
    }

    /// Checks that nothing is wrong with it, except that space may leak.
    pub(crate) async fn expect_uncorrupted(&self, about: &str) {
        if let Err(error) = self.subject.check(&self.world).await {
            panic!("{about}: {error}");
        }
    }

    /// The number at `at` in the file.
    pub(crate) fn word(&self, at: u64) -> u64 {
        let bytes = self.bytes(at, 8);
        u64::from_be_bytes(*bytes.first_chunk().unwrap())
    }

    /// `len` bytes of the file at `at`.
    pub(crate) fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let at = usize::try_from(at).unwrap();
        self.file()[at..at + len].to_vec()
    }

    /// Puts `word` at `at` of the file.
    pub(crate) fn put(&self, at: u64, word: u64) {
        let at = usize::try_from(at).unwrap();
        self.world.change(Self::top(), |file| {
            file[at..at + 8].copy_from_slice(&word.to_be_bytes());
        });
    }

    /// Where the active L1 table is.
    pub(crate) fn l1(&self) -> u64 {
        self.word(L1_AT)
    }

    /// Where the first L2 table is.
    pub(crate) fn l2(&self) -> u64 {
        self.word(self.l1()) & OFFSET_MASK
    }

    /// Where the refcount table is.
    pub(crate) fn refcount_table(&self) -> u64 {
        self.word(REFCOUNT_TABLE_AT)
    }

    /// Where the first refcount block is.
    pub(crate) fn refcount_block(&self) -> u64 {
        self.word(self.refcount_table())
    }

    /// Whether it says that it is corrupt.
    pub(crate) fn is_marked_corrupt(&self) -> bool {
        self.word(INCOMPATIBLE_AT) & CORRUPT != 0
    }
}

/// Writes `len` bytes like `byte` at `at`.
pub(crate) async fn write(chain: &Chain, at: u64, byte: u8, len: usize) -> Result<()> {
    chain.write(GuestOffset::new(at), Buf::from_slice(&vec![byte; len])).await.0
}

/// Reads `len` bytes at `at`.
pub(crate) async fn read(chain: &Chain, at: u64, len: u64) -> Result<Vec<u8>> {
    mica_sim::read(chain, range(at, len)).await
}

/// `len` bytes at `at`.
pub(crate) fn range(at: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(at), len).unwrap()
}

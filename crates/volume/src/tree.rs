//! Reads what a volume has in its store: nodes of its trees, through a cache, and blocks of data.
//!
//! Invariants
//! - I1 Nothing is returned whose sum is not the one that its place has.
//! - I2 A node that several readers miss together is read once, if they wait for as long as it
//!   takes. Who does not, or is given up, reads it alone, so as not to wait for them.
//! - I3 The cache holds what its budget allows. Places never come to mean something else, so
//!   nothing is removed from it for any other reason.
//! - I4 What is in an extent that is still being put is read from memory.
//! - I5 What was read with one cipher is not returned to who has another, or none.
//! - I6 Memory that another program may change is judged to be good, never to be damaged: that is
//!   judged in memory of our own. A guest may have two reads in flight to the same page.
//! - I7 A store that is far is asked to read only into memory of this module's own, which outlives
//!   who asked: so a request of a guest can be answered, with an error, though the store hangs, and
//!   its memory is never written after that. What a directory is asked for goes into the memory of
//!   who asked: to that the system writes at any time until it has answered, be it from a file
//!   system that hangs, so the answer is waited for.

mod cursor;
mod last_answer;
mod object;
mod shortcuts;

pub(crate) use cursor::Cursor;

use crate::ahead::Ahead;
use crate::chunks::{Chunks, Reader, Role};
use crate::crypt::Cipher;
use crate::format::Id;
use crate::format::snapshot::{FRAMED_BYTES_MAX, Record};
use crate::frames;
use crate::place::{BLOCK_BYTES, ExtentId, FramePart, Place};
use crate::plans::RUN_BLOCKS_MAX;
use crate::properties::Access;
use crate::put::Patience;
use crate::state::Root;
use last_answer::{NO_ANSWER, read_unless_given_up};
use mica_block::{Error, ErrorKind, IoFuture, MapStats, Object, Objects, Result};
use mica_map::{Directory, Step, crc32c, directory_bytes_max, open_node};
use mica_rt::Buf;
use mica_rt::sync::Signal;
use parking_lot::{Mutex, MutexGuard};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use shortcuts::Shortcuts;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Bytes of memory that a node takes: a multiple of 16 for it and its two counts, with what the
/// allocator has before it.
const NODE_BYTES: u64 = ((size_of::<Directory<Place>>() + 16 + 8).next_multiple_of(16)) as u64;
/// What the cache has for it besides, at most: places for half as many that it had before; both of
/// its tables grow twofold. One has a place and a pointer with 16 bytes of its own, the other 5.
const ENTRY_BYTES: u64 = 3 * (size_of::<(Place, Node)>() as u64 + 16) + 16;
/// Bytes of memory that a node in the cache takes.
const NODE_MEMORY_BYTES: u64 = NODE_BYTES + ENTRY_BYTES;
/// The levels of the directories to which there are shortcuts, and which part of the cache's memory
/// these may have.
const SHORTCUT_PARTS: [(u8, u64); 2] = [(0, 4), (1, 32)];
/// Records of snapshots that are kept: each takes less than a node.
const RECORDS_MAX: usize = 1 << 14;
/// Bytes of frames that are kept as they are without compression: those that are read in sequence.
const FRAMES_BYTES_MAX: u64 = 4 << 20;
/// What most of them take.
const FRAME_BYTES: u64 = 64 << 10;
/// Objects that are kept open: what they cost is bounded by the store.
const OPENED_MAX: usize = 1024;
/// As [`RUN_BLOCKS_MAX`], where the store is far.
const FAR_RUN_BLOCKS_MAX: usize = 256;

/// A directory of a volume's tree.
pub(crate) type Node = Arc<Directory<Place>>;

/// What is read from a store, by all that share it.
pub(crate) struct Tree {
    shared: Arc<Shared>,
    patience: Patience,
    /// How blocks are read with this.
    access: Access,
    /// Raised when nothing is tried again any more for those who read with this.
    given_up: Signal,
    /// What is held for boots, and whether this reads for a guest or ahead of it.
    chunks: Option<(Arc<Chunks>, Role)>,
}

struct Shared {
    objects: Arc<dyn Objects>,
    /// As that says of itself.
    is_far: bool,
    nodes: Cache<Place, Node, NodeMemory>,
    /// To the lowest directories, and to those above them.
    shortcuts: [Shortcuts; 2],
    records: Cache<Place, Arc<Record>>,
    frames: Cache<FrameKey, Arc<Vec<u8>>, FrameMemory>,
    opened: Cache<ExtentId, Arc<dyn Object>>,
    /// Few.
    held: Mutex<Vec<Held>>,
    hits: AtomicU64,
    misses: AtomicU64,
    /// Reads that failed and are tried again.
    failing: AtomicU64,
    /// Of each image of which a volume is open.
    boots: Mutex<HashMap<Id, Weak<Chunks>>>,
    ahead: Arc<Ahead>,
}

/// The nodes of an extent that is being put.
struct Held {
    extent: ExtentId,
    /// Where they begin in it.
    start: usize,
    bytes: Vec<u8>,
}

#[derive(Clone)]
struct NodeMemory;

impl Weighter<Place, Node> for NodeMemory {
    fn weight(&self, _place: &Place, _node: &Node) -> u64 {
        NODE_MEMORY_BYTES
    }
}

/// A frame, and the name of the cipher that it was read with; 0 is none.
type FrameKey = (Place, u64);

#[derive(Clone)]
struct FrameMemory;

impl Weighter<FrameKey, Arc<Vec<u8>>> for FrameMemory {
    fn weight(&self, _key: &FrameKey, frame: &Arc<Vec<u8>>) -> u64 {
        frame.len() as u64
    }
}

impl Tree {
    /// Reads from `objects`, with a cache of nodes of about `cache_bytes`, with the patience of a
    /// verb.
    pub(crate) fn new(objects: Arc<dyn Objects>, cache_bytes: u64) -> Self {
        let shortcuts =
            SHORTCUT_PARTS.map(|(level, part)| Shortcuts::new(level, cache_bytes / part));
        let shortcut_bytes: u64 = shortcuts.iter().map(Shortcuts::budget_bytes).sum();
        let node_bytes = cache_bytes - shortcut_bytes;
        let count = usize::try_from(node_bytes / NODE_MEMORY_BYTES).unwrap_or(usize::MAX).max(1);
        let nodes = Cache::with_weighter(count, node_bytes, NodeMemory);
        let (hits, misses, failing, held, boots, ahead) = Default::default();
        let (records, opened) = (Cache::new(RECORDS_MAX), Cache::new(OPENED_MAX));
        let count = usize::try_from(FRAMES_BYTES_MAX / FRAME_BYTES).expect("small");
        let frames = Cache::with_weighter(count, FRAMES_BYTES_MAX, FrameMemory);
        let shared = Arc::new(Shared {
            is_far: objects.is_far(),
            objects,
            nodes,
            shortcuts,
            records,
            frames,
            opened,
            held,
            hits,
            misses,
            failing,
            boots,
            ahead,
        });
        let (access, given_up) = (Access::Plain, Signal::default());
        Self { shared, patience: Patience::VERB, access, given_up, chunks: None }
    }

    /// The same, for those who have `patience`. Whoever gives up one of them gives up no other.
    pub(crate) fn with_patience(&self, patience: Patience) -> Arc<Self> {
        Arc::new(Self { patience, ..self.another() })
    }

    /// The same, for a volume whose blocks are read with `access`.
    pub(crate) fn with_access(&self, access: Access) -> Arc<Self> {
        Arc::new(Self { access, ..self.another() })
    }

    /// The same, through chunks.
    pub(crate) fn through(&self, chunks: &Arc<Chunks>, role: Role) -> Arc<Self> {
        Arc::new(Self { chunks: Some((Arc::clone(chunks), role)), ..self.another() })
    }

    fn another(&self) -> Self {
        let (shared, access) = (Arc::clone(&self.shared), self.access.clone());
        let given_up = Signal::default();
        Self { shared, patience: self.patience, access, given_up, chunks: None }
    }

    /// The chunks of an image, which all share that come from it.
    pub(crate) fn chunks_of(&self, image: Id) -> Arc<Chunks> {
        let mut boots = self.shared.boots.lock();
        if let Some(chunks) = boots.get(&image).and_then(Weak::upgrade) {
            return chunks;
        }
        boots.retain(|_, chunks| chunks.strong_count() > 0);
        let chunks = Arc::new(Chunks::new(&self.shared.ahead));
        boots.insert(image, Arc::downgrade(&chunks));
        chunks
    }

    /// What all boots share.
    pub(crate) fn ahead(&self) -> &Arc<Ahead> {
        &self.shared.ahead
    }

    /// Reads that wait until the store answers again: of all that share it.
    pub(crate) fn failing_reads(&self) -> u64 {
        self.shared.failing.load(Ordering::Relaxed)
    }

    /// For how long a read is tried.
    pub(crate) fn patience(&self) -> Patience {
        self.patience
    }

    /// Where the leaf of `key` is; `None` if it has none.
    ///
    /// # Errors
    /// If a node cannot be read, or is damaged.
    pub(crate) async fn look_up(&self, root: Root, key: u64) -> Result<Option<Place>> {
        Cursor::new(self, root).look_up(key).await
    }

    /// As [`Self::look_up`], if all that has to be known is in the cache.
    pub(crate) fn look_up_cached(&self, root: Root, key: u64) -> Option<Option<Place>> {
        let [lowest, _] = &self.shared.shortcuts;
        let top = root.node.filter(|_| root.height > lowest.level() && !root.is_beyond(key));
        if let Some(found) = top.and_then(|top| lowest.child(top, key)) {
            self.shared.hits.fetch_add(1, Ordering::Relaxed);
            return Some(found);
        }
        Cursor::new(self, root).look_up_cached(key)
    }

    /// Whether what the store has of it is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.access.cipher().is_some()
    }

    /// What the cache of nodes did.
    pub(crate) fn stats(&self) -> MapStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (hits, misses) = (count(&self.shared.hits), count(&self.shared.misses));
        let shortcut_bytes: u64 = self.shared.shortcuts.iter().map(Shortcuts::budget_bytes).sum();
        let slot_bytes: u64 = self.shared.shortcuts.iter().map(Shortcuts::slot_bytes).sum();
        MapStats {
            hits,
            misses,
            index_loads: misses,
            cached_bytes: self.shared.nodes.weight() + slot_bytes,
            budget_bytes: self.shared.nodes.capacity() + shortcut_bytes,
            ..MapStats::default()
        }
    }

    /// The node at `at`.
    ///
    /// # Errors
    /// As [`Self::look_up`].
    pub(crate) async fn node(&self, at: Place) -> Result<Node> {
        if let Some(node) = self.shared.nodes.get(&at) {
            self.shared.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(node);
        }
        self.shared.misses.fetch_add(1, Ordering::Relaxed);
        self.once(&self.shared.nodes, at, self.read_node(at)).await
    }

    /// What `read` gives, which is in `cache` then (I2).
    async fn once<K: Eq + Hash + Copy, T: Clone, W: Weighter<K, T> + Clone>(
        &self,
        cache: &Cache<K, T, W>,
        at: K,
        read: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        if self.patience == Patience::Endless {
            // Who is given up must not wait for a reader who is not.
            let known = cache.get_value_or_guard_async(&at);
            match self.given_up.unless_raised(known).await {
                Some(Ok(known)) => return Ok(known),
                Some(Err(guard)) => {
                    let found = read.await?;
                    // It is refused if somebody who reads it alone was faster.
                    let _ = guard.insert(found.clone());
                    return Ok(found);
                }
                None => {}
            }
        }
        if let Some(known) = cache.get(&at) {
            return Ok(known);
        }
        let found = read.await?;
        cache.insert(at, found.clone());
        Ok(found)
    }

    /// Whoever waits to read with this, and not with another of the same store, gets the error of
    /// the last try from now on. What is in flight in a store that is not far still ends by itself
    /// (I7).
    pub(crate) fn give_up(&self) {
        self.given_up.raise();
    }

    /// Keeps a node that was just made, so that it is not read back.
    pub(crate) fn keep(&self, at: Place, node: Node) {
        self.shared.nodes.insert(at, node);
    }

    /// Holds the nodes of an extent that is being put, `bytes` from `start` on, until
    /// [`Self::release`].
    pub(crate) fn hold(&self, extent: ExtentId, start: usize, bytes: Vec<u8>) {
        self.held().push(Held { extent, start, bytes });
    }

    /// Objects of extents that are not among `kept` are not held open any more: the space of a file
    /// that was deleted comes back when it is closed.
    pub(crate) fn close_all_but(&self, kept: &BTreeSet<ExtentId>) {
        self.shared.opened.retain(|id, _| kept.contains(id));
    }

    /// The extent is in the store.
    pub(crate) fn release(&self, extent: ExtentId) {
        self.held().retain(|held| held.extent != extent);
    }

    /// `len` bytes at `at`, with zeros after the end, if they are held.
    fn read_held(&self, at: Place, len: usize) -> Option<Buf> {
        let held = self.held();
        let Held { start, bytes, .. } = held.iter().find(|held| held.extent == at.extent())?;
        let bytes = bytes.get(usize::try_from(at.offset()).ok()?.checked_sub(*start)?..)?;
        let mut buf = Buf::new(len);
        buf.fill(0);
        buf.put(0, &bytes[..len.min(bytes.len())]);
        Some(buf)
    }

    fn held(&self) -> MutexGuard<'_, Vec<Held>> {
        self.shared.held.lock()
    }

    /// The record of a snapshot at `at`.
    ///
    /// # Errors
    /// As [`Self::look_up`].
    pub(crate) async fn record(&self, at: Place) -> Result<Arc<Record>> {
        self.once(&self.shared.records, at, self.read_record(at)).await
    }

    /// As [`Self::keep`], of a record.
    pub(crate) fn keep_record(&self, at: Place, record: Arc<Record>) {
        self.shared.records.insert(at, record);
    }

    /// The node at `at`, as it is in the store.
    ///
    /// # Errors
    /// As [`Self::look_up`].
    pub(crate) async fn read_node(&self, at: Place) -> Result<Node> {
        let buf = self.read_framed(at, directory_bytes_max::<Place>()).await?;
        decode_node(&buf, at).map(Arc::new)
    }

    /// The record of a snapshot at `at`, as it is in the store.
    ///
    /// # Errors
    /// As [`Self::look_up`].
    pub(crate) async fn read_record(&self, at: Place) -> Result<Arc<Record>> {
        let buf = self.read_framed(at, FRAMED_BYTES_MAX).await?;
        decode_record(&buf, at).map(Arc::new)
    }

    /// What has a frame like a node's, of at most `len` bytes.
    async fn read_framed(&self, at: Place, len: usize) -> Result<Buf> {
        match self.read_held(at, len) {
            Some(buf) => Ok(buf),
            None => {
                let is_good = |bytes: &[u8]| {
                    open_node(bytes, at).is_ok_and(|payload| crc32c(payload) == at.sum())
                };
                self.read_own(at, len, is_good).await
            }
        }
    }

    /// As [`Self::read_good`], into memory that nobody else has, so that a store which answers
    /// nothing is not waited for once this is given up.
    ///
    /// # Errors
    /// As [`Self::look_up`].
    async fn read_own(
        &self,
        at: Place,
        len: usize,
        is_good: impl Fn(&[u8]) -> bool,
    ) -> Result<Buf> {
        let read = self.read_good(at, Buf::new(len), is_good);
        if let Some((result, buf)) = read_unless_given_up(&self.given_up, read).await {
            return result.map(|()| buf);
        }
        let (extent, store) = (at.extent().name(), self.shared.objects.name());
        let what = format!("reading {extent} of {store}: {NO_ANSWER}");
        Err(Error::new(ErrorKind::Io, what))
    }

    /// Fills `buf` with consecutive blocks: those at `places`, each of which [`follows`] the one
    /// before, and of which `first` is the first.
    ///
    /// # Errors
    /// If they cannot be read, or one is damaged; `Denied` without the key.
    pub(crate) async fn read_blocks(
        &self,
        first: Place,
        places: impl IntoIterator<Item = Place> + Clone,
        buf: Buf,
    ) -> Result<Buf> {
        let (result, buf) = self.fill_blocks(first, places, buf).await;
        result.map(|()| buf)
    }

    /// As [`Self::read_blocks`]; gives `buf` back whatever happens.
    pub(crate) async fn fill_blocks(
        &self,
        first: Place,
        places: impl IntoIterator<Item = Place> + Clone,
        buf: Buf,
    ) -> (Result<()>, Buf) {
        if let Err(locked) = self.access.check() {
            return (Err(locked), buf);
        }
        if first.frame().is_some() {
            return self.fill_from_frame(first, places, buf).await;
        }
        let cipher = self.access.cipher();
        if !buf.is_foreign() {
            return self.fill_in_place(first, places, buf, cipher).await;
        }
        let mut buf = buf;
        // A guest's memory is not for what is not decrypted yet.
        if cipher.is_none() {
            let (result, back) = self.read(first, buf).await;
            if result.is_err() || are_whole(&back, places.clone()) {
                return (result, back);
            }
            // Another read that the guest has in flight may go to the same memory.
            buf = back;
        }
        let own = Buf::new(buf.len());
        let (result, own) = self.fill_in_place(first, places, own, cipher).await;
        if result.is_ok() {
            buf.put(0, &own);
        }
        (result, buf)
    }

    /// Begins to fill `buf` from `first` on, for a caller that compares the sums. Gives it back if
    /// there is more to do: the blocks are in a frame or encrypted, or may be held for boots, or
    /// the store is far.
    pub(crate) fn begin_plain(&self, first: Place, buf: Buf) -> std::result::Result<IoFuture, Buf> {
        let is_plain = matches!(self.access, Access::Plain) && first.frame().is_none();
        match is_plain && self.chunks.is_none() && !self.shared.is_far {
            true => Ok(self.object(first.extent()).read_at(buf, first.offset())),
            false => Err(buf),
        }
    }

    /// As [`Self::fill_blocks`], of blocks that are not in frames, into memory of our own.
    async fn fill_in_place(
        &self,
        first: Place,
        places: impl IntoIterator<Item = Place> + Clone,
        buf: Buf,
        cipher: Option<&Cipher>,
    ) -> (Result<()>, Buf) {
        let is_good = |bytes: &[u8]| are_whole(bytes, places.clone());
        let (result, mut buf) = self.read_good(first, buf, is_good).await;
        if result.is_err() {
            return (result, buf);
        }
        for (index, place) in places.into_iter().enumerate() {
            let range = index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES;
            if crc32c(&buf[range.clone()]) != place.sum() {
                return (Err(damaged(place, "a block", &"its checksum does not match")), buf);
            }
            if let Some(cipher) = cipher {
                cipher.decrypt(place, &mut buf.own_bytes()[range]);
            }
        }
        (Ok(()), buf)
    }

    /// As [`Self::fill_blocks`], of blocks in one frame.
    async fn fill_from_frame(
        &self,
        first: Place,
        places: impl IntoIterator<Item = Place> + Clone,
        mut buf: Buf,
    ) -> (Result<()>, Buf) {
        let frame = match self.frame(first).await {
            Ok(frame) => frame,
            Err(error) => return (Err(error), buf),
        };
        for (at, place) in places.into_iter().enumerate() {
            let block = place
                .frame()
                .and_then(|part| frame.get(part.index * BLOCK_BYTES..)?.get(..BLOCK_BYTES));
            let Some(block) = block else {
                return (Err(damaged(place, "a frame", &"it has no such block")), buf);
            };
            buf.put(at * BLOCK_BYTES, block);
        }
        (Ok(()), buf)
    }

    /// The blocks of the frame that the block at `at` is in.
    async fn frame(&self, at: Place) -> Result<Arc<Vec<u8>>> {
        let key = (at.whole(), self.access.cipher().map_or(0, Cipher::name));
        match self.shared.frames.get(&key) {
            Some(frame) => Ok(frame),
            None => self.once(&self.shared.frames, key, self.read_frame(at)).await,
        }
    }

    async fn read_frame(&self, at: Place) -> Result<Arc<Vec<u8>>> {
        let part = at.frame().expect("the place of a block in a frame");
        let is_good = |bytes: &[u8]| frames::check(bytes, at).is_ok();
        let mut buf = self.read_own(at, part.len_max(), is_good).await?;
        frames::open(buf.own_bytes(), at, self.access.cipher()).map(Arc::new)
    }

    /// That what is stored of the block at `at` is what was written there. Needs no key.
    ///
    /// # Errors
    /// As [`Self::read_blocks`].
    pub(crate) async fn check_block(&self, at: Place) -> Result<()> {
        let len = at.frame().map_or(BLOCK_BYTES, FramePart::len_max);
        let (result, buf) = self.read(at, Buf::new(len)).await;
        result?;
        match at.frame() {
            Some(_) => frames::check(&buf, at).map(drop),
            None if crc32c(&buf) == at.sum() => Ok(()),
            None => Err(damaged(at, "a block", &"its checksum does not match")),
        }
    }

    /// As [`Self::read`], of what `is_good` tells from damage. What was damaged on its way into
    /// chunks stays so there: it is forgotten, and read past them, once.
    async fn read_good(
        &self,
        at: Place,
        buf: Buf,
        is_good: impl Fn(&[u8]) -> bool,
    ) -> (Result<()>, Buf) {
        let (result, buf) = self.read(at, buf).await;
        let Some((chunks, _)) = self.chunks.as_ref().filter(|(chunks, _)| chunks.is_used()) else {
            return (result, buf);
        };
        let bytes = at.offset()..at.offset() + buf.len() as u64;
        match result.is_ok() && !is_good(&buf) && chunks.forget(at.extent(), &bytes) {
            true => self.read_object(at.extent(), buf, at.offset()).await,
            false => (result, buf),
        }
    }

    /// Fills `buf` from `at` on.
    async fn read(&self, at: Place, buf: Buf) -> (Result<()>, Buf) {
        let (extent, offset) = (at.extent(), at.offset());
        match &self.chunks {
            Some((chunks, role)) if chunks.is_used() => {
                let bytes = offset..offset + buf.len() as u64;
                let read = async |buf, offset| self.read_object(extent, buf, offset).await;
                let reader = Reader { role: *role, given_up: &self.given_up };
                Box::pin(chunks.read((extent, bytes), buf, reader, &read)).await
            }
            _ => self.read_object(extent, buf, offset).await,
        }
    }

    /// Has `bytes` of an extent in chunks, for those who read through them. Returns false if there
    /// is no room.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(crate) async fn load(&self, extent: ExtentId, bytes: &Range<u64>) -> Result<bool> {
        let Some((chunks, _)) = &self.chunks else { return Ok(false) };
        let has_room = chunks.want(extent, bytes);
        let read = async |buf, offset| self.read_object(extent, buf, offset).await;
        chunks.load((extent, bytes), &read).await?;
        Ok(has_room)
    }

    /// Blocks that are read by one request, at most: a far store has a price for each request.
    pub(crate) fn run_blocks_max(&self) -> usize {
        match self.shared.is_far {
            true => FAR_RUN_BLOCKS_MAX,
            false => RUN_BLOCKS_MAX,
        }
    }

    fn object(&self, extent: ExtentId) -> Arc<dyn Object> {
        let open = || Ok::<_, std::convert::Infallible>(self.shared.objects.open(&extent.name()));
        match self.shared.opened.get_or_insert_with(&extent, open) {
            Ok(object) => object,
            Err(never) => match never {},
        }
    }
}

fn found(step: Step<Place>) -> Option<Place> {
    match step {
        Step::Leaf(at) => Some(at),
        Step::Absent => None,
        Step::Read(..) => unreachable!("a tree is as high as it says"),
    }
}

/// Whether `bytes` are the blocks at `places`, by their sums.
fn are_whole(bytes: &[u8], places: impl IntoIterator<Item = Place>) -> bool {
    let blocks = bytes.chunks_exact(BLOCK_BYTES);
    blocks.zip(places).all(|(block, place)| crc32c(block) == place.sum())
}

/// Whether `next` is the block that follows the one at `place` in its extent, or in its frame.
pub(crate) fn follows(place: Place, next: Place) -> bool {
    match (place.frame(), next.frame()) {
        (None, None) => {
            place.extent() == next.extent() && place.offset() + BLOCK_BYTES as u64 == next.offset()
        }
        (Some(part), Some(after)) => place.whole() == next.whole() && part.index + 1 == after.index,
        _ => false,
    }
}

/// The node at `at`, which `bytes` begin with.
///
/// # Errors
/// `Corrupt` if they are not that node's.
pub(crate) fn decode_node(bytes: &[u8], at: Place) -> Result<Directory<Place>> {
    decode_framed(bytes, at, "a node of the map", |payload| Directory::decode(payload, at))
}

/// The record of a snapshot at `at`, which `bytes` begin with.
///
/// # Errors
/// As [`decode_node`].
pub(crate) fn decode_record(bytes: &[u8], at: Place) -> Result<Record> {
    decode_framed(bytes, at, "the record of a snapshot", |payload| Record::decode(payload, at))
}

/// What has a frame like a node's.
fn decode_framed<T, E: std::fmt::Display>(
    bytes: &[u8],
    at: Place,
    what: &str,
    decode: impl FnOnce(&[u8]) -> std::result::Result<T, E>,
) -> Result<T> {
    let damaged = |why: &dyn std::fmt::Display| damaged(at, what, why);
    let payload = open_node(bytes, at).map_err(|error| damaged(&error))?;
    if crc32c(payload) != at.sum() {
        return Err(damaged(&"it is not the one that was written there"));
    }
    decode(payload).map_err(|error| damaged(&error))
}

pub(crate) fn damaged(at: Place, what: &str, why: &dyn std::fmt::Display) -> Error {
    let (extent, offset) = (at.extent().name(), at.offset());
    Error::new(ErrorKind::Corrupt, format!("{what} at offset {offset} of {extent}: {why}"))
}

#[cfg(test)]
mod tests;

//! The clusters of an image against a plain map of who has each, from a seed: requests that reserve
//! at once, return, free, flush, close and open again, on a store that takes its time and may be
//! full.

use super::*;
use crate::testing::{at_once, done_at_once, from_seeds};
use mica_block::write_all;
use mica_qcow2_format::{Compression, L2Format, Version, field};
use mica_rt::{Backend, Buf, Executor, join_all};
use mica_store::MemoryStore;
use mica_store::faulty::{
    DelayOptions, DelayStore, ErrorOptions, ErrorStore, LogOptions, LogStore, Operation,
    Operations, When,
};
use mica_units::Rng;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

const ROUNDS: u64 = 100;
const ENOSPC: i32 = 28;

/// How an image looks, and how much is done with it.
#[derive(Clone, Copy)]
struct Shape {
    bits: ClusterBits,
    width: RefcountWidth,
    /// Clusters of the file in the beginning.
    clusters: u64,
    /// Maximum number of clusters that one request wants.
    wanted_max: u64,
    /// Clusters in use beyond which more is returned than reserved.
    used_max: usize,
    /// Whether the device is full at times.
    is_scarce: bool,
}

impl Shape {
    fn of(seed: u64, rng: &mut Rng) -> Self {
        let (bits, order, wanted_max, used_max) = match seed % 6 {
            // The refcount table is outgrown.
            0 => (9, 6, 300, 5000),
            1 => (9, 6, 40, 2000),
            2 => (9, 4, 100, 3000),
            // Several counts share a byte.
            3 => (9, 0, 100, 3000),
            4 => (9, 2, 100, 3000),
            _ => (13, 6, 60, 1000),
        };
        Self {
            bits: ClusterBits::new(bits).expect("of the format"),
            width: RefcountWidth::from_order(order).expect("of the format"),
            clusters: 40 + rng.below(400),
            wanted_max,
            used_max,
            is_scarce: rng.percent(50),
        }
    }

    fn place(&self, cluster: u64) -> HostOffset {
        HostOffset::new(cluster << self.bits.bits())
    }

    fn region_of(&self, cluster: u64) -> u64 {
        self.width.block_of(self.bits, HostCluster::new(cluster))
    }

    fn number_at(&self, at: u64) -> u64 {
        self.bits.host_cluster(HostOffset::new(at)).number()
    }
}

/// The clusters of a run; the model counts by bare numbers.
fn numbers(first: HostCluster, count: u64) -> Range<u64> {
    first.number()..first.number() + count
}

/// Who has which cluster.
#[derive(Default)]
struct Model {
    /// Clusters that were reserved, or were in use before, with the references to them.
    used: BTreeMap<u64, u64>,
    /// Runs that may still be given back.
    reserved: Vec<Reserved>,
    /// Something was written there, or may have been.
    touched: BTreeSet<u64>,
    /// Clusters of old tables, which no group names any more.
    limbo: Vec<u64>,
    blank_seen: u64,
}

/// How often the store was asked to make something durable.
#[derive(Default)]
struct Syncs {
    of_everything: AtomicU64,
    of_a_part: AtomicU64,
}

impl Syncs {
    fn note(&self, line: &str) {
        if line.contains(" sync ") {
            let which = if line.contains(" len=") { &self.of_a_part } else { &self.of_everything };
            which.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Of everything, and of a part.
    fn counts(&self) -> (u64, u64) {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (get(&self.of_everything), get(&self.of_a_part))
    }
}

struct Image {
    shape: Shape,
    file: Arc<MemoryStore>,
    metadata: Arc<Metadata>,
    space: Space,
    syncs: Arc<Syncs>,
    model: RefCell<Model>,
    /// Whether more is reserved than returned at present.
    is_growing: Cell<bool>,
    /// A table could not be moved: nothing more is written.
    has_failed: Cell<bool>,
}

/// An image file with clusters that are in use, some of them several times, and holes; not every
/// region has a refcount block.
fn new_file(shape: Shape, rng: &mut Rng) -> (Arc<MemoryStore>, BTreeMap<u64, u64>) {
    let len = usize::try_from(shape.clusters << shape.bits.bits()).expect("a small image");
    let file = Arc::new(MemoryStore::new_writable("the image", vec![0; len]));
    let write = |at: HostOffset, bytes: &[u8]| {
        done_at_once(write_all(&*file, Buf::from_slice(bytes), at));
    };
    let place_of = |at: usize| HostOffset::new(at as u64);
    write(place_of(field::REFCOUNT_TABLE), &shape.place(1).bytes().to_be_bytes());
    write(place_of(field::REFCOUNT_TABLE + 8), &1_u32.to_be_bytes());
    let mut counts = BTreeMap::from([(0, 1), (1, 1)]);
    let mut used = BTreeMap::new();
    let entries = shape.width.block_entries(shape.bits);
    for region in 0..shape.clusters.div_ceil(entries) {
        let clusters = region * entries..((region + 1) * entries).min(shape.clusters);
        if region > 0 && rng.percent(30) {
            continue;
        }
        let block = clusters.start + if region == 0 { 2 } else { 0 };
        counts.insert(block, 1);
        for cluster in block + 1..clusters.end {
            if rng.percent(40) {
                let references_max = (1_u64 << shape.width.bits().min(8)) - 1;
                used.insert(cluster, 1 + rng.below(references_max.min(3)));
            }
        }
        let mut bytes = vec![0; usize::try_from(shape.bits.bytes()).expect("small")];
        for (cluster, count) in counts.range(clusters.clone()).chain(used.range(clusters)) {
            let index = usize::try_from(cluster % entries).expect("in a block");
            shape.width.set(&mut bytes, index, *count).expect("a small count");
        }
        write(shape.place(block), &bytes);
        let entry = RefcountTableEntry::encode(shape.place(block)).0;
        let at = HostOffset::new(shape.place(1).bytes() + region * 8);
        write(at, &entry.to_be_bytes());
    }
    (file, used)
}

fn number_in(file: &MemoryStore, at: usize, len: usize) -> u64 {
    let (read, buf) = at_once(file.read_at(Buf::new(len), HostOffset::new(at as u64)));
    read.expect("memory is read");
    buf.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Image {
    async fn open(shape: Shape, file: Arc<MemoryStore>, model: Model, seed: u64) -> Self {
        let l2 = L2Format {
            cluster_bits: shape.bits,
            version: Version::V3,
            extended: false,
            data_file: false,
        };
        let mut header = Header::new(l2, Compression::Deflate);
        header.refcount_width = shape.width;
        let table = number_in(&file, field::REFCOUNT_TABLE, 8);
        let clusters = number_in(&file, field::REFCOUNT_TABLE + 8, 4);
        header.refcount_table_offset = HostOffset::new(table);
        header.refcount_table_clusters = u32::try_from(clusters).expect("4 bytes");
        let mut store: Arc<dyn Store> = Arc::clone(&file) as _;
        if shape.is_scarce {
            let when = When::Rate { share: 0.1, seed };
            let operations = Operations::NONE.with(Operation::Write).with(Operation::SetLen);
            store =
                Arc::new(ErrorStore::new(store, ErrorOptions { operations, when, errno: ENOSPC }));
        }
        let time = Duration::from_micros(10);
        store =
            Arc::new(DelayStore::new(store, DelayOptions { operations: Operations::ALL, time }));
        let syncs = Arc::new(Syncs::default());
        let of_store = Arc::clone(&syncs);
        let sink = Arc::new(move |line: &str| of_store.note(line));
        store = Arc::new(LogStore::new(store, LogOptions { sink }));
        let metadata = Metadata::new(store, shape.bits);
        let file_end = HostOffset::new(file.len().expect("memory"));
        metadata.ranges.set_file_end(shape.bits.host_cluster_up(file_end));
        metadata.ranges.add(HostOffset::ZERO, shape.bits.bytes(), "the header");
        let table_bytes = clusters * shape.bits.bytes();
        metadata.ranges.add(header.refcount_table_offset, table_bytes, "the refcount table");
        let space = Space::open(&metadata, &header, true).await.expect("an image in order");
        let model = RefCell::new(model);
        let (is_growing, has_failed) = (Cell::new(true), Cell::new(false));
        Self { shape, file, metadata, space, syncs, model, is_growing, has_failed }
    }

    /// One of 100 clusters of 4 KiB, with a refcount block for each 2048.
    async fn open_small() -> Self {
        let shape = Shape {
            bits: ClusterBits::new(12).expect("of the format"),
            width: RefcountWidth::from_order(4).expect("of the format"),
            clusters: 100,
            wanted_max: 1,
            used_max: usize::MAX,
            is_scarce: false,
        };
        let (file, used) = new_file(shape, &mut Rng::new(1));
        let touched = (0..shape.clusters).collect();
        Self::open(shape, file, Model { used, touched, ..Model::default() }, 1).await
    }

    /// Asks for clusters; what it gets is nobody else's.
    async fn reserve(&self, wanted: u64, writes: bool) {
        let reserved = match self.space.reserve(wanted).await {
            Ok(reserved) => reserved,
            Err(error) => {
                assert!(self.shape.is_scarce && error.kind() == ErrorKind::NoSpace, "{error}");
                self.has_failed.set(self.metadata.failure().is_some());
                return;
            }
        };
        assert!((1..=wanted).contains(&reserved.count), "{reserved:?} of {wanted}");
        let model = &mut *self.model.borrow_mut();
        for cluster in numbers(reserved.first, reserved.count) {
            assert_eq!(model.used.insert(cluster, 1), None, "{cluster} is given twice");
            let at = self.shape.place(cluster);
            assert!(self.metadata.ranges.check(at, 1).is_ok(), "{cluster} is metadata");
            if reserved.blank {
                let is_new = !model.touched.contains(&cluster);
                assert!(is_new && self.is_zeros(cluster), "{cluster} is not blank");
                model.blank_seen += 1;
            }
            model.touched.insert(cluster);
            if writes {
                let bytes = Buf::from_slice(&cluster.to_be_bytes());
                done_at_once(write_all(&*self.file, bytes, at));
            }
        }
        model.reserved.push(reserved);
    }

    fn give_back(&self, rng: &mut Rng) {
        let model = &mut *self.model.borrow_mut();
        if model.reserved.is_empty() {
            return;
        }
        let which = rng.below(model.reserved.len() as u64);
        let reserved = model.reserved.swap_remove(usize::try_from(which).expect("few"));
        for cluster in numbers(reserved.first, reserved.count) {
            assert_eq!(model.used.remove(&cluster), Some(1));
        }
        self.space.give_back(reserved);
    }

    /// Picks a cluster to lose a reference, which is linked from now on at the latest.
    fn pick(&self, rng: &mut Rng) -> Option<u64> {
        let model = &mut *self.model.borrow_mut();
        let last = *model.used.keys().next_back()?;
        let cluster = *model.used.range(rng.below(last + 1)..).next()?.0;
        model.reserved.retain(|run| !numbers(run.first, run.count).contains(&cluster));
        let left = model.used.get(&cluster)? - 1;
        match left {
            0 => model.used.remove(&cluster),
            left => model.used.insert(cluster, left),
        };
        Some(cluster)
    }

    async fn release(&self, clusters: Vec<u64>) {
        for cluster in clusters {
            self.space.release(HostCluster::new(cluster)).await.expect("nothing fails that reads");
        }
    }

    /// Makes a group durable, as [`commit`](super::super::commit) does.
    async fn commit(&self) {
        let _locked = self.metadata.page_writes.lock().await;
        let (mut dirty, group) = self.metadata.lock().take_group(self.space.state());
        for pages in [std::mem::take(&mut dirty.early), std::mem::take(&mut dirty.late)] {
            mica_rt::sleep(Duration::from_micros(30)).await;
            for (at, buf) in pages {
                done_at_once(write_all(&*self.file, buf, at));
            }
        }
        let mut pages = self.metadata.lock();
        pages.written(&dirty);
        pages.group.durable = group.number;
        drop(pages);
        self.model.borrow_mut().limbo.extend(group.freed.iter().map(|freed| freed.number()));
    }

    /// Everything that is not used is returned.
    async fn close(&self) {
        self.commit().await;
        let mut unused = self.space.drain_pool();
        unused.sort_unstable();
        let limbo = std::mem::take(&mut self.model.borrow_mut().limbo);
        self.release(unused.iter().map(|unused| unused.number()).chain(limbo).collect()).await;
        self.commit().await;
        let end = self.shape.bits.clusters_for(self.file.len().expect("memory"));
        let is_unused: BTreeSet<_> = unused.iter().map(|unused| unused.number()).collect();
        let kept = (0..end).rev().find(|cluster| !is_unused.contains(cluster));
        match self.space.cut_tail(&unused).await {
            Ok(()) => {
                let now = self.file.len().expect("memory");
                assert_eq!(now, self.shape.place(kept.map_or(0, |kept| kept + 1)).bytes());
            }
            Err(error) => assert!(self.shape.is_scarce, "{error}"),
        }
    }

    fn is_zeros(&self, cluster: u64) -> bool {
        self.read_file(cluster).iter().all(|byte| *byte == 0)
    }

    fn read_file(&self, cluster: u64) -> Buf {
        let len = usize::try_from(self.shape.bits.bytes()).expect("small");
        let (read, buf) = at_once(self.file.read_at(Buf::new(len), self.shape.place(cluster)));
        read.expect("memory is read");
        buf
    }

    /// The refcount block in cluster `block`, as it is here, and as the file has it.
    fn read_block(&self, block: u64) -> (Vec<u8>, Buf) {
        let in_file = self.read_file(block);
        let mut here = in_file.to_vec();
        let state = self.metadata.lock();
        let len = usize::try_from(state.page_bytes()).expect("4 KiB");
        for (start, part) in (0..).step_by(len).zip(here.chunks_exact_mut(len)) {
            let at = HostOffset::new(self.shape.place(block).bytes() + start);
            if let Some(bytes) = state.get(at, len) {
                part.copy_from_slice(bytes);
            }
        }
        (here, in_file)
    }

    /// What each cluster must count, from those who have one.
    fn owners(&self) -> BTreeMap<u64, u64> {
        let mut owners = BTreeMap::new();
        let mut own = |clusters: &mut dyn Iterator<Item = u64>, count: u64, who: &str| {
            for cluster in clusters {
                let other = owners.insert(cluster, count);
                assert_eq!(other, None, "{cluster} belongs to {who} and to another");
            }
        };
        let model = self.model.borrow();
        own(&mut [0].into_iter(), 1, "the header");
        let freed = self.metadata.lock().group.freed.clone();
        let state = self.space.lock();
        let table = self.shape.bits.host_cluster(state.table_offset).number();
        let table_end = table + self.shape.bits.clusters_for(state.table.len() as u64 * 8);
        own(&mut (table..table_end), 1, "the table");
        let blocks = state.table.to_vec().into_iter().filter(|entry| *entry != 0);
        let blocks = blocks.map(|entry| self.shape.number_at(entry));
        own(&mut { blocks }, 1, "the blocks");
        let pool = state.pool.iter().flat_map(|run| numbers(run.first, run.count));
        own(&mut { pool }, 1, "the pool");
        own(&mut freed.iter().map(|freed| freed.number()), 1, "the freed ones");
        own(&mut model.limbo.iter().copied(), 1, "limbo");
        model.used.iter().for_each(|(cluster, count)| {
            own(&mut [*cluster].into_iter(), *count, "a request");
        });
        owners
    }

    /// Nothing is under way: each cluster is as its owner says.
    fn check(&self) {
        let owners = self.owners();
        let state = self.space.lock();
        state.verify(self.shape.bits);
        let (table, cursor) = (state.table.to_vec(), state.cursor.number());
        let pool: Vec<_> = state.pool.iter().copied().collect();
        drop(state);
        let durable = self.metadata.lock().group.durable;
        let entries = self.shape.width.block_entries(self.shape.bits);
        let last = owners.keys().next_back().copied().unwrap_or(0);
        let mut counted_in_file = BTreeSet::new();
        for (region, entry) in (0..).zip(&table) {
            let clusters = region * entries..(region + 1) * entries;
            if *entry == 0 {
                let stray = owners.range(clusters).next();
                assert_eq!(stray, None, "it has an owner and no refcount");
                continue;
            }
            let block = self.shape.number_at(*entry);
            assert!(self.metadata.ranges.check(self.shape.place(block), 1).is_err(), "{block}");
            let (here, in_file) = self.read_block(block);
            for (index, cluster) in clusters.enumerate() {
                let count = self.shape.width.get(&here, index).expect("in the block");
                assert_eq!(count, owners.get(&cluster).copied().unwrap_or(0), "{cluster}");
                assert!(count > 0 || cluster >= cursor, "{cluster} is free and never found");
                if self.shape.width.get(&in_file, index) > Some(0) {
                    counted_in_file.insert(cluster);
                }
            }
        }
        assert!(self.shape.region_of(last) < table.len() as u64, "every owner has a refcount");
        for entry in table.iter().filter(|entry| **entry != 0) {
            let block = self.shape.number_at(*entry);
            assert!(counted_in_file.contains(&block), "I7: block {block}");
        }
        let end = self.shape.bits.clusters_for(self.file.len().expect("memory"));
        assert!(last < end, "I4: {last} is counted beyond the end of the file, {end}");
        let model = self.model.borrow();
        for run in &pool {
            let mut clusters = numbers(run.first, run.count);
            let is_blank = |cluster| !model.touched.contains(&cluster) && self.is_zeros(cluster);
            assert!(!run.blank || clusters.all(is_blank), "I3: {run:?}");
        }
        let pool = pool.iter().map(|run| (numbers(run.first, run.count), run.group));
        let reserved = model.reserved.iter().map(|run| (numbers(run.first, run.count), run.group));
        for (clusters, group) in pool.chain(reserved).filter(|run| run.1 <= durable) {
            for cluster in clusters {
                assert!(counted_in_file.contains(&cluster), "I2: {cluster} of group {group}");
            }
        }
    }

    /// Some requests at once, and perhaps a flush beside them.
    async fn round(&self, rng: &mut Rng) {
        let mut tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
        let mut releases = std::mem::take(&mut self.model.borrow_mut().limbo);
        let used = self.model.borrow().used.len();
        if used > self.shape.used_max || used < self.shape.used_max / 4 {
            self.is_growing.set(used < self.shape.used_max);
        }
        let (reserving, releasing, released_max) =
            if self.is_growing.get() { (80, 10, 3) } else { (30, 60, 1 + used as u64 / 10) };
        for _ in 0..=rng.below(6) {
            match rng.below(100) {
                dice if dice < reserving => {
                    let wanted = 1 + rng.below(self.shape.wanted_max);
                    tasks.push(Box::pin(self.reserve(wanted, rng.percent(50))));
                }
                dice if dice < reserving + releasing => {
                    let count = 1 + rng.below(released_max);
                    releases.extend((0..count).filter_map(|_| self.pick(rng)));
                }
                _ => self.give_back(rng),
            }
        }
        // Only a flush releases, and there is one at a time.
        let commits = rng.percent(30);
        tasks.push(Box::pin(async move {
            self.release(releases).await;
            if commits {
                self.commit().await;
            }
        }));
        if rng.percent(30) {
            tasks.push(Box::pin(self.space.make_blocks_ahead()));
        }
        rng.shuffle(&mut tasks);
        join_all(tasks).await;
    }
}

#[test]
fn each_cluster_has_one_owner_and_the_count_that_this_one_says() {
    from_seeds(8, |seed| {
        let executor = Executor::new(Backend::Sim { seed }).expect("the simulator");
        executor.block_on(async {
            let mut rng = Rng::new(seed);
            let shape = Shape::of(seed, &mut rng);
            let (mut file, used) = new_file(shape, &mut rng);
            let touched = (0..shape.clusters).collect();
            let mut model = Model { used, touched, ..Model::default() };
            for turn in 0..3 {
                let image = Image::open(shape, file, model, seed << 2 | turn).await;
                image.check();
                for _ in 0..ROUNDS {
                    image.round(&mut rng).await;
                    if image.has_failed.get() {
                        return;
                    }
                    // It looks at every cluster.
                    if rng.percent(25) {
                        image.check();
                    }
                }
                image.close().await;
                image.check();
                (file, model) = (image.file, image.model.into_inner());
                // From now on they are linked, and what is in the file may have been written.
                model.reserved.clear();
                model.touched = (0..shape.bits.clusters_for(file.len().expect("memory"))).collect();
            }
            assert!(model.blank_seen > 0, "something was allocated beyond the end of the file");
        });
    });
}

#[test]
fn file_is_lengthened_more_rarely_the_more_is_allocated_and_as_long_as_needed_after_a_close() {
    let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
    executor.block_on(async {
        let image = Image::open_small().await;
        let mut lens = BTreeSet::new();
        for _ in 0..20_000 {
            image.reserve(1, false).await;
            lens.insert(image.file.len().expect("memory"));
            image.commit().await;
        }
        // 256 at a time from the beginning, and then up to 1024.
        assert!((20..40).contains(&lens.len()), "{} lengths for 20,000 clusters", lens.len());
        image.close().await;
        image.check();
    });
}

/// The story: a wrapper of the file turned this into a sync of everything that was written.
#[test]
fn refcount_block_that_a_request_waits_for_is_made_durable_alone() {
    let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
    executor.block_on(async {
        let image = Image::open_small().await;
        for _ in 0..20_000 {
            image.reserve(1, false).await;
        }
        let (of_everything, of_a_part) = image.syncs.counts();
        assert_eq!(of_everything, 0, "a request waited for all that others wrote");
        assert!(of_a_part > 0, "blocks were made");
    });
}

/// The story: with clusters of 64 KiB everybody waited 0.8 s for the device, once in 16 GiB.
#[test]
fn request_that_reaches_a_new_region_waits_for_no_sync_and_finds_blank_clusters() {
    for flushes in [true, false] {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        executor.block_on(async {
            let image = Image::open_small().await;
            let mut made = 0;
            for number in 0..20_000 {
                let before = image.syncs.counts();
                image.reserve(1, false).await;
                assert_eq!(image.syncs.counts(), before, "request {number} waited for a sync");
                if flushes && number % 100 == 0 {
                    image.commit().await;
                }
                if image.space.wants_blocks() {
                    image.space.make_blocks_ahead().await;
                    made += 1;
                }
            }
            image.check();
            // Blocks for eight regions at a time, and ten regions are in use.
            assert!((1..=30).contains(&made), "blocks were made {made} times");
            let beyond_old_end = image.model.borrow().used.range(image.shape.clusters..).count();
            assert_eq!(image.model.borrow().blank_seen, beyond_old_end as u64);
            image.close().await;
            image.check();
        });
    }
}

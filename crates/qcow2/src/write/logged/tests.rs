//! What sees a page, and what is in the log by then.

use super::super::overlay::MetadataStore;
use super::super::pages::Metadata;
use super::*;
use crate::chain::{Chain, ChainOptions};
use crate::redo::HeaderFields;
use crate::testing::at_once;
use crate::testing::{CLUSTER_BYTES, Folder};
use crate::write::allocate::Space;
use mica_block::{Disk as _, Manage as _, RedoMemory, RedoOrigin, Result, Store};
use mica_qcow2_format::{Compression, Header, L2Format, Version};
use mica_rt::{Backend, Executor, join_all};
use mica_store::MemoryStore;
use mica_units::{ClusterBits, GuestOffset};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const LEN: usize = 1 << 20;
const PAGE: HostOffset = HostOffset::new(4 << 12);

/// Memory that counts what is written to it, and forgets it.
#[derive(Default)]
struct Counting(AtomicU64);

impl Counting {
    fn writes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl RedoMemory for Counting {
    fn renew(&self) -> Result<RedoOrigin> {
        self.origin()
    }

    fn origin(&self) -> Result<RedoOrigin> {
        Ok(RedoOrigin { boot: 1, memory: 1 })
    }

    fn now_ns(&self) -> i128 {
        0
    }

    fn changed_ns(&self) -> Result<i128> {
        Ok(0)
    }

    fn capacity(&self) -> u64 {
        1 << 20
    }

    fn read_at(&self, _at: u64, buf: &mut [u8]) -> Result<()> {
        buf.fill(0);
        Ok(())
    }

    fn write_at(&self, _at: u64, _bytes: &[u8]) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn remove(&self) {}
}

#[test]
fn reader_of_the_tables_sees_no_entry_before_it_is_in_the_log() {
    let bits = ClusterBits::new(12).expect("of the format");
    let file = Arc::new(MemoryStore::new_writable("the image", vec![0; LEN]));
    let metadata = Metadata::new(Arc::clone(&file) as _, bits);
    let l2 =
        L2Format { cluster_bits: bits, version: Version::V3, extended: false, data_file: false };
    let mut header = Header::new(l2, Compression::Deflate);
    header.refcount_table_offset = HostOffset::new(1 << 12);
    header.refcount_table_clusters = 1;
    let _space = at_once(Space::open(&metadata, &header, true)).expect("an image in order");
    let memory = Arc::new(Counting::default());
    let stores: Vec<Arc<dyn Store>> = vec![Arc::clone(&file) as _];
    metadata.lock().logging.begin(Arc::clone(&memory) as _, stores, (0, 0), 4096);
    metadata.lock().header.now = HeaderFields::of(&header, 1);
    at_once(metadata.load(PAGE)).expect("memory is read");
    let before = memory.writes();

    let put = |entry: u64| {
        let mut pages = metadata.lock();
        let bytes = pages.get_mut(PAGE, 8, Stage::Late).expect("it is loaded");
        bytes.copy_from_slice(&entry.to_be_bytes());
        pages.has_new_links = true;
    };
    put(1);
    put(2);
    assert_eq!(memory.writes(), before, "nobody has seen them");
    let seen = at_once(MetadataStore::new(Arc::clone(&metadata)).read_at(Buf::new(8), PAGE));
    assert_eq!((seen.0.is_ok(), &seen.1[..]), (true, &2_u64.to_be_bytes()[..]));
    assert_eq!(memory.writes(), before + 1, "one group has both");
    metadata.log_links(&mut metadata.lock());
    assert_eq!(memory.writes(), before + 1, "there is nothing new");
}

#[test]
fn writes_that_link_in_the_same_turn_take_fewer_groups_than_they_are() {
    const WRITES: u64 = 32;
    // One that runs its tasks in the order in which they are ready.
    Executor::new(Backend::Pool).expect("starts").block_on(async {
        let memory = Arc::new(Counting::default());
        let folder = Folder::default().with_log(Arc::clone(&memory) as _);
        folder.make("image", 2 * LEN as u64, None);
        let options = ChainOptions { writable: true, ..ChainOptions::default() };
        let chain = Chain::open(Arc::new(folder), &Folder::path("image"), &options).await;
        let chain = &chain.expect("opens");
        let write = |cluster: u64| async move {
            let at = GuestOffset::new(cluster * CLUSTER_BYTES as u64);
            chain.write(at, Buf::from_slice(&[1; 512])).await.0.expect("written");
        };
        // With the table for the others.
        write(0).await;
        let before = memory.writes();
        join_all((1..=WRITES).map(write)).await;
        let groups = memory.writes() - before;
        assert!(groups < WRITES / 4, "{groups} groups of {WRITES} writes");
        chain.close().await.expect("closed");
    });
}

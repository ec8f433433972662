//! What images make of the memory for their bitmaps.

use super::bits::ROOM_BYTES;
use crate::chain::{Chain, ChainOptions};
use crate::header_io::read_header;
use crate::snapshots::list_bitmaps;
use crate::testing::{CLUSTER_BYTES, Folder, REFCOUNTS_AT};
use mica_block::{Disk as _, Images as _, Manage as _};
use mica_qcow2_format::{Autoclear, BITMAP_BYTES_MAX, BitmapEntry, BitmapTableEntry};
use mica_rt::{Backend, Buf, Executor};
use mica_store::faulty::LogOptions;
use mica_units::{GuestOffset, HostOffset};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const DISK: u64 = 2 << 20;

/// Where the directory is, and the table that all bitmaps name.
const DIRECTORY_AT: usize = 4 * CLUSTER_BYTES;
const TABLE_AT: usize = 5 * CLUSTER_BYTES;

/// An image with as many bitmaps as are kept, all of which name one table, as long as one can be,
/// though a disk of this length needs one entry.
fn image_of_long_tables() -> Folder {
    image_of(Autoclear::KEPT_BITMAPS_MAX, true)
}

/// An image with `count` such bitmaps.
fn image_of(count: usize, are_enabled: bool) -> Folder {
    image_of_tables(count, 16, are_enabled)
}

fn image_of_tables(count: usize, granularity_bits: u8, auto: bool) -> Folder {
    image_of_disk(DISK, count, granularity_bits, auto)
}

fn image_of_disk(len: u64, count: usize, granularity_bits: u8, auto: bool) -> Folder {
    let folder = Folder::default();
    folder.make("image", len, None);
    let entries = u32::try_from(BITMAP_BYTES_MAX / CLUSTER_BYTES as u64).expect("many");
    let mut directory = Vec::new();
    for number in 0..count {
        let entry = BitmapEntry {
            name: format!("bitmap {number}"),
            table_offset: HostOffset::new(TABLE_AT as u64),
            table_entries: entries,
            granularity_bits,
            in_use: false,
            auto,
        };
        entry.encode(&mut directory);
    }
    let put = |at, bytes: &[u8]| folder.put("image", at, bytes);
    put(DIRECTORY_AT, &directory);
    let table_bytes = entries as usize * 8;
    put(TABLE_AT, &vec![0; table_bytes]);
    put(REFCOUNTS_AT, &vec![u8::MAX; (5 + table_bytes / CLUSTER_BYTES).div_ceil(8)]);
    let l1_entries = len.div_ceil(CLUSTER_BYTES as u64 * CLUSTER_BYTES as u64 / 8);
    put(36, &u32::try_from(l1_entries).expect("few").to_be_bytes());
    put(88, &1_u64.to_be_bytes());
    put(104, &0x2385_2875_u32.to_be_bytes());
    put(108, &24_u32.to_be_bytes());
    let count = u32::try_from(count).expect("few");
    put(112, &count.to_be_bytes());
    put(120, &(directory.len() as u64).to_be_bytes());
    put(128, &(DIRECTORY_AT as u64).to_be_bytes());
    folder
}

async fn open_and_write(folder: &Folder, options: &ChainOptions) -> Chain {
    let images = Arc::new(folder.clone());
    let chain = Chain::open(images, &Folder::path("image"), options).await.expect("opens");
    let bytes = Buf::from_slice(&[1; 512]);
    chain.write(GuestOffset::ZERO, bytes).await.0.expect("it is written");
    chain
}

/// The story: a file of kilobytes had tables of gigabytes in memory, which counted for nothing.
#[test]
fn table_takes_no_more_memory_than_the_disk_needs() {
    Executor::new(Backend::Sim { seed: 1 }).expect("starts").block_on(async {
        let (folder, options) = (image_of_long_tables(), options());
        for _ in 0..2 {
            let chain = open_and_write(&folder, &options).await;
            let writer = chain.present_writer();
            let all = &writer.bitmaps.recorder().expect("they are kept").all;
            assert_eq!(all.len(), Autoclear::KEPT_BITMAPS_MAX);
            assert!(all.iter().all(|bitmap| bitmap.table_len() == 1));
            chain.close().await.expect("it is closed");
        }
    });
}

#[test]
fn bitmap_ends_for_whose_table_there_is_no_memory() {
    Executor::new(Backend::Sim { seed: 1 }).expect("starts").block_on(async {
        let (folder, options) = (image_of_long_tables(), options());
        let used = options.cache.bitmap_bytes();
        used.store(ROOM_BYTES, Ordering::Relaxed);
        let chain = open_and_write(&folder, &options).await;
        assert!(chain.present_writer().bitmaps.recorder().is_none());
        chain.close().await.expect("it is closed");
        assert_eq!(used.load(Ordering::Relaxed), ROOM_BYTES);
    });
}

/// The story: beyond what the disk needed, the table of a bitmap named a refcount block. When the
/// disk was made longer, what was dirty in its new part was written there.
#[test]
fn what_a_table_says_beyond_the_disk_is_nothing_when_that_grows() {
    const TABLE_COVERS: u64 = (CLUSTER_BYTES as u64 * 8) << 16;
    for are_enabled in [true, false] {
        Executor::new(Backend::Sim { seed: 1 }).expect("starts").block_on(async {
            let (folder, options) = (image_of(1, are_enabled), options());
            let block = BitmapTableEntry::Data(HostOffset::new(REFCOUNTS_AT as u64)).encode();
            folder.put("image", TABLE_AT + 8, &block.to_be_bytes());
            let chain = open_and_write(&folder, &options).await;
            assert_eq!(chain.present_writer().bitmaps.recorder().is_some(), are_enabled);
            chain.resize(TABLE_COVERS * 3 / 2).await.expect("it grows");
            chain.close().await.expect("it is closed");
            let number = |at| {
                let bytes = folder.get("image", at, 8).try_into().expect("eight bytes");
                u64::from_be_bytes(bytes)
            };
            let place = |at| usize::try_from(number(at)).expect("in memory");
            let table = place(place(128));
            assert_ne!(table, TABLE_AT);
            assert_ne!(number(table + 8), block, "enabled: {are_enabled}");
            // There are some hundred clusters, and a bit is the count of one.
            let counts = folder.get("image", REFCOUNTS_AT, CLUSTER_BYTES);
            assert!(counts[64..].iter().all(|byte| *byte == 0), "enabled: {are_enabled}");
        });
    }
}

/// The story: the counts said that nothing was where the bits of a bitmap are, and a table of the
/// image was put there. Then the bits were written.
#[test]
fn bits_are_not_written_where_a_table_was_put_since() {
    const IS_COPIED: u64 = 1 << 63;
    let table_bytes = usize::try_from(BITMAP_BYTES_MAX).expect("it fits") / CLUSTER_BYTES * 8;
    let first_free = (TABLE_AT + table_bytes) / CLUSTER_BYTES;
    let mut refused = 0;
    for cluster in first_free..first_free + 6 {
        Executor::new(Backend::Sim { seed: 1 }).expect("starts").block_on(async {
            let folder = image_of(1, true);
            let at = cluster * CLUSTER_BYTES;
            let bits = BitmapTableEntry::Data(HostOffset::new(at as u64)).encode();
            folder.put("image", TABLE_AT, &bits.to_be_bytes());
            folder.put("image", at, &[0; CLUSTER_BYTES]);
            let chain = open_and_write(&folder, &options()).await;
            let is_refused = chain.close().await.is_err();
            assert_eq!(is_marked_corrupt(&folder), is_refused, "{cluster}");
            refused += u32::from(is_refused);
            let number = |at| {
                let bytes = folder.get("image", at, 8).try_into().expect("eight bytes");
                u64::from_be_bytes(bytes)
            };
            let table = number(3 * CLUSTER_BYTES) & !IS_COPIED;
            let entry = number(usize::try_from(table).expect("in memory"));
            assert_ne!(entry & IS_COPIED, 0, "{cluster}: the link of what was written");
        });
    }
    assert_eq!(refused, 1, "the table is somewhere there");
}

fn is_marked_corrupt(folder: &Folder) -> bool {
    folder.get("image", 79, 1) == [2]
}

/// The story: as above, and the guest went on: the same error, again and again, and the image was
/// opened for writing the next day.
#[test]
fn image_whose_bits_are_where_a_table_is_takes_no_more_writes() {
    const DISK: u64 = 1 << 30;
    let table_bytes = usize::try_from(BITMAP_BYTES_MAX).expect("it fits") / CLUSTER_BYTES * 8;
    let first_free = (TABLE_AT + table_bytes) / CLUSTER_BYTES;
    let mut refused = 0;
    for cluster in first_free..first_free + 6 {
        Executor::new(Backend::Sim { seed: 1 }).expect("starts").block_on(async {
            let folder = image_of_disk(DISK, 1, 16, true);
            let at = cluster * CLUSTER_BYTES;
            let bits = BitmapTableEntry::Data(HostOffset::new(at as u64)).encode();
            folder.put("image", TABLE_AT, &bits.to_be_bytes());
            folder.put("image", at, &[0; CLUSTER_BYTES]);
            let chain = open_and_write(&folder, &options()).await;
            // In a region of its own, and in the first one again.
            let mut written = Vec::new();
            for at in [DISK / 2, 0] {
                let bytes = Buf::from_slice(&[1; 512]);
                written.push(chain.write(GuestOffset::new(at), bytes).await.0.is_ok());
            }
            let is_fine = written[0];
            assert_eq!(written, [is_fine; 2], "{cluster}");
            refused += u32::from(!is_fine);
            // Of the table that the new region gets the image learns when it is closed.
            let is_closed = chain.close().await.is_ok();
            assert!(is_fine || !is_closed, "{cluster}");
            assert_eq!(is_marked_corrupt(&folder), !is_closed, "{cluster}");
        });
    }
    assert_eq!(refused, 1, "the first table is somewhere there");
}

/// The longest piece that is read or written while the image in `folder` gets `len` bytes.
async fn grow(folder: &Folder, len: u64) -> u64 {
    let longest = Arc::new(AtomicU64::new(0));
    let of_sink = Arc::clone(&longest);
    let sink = move |line: &str| {
        let len = line.split(" len=").nth(1).and_then(|rest| rest.split(' ').next());
        let is_data = line.contains(" read ") || line.contains(" write ");
        if let Some(len) = len.filter(|_| is_data).and_then(|len| len.parse().ok()) {
            of_sink.fetch_max(len, Ordering::Relaxed);
        }
    };
    let images = Arc::new(folder.watched(LogOptions { sink: Arc::new(sink) }));
    let chain = Chain::open(images, &Folder::path("image"), &options()).await.expect("opens");
    longest.store(0, Ordering::Relaxed);
    chain.resize(len).await.expect("it grows");
    chain.close().await.expect("it is closed");
    longest.load(Ordering::Relaxed)
}

/// The story: a disk grew, and the tables of all its bitmaps were in memory at one time, 24 bytes
/// for each 8 of them.
#[test]
fn tables_are_copied_a_piece_at_a_time() {
    Executor::new(Backend::Sim { seed: 1 }).expect("starts").block_on(async {
        let folder = image_of_tables(Autoclear::KEPT_BITMAPS_MAX, 16, true);
        assert!(grow(&folder, 2 * DISK).await <= 64 << 10);
    });
}

#[test]
fn table_of_several_pieces_stays_what_it_was() {
    // 16384 entries of the table: two pieces.
    const LEN: u64 = 256 << 30;
    const ONES: [usize; 4] = [5, 8191, 8192, 16383];
    Executor::new(Backend::Sim { seed: 1 }).expect("starts").block_on(async {
        let folder = image_of_tables(1, 9, false);
        let table_of = async || {
            let image = folder.open(&Folder::path("image")).expect("there").store;
            let header = read_header(&*image).await.expect("a header");
            let entries = list_bitmaps(&*image, &header).await.expect("bitmaps");
            let [entry] = &entries[..] else { panic!("{entries:?}") };
            assert!(!entry.in_use);
            (usize::try_from(entry.table_offset.bytes()).expect("small"), entry.table_entries)
        };
        grow(&folder, LEN).await;
        let (at, entries) = table_of().await;
        assert_eq!(entries, 16384);
        let ones = BitmapTableEntry::Ones.encode().to_be_bytes();
        ONES.iter().for_each(|entry| folder.put("image", at + entry * 8, &ones));
        grow(&folder, LEN + (1 << 30)).await;
        let (at, entries) = table_of().await;
        assert_eq!(entries, 16384 + 64);
        let table = folder.get("image", at, (16384 + 64) * 8);
        let is_set = |index: &usize| table[index * 8..index * 8 + 8] == ones;
        assert_eq!((0..16384 + 64).filter(is_set).collect::<Vec<_>>(), ONES);
        assert_eq!(table.iter().filter(|byte| **byte != 0).count(), ONES.len());
    });
}

fn options() -> ChainOptions {
    ChainOptions { writable: true, ..ChainOptions::default() }
}

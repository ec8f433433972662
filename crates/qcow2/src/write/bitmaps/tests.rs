//! What images make of the memory for their bitmaps.

use super::bits::ROOM_BYTES;
use crate::chain::{Chain, ChainOptions};
use crate::testing::{CLUSTER_BYTES, Folder, REFCOUNTS_AT};
use mica_block::{Disk as _, Manage as _};
use mica_qcow2_format::{Autoclear, BITMAP_BYTES_MAX, BitmapEntry};
use mica_rt::{Backend, Buf, Executor};
use mica_units::{GuestOffset, HostOffset};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const DISK: u64 = 2 << 20;

/// An image with as many bitmaps as are kept, all of which name one table, as long as one can be,
/// though a disk of this length needs one entry.
fn image_of_long_tables() -> Folder {
    let folder = Folder::default();
    folder.make("image", DISK, None);
    let entries = u32::try_from(BITMAP_BYTES_MAX / CLUSTER_BYTES as u64).expect("many");
    let mut directory = Vec::new();
    for number in 0..Autoclear::KEPT_BITMAPS_MAX {
        let entry = BitmapEntry {
            name: format!("bitmap {number}"),
            table_offset: HostOffset::new(5 * CLUSTER_BYTES as u64),
            table_entries: entries,
            granularity_bits: 16,
            in_use: false,
            auto: true,
        };
        entry.encode(&mut directory);
    }
    let put = |at, bytes: &[u8]| folder.put("image", at, bytes);
    put(4 * CLUSTER_BYTES, &directory);
    let table_bytes = entries as usize * 8;
    put(5 * CLUSTER_BYTES, &vec![0; table_bytes]);
    put(REFCOUNTS_AT, &vec![u8::MAX; (5 + table_bytes / CLUSTER_BYTES).div_ceil(8)]);
    put(88, &1_u64.to_be_bytes());
    put(104, &0x2385_2875_u32.to_be_bytes());
    put(108, &24_u32.to_be_bytes());
    let count = u32::try_from(Autoclear::KEPT_BITMAPS_MAX).expect("few");
    put(112, &count.to_be_bytes());
    put(120, &(directory.len() as u64).to_be_bytes());
    put(128, &(4 * CLUSTER_BYTES as u64).to_be_bytes());
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

fn options() -> ChainOptions {
    ChainOptions { writable: true, ..ChainOptions::default() }
}

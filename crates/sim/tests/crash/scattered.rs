//! Guests that write at scattered places on large disks, so that the L1, L2 and refcount tables of
//! an image exceed what is kept in memory.
//!
//! The story: a clean L1 page was evicted between its check and its change, and the server
//! panicked.

use crate::plain::{Plain, read, write};
use mica_block::{Disk as _, Manage as _, Zeroes};
use mica_qcow2_tools::create::ImageWish;
use mica_sim::crash::Mode;
use mica_sim::{World, scenario};
use std::cell::Cell;
use std::collections::BTreeMap;

const TIB: u64 = 1 << 40;
const BLOCK: u64 = 4096;

/// A disk, and how it is written.
struct Scatter {
    cluster_bytes: u64,
    disk_bytes: u64,
    extended: bool,
    refcount_bits: u64,
    writes: u64,
    /// One flush in this many writes; only the last one if it is zero.
    flush_one_in: u64,
}

impl Scatter {
    fn wish(&self) -> ImageWish {
        ImageWish {
            cluster_bytes: Some(self.cluster_bytes),
            extended_l2: Some(self.extended),
            refcount_bits: Some(self.refcount_bits),
            ..ImageWish::default()
        }
    }

    /// Opens the image, writes blocks at random places, each with its own byte, and closes the
    /// image.
    async fn write(&self, world: &World, image: &Plain, shown: &mut BTreeMap<u64, u8>) {
        let chain = image.open(Mode::Write).await;
        for number in 0..self.writes {
            let block = match world.random_below(8) {
                // One that was written.
                0 => {
                    let near = world.random_below(self.disk_bytes / BLOCK);
                    shown.range(near..).next().map_or(near, |(block, _)| *block)
                }
                _ => world.random_below(self.disk_bytes / BLOCK),
            };
            match world.random_below(16) {
                0 => {
                    let how = Zeroes { may_unmap: world.random_below(2) == 0, fast: false };
                    let range = crate::plain::range(block * BLOCK, BLOCK);
                    chain.write_zeroes(range, how).await.unwrap();
                    shown.insert(block, 0);
                }
                _ => {
                    let byte = u8::try_from(1 + number % 255).unwrap();
                    write(&chain, block * BLOCK, byte, 4096).await.unwrap();
                    shown.insert(block, byte);
                }
            }
            if self.flush_one_in > 0 && number % self.flush_one_in == 0 {
                chain.flush().await.unwrap();
            }
        }
        chain.flush().await.unwrap();
        expect_shown(&chain, shown).await;
        chain.close().await.unwrap();
    }

    /// Writes, then writes again to an image that is opened with nothing in memory.
    fn run(self) {
        scenario(1, |world| {
            let scatter = &self;
            async move {
                let image = Plain::new(&world, &scatter.wish(), scatter.disk_bytes).await;
                let mut shown = BTreeMap::new();
                for _ in 0..2 {
                    scatter.write(&world, &image, &mut shown).await;
                    image.expect_sound().await;
                }
                let chain = image.open(Mode::Read).await;
                expect_shown(&chain, &shown).await;
            }
        });
    }
}

async fn expect_shown(chain: &mica_qcow2::Chain, shown: &BTreeMap<u64, u8>) {
    for (block, byte) in shown {
        let bytes = read(chain, block * BLOCK, BLOCK).await.unwrap();
        assert!(bytes.iter().all(|read| read == byte), "block {block} is {bytes:x?}, not {byte:x}");
    }
}

/// Its L1 table is 16 MiB: twice what is kept in memory.
#[test]
fn blocks_scattered_over_64_tib_are_there_after_one_flush_at_the_end() {
    Scatter {
        cluster_bytes: 16 << 10,
        disk_bytes: 64 * TIB,
        extended: false,
        refcount_bits: 16,
        writes: 1500,
        flush_one_in: 0,
    }
    .run();
}

#[test]
fn blocks_scattered_over_64_tib_are_there_with_a_flush_now_and_then() {
    Scatter {
        cluster_bytes: 16 << 10,
        disk_bytes: 64 * TIB,
        extended: true,
        refcount_bits: 64,
        writes: 1500,
        flush_one_in: 50,
    }
    .run();
}

/// Pages of 512 bytes: L1, L2 and refcounts each have more than are kept in memory.
#[test]
fn blocks_scattered_in_tiny_clusters_are_there() {
    for flush_one_in in [0, 1, 97] {
        Scatter {
            cluster_bytes: 512,
            disk_bytes: 100 << 30,
            extended: false,
            refcount_bits: 64,
            writes: 3000,
            flush_one_in,
        }
        .run();
    }
}

#[test]
fn blocks_scattered_in_clusters_of_a_page_are_there() {
    for flush_one_in in [0, 31] {
        Scatter {
            cluster_bytes: 4 << 10,
            disk_bytes: 8 * TIB,
            extended: false,
            refcount_bits: 1,
            writes: 3000,
            flush_one_in,
        }
        .run();
    }
}

/// Syncs take so long that thousands of writes could be answered before the flush ends that is due:
/// those wait that would leave more than 4096 pages dirty.
#[test]
fn writes_wait_for_a_flush_once_too_much_waits_for_one() {
    const TABLE: u64 = 32 << 10;
    const WRITES: u64 = 8192;
    const PAGES_MAX: u64 = 4096;
    const CLIENTS: u64 = 512;
    scenario(1, |world| async move {
        // Not the log is what is full.
        world.set_log_capacity(64 << 20);
        let wish = ImageWish { cluster_bytes: Some(512), ..ImageWish::default() };
        let image = Plain::new(&world, &wish, (WRITES + 1) * TABLE).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, WRITES * TABLE, 1, 512).await.unwrap();
        chain.flush().await.unwrap();
        let groups = chain.write_stats().groups;
        let (next, answered, most) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let client = async || {
            while next.get() < WRITES {
                // Each needs a table of its own.
                let table = next.replace(next.get() + 1);
                write(&chain, table * TABLE, 1, 512).await.unwrap();
                answered.set(answered.get() + 1);
                if chain.write_stats().groups == groups {
                    most.set(answered.get());
                }
            }
        };
        mica_rt::join_all((0..CLIENTS).map(|_| client())).await;
        assert_eq!(answered.get(), WRITES);
        assert!(most.get() >= 1024, "a flush is due, and nobody waits for it: {}", most.get());
        assert!(most.get() <= PAGES_MAX + CLIENTS, "{} pages were dirty", most.get());
        chain.close().await.unwrap();
        drop(chain);
        image.expect_sound().await;
    });
}

//! Tables that an attacker made, or that other programs leave: the writing engine trusts nothing in
//! them that would make it overwrite tables.

use crate::plain::{Plain, range, read, write};
use mica_block::{Disk as _, ErrorKind, Manage as _};
use mica_qcow2_format::bits::COPIED;
use mica_qcow2_tools::create::ImageWish;
use mica_sim::crash::Mode;
use mica_sim::{World, scenario};

const CLUSTER: u64 = 64 << 10;
const CLUSTER_LEN: usize = 64 << 10;
const MIB: u64 = 1 << 20;
const COMPRESSED: u64 = 1 << 62;
/// What the guest writes.
const GUEST: u8 = 0xee;

/// A table, and where it is.
type Place = (&'static str, fn(&Plain) -> u64);

const PLACES: [Place; 4] = [
    ("the L1 table", Plain::l1),
    ("an L2 table", Plain::l2),
    ("the refcount table", Plain::refcount_table),
    ("a refcount block", Plain::refcount_block),
];

/// An image of 2 GiB with two clusters, closed.
async fn two_clusters(world: &World) -> Plain {
    let image = Plain::new(world, &ImageWish::default(), 2048 * MIB).await;
    let chain = image.open(Mode::Write).await;
    write(&chain, 0, 1, 2 * CLUSTER_LEN).await.unwrap();
    chain.close().await.unwrap();
    image
}

/// Whether the cluster at `place` holds the guest's bytes.
fn is_written_over(image: &Plain, place: u64) -> bool {
    image.bytes(place, CLUSTER_LEN).chunks(16).any(|bytes| bytes == [GUEST; 16])
}

/// The story: only the first write, which marks the header, took the path that checks what it
/// overwrites. The second one went straight to the place that the entry names.
#[test]
fn second_write_does_not_go_through_an_entry_that_names_metadata() {
    for (name, place) in PLACES {
        scenario(1, |world| async move {
            let image = two_clusters(&world).await;
            let target = place(&image);
            image.put(image.l2() + 8, target | COPIED);
            let chain = image.open(Mode::Write).await;
            write(&chain, 0, GUEST, 512).await.unwrap();
            let error = write(&chain, CLUSTER, GUEST, 512).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}: {error:?}");
            assert!(!is_written_over(&image, target), "{name}");
            assert!(image.is_marked_corrupt(), "{name}");
            // What was good can still be read.
            assert_eq!(read(&chain, 0, 512).await.unwrap(), [GUEST; 512], "{name}");
        });
    }
}

/// The story: a table that was named twice, once as something else, was taken for an L2 table and
/// written.
#[test]
fn l1_entry_that_names_other_metadata_is_no_table() {
    for (name, place) in PLACES {
        for flag in [COPIED, 0] {
            scenario(1, |world| async move {
                let image = two_clusters(&world).await;
                let target = place(&image);
                image.put(image.l1() + 8, target | flag);
                let before = image.bytes(target, CLUSTER_LEN);
                let chain = image.open(Mode::Write).await;
                let error = write(&chain, 516 * MIB, GUEST, 512).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}: {error:?}");
                // Nor is the one that it names freed.
                for _ in 0..3 {
                    drop(chain.flush().await);
                }
                drop(chain.close().await);
                assert!(image.bytes(target, CLUSTER_LEN) == before, "{name}");
                assert!(image.is_marked_corrupt(), "{name}");
            });
        }
    }
}

/// The story: the L2 table lacked the flag that it is not shared, as other programs leave it. It
/// was copied and freed, and when its cluster was reused it still counted as a table, so that a
/// sound image was marked as corrupt.
#[test]
fn l2_table_without_its_flag_is_replaced_and_its_space_used_again() {
    for cluster_bytes in [4096, CLUSTER] {
        scenario(2, |world| async move {
            let wish = ImageWish { cluster_bytes: Some(cluster_bytes), ..ImageWish::default() };
            let image = Plain::new(&world, &wish, 256 * MIB).await;
            let chain = image.open(Mode::Write).await;
            write(&chain, 0, 1, CLUSTER_LEN).await.unwrap();
            chain.close().await.unwrap();
            drop(chain);
            image.put(image.l1(), image.word(image.l1()) & !COPIED);
            let chain = image.open(Mode::Write).await;
            let count = 200;
            let place = |number: u64| (16 + number * 7) * cluster_bytes;
            for number in 0..count {
                let byte = u8::try_from(number).unwrap();
                write(&chain, place(number), byte, 4096).await.unwrap();
                if world.seed() == 0 || number % 16 == 0 {
                    chain.flush().await.unwrap();
                }
            }
            let stop = async {
                chain.idle().await;
                chain.close().await.unwrap();
            };
            mica_rt::timeout(std::time::Duration::from_secs(5), stop).await.expect("it stops");
            image.expect_sound().await;
            assert!(!image.is_marked_corrupt());
            let chain = image.open(Mode::Read).await;
            for number in 0..count {
                let shown = read(&chain, place(number), 4096).await.unwrap();
                assert!(shown.iter().all(|byte| u64::from(*byte) == number), "write {number}");
            }
        });
    }
}

/// The story: a refcount table of a million entries all of which name one block that is full kept
/// the first write, and with it all others of its queue, for minutes.
#[test]
fn search_for_a_free_cluster_ends_where_the_file_does() {
    const ENTRIES: u64 = 1 << 17;
    scenario(1, |world| async move {
        let image = two_clusters(&world).await;
        let end = 16 * CLUSTER;
        let block = end + ENTRIES * 8;
        world.change("/chain/plain.qcow2", |file| {
            file.resize(usize::try_from(block + CLUSTER).unwrap(), 0);
        });
        world.change("/chain/plain.qcow2", |file| {
            let (end, block_at) = (usize::try_from(end).unwrap(), usize::try_from(block).unwrap());
            for entry in file[end..block_at].chunks_mut(8) {
                entry.copy_from_slice(&block.to_be_bytes());
            }
            for count in file[block_at..].chunks_mut(2) {
                count.copy_from_slice(&1_u16.to_be_bytes());
            }
        });
        image.put(48, end);
        let clusters = ENTRIES * 8 / CLUSTER;
        world.change("/chain/plain.qcow2", |file| {
            file[56..60].copy_from_slice(&u32::try_from(clusters).unwrap().to_be_bytes());
        });
        world.inject("/chain/plain.qcow2", mica_sim::ReadFault::FailNth(u64::MAX, 5));
        let chain = image.open(Mode::Write).await;
        drop(write(&chain, 0, GUEST, 512).await);
        let error = write(&chain, MIB, GUEST, 4096).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
        let reads = world.reads_of("/chain/plain.qcow2");
        assert!(reads < 2000, "{reads} reads for one write");
    });
}

/// The story: the guest overwrote a compressed cluster that named the header. Two flushes later the
/// header was a hole.
#[test]
fn what_a_compressed_entry_names_is_not_freed_where_it_is_metadata() {
    let header: Place = ("the header", |_| 0);
    for (name, place) in PLACES.into_iter().chain([header]) {
        scenario(1, |world| async move {
            let image = two_clusters(&world).await;
            let target = place(&image);
            image.put(image.l2() + 8, target | COMPRESSED);
            // In the header the feature bits may change, in the others what is rightly counted.
            let start = image.bytes(target, 64);
            let chain = image.open(Mode::Write).await;
            drop(write(&chain, CLUSTER, GUEST, CLUSTER_LEN).await);
            for _ in 0..4 {
                drop(chain.flush().await);
                drop(write(&chain, 0, 2, 512).await);
            }
            drop(chain.discard(range(CLUSTER, CLUSTER)).await);
            drop(chain.flush().await);
            drop(chain.close().await);
            let now = image.bytes(target, 64);
            assert!(now.iter().any(|byte| *byte != 0), "{name} is a hole");
            assert!(name == "an L2 table" || now == start, "{name}: {start:x?} is {now:x?}");
            assert!(!is_written_over(&image, target), "{name}");
        });
    }
}

//! Writes that change no metadata go straight to their place, without a separate task.

use crate::plain::{Plain, range, read};
use mica_block::{Disk, Manage as _, Writing, Zeroes};
use mica_qcow2::{Chain, ChainOptions};
use mica_qcow2_tools::create::ImageWish;
use mica_rt::Buf;
use mica_sim::{World, scenario};
use mica_units::GuestOffset;
use std::sync::Arc;

const LEN: u64 = 16 << 20;

async fn opened(world: &World) -> Chain {
    let options = ChainOptions { writable: true, ..ChainOptions::default() };
    Chain::open(Arc::new(world.clone()), &Plain::top(), &options).await.unwrap()
}

/// Writes a sector at `at`; returns whether that went straight to its place.
async fn goes_straight(chain: &Chain, at: u64) -> bool {
    let writing = chain.write(GuestOffset::new(at), Buf::zeroed(512));
    let straight = matches!(writing, Writing::Direct(_));
    writing.await.0.unwrap();
    straight
}

#[test]
fn second_write_near_bytes_that_the_layer_has_goes_straight_to_its_place() {
    scenario(1, |world| async move {
        Plain::new(&world, &ImageWish::default(), LEN).await;
        let chain = opened(&world).await;
        for at in (0..LEN).step_by(64 << 10) {
            assert!(!goes_straight(&chain, at).await, "a cluster that is new");
        }
        chain.close().await.unwrap();
        drop(chain);
        let chain = opened(&world).await;
        assert!(!goes_straight(&chain, 0).await, "nothing is known of the image yet");
        assert!(goes_straight(&chain, 512).await, "nothing was read, and yet its place is known");
        assert!(goes_straight(&chain, 1 << 20).await, "a neighbour");
        chain.close().await.unwrap();
    });
}

/// What a database does with its log.
#[test]
fn writer_that_goes_on_in_sequence_and_waits_for_flushes_gets_whole_clusters() {
    for extended in [false, true] {
        scenario(1, |world| async move {
            let wish = ImageWish {
                extended_l2: Some(extended),
                cluster_bytes: Some(64 << 10),
                ..ImageWish::default()
            };
            Plain::new(&world, &wish, LEN).await;
            let chain = opened(&world).await;
            let has_slice = goes_straight(&chain, LEN - 512).await;
            assert!(!has_slice, "the first write of all");
            for at in (0..1 << 20).step_by(4096) {
                // Only once a second cluster follows is it a sequence.
                let is_alone = at < 64 << 10 && extended;
                let expected = !is_alone && at % (64 << 10) != 0;
                assert_eq!(goes_straight(&chain, at).await, expected, "{at}, {extended}");
                chain.flush().await.unwrap();
            }
            assert_eq!(read(&chain, 0, 2 << 20).await.unwrap(), vec![0; 2 << 20]);
            assert!(!goes_straight(&chain, 1 << 20).await, "nothing is written ahead of it");
            // Without flushes there is nothing to gain.
            for at in (2 << 20..3 << 20).step_by(2048) {
                let is_first = extended || at % (64 << 10) == 0;
                assert_eq!(goes_straight(&chain, at).await, !is_first, "{at}, {extended}");
            }
            chain.close().await.unwrap();
        });
    }
}

/// The story: while some subclusters became zeros the others were not to be written in place, and
/// that stayed in memory.
#[test]
fn what_a_cluster_keeps_beside_zeros_is_written_in_place_again() {
    scenario(1, |world| async move {
        let wish = ImageWish {
            extended_l2: Some(true),
            cluster_bytes: Some(64 << 10),
            ..ImageWish::default()
        };
        Plain::new(&world, &wish, LEN).await;
        let chain = opened(&world).await;
        let whole = Buf::from_slice(&[1; 64 << 10]);
        chain.write(GuestOffset::ZERO, whole).await.0.unwrap();
        assert!(goes_straight(&chain, 512).await);
        let how = Zeroes { may_unmap: true, fast: false };
        chain.write_zeroes(range(4096, 2048), how).await.unwrap();
        assert!(goes_straight(&chain, 512).await, "a subcluster that it keeps");
        assert!(!goes_straight(&chain, 4096).await, "one that it does not");
        assert_eq!(read(&chain, 2048, 512).await.unwrap(), [1; 512]);
        chain.close().await.unwrap();
    });
}

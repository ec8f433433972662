//! Writes that change no metadata go straight to their place, without a separate task.

use crate::plain::Plain;
use mica_block::{Disk, Manage as _, Writing};
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

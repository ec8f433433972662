//! Queues whose requests cannot be done in place, with and without memory for them.

use crate::budget::{Party, Share};
use crate::testing::clock::pause;
use crate::vhost_user::chain::Piece;
use crate::vhost_user::testing::{Guest, MIB, Ring, Seg, TestDisk, Way, World};
use crate::vhost_user::transfer::Cost;
use std::time::Duration;
use vm_memory::GuestAddress;

const REQUESTS: u16 = 20;
const PIECES: u64 = 16;
const PIECE_BYTES: u32 = 16 << 10;

/// What a driver writes in many small pieces: such a request goes through our own memory.
fn pieces() -> Vec<Seg> {
    (0..PIECES)
        .map(|piece| (2 * MIB + piece * 2 * u64::from(PIECE_BYTES), PIECE_BYTES, false))
        .collect()
}

fn offer_all(ring: &mut Ring) {
    for number in 0..REQUESTS {
        ring.request(1, u64::from(number), &pieces());
    }
    ring.kick();
}

fn wait_for(world: &World, waiting: usize) {
    while world.disk.waiting() < waiting {
        pause(Duration::from_millis(1));
    }
}

#[test]
fn requests_that_are_not_done_in_place_run_side_by_side_where_there_is_memory() {
    let world = World::new(TestDisk::new(MIB));
    let way = Way { indirect: true, ..Way::default() };
    let (_front_end, mut rings) = world.guest(way);
    world.disk.close();
    offer_all(&mut rings[0]);
    wait_for(&world, usize::from(REQUESTS));
    world.disk.open();
    assert_eq!(rings[0].wait_used(usize::from(REQUESTS)).len(), usize::from(REQUESTS));
}

/// The story: a piece that went on in the next region at an odd address took a window of memory,
/// and was charged as if it were done in place.
#[test]
fn piece_that_goes_on_in_the_next_region_is_charged_its_window() {
    let guest = Guest::new(&[MIB, MIB]);
    let cost = |at| {
        let piece = Piece { at: GuestAddress(at), len: 128 << 10 };
        Cost::of(128 << 10, &[piece], &guest.memory).bytes()
    };
    assert!(cost(MIB - 100) >= 128 << 10);
    assert!(cost(MIB - (128 << 10)) < 4096 && cost(MIB) < 4096, "within a region");
}

#[test]
fn requests_for_which_there_is_no_memory_run_one_after_the_other_and_none_is_lost() {
    let world = World::new(TestDisk::new(MIB));
    let all = usize::MAX / 2;
    let take_all = |_| {
        let share = Share::new(&Party::new(world.workers.pool()), 0, all);
        share.up_to(all);
        share
    };
    let _others: Vec<Share> = (0..200).map(take_all).collect();
    let way = Way { indirect: true, ..Way::default() };
    let (front_end, mut rings) = world.guest(way);
    let bytes: Vec<u8> =
        (0..2 * PIECES * u64::from(PIECE_BYTES)).map(|at| (at / 251).to_le_bytes()[0]).collect();
    rings[0].guest().put(2 * MIB, &bytes);
    world.disk.close();
    offer_all(&mut rings[0]);
    wait_for(&world, 1);
    // What is done in place needs no memory: another queue continues.
    world.disk.open();
    assert_eq!(rings[1].write(1000, &[1; 512]), 0);
    assert_eq!(rings[0].wait_used(usize::from(REQUESTS)).len(), usize::from(REQUESTS));
    assert_eq!(world.disk.most_waiting(), 1, "more than the queue has memory for");
    let written: Vec<u8> = bytes
        .chunks(2 * PIECE_BYTES as usize)
        .flat_map(|two| &two[..PIECE_BYTES as usize])
        .copied()
        .collect();
    let last = usize::from(REQUESTS - 1) * 512;
    assert!(world.disk.memory.bytes(last..last + written.len()) == written);
    assert_eq!(front_end.stop(&rings[0]), REQUESTS);
}

//! Servers that go while requests are in flight, and what the next one does.

use crate::testing::clock::{pause, until};
use crate::testing::memory::Event;
use crate::vhost_user::inflight::{Inflight, QueuesShape};
use crate::vhost_user::lost::FilePart;
use crate::vhost_user::testing::{
    FrontEnd, Guest, MIB, Ring, TestDisk, Way, World, code, inflight_message,
};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

const SHAPE: QueuesShape = QueuesShape { queues: 2, queue_size: 64 };

fn map_inflight(file: &File, len: u64) -> mica_block::Result<Inflight> {
    let file = file.try_clone().expect("a file");
    Inflight::map(file, FilePart { offset: 0, len }, SHAPE, &Arc::default())
}

fn region(front_end: &FrontEnd) -> (u64, File) {
    let (answer, file) = front_end.ask(code::GET_INFLIGHT_FD, &inflight_message(0, 2, 64));
    let len = u64::from_le_bytes(*answer.first_chunk().expect("8 bytes"));
    (len, File::from(file.expect("a file")))
}

fn start(
    world: &World,
    guest: &Guest,
    ring: &Ring,
    region: Option<(u64, File)>,
) -> (FrontEnd, (u64, File)) {
    let front_end = world.connect();
    front_end.negotiate(ring.way);
    front_end.share(guest);
    let (len, file) = region.unwrap_or_else(|| self::region(&front_end));
    front_end.command(code::SET_INFLIGHT_FD, &inflight_message(len, 2, 64), &[file.as_fd()]);
    front_end.start(ring);
    (front_end, (len, file))
}

/// Once, such a queue was served without marks, and a kill lost what it had in flight.
#[test]
fn queue_for_which_the_region_has_no_room_is_refused() {
    let world = World::new(TestDisk::new(MIB));
    let guest = Guest::new(&[2 * MIB, 2 * MIB]);
    for (queues, size, index, accepted) in [(1, 64, 0, true), (1, 64, 1, false), (2, 32, 0, false)]
    {
        let front_end = world.connect();
        front_end.negotiate(Way::default());
        front_end.share(&guest);
        let asked = inflight_message(0, queues, size);
        let (answer, file) = front_end.ask(code::GET_INFLIGHT_FD, &asked);
        let len = u64::from_le_bytes(*answer.first_chunk().expect("8 bytes"));
        let told = inflight_message(len, queues, size);
        let file = file.expect("a file");
        front_end.command(code::SET_INFLIGHT_FD, &told, &[file.as_fd()]);
        let ring = Ring::new(&guest, index, 64, Way::default());
        front_end.set(code::SET_VRING_NUM, &ring, 64);
        front_end.addresses(&ring);
        let index = u64::from(index).to_le_bytes();
        let kicked = front_end.order(code::SET_VRING_KICK, &index, &[ring.kick.as_fd()]);
        assert_eq!(kicked.is_ok_and(|kicked| kicked), accepted);
    }
}

/// What a server that was killed leaves: heads that it took and did not give back, out of order.
#[test]
fn requests_in_flight_are_repeated_in_order_and_returned_once() {
    for event_idx in [false, true] {
        let way = Way { event_idx, ..Way::default() };
        let world = World::new(TestDisk::new(MIB));
        let guest = Guest::new(&[2 * MIB, 2 * MIB]);
        let mut ring = Ring::new(&guest, 0, 64, way);
        let (front_end, (len, file)) = start(&world, &guest, &ring, None);
        assert_eq!(ring.write(1, &[1; 512]), 0);
        drop(front_end);
        world.assert_serves();
        world.disk.memory.events();

        // The server that was killed took five and gave the second and the fourth back.
        let heads: Vec<u16> =
            (0..8).map(|sector| ring.request(1, 100 + sector, &[(MIB, 512, false)])).collect();
        let map = map_inflight(&file, len);
        let mut killed = map.expect("a region").queue(0, 64).expect("there are two");
        let used = ring.used_idx();
        assert!(killed.recover(used).is_empty());
        heads[..5].iter().for_each(|head| killed.taken(*head));
        for (place, head) in [(0, heads[1]), (1, heads[3])] {
            let slot = u64::from(used + place) % 64;
            let element = [u32::from(head).to_le_bytes(), 1_u32.to_le_bytes()].concat();
            killed.about_to_end(head);
            guest.put(ring.used() + 4 + slot * 8, &element);
            guest.put(ring.used() + 2, &(used + place + 1).to_le_bytes());
            // The server died before the mark of the second was gone.
            if place == 0 {
                killed.ended(head, used + place + 1);
            }
        }

        let (front_end, _) = start(&world, &guest, &ring, Some((len, file)));
        let mut given: Vec<u16> = ring.wait_used(8).iter().map(|(head, _)| *head).collect();
        given.sort_unstable();
        let mut all = heads.clone();
        all.sort_unstable();
        assert_eq!(given, all, "each once");
        let places: Vec<u64> = world.disk.memory.events().iter().map(place_of).collect();
        assert_eq!(places, [100, 102, 104, 105, 106, 107], "in order, and none that was done");
        assert_eq!(front_end.stop(&ring), used + 8);
    }
}

fn place_of(event: &Event) -> u64 {
    match event {
        Event::Write { at, .. } => at / 512,
        _ => u64::MAX,
    }
}

/// The server is dropped while its disk holds the requests, and the next one takes over.
#[test]
fn server_that_is_replaced_loses_nothing() {
    let mut world = World::new(TestDisk::new(MIB));
    let guest = Guest::new(&[2 * MIB, 2 * MIB]);
    let mut ring = Ring::new(&guest, 0, 64, Way { event_idx: true, ..Way::default() });
    let mut kept = None;
    for round in 0..10 {
        let (front_end, region) = start(&world, &guest, &ring, kept.take());
        kept = Some(region);
        world.disk.close();
        for sector in 0..6 {
            ring.request(1, sector, &[(MIB, 512, false)]);
        }
        ring.kick();
        let server = world.server.take().expect("it runs");
        std::thread::scope(|scope| {
            let ending = scope.spawn(move || drop(server));
            pause(std::time::Duration::from_millis(5));
            world.disk.open();
            ending.join().expect("ends");
        });
        drop(front_end);
        world.serve();
        let (front_end, region) = start(&world, &guest, &ring, kept.take());
        kept = Some(region);
        assert_eq!(ring.wait_used(6).len(), 6, "round {round}");
        drop(front_end);
    }
    assert_eq!(world.disk.memory.events().len(), 60);
}

/// A server that is told to end while it writes gigabytes of zeros.
#[test]
fn rest_of_long_zeros_is_left_to_the_next_server() {
    let len = 1024 * MIB;
    let mut world = World::new(TestDisk::new(len));
    let guest = Guest::new(&[2 * MIB, 2 * MIB]);
    let mut ring = Ring::new(&guest, 0, 64, Way::default());
    guest.put(MIB, &[0, len / 512].map(u64::to_le_bytes).concat());
    let end = |world: &mut World, ring: &mut Ring| {
        world.disk.close();
        ring.request(13, 0, &[(MIB, 16, false)]);
        ring.kick();
        until("the first piece waits", || world.disk.waiting() == 1);
        let server = world.server.take().expect("it runs");
        std::thread::scope(|scope| {
            let ending = scope.spawn(move || drop(server));
            // It has been told when its socket is gone.
            until("it ends", || !world.path().exists());
            world.disk.open();
            ending.join().expect("ends");
        });
        assert_eq!(world.disk.memory.events().len(), 1, "the piece that was under way");
        world.serve();
    };
    let (front_end, kept) = start(&world, &guest, &ring, None);
    end(&mut world, &mut ring);
    assert_eq!(ring.take_used().len(), 0, "it is not done");
    drop(front_end);
    let (front_end, _) = start(&world, &guest, &ring, Some(kept));
    let (head, _) = ring.wait_used(1)[0];
    assert_eq!((ring.status(head), world.disk.memory.events().len()), (0, 32), "all of it");
    drop(front_end);

    // A monitor that keeps no marks: nobody else would answer.
    let (front_end, mut rings) = world.guest(Way::default());
    rings[0].guest().put(MIB, &[0, len / 512].map(u64::to_le_bytes).concat());
    end(&mut world, &mut rings[0]);
    let (head, _) = rings[0].wait_used(1)[0];
    assert_eq!(rings[0].status(head), 1);
    drop(front_end);
}

/// A guest that stops while a predecessor's requests were not all done again yet.
#[test]
fn requests_of_the_server_before_are_not_left_in_the_ring() {
    let rates = crate::limit::Rates { iops: 1, iops_burst: 1, ..Default::default() };
    let world = World::with(TestDisk::new(MIB), rates, 2);
    let guest = Guest::new(&[2 * MIB, 2 * MIB]);
    let mut ring = Ring::new(&guest, 0, 64, Way::default());
    let heads: Vec<u16> =
        (0..6).map(|sector| ring.request(1, sector, &[(MIB, 512, false)])).collect();
    let (len, file) = Inflight::create(SHAPE).expect("memory");
    let map = map_inflight(&file, len);
    let mut killed = map.expect("a region").queue(0, 64).expect("there are two");
    killed.recover(0);
    heads[..4].iter().for_each(|head| killed.taken(*head));
    let (front_end, _) = start(&world, &guest, &ring, Some((len, file)));
    let base = front_end.stop(&ring);
    assert_eq!((base, ring.used_idx()), (4, 4));
    let given: Vec<u16> = ring.take_used().iter().map(|(head, _)| *head).collect();
    assert_eq!(given, heads[..4]);
}

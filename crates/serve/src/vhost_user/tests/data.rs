//! What is written is what is read, however the driver divides it.

use crate::discard::Discard;
use crate::limit::Rates;
use crate::testing::clock::{now, pause};
use crate::testing::memory::Event;
use crate::testing::random::Random;
use crate::vhost_user::testing::{MIB, Ring, Seg, TestDisk, Way, World};
use mica_block::REQUEST_BYTES_MAX;
use mica_rt::sync::SharedLock;
use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const WAYS: [Way; 4] = [way(false, false), way(true, false), way(false, true), way(true, true)];

const fn way(event_idx: bool, indirect: bool) -> Way {
    Way { event_idx, indirect, is_logged: false, is_write_through: false }
}

/// Data of requests lies between these, a part of the guest for each that is in flight: around
/// the border between its two regions.
const DATA: u64 = 2 * MIB - 4 * ROOM - ROOM / 2;
const ROOM: u64 = 64 << 10;
const MIB_LEN: usize = 1 << 20;
/// Requests of one queue: as its descriptors suffice for.
const IN_FLIGHT_MAX: usize = 6;

/// `len` bytes from `at` on, divided: by sectors, or anywhere.
fn divided(random: &mut Random, at: u64, len: u64, is_written: bool) -> Vec<Seg> {
    let unit = if random.below(2) == 0 { 512 } else { 1 };
    let count = random.below(7);
    let mut cuts: Vec<u64> =
        (0..count).map(|_| random.below(len / unit) * unit).chain([0, len]).collect();
    cuts.sort_unstable();
    let segs: Vec<Seg> = cuts
        .windows(2)
        .map(|cut| (at + cut[0], u32::try_from(cut[1] - cut[0]).expect("short"), is_written))
        .collect();
    // Two cuts at one place make an empty descriptor.
    assert!(!segs.is_empty());
    segs
}

struct Flying {
    /// What the memory is to hold at the end, for a read.
    expected: Option<Vec<u8>>,
    place: u64,
}

/// Random reads and writes of places that do not overlap while they are in flight.
fn run_model(way: Way, seed: u64) {
    let mut disk = TestDisk::new(MIB);
    disk.is_uneven = true;
    let world = World::new(disk);
    let (_front_end, mut rings) = world.guest(way);
    let mut random = Random(seed);
    let mut model = vec![0xee; MIB_LEN];
    let mut flying: Vec<HashMap<u16, Flying>> = rings.iter().map(|_| HashMap::new()).collect();
    for _ in 0..400 {
        let queue = usize::from(random.byte()) % rings.len();
        let place = (0..8).find(|place| {
            flying.iter().all(|queue| queue.values().all(|flying| flying.place != *place))
        });
        let has_room = flying[queue].len() < IN_FLIGHT_MAX;
        let (Some(place), true) = (place, has_room && random.below(4) != 0) else {
            reap(&mut rings[queue], &mut flying[queue]);
            continue;
        };
        let len = (random.below(ROOM / 512) + 1) * 512;
        let start = place * (MIB / 8) + random.below((MIB / 8 - len) / 512) * 512;
        let size = |bytes: u64| usize::try_from(bytes).expect("on the disk");
        let range = size(start)..size(start + len);
        let memory = DATA + place * ROOM + random.below(ROOM - len + 1);
        let is_write = random.below(2) == 0;
        let segs = divided(&mut random, memory, len, !is_write);
        let ring = &mut rings[queue];
        let expected = if is_write {
            let bytes: Vec<u8> = (0..len).map(|_| random.byte()).collect();
            ring.guest().put(memory, &bytes);
            model[range].copy_from_slice(&bytes);
            None
        } else {
            Some([&memory.to_le_bytes()[..], &model[range]].concat())
        };
        let before = ring.next_avail;
        let head = ring.request(u32::from(is_write), start / 512, &segs);
        ring.kick_if_wanted(before);
        flying[queue].insert(head, Flying { expected, place });
    }
    for (ring, flying) in rings.iter_mut().zip(&mut flying) {
        while !flying.is_empty() {
            reap(ring, flying);
        }
    }
    assert!(world.disk.memory.is_quiet());
    assert_eq!(world.disk.memory.bytes(0..MIB_LEN), model);
}

fn reap(ring: &mut Ring, flying: &mut HashMap<u16, Flying>) {
    if flying.is_empty() {
        return;
    }
    for (head, len) in ring.wait_used(1) {
        let done = flying.remove(&head).expect("given back once");
        assert_eq!(ring.status(head), 0);
        match done.expected {
            None => assert_eq!(len, 1),
            Some(expected) => {
                let (at, bytes) = expected.split_first_chunk().expect("an address");
                let at = u64::from_le_bytes(*at);
                assert_eq!(len as usize, bytes.len() + 1);
                assert!(ring.guest().get(at, bytes.len()) == bytes, "other bytes at {at:#x}");
            }
        }
    }
}

#[test]
fn reads_and_writes_in_all_divisions_hold_what_was_written() {
    for way in WAYS {
        for seed in 0..3 {
            eprintln!("{way:?}, seed {seed}");
            run_model(way, seed);
        }
    }
}

/// Each waits for its call before the next one comes: a call or a kick that is lost stops it.
#[test]
fn no_notification_is_lost() {
    for way in WAYS {
        let world = World::new(TestDisk::new(MIB));
        let (_front_end, mut rings) = world.guest(way);
        for number in 0..3000_u64 {
            let ring = &mut rings[usize::from(number % 3 == 0)];
            let byte = number.to_le_bytes()[0];
            assert_eq!(ring.write(number % 64, &[byte; 512]), 0);
        }
    }
}

#[test]
fn large_requests_go_in_windows() {
    let world = World::new(TestDisk::new(4 * MIB));
    let (_front_end, mut rings) = world.guest(Way::default());
    let bytes: Vec<u8> = (0..5 * MIB / 2).map(|at| (at % 251).to_le_bytes()[0]).collect();
    rings[0].guest().put(MIB + 3, &bytes);
    let half = u32::try_from(bytes.len() / 2).expect("short");
    let segs = [(MIB + 3, half, false), (MIB + 3 + u64::from(half), half, false)];
    assert_eq!(rings[0].run(1, 3, &segs), (0, 1));
    assert!(world.disk.memory.bytes(1536..1536 + bytes.len()) == bytes);
    rings[0].guest().put(MIB, &vec![0; 3 * MIB_LEN - 16]);
    let segs = [(MIB + 7, half, true), (MIB + 7 + u64::from(half), half, true)];
    assert_eq!(rings[0].run(0, 3, &segs), (0, 2 * half + 1));
    assert!(rings[0].guest().get(MIB + 7, bytes.len()) == bytes);
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn discards_zeros_and_flushes_reach_the_disk() {
    let world = World::new(TestDisk::new(MIB));
    let (_front_end, mut rings) = world.guest(Way::default());
    let ring = &mut rings[0];
    let at = 2 * MIB - 24;
    ring.guest().put(at, &[range(8, 8, 0), range(32, 1, 0)].concat());
    assert_eq!(ring.run(11, 0, &[(at, 20, false), (at + 20, 12, false)]).0, 0);
    ring.guest().put(at, &[range(100, 4, 1), range(1, 0, 0), range(200, 4, 0)].concat());
    assert_eq!(ring.run(13, 0, &[(at, 48, false)]).0, 0);
    assert_eq!(ring.run(4, 0, &[]).0, 0);
    let zeroes = |may_unmap| mica_block::Zeroes { may_unmap, fast: false };
    assert_eq!(
        world.disk.memory.events(),
        [
            Event::Discard { at: 4096, len: 4096 },
            Event::Discard { at: 16_384, len: 512 },
            Event::Zeroes { at: 51_200, len: 2048, how: zeroes(true) },
            Event::Zeroes { at: 102_400, len: 2048, how: zeroes(false) },
            Event::Flush,
        ]
    );
    assert_eq!(ring.run(8, 0, &[(at, 20, true)]), (0, 21));
    assert_eq!(ring.guest().get(at, 20), b"a serial number\0\0\0\0\0");
    assert_eq!(ring.run(99, 0, &[]).0, 2);
}

/// The story: a driver that had not negotiated flushes got its answers as one that had, and lost in
/// a power cut what it had every right to think durable.
#[test]
fn changes_of_a_driver_without_flushes_are_durable_when_they_are_answered() {
    let world = World::new(TestDisk::new(4 * MIB));
    let way = Way { is_write_through: true, ..Way::default() };
    let (_front_end, mut rings) = world.guest(way);
    let ring = &mut rings[0];
    let events = || world.disk.memory.events();
    assert_eq!(ring.write(8, &[7; 512]), 0);
    assert_eq!(events(), [Event::Write { at: 4096, len: 512 }, Event::Flush]);
    let at = 3 * MIB;
    assert_eq!(ring.run(1, 0, &[(at, 100, false), (at + 4096, 412, false)]).0, 0);
    assert_eq!(events(), [Event::Write { at: 0, len: 512 }, Event::Flush]);
    ring.guest().put(at, &range(8, 8, 0));
    for kind in [11, 13] {
        assert_eq!(ring.run(kind, 0, &[(at, 16, false)]).0, 0);
        assert!(matches!(events()[..], [_, Event::Flush]));
    }
    assert_eq!(ring.read(64, 512), (0, vec![0xee; 512]));
    assert_eq!(events(), []);
}

/// The story: the contract of a disk says how much a request may be, and a guest could ask for 64
/// GiB at once.
#[test]
fn long_discards_and_zeros_reach_the_disk_in_pieces() {
    let gib = 1024 * MIB;
    let world = World::new(TestDisk::new(5 * gib));
    let (_front_end, mut rings) = world.guest(Way::default());
    let ring = &mut rings[0];
    let at = 2 * MIB;
    ring.guest().put(at, &[range(8, 4 << 20, 0), range(6 << 20, 2, 0)].concat());
    for kind in [11, 13] {
        assert_eq!(ring.run(kind, 0, &[(at, 32, false)]).0, 0);
        let events = world.disk.memory.events();
        let pieces: Vec<(u64, u64)> = events
            .iter()
            .map(|event| match *event {
                Event::Discard { at, len } | Event::Zeroes { at, len, .. } => (at, len),
                _ => panic!("{event:?}"),
            })
            .collect();
        assert!(pieces.iter().all(|(_, len)| *len <= REQUEST_BYTES_MAX), "{pieces:?}");
        let (last, first) = pieces.split_last().expect("pieces");
        assert_eq!(*last, (3 * gib, 1024));
        let end = first.iter().fold(4096, |end, (at, len)| {
            assert_eq!(*at, end, "one after the other");
            at + len
        });
        assert_eq!(end, 4096 + 2 * gib);
    }
}

#[test]
fn ignored_discards_are_answered_and_zeros_keep_their_space() {
    let mut world = World::new(TestDisk::new(MIB));
    world.discard = Discard::Ignore;
    world.server = None;
    world.serve();
    let (_front_end, mut rings) = world.guest(Way::default());
    let ring = &mut rings[0];
    ring.guest().put(2 * MIB, &[range(8, 8, 0), range(32, 1, 0)].concat());
    assert_eq!(ring.run(11, 0, &[(2 * MIB, 32, false)]), (0, 1));
    assert_eq!(ring.read(8, 512), (0, vec![0xee; 512]), "nothing was discarded");
    ring.guest().put(2 * MIB, &range(100, 4, 1));
    assert_eq!(ring.run(13, 0, &[(2 * MIB, 16, false)]), (0, 1));
    let how = mica_block::Zeroes { may_unmap: false, fast: false };
    assert_eq!(world.disk.memory.events(), [Event::Zeroes { at: 51_200, len: 2048, how }]);
    assert_eq!(ring.read(100, 512), (0, vec![0; 512]));
    ring.guest().put(2 * MIB, &range(2047, 2, 0));
    assert_eq!(ring.run(11, 0, &[(2 * MIB, 16, false)]).0, 1, "beyond the end");
    assert_eq!((world.counters().discards, world.counters().zeroes), (1, 1));
}

#[test]
fn failing_disk_returns_an_error_and_the_queue_continues() {
    let mut disk = TestDisk::new(MIB);
    disk.bad = 4096..4097;
    let world = World::new(disk);
    let (_front_end, mut rings) = world.guest(Way::default());
    assert_eq!(rings[0].read(8, 512).0, 1);
    assert_eq!(rings[0].run(0, 6, &[(MIB, 1025, true), (MIB + 2000, 511, true)]).0, 1);
    assert_eq!(rings[0].read(9, 512).0, 0);
    assert_eq!(rings[0].read(2048, 512).0, 1, "beyond the end");
    assert_eq!(world.counters().failed, 2);
    assert_eq!(world.counters().refused, 1);
}

/// The story: an NBD client wrote a part of a sector of a disk that a guest had, too: the sector
/// was read, the guest wrote it, and then it was written back as it had been.
#[test]
fn guest_writes_nothing_while_another_server_changes_a_part_of_a_sector() {
    let mut world = World::new(TestDisk::new(MIB));
    let edges = Arc::<SharedLock>::default();
    world.edges = Some(Arc::clone(&edges));
    world.server = None;
    world.serve();
    let (_front_end, mut rings) = world.guest(Way::default());
    let ring = &mut rings[0];
    assert_eq!(ring.write(8, &[7; 512]), 0);
    ring.guest().put(3 * MIB, &range(8, 8, 0));
    assert_eq!(world.disk.memory.events().len(), 1);
    for (kind, len) in [(1, 512), (11, 16), (13, 16)] {
        let mut alone = Box::pin(edges.alone());
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(held) = alone.as_mut().poll(&mut context) else { panic!("it is free") };
        ring.request(kind, 8, &[(3 * MIB, len, false)]);
        ring.kick();
        pause(Duration::from_millis(20));
        assert_eq!(world.disk.memory.events(), []);
        drop(held);
        assert_eq!(ring.wait_used(1).len(), 1);
        assert_eq!(world.disk.memory.events().len(), 1);
    }
}

#[test]
fn disk_that_is_only_read_takes_no_writes() {
    let mut disk = TestDisk::new(MIB);
    disk.is_writable = false;
    let world = World::new(disk);
    let (_front_end, mut rings) = world.guest(Way::default());
    assert_eq!(rings[0].write(8, &[7; 512]), 1);
    assert_eq!(rings[0].read(8, 512), (0, vec![0xee; 512]));
    assert_eq!(rings[0].run(4, 0, &[]).0, 0);
    assert!(world.disk.memory.events().iter().all(|event| *event == Event::Flush));
}

#[test]
fn flushes_do_not_count_as_operations() {
    let rates = Rates { iops: 1, iops_burst: 1, ..Rates::default() };
    let world = World::with(TestDisk::new(MIB), rates, 1);
    let (_front_end, mut rings) = world.guest(Way::default());
    assert_eq!(rings[0].write(0, &[7; 512]), 0);
    for _ in 0..5 {
        assert_eq!(rings[0].run(4, 0, &[]).0, 0);
    }
    assert_eq!(world.counters().delayed, 0);
}

#[test]
fn rates_delay_and_lose_nothing() {
    let rates = Rates { iops: 200, iops_burst: 1, ..Rates::default() };
    let world = World::with(TestDisk::new(MIB), rates, 2);
    let (front_end, mut rings) = world.guest(Way::default());
    let start = now();
    for round in 0..2 {
        for ring in &mut rings {
            for sector in 0..10 {
                ring.request(1, sector, &[(MIB, 512, false)]);
            }
            ring.kick();
        }
        for ring in &mut rings {
            let given = ring.wait_used(10);
            assert!(given.iter().all(|(head, _)| ring.status(*head) == 0), "round {round}");
        }
    }
    assert!(start.elapsed() > Duration::from_millis(150), "40 at 200 in a second");
    assert!(world.counters().delayed > 0);
    // A stop does not wait for those that were not begun, and leaves them in the ring.
    for sector in 0..20 {
        rings[0].request(1, sector, &[(MIB, 512, false)]);
    }
    rings[0].kick();
    let base = front_end.stop(&rings[0]);
    assert_eq!(base, rings[0].used_idx());
    assert!(base < rings[0].next_avail);
    front_end.start(&rings[0]);
    assert_eq!(rings[0].wait_used(20).len(), 20);
}

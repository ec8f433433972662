//! Queues that start, stop, move and are migrated while requests run.

use crate::testing::clock::{now, pause, until};
use crate::vhost_user::placement::Placement;
use crate::vhost_user::testing::{
    FrontEnd, Guest, MIB, Ring, TestDisk, Way, World, code, event, memfd,
};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

#[test]
fn stop_drains_and_reports_where_to_continue() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way { event_idx: true, ..Way::default() });
    world.disk.close();
    for sector in 0..5 {
        rings[0].request(1, sector, &[(MIB, 512, false)]);
    }
    rings[0].kick();
    until("all wait", || world.disk.waiting() == 5);
    let base = std::thread::scope(|scope| {
        let stopping = scope.spawn(|| front_end.stop(&rings[0]));
        pause(Duration::from_millis(50));
        assert!(!stopping.is_finished(), "they are in flight");
        world.disk.open();
        stopping.join().expect("stops")
    });
    assert_eq!((base, rings[0].used_idx()), (5, 5));
    assert_eq!(rings[0].take_used().len(), 5);
    // What comes while it is stopped waits for the start.
    rings[0].request(1, 9, &[(MIB, 512, false)]);
    rings[0].kick();
    pause(Duration::from_millis(50));
    assert_eq!(rings[0].used_idx(), 5);
    front_end.start(&rings[0]);
    assert_eq!(rings[0].wait_used(1).len(), 1);
    drop(front_end);
}

/// The story: the task that accepts front ends held the disk until its worker had a turn, so that
/// files and locks of a disk that was drained outlasted it on a worker that was stuck.
#[test]
fn device_that_has_ended_lets_go_of_its_disk_though_no_worker_has_a_turn() {
    let mut world = World::new(TestDisk::new(MIB));
    let (front_end, _rings) = world.guest(Way::default());
    drop(front_end);
    until("it has left", || !world.server.as_ref().expect("it runs").is_connected());
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (stuck, is_stuck) = std::sync::mpsc::channel();
    world.workers.handles()[0].spawn_with(move || async move {
        stuck.send(()).expect("the test waits");
        let _ = released.recv();
    });
    is_stuck.recv().expect("it runs");
    world.server.take().expect("it runs").shutdown();
    assert_eq!(std::sync::Arc::strong_count(&world.disk), 1, "that of the test");
    drop(release);
}

/// The flag of a driver without events (virtio 1.2, section 2.7.7.2).
#[test]
fn driver_that_polls_for_answers_is_not_called() {
    let world = World::new(TestDisk::new(MIB));
    for (flags, is_called) in [(1_u16, false), (0, true)] {
        let (front_end, mut rings) = world.guest(Way::default());
        let ring = &mut rings[0];
        ring.guest().put(ring.avail(), &flags.to_le_bytes());
        // The device calls once when it begins, lest a call was lost before.
        ring.is_called(0);
        ring.request(1, 0, &[(MIB, 512, false)]);
        ring.kick();
        until("it is done", || ring.used_idx() == 1);
        // From then on it calls nobody.
        assert_eq!(front_end.stop(ring), 1);
        assert_eq!(ring.is_called(0), is_called);
    }
}

/// Whichever program serves the ring next, the driver notifies it.
#[test]
fn queue_that_stops_at_work_leaves_a_driver_that_notifies() {
    let world = World::new(TestDisk::new(MIB));
    for event_idx in [false, true] {
        let (front_end, mut rings) = world.guest(Way { event_idx, ..Way::default() });
        for round in 1..=20 {
            for sector in 0..8 {
                rings[0].request(1, sector, &[(MIB, 512, false)]);
            }
            rings[0].kick();
            // What it left in the ring counts as new for the next device.
            let base = front_end.stop(&rings[0]);
            rings[0].request(1, 9, &[(MIB, 512, false)]);
            assert!(rings[0].is_kick_wanted(base), "round {round} from {base}");
            front_end.start(&rings[0]);
            assert_eq!(rings[0].wait_used(9).len(), 9);
        }
    }
}

#[test]
fn queues_move_between_workers_while_requests_run() {
    for event_idx in [false, true] {
        let mut disk = TestDisk::new(MIB);
        disk.is_uneven = true;
        let world = World::new(disk);
        let placement = world.server.as_ref().expect("it runs").placement();
        let (front_end, mut rings) = world.guest(Way { event_idx, ..Way::default() });
        for round in 0..100 {
            for ring in &mut rings {
                for sector in 0..4 {
                    ring.request(1, sector * 3 + u64::from(ring.index), &[(MIB, 512, false)]);
                }
                ring.kick();
            }
            placement.set_width(1 + round % 2);
            for ring in &mut rings {
                assert_eq!(ring.wait_used(4).len(), 4, "round {round}");
            }
        }
        assert_eq!(world.counters().writes, 800);
        // Where it is, it can be stopped.
        assert_eq!((front_end.stop(&rings[0]), front_end.stop(&rings[1])), (400, 400));
    }
}

#[test]
fn queue_does_not_hold_up_requests_to_move_while_a_flush_may_take_long() {
    let world = World::new(TestDisk::new(MIB));
    let placement = world.server.as_ref().expect("it runs").placement();
    let (front_end, mut rings) = world.guest(Way::default());
    world.disk.close();
    rings[1].request(4, 0, &[]);
    rings[1].kick();
    until("it waits", || world.disk.waiting() == 1);
    placement.set_width(2);
    rings[1].request(1, 0, &[(MIB, 512, false)]);
    rings[1].kick();
    until("the other waits, too", || world.disk.waiting() == 2);
    world.disk.open();
    assert_eq!(rings[1].wait_used(2).len(), 2);
    assert_eq!(rings[1].write(8, &[7; 512]), 0);
    assert_eq!(front_end.stop(&rings[1]), 3);
}

#[test]
fn devices_begin_on_different_workers() {
    let world = World::new(TestDisk::new(MIB));
    let places = (0..4).map(|_| Placement::new(&world.workers).place_of(0));
    assert_eq!(places.collect::<Vec<_>>(), [1, 0, 1, 0], "the world's own is at 0");
}

#[test]
fn queue_that_is_disabled_takes_nothing() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way::default());
    front_end.set(code::SET_VRING_ENABLE, &rings[0], 0);
    rings[0].request(1, 0, &[(MIB, 512, false)]);
    rings[0].kick();
    assert_eq!(rings[1].write(8, &[7; 512]), 0);
    pause(Duration::from_millis(50));
    assert_eq!(rings[0].used_idx(), 0);
    front_end.set(code::SET_VRING_ENABLE, &rings[0], 1);
    assert_eq!(rings[0].wait_used(1).len(), 1);
    assert_eq!(front_end.stop(&rings[0]), 1);
}

#[test]
fn memory_is_replaced_while_requests_run() {
    let mut disk = TestDisk::new(MIB);
    disk.is_uneven = true;
    let world = World::new(disk);
    let guest = Guest::new(&[2 * MIB, 2 * MIB]);
    let front_end = world.connect();
    let way = Way { event_idx: true, ..Way::default() };
    front_end.negotiate(way);
    front_end.share(&guest);
    let mut ring = Ring::new(&guest, 0, 64, way);
    front_end.start(&ring);
    for round in 0..40 {
        for sector in 0..8 {
            ring.request(1, sector * 5, &[(MIB, 1024, false)]);
        }
        ring.kick();
        front_end.share(&guest);
        assert_eq!(ring.wait_used(8).len(), 8, "round {round}");
    }
    assert_eq!(front_end.stop(&ring), 320);
    assert_eq!(world.counters().writes, 320);
}

#[test]
fn regions_come_and_go_one_by_one() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way::default());
    let second = Guest::new(&[MIB]);
    let region = |at: u64| {
        let numbers = [0, at, MIB, 0x1000_0000_0000, 0];
        numbers.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>()
    };
    let at = 8 * MIB;
    assert_eq!(rings[0].run(0, 0, &[(at, 512, true)]).0, 1, "there is no such memory");
    front_end.command(code::ADD_MEM_REG, &region(at), &[second.files[0].1.as_fd()]);
    assert_eq!(rings[0].run(0, 0, &[(at, 512, true)]).0, 0);
    assert_eq!(second.get(0, 512), [0xee; 512]);
    front_end.command(code::REM_MEM_REG, &region(at), &[]);
    assert_eq!(rings[0].run(0, 0, &[(at, 512, true)]).0, 1);
    assert!(!front_end.order(code::REM_MEM_REG, &region(at), &[]).expect("an answer"));
    world.assert_serves();
}

#[test]
fn call_descriptor_is_replaced_while_the_queue_runs() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way::default());
    for round in 0..200 {
        rings[0].request(1, round % 64, &[(MIB, 512, false)]);
        rings[0].kick();
        // Whichever descriptor was used: the new one is rung as well.
        rings[0].call = event();
        let call = rings[0].call.try_clone().expect("a descriptor");
        front_end.hand(code::SET_VRING_CALL, &rings[0], &call);
        assert_eq!(rings[0].wait_used(1).len(), 1);
    }
}

/// The pages that are marked, a bit for each page of the guest; they are marked no more. A byte in
/// which nothing is marked is left alone, as the server may be marking it right now.
fn dirty(log: &std::fs::File) -> Vec<u64> {
    let mut bytes = [0; 256];
    log.read_exact_at(&mut bytes, 0).expect("reads");
    for (at, _) in (0..).zip(bytes).filter(|(_, byte)| *byte != 0) {
        log.write_all_at(&[0], at).expect("writes");
    }
    (0..2048)
        .filter(|page| bytes[page / 8] >> (page % 8) & 1 == 1)
        .map(|page| page as u64)
        .collect()
}

fn log_to(front_end: &FrontEnd, log: &std::fs::File) {
    let payload = [256_u64.to_le_bytes(), [0; 8]].concat();
    front_end
        .send(&FrontEnd::message(code::SET_LOG_BASE, 0, &payload), &[log.as_fd()])
        .expect("sends");
    let mut answer = [0; 12 + 16];
    std::io::Read::read_exact(&mut &front_end.stream, &mut answer).expect("an answer");
}

#[test]
fn pages_that_are_written_are_logged_and_no_others() {
    let world = World::new(TestDisk::new(MIB));
    let way = Way { event_idx: true, is_logged: true, ..Way::default() };
    let guest = Guest::new(&[2 * MIB, 2 * MIB]);
    let front_end = world.connect();
    front_end.negotiate(way);
    front_end.share(&guest);
    let log = memfd(256);
    log_to(&front_end, &log);
    let mut ring = Ring::new(&guest, 1, 64, way);
    front_end.start(&ring);
    until("the queue waits", || !dirty(&log).is_empty());
    let head = ring.request(0, 0, &[(3 * MIB + 4000, 96, true), (MIB - 16, 4096 - 96, true)]);
    ring.kick();
    assert_eq!(ring.wait_used(1).len(), 1);
    // Everything of the ring that the device writes is in one page.
    let used = ring.used() >> 12;
    let status = ring.meta(head) >> 12;
    pause(Duration::from_millis(20));
    assert_eq!(dirty(&log), [used, status, MIB / 4096 - 1, MIB / 4096, 3 * MIB / 4096]);
    assert_eq!(ring.write(8, &[7; 512]), 0);
    pause(Duration::from_millis(20));
    assert_eq!(dirty(&log), [used, status], "a write writes no data into the guest");
}

/// The story: the page of a status was marked before the status was written, so that a front end
/// could copy it in between. Here the status lies on the byte that marks its own page: what is
/// written last stays.
#[test]
fn page_of_a_status_is_marked_when_the_status_is_there() {
    let world = World::new(TestDisk::new(MIB));
    let way = Way { is_logged: true, ..Way::default() };
    let guest = Guest::new(&[2 * MIB, 2 * MIB]);
    let front_end = world.connect();
    front_end.negotiate(way);
    front_end.share(&guest);
    log_to(&front_end, &guest.files[1].1);
    let mut ring = Ring::new(&guest, 0, 64, way);
    front_end.start(&ring);
    let (header, status_at) = (MIB, 2 * MIB + ((2 * MIB) >> 12) / 8);
    guest.put(header, &4_u32.to_le_bytes());
    ring.offer(&[(header, 16, false), (status_at, 1, true)]);
    ring.kick();
    assert_eq!(ring.wait_used(1).len(), 1);
    assert_eq!(guest.get(status_at, 1), [1]);
}

#[test]
fn panic_of_a_request_ends_its_queue_and_no_other() {
    let mut disk = TestDisk::new(MIB);
    disk.poisoned = 20_480..20_481;
    let world = World::new(disk);
    let (front_end, mut rings) = world.guest(Way::default());
    let error = event();
    front_end.hand(code::SET_VRING_ERR, &rings[0], &error);
    rings[0].request(0, 40, &[(MIB, 512, true)]);
    rings[0].kick();
    until("the front end learns of it", || rustix::io::read(&error, &mut [0; 8]).is_ok());
    assert_eq!(rings[1].write(8, &[7; 512]), 0);
    front_end.stop(&rings[0]);
    drop(front_end);
    world.assert_serves();
    assert_eq!(world.counters().broken_queues, 1);
}

/// The kernel may still write into the guest's memory for what was in flight beside it.
#[test]
fn queue_that_panicked_has_stopped_when_nothing_of_it_is_in_flight() {
    let mut disk = TestDisk::new(MIB);
    disk.poisoned = 20_480..20_481;
    let world = World::new(disk);
    let (front_end, mut rings) = world.guest(Way::default());
    world.disk.close();
    rings[0].request(0, 8, &[(MIB, 512, true)]);
    rings[0].kick();
    until("it waits", || world.disk.waiting() == 1);
    rings[0].request(0, 40, &[(MIB + 4096, 512, true)]);
    rings[0].kick();
    until("it panics", || world.counters().panics == 1);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| front_end.stop(&rings[0]));
        pause(Duration::from_millis(50));
        let is_early = stopping.is_finished();
        world.disk.open();
        stopping.join().expect("an answer");
        assert!(!is_early, "a request was in flight");
    });
    assert_eq!(world.disk.waiting(), 0);
    assert_eq!(rings[1].write(8, &[7; 512]), 0);
}

/// A request hangs in the disk, the front end disconnects, and the server is asked to end.
#[test]
fn shutdown_waits_for_what_is_in_flight() {
    let mut world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way::default());
    world.disk.close();
    rings[0].request(1, 0, &[(MIB, 512, false)]);
    rings[0].kick();
    until("it waits", || world.disk.waiting() == 1);
    drop(front_end);
    let server = world.server.take().expect("it runs");
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| server.shutdown());
        pause(Duration::from_millis(50));
        assert!(!ending.is_finished());
        world.disk.open();
        assert_eq!(ending.join().expect("ends").writes, 1);
    });
    assert_eq!(rings[0].take_used().len(), 1);
}

/// The non-blocking flag is shared by all owners of the event.
#[test]
fn kick_that_is_made_blocking_holds_nothing_up() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way::default());
    rustix::io::ioctl_fionbio(&rings[0].kick, false).expect("an event");
    for sector in 0..100 {
        assert_eq!(rings[0].write(sector, &[7; 512]), 0);
        assert_eq!(rings[1].write(sector, &[7; 512]), 0);
    }
    front_end.stop(&rings[0]);
}

#[test]
fn call_that_is_made_blocking_and_full_holds_nothing_up() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way::default());
    let full = (u64::MAX - 1).to_ne_bytes();
    for ring in &rings {
        rustix::io::ioctl_fionbio(&ring.call, false).expect("an event");
        let _ = rustix::io::read(&ring.call, &mut [0; 8]);
        rustix::io::write(&ring.call, &full).expect("there is room");
    }
    let start = now();
    for sector in 0..20 {
        for ring in &mut rings {
            ring.request(1, sector, &[(MIB, 512, false)]);
            ring.kick();
            while ring.take_used().is_empty() {
                assert!(start.elapsed() < Duration::from_secs(60), "a worker is held up");
                pause(Duration::from_millis(1));
            }
        }
    }
    assert_eq!(rings[0].write(1, &[7; 512]), 0, "there is room in it again");
    front_end.stop(&rings[0]);
}

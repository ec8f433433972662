//! Front ends that do what no front end should. After each the server serves one that does not.

use crate::vhost_user::testing::{
    FrontEnd, Guest, MIB, Ring, TestDisk, USER, Way, World, code, event, inflight_message, memfd,
    region,
};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A front end that has shared its memory, with a ring that was not set up.
fn ready(world: &World) -> (FrontEnd, Arc<Guest>, Ring) {
    let guest = Guest::new(&[2 * MIB, 2 * MIB]);
    let front_end = world.connect();
    front_end.negotiate(Way::default());
    front_end.share(&guest);
    let ring = Ring::new(&guest, 0, 64, Way::default());
    (front_end, guest, ring)
}

fn numbers(all: &[u32]) -> Vec<u8> {
    all.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn pipe() -> OwnedFd {
    rustix::pipe::pipe().expect("a pipe").0
}

fn zeros() -> OwnedFd {
    File::open("/dev/zero").expect("it is there").into()
}

/// Each is refused, and ends the session.
#[test]
fn messages_that_make_no_sense_are_refused() {
    let world = World::new(TestDisk::new(MIB));
    let long = |code, len: usize| (code, vec![0xa5; len]);
    let address = |desc: u64, used: u64, avail: u64| {
        let places = [USER + desc, USER + used, USER + avail, 0];
        let mut payload = numbers(&[0, 0]);
        payload.extend(places.into_iter().flat_map(u64::to_le_bytes));
        (code::SET_VRING_ADDR, payload)
    };
    let messages = [
        long(code::SET_FEATURES, 7),
        long(code::SET_FEATURES, 8),
        long(code::SET_PROTOCOL_FEATURES, 8),
        long(code::SET_MEM_TABLE, 8),
        long(code::GET_CONFIG, 12),
        long(code::SET_VRING_NUM, 0),
        (code::SET_VRING_NUM, numbers(&[0, 0])),
        (code::SET_VRING_NUM, numbers(&[0, 3])),
        (code::SET_VRING_NUM, numbers(&[0, 2048])),
        (code::SET_VRING_NUM, numbers(&[0, 65_535])),
        (code::SET_VRING_NUM, numbers(&[2, 64])),
        (code::SET_VRING_NUM, numbers(&[u32::MAX, 64])),
        (code::SET_VRING_BASE, numbers(&[0, 65_536])),
        (code::SET_VRING_ENABLE, numbers(&[2, 1])),
        (code::SET_VRING_ENABLE, numbers(&[0, 7])),
        (code::GET_VRING_BASE, numbers(&[9, 0])),
        (code::SET_VRING_KICK, vec![0; 8]),
        (code::SET_INFLIGHT_FD, inflight_message(64, 2, 64)),
        (code::GET_INFLIGHT_FD, inflight_message(0, 65_535, 65_535)),
        (code::GET_INFLIGHT_FD, inflight_message(0, 0, 0)),
        (code::REM_MEM_REG, vec![0; 40]),
        (code::ADD_MEM_REG, vec![0; 40]),
        long(4711, 8),
        long(0, 0),
    ];
    for (code, payload) in messages {
        let (front_end, _, _) = ready(&world);
        let is_taken = front_end.order(code, &payload, &[]);
        assert!(!matches!(is_taken, Ok(true)), "message {code} with {payload:?}");
        assert!(front_end.is_closed(), "message {code} with {payload:?}");
    }
    // Places of rings are checked once all is known.
    for (code, payload) in
        [address(1, 0x4000, 0x2000), address(4 * MIB - 512, 0x4000, 0x2000), address(9 * MIB, 0, 0)]
    {
        let (front_end, _, ring) = ready(&world);
        front_end.set(code::SET_VRING_NUM, &ring, 64);
        // The misaligned one is refused at once.
        if front_end.order(code, &payload, &[]).is_err() {
            continue;
        }
        let kick = u64::from(ring.index).to_le_bytes();
        let is_taken = front_end.order(code::SET_VRING_KICK, &kick, &[ring.kick.as_fd()]);
        assert!(!is_taken.expect("an answer"));
    }
    world.assert_serves();
}

#[test]
fn descriptors_that_are_something_else_are_refused() {
    let world = World::new(TestDisk::new(MIB));
    let table = |at: u64, len: u64| [numbers(&[1, 0]), region(at, len, USER)].concat();
    let two =
        |second: u64| [numbers(&[2, 0]), region(0, MIB, USER), region(second, MIB, USER)].concat();
    let short = || memfd(4096).into();
    let whole = || memfd(MIB).into();
    let one: Vec<(u32, Vec<u8>, Vec<OwnedFd>)> = vec![
        (code::SET_MEM_TABLE, table(0, MIB), vec![pipe()]),
        (code::SET_MEM_TABLE, table(0, MIB), vec![zeros()]),
        (code::SET_MEM_TABLE, table(0, MIB), vec![event()]),
        (code::SET_MEM_TABLE, table(0, MIB), vec![short()]),
        (code::SET_MEM_TABLE, table(0, 0), vec![whole()]),
        (code::SET_MEM_TABLE, table(0, 1 << 62), vec![whole()]),
        (code::SET_MEM_TABLE, table(u64::MAX - 4095, 4096), vec![whole()]),
        (code::SET_MEM_TABLE, table(513, 4096), vec![whole()]),
        (code::SET_MEM_TABLE, two(MIB - 4096), vec![whole(), whole()]),
        (code::SET_MEM_TABLE, two(MIB), vec![whole()]),
        (code::SET_MEM_TABLE, table(0, MIB), vec![whole(), whole(), whole()]),
        (code::SET_VRING_KICK, vec![0; 8], vec![pipe()]),
        (code::SET_VRING_KICK, vec![0; 8], vec![zeros()]),
        (code::SET_VRING_CALL, vec![0; 8], vec![whole()]),
        (code::SET_VRING_CALL, vec![0; 8], vec![event(), event()]),
        (code::SET_VRING_ERR, vec![9, 0, 0, 0, 0, 0, 0, 0], vec![event()]),
        (code::SET_VRING_NUM, numbers(&[0, 64]), vec![event()]),
        (code::SET_INFLIGHT_FD, inflight_message(1 << 30, 2, 64), vec![short()]),
        (code::SET_INFLIGHT_FD, inflight_message(4096, 2, 64), vec![zeros()]),
        (code::SET_INFLIGHT_FD, inflight_message(4096, 0, 0), vec![short()]),
        (code::SET_LOG_BASE, vec![1; 16], vec![short()]),
        (code::SET_LOG_BASE, [[0; 8], [0; 8]].concat(), vec![short()]),
    ];
    for (code, payload, fds) in one {
        let (front_end, _, _) = ready(&world);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let is_taken = front_end.order(code, &payload, &fds);
        assert!(!matches!(is_taken, Ok(true)), "message {code} with {payload:?}");
        assert!(front_end.is_closed(), "message {code} with {payload:?}");
    }
    world.assert_serves();
}

/// An event descriptor that is always readable is none, but looks like one.
#[test]
fn other_anonymous_descriptors_are_not_kicks() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, _, mut ring) = ready(&world);
    ring.kick = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC)
        .expect("an epoll descriptor");
    front_end.start(&ring);
    assert_eq!(front_end.stop(&ring), 0);
    drop(front_end);
    world.assert_serves();
}

/// A ring that contradicts itself is left alone; the other ring continues.
#[test]
fn rings_that_contradict_themselves_end_alone() {
    type Break = fn(&mut Ring);
    let breaks: [Break; 4] = [
        |ring| {
            ring.next_avail = ring.next_avail.wrapping_add(1000);
            ring.publish();
        },
        |ring| {
            ring.next_avail = ring.next_avail.wrapping_sub(1);
            ring.publish();
        },
        |ring| ring.put_avail(64),
        |ring| ring.put_avail(65_535),
    ];
    for (number, broken) in (1..).zip(breaks) {
        let world = World::new(TestDisk::new(MIB));
        let (front_end, mut rings) = world.guest(Way::default());
        let error = event();
        front_end.hand(code::SET_VRING_ERR, &rings[0], &error);
        assert_eq!(rings[0].write(1, &[1; 512]), 0);
        broken(&mut rings[0]);
        rings[0].kick();
        let mut fds = [rustix::event::PollFd::new(&error, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        let ready = rustix::event::poll(&mut fds, Some(&timeout)).expect("polls");
        assert_eq!(ready, 1, "break {number}");
        assert_eq!(rings[1].write(1, &[1; 512]), 0);
        front_end.stop(&rings[0]);
        drop(front_end);
        world.assert_serves();
        assert_eq!(world.counters().broken_queues, 1);
    }
}

/// Malformed chains are returned with nothing written, and the ring continues.
#[test]
fn malformed_chains_are_returned() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way::default());
    let ring = &mut rings[0];
    let far = 1 << 40;
    let chains: [&[(u64, u32, bool)]; 6] = [
        &[(MIB, 16, false)],
        &[(MIB, 15, false), (MIB, 1, true)],
        &[(MIB, 1, true), (MIB, 16, false)],
        &[(far, 16, false), (MIB, 1, true)],
        &[(u64::MAX - 3, 16, false), (MIB, 1, true)],
        &[(MIB, 0, false), (MIB, 0, true)],
    ];
    for chain in chains {
        let head = ring.offer(chain);
        ring.kick();
        assert_eq!(ring.wait_used(1), [(head, 0)]);
    }
    // A loop, and an indirect table of an indirect table.
    let head = ring.offer(&[(MIB, 16, false)]);
    let at = ring.desc() + u64::from(head) * 16;
    ring.put_descriptor(at, (MIB, 16, false), 1, head);
    ring.kick();
    ring.wait_used(1);
    for _ in 0..100 {
        ring.put_descriptor(at, (at, 16, false), 4, 0);
        ring.put_avail(head);
        ring.kick();
        assert_eq!(ring.wait_used(1), [(head, 0)]);
    }
    // A status that cannot be written is the driver's loss.
    ring.guest().put(MIB, &[0; 16]);
    let head = ring.offer(&[(MIB, 16, false), (far, 513, true)]);
    ring.kick();
    assert_eq!(ring.wait_used(1), [(head, 0)]);
    assert_eq!(ring.write(1, &[1; 512]), 0);
    drop(front_end);
    world.assert_serves();
}

#[test]
fn one_head_many_times_is_done_as_often() {
    let world = World::new(TestDisk::new(MIB));
    let (front_end, mut rings) = world.guest(Way::default());
    world.disk.close();
    let head = rings[0].request(0, 0, &[(MIB, 512, true)]);
    for _ in 0..63 {
        rings[0].put_avail(head);
    }
    rings[0].kick();
    world.disk.open();
    assert_eq!(rings[0].wait_used(64).len(), 64);
    drop(front_end);
    world.assert_serves();
}

#[test]
fn front_end_may_vanish_at_any_time() {
    let world = World::new(TestDisk::new(MIB));
    let whole = FrontEnd::message(code::SET_FEATURES, 8, &[0; 8]);
    for len in 0..whole.len() {
        world.connect().send(&whole[..len], &[]).expect("sends");
    }
    for stage in 0..5 {
        let (front_end, _, mut ring) = ready(&world);
        if stage > 0 {
            front_end.set(code::SET_VRING_NUM, &ring, 64);
            front_end.addresses(&ring);
        }
        if stage > 1 {
            front_end.hand(code::SET_VRING_KICK, &ring, &ring.kick);
        }
        if stage > 2 {
            ring.request(0, 0, &[(MIB, 512, true)]);
            ring.kick();
            front_end.set(code::SET_VRING_ENABLE, &ring, 1);
        }
        if stage > 3 {
            let question = FrontEnd::message(code::GET_VRING_BASE, 0, &numbers(&[0, 0]));
            front_end.send(&question, &[]).expect("sends");
        }
    }
    world.assert_serves();
}

/// Kick before memory, enable before addresses: whatever is there last starts the queue.
#[test]
fn queue_starts_when_all_is_known_in_any_order() {
    let world = World::new(TestDisk::new(MIB));
    let guest = Guest::new(&[2 * MIB]);
    let front_end = world.connect();
    front_end.negotiate(Way::default());
    let mut ring = Ring::new(&guest, 1, 64, Way::default());
    front_end.set(code::SET_VRING_ENABLE, &ring, 1);
    front_end.hand(code::SET_VRING_KICK, &ring, &ring.kick);
    front_end.hand(code::SET_VRING_CALL, &ring, &ring.call);
    front_end.set(code::SET_VRING_NUM, &ring, 64);
    front_end.set(code::SET_VRING_BASE, &ring, 0);
    front_end.addresses(&ring);
    ring.request(4, 0, &[]);
    ring.kick();
    front_end.share(&guest);
    assert_eq!(ring.wait_used(1).len(), 1);
}

fn count_of(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).expect("a directory").count()
}

/// Other tests run concurrently, so the counts are not exact.
#[test]
fn a_thousand_sessions_leave_nothing_behind() {
    let world = World::new(TestDisk::new(MIB));
    let guest = Guest::new(&[MIB, MIB]);
    let before = (count_of("fd"), count_of("task"));
    for number in 0..1000 {
        let front_end = world.connect();
        if number % 2 == 0 {
            front_end.negotiate(Way::default());
            front_end.share(&guest);
            front_end.start(&Ring::new(&guest, 0, 64, Way::default()));
        }
    }
    world.assert_serves();
    let after = (count_of("fd"), count_of("task"));
    assert!(after.0 < before.0 + 400 && after.1 < before.1 + 200, "{before:?} {after:?}");
}

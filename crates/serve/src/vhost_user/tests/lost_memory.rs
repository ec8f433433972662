//! Front ends that take memory away which they have shared. Each ran with a server of its own once:
//! the first that truncated its file ended the process by SIGBUS, and with it all other disks.

use crate::testing::clock::until;
use crate::vhost_user::testing::{
    FrontEnd, Guest, MIB, Ring, Seg, TestDisk, Way, World, code, event, inflight_message, memfd,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A guest at a device, both of whose rings run. Its data lies in its second region.
struct Machine {
    guest: Arc<Guest>,
    front_end: FrontEnd,
    rings: [Ring; 2],
    errors: [OwnedFd; 2],
    in_flight: File,
}

impl Machine {
    fn new(world: &World) -> Self {
        let guest = Guest::unsealed(&[2 * MIB, 2 * MIB]);
        let front_end = world.connect();
        front_end.negotiate(Way::default());
        front_end.share(&guest);
        // A file that is as good as theirs, without their seals.
        let in_flight = memfd(MIB);
        let message = inflight_message(MIB, 2, 64);
        front_end.command(code::SET_INFLIGHT_FD, &message, &[in_flight.as_fd()]);
        let rings = [0, 1].map(|index| Ring::new(&guest, index, 64, Way::default()));
        let errors = [event(), event()];
        for (ring, error) in rings.iter().zip(&errors) {
            front_end.hand(code::SET_VRING_ERR, ring, error);
            front_end.start(ring);
        }
        Self { guest, front_end, rings, errors, in_flight }
    }

    /// Waits until a queue says that it is broken.
    fn wait_broken(&self, queue: usize) {
        let mut fds = [PollFd::new(&self.errors[queue], PollFlags::IN)];
        let timeout = Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&timeout)).expect("polls"), 1, "queue {queue}");
    }
}

/// A front end does `harm` and then uses what is left; another device is not affected.
fn survives(harm: impl Fn(&Machine), touch: impl Fn(&mut Machine)) {
    let (world, beside) = (World::new(TestDisk::new(MIB)), World::new(TestDisk::new(MIB)));
    let mut machine = Machine::new(&world);
    let (_front_end, mut rings) = beside.guest(Way::default());
    assert_eq!(machine.rings[0].write(1, &[1; 512]), 0);
    assert_eq!(rings[0].write(1, &[2; 512]), 0);

    harm(&machine);
    touch(&mut machine);

    machine.wait_broken(0);
    machine.rings[1].kick();
    machine.wait_broken(1);
    assert!(world.server.as_ref().expect("it runs").is_broken());
    assert_eq!((world.counters().memory_losses, world.counters().panics), (1, 0));
    assert_eq!(rings[0].read(1, 512), (0, vec![2; 512]));
    assert!(!beside.server.as_ref().expect("it runs").is_broken());
    machine.front_end.stop(&machine.rings[0]);
    drop(machine);
    // The next front end has memory of its own.
    world.assert_serves();
    assert!(!world.server.as_ref().expect("it runs").is_broken());
    let (front_end, mut rings) = world.guest(Way::default());
    assert_eq!(rings[0].read(1, 512), (0, vec![1; 512]), "and nothing was written in between");
    drop(front_end);
}

fn truncate(machine: &Machine, region: usize) {
    machine.guest.files[region].1.set_len(0).expect("truncated");
}

#[test]
fn lost_rings_break_only_their_device() {
    survives(|machine| truncate(machine, 0), |machine| machine.rings[0].kick());
}

#[test]
fn lost_data_breaks_only_its_device() {
    let in_place: &[Seg] = &[(3 * MIB, 512, false)];
    let pieces: Vec<Seg> = (0..16).map(|piece| (3 * MIB + piece * 8192, 32, false)).collect();
    for segs in [in_place, &pieces] {
        survives(
            |machine| truncate(machine, 1),
            |machine| {
                let head = machine.rings[0].request(0, 2, &segs_written(segs));
                machine.rings[0].kick();
                machine.wait_broken(0);
                assert_ne!(machine.rings[0].status(head), 0xff, "it is answered");
            },
        );
        // What would be written is not what the guest had there.
        survives(
            |machine| truncate(machine, 1),
            |machine| {
                machine.rings[0].request(1, 1, if segs.len() > 1 { segs } else { SPLIT });
                machine.rings[0].kick();
            },
        );
    }
}

/// The story: memory went away while a write of it was under way, the disk copied zeros, and the
/// write was acknowledged.
#[test]
fn write_whose_data_went_away_before_the_disk_had_it_fails() {
    let world = World::new(TestDisk::new(MIB));
    let mut machine = Machine::new(&world);
    world.disk.close();
    let head = machine.rings[0].request(1, 1, &[(3 * MIB, 512, false)]);
    machine.rings[0].kick();
    until("the write waits", || world.disk.waiting() == 1);
    truncate(&machine, 1);
    world.disk.open();
    machine.wait_broken(0);
    assert_eq!(machine.rings[0].status(head), 1);
}

/// A sector in parts, so that it goes through one of our own buffers.
const SPLIT: &[Seg] = &[(3 * MIB, 256, false), (3 * MIB + 8192, 256, false)];

fn segs_written(segs: &[Seg]) -> Vec<Seg> {
    segs.iter().map(|(at, len, _)| (*at, *len, true)).collect()
}

#[test]
fn lost_in_flight_region_breaks_only_its_device() {
    survives(
        |machine| machine.in_flight.set_len(0).expect("truncated"),
        |machine| {
            machine.rings[0].request(0, 2, &[(3 * MIB, 512, true)]);
            machine.rings[0].kick();
        },
    );
}

#[test]
fn rings_lost_before_they_start_are_refused() {
    let world = World::new(TestDisk::new(MIB));
    let guest = Guest::unsealed(&[2 * MIB]);
    let front_end = world.connect();
    front_end.negotiate(Way::default());
    front_end.share(&guest);
    let ring = Ring::new(&guest, 0, 64, Way::default());
    front_end.set(code::SET_VRING_NUM, &ring, 64);
    front_end.addresses(&ring);
    guest.files[0].1.set_len(0).expect("truncated");
    let index = u64::from(ring.index).to_le_bytes();
    let is_taken = front_end.order(code::SET_VRING_KICK, &index, &[ring.kick.as_fd()]);
    assert!(!matches!(is_taken, Ok(true)));
    assert!(front_end.is_closed());
    assert_eq!(world.counters().memory_losses, 1);
    world.assert_serves();
}

//! Bells of a process that can no longer make rings. A binary of its own: preparing rings affects
//! the whole process.

use mica_rt::{Doorbell, prepare_doorbells};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;

fn rings() -> usize {
    let all = std::fs::read_dir("/proc/self/fd").expect("listed").flatten();
    let targets = all.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("[io_uring]")).count()
}

fn count(fd: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::read(fd, &mut bytes).expect("it was rung");
    u64::from_ne_bytes(bytes)
}

#[test]
fn bells_reuse_prepared_rings_and_make_none() {
    prepare_doorbells(2);
    let before = rings();
    for _ in 0..5 {
        // One more than there are rings.
        let fds = [(); 3].map(|()| eventfd(0, EventfdFlags::CLOEXEC).expect("an event"));
        let bells = fds.each_ref().map(|fd| Doorbell::new(fd.try_clone().expect("a descriptor")));
        for bell in &bells {
            bell.ring();
            bell.ring();
        }
        assert_eq!(fds.each_ref().map(count), [2; 3]);
        assert_eq!(rings(), before);
    }
    // Nor does one beyond their number block on a counter that is full.
    let fds = [(); 3].map(|()| eventfd(0, EventfdFlags::CLOEXEC).expect("an event"));
    let bells = fds.each_ref().map(|fd| Doorbell::new(fd.try_clone().expect("a descriptor")));
    bells.iter().for_each(Doorbell::ring);
    rustix::io::write(&fds[2], &(u64::MAX - 2).to_ne_bytes()).expect("there is room");
    bells[2].ring();
    bells[2].ring();
    assert!(count(&fds[2]) >= u64::MAX - 1);
    drop(bells);
    // Anything but an eventfd takes no ring.
    for _ in 0..5 {
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        Doorbell::new(reader).ring();
    }
    let fds = [(); 2].map(|()| eventfd(0, EventfdFlags::CLOEXEC).expect("an event"));
    let bells = fds.each_ref().map(|fd| Doorbell::new(fd.try_clone().expect("a descriptor")));
    bells.iter().for_each(Doorbell::ring);
    assert_eq!(fds.each_ref().map(count), [1; 2]);
}

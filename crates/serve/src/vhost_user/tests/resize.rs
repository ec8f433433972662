//! A disk becomes longer while a guest uses it.

use crate::testing::clock::{pause, until};
use crate::vhost_user::Notice;
use crate::vhost_user::testing::{FrontEnd, MIB, TestDisk, Way, World, code};
use mica_block::{ErrorKind, Result};
use rustix::fd::AsFd;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::thread::scope;
use std::time::Duration;

/// A disk of 1 MiB that may become longer.
fn world() -> World {
    let disk = TestDisk::new(2 * MIB);
    disk.len.store(MIB, Ordering::Release);
    World::new(disk)
}

fn grow(world: &World) {
    world.disk.len.store(2 * MIB, Ordering::Release);
}

fn notify(world: &World) -> Result<Notice> {
    world.server.as_ref().expect("it runs").notify_resize()
}

/// The capacity that the configuration space gives, in sectors.
fn capacity(front_end: &FrontEnd) -> u64 {
    let ask = [&[0; 4][..], &60_u32.to_le_bytes(), &[0; 4], &[0; 60]].concat();
    let (answer, _) = front_end.ask(code::GET_CONFIG, &ask);
    u64::from_le_bytes(*answer[12..].first_chunk().expect("8 bytes"))
}

/// The front end's end of a back channel.
fn back_channel(front_end: &FrontEnd) -> UnixStream {
    let (near, far) = UnixStream::pair().expect("a pair");
    front_end.command(code::SET_BACKEND_REQ_FD, &[], &[far.as_fd()]);
    near.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    near
}

/// The next message: its code and its flags.
fn receive(mut channel: &UnixStream) -> (u32, u32) {
    let mut bytes = [0; 12];
    channel.read_exact(&mut bytes).expect("a message");
    let number = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().expect("4 bytes"));
    assert_eq!(number(8), 0, "no payload");
    (number(0), number(4))
}

fn reply(mut channel: &UnixStream, code: u32, value: u64) {
    let header = [code, 1 | 4, 8].into_iter().flat_map(u32::to_le_bytes);
    let bytes: Vec<u8> = header.chain(value.to_le_bytes()).collect();
    channel.write_all(&bytes).expect("the channel is open");
}

#[test]
fn front_end_is_notified_and_its_guest_reaches_the_new_part() {
    let world = world();
    let (front_end, mut rings) = world.guest(Way::default());
    let channel = back_channel(&front_end);
    assert_eq!(capacity(&front_end), 2048);
    assert_eq!(rings[0].read(2048, 512).0, 1, "beyond the end");
    grow(&world);
    assert_eq!(rings[0].write(2048, &[7; 512]), 0, "the very next request");
    scope(|scope| {
        let notified = scope.spawn(|| notify(&world));
        assert_eq!(receive(&channel), (2, 1 | 8));
        // As QEMU does: the session answers while the notice waits.
        assert_eq!(capacity(&front_end), 4096);
        reply(&channel, 2, 0);
        assert_eq!(notified.join().expect("no panic").expect("notified"), Notice::Taken);
    });
    assert_eq!(rings[1].read(2048, 512), (0, vec![7; 512]));
    assert_eq!(rings[1].read(4096, 512).0, 1, "beyond the new end");
}

#[test]
fn front_end_without_replies_is_notified_too() {
    let world = world();
    let front_end = world.connect();
    let (protocol, _) = front_end.ask(code::GET_PROTOCOL_FEATURES, &[]);
    let offered = u64::from_le_bytes(*protocol.first_chunk().expect("8 bytes"));
    assert!(offered & 1 << 5 != 0 && offered & 1 << 9 != 0, "the channel and configurations");
    front_end.ask(code::GET_FEATURES, &[]);
    front_end.say(code::SET_FEATURES, &(1_u64 << 32 | 1 << 30).to_le_bytes(), &[]);
    let without = offered & !(1 << 3);
    front_end.say(code::SET_PROTOCOL_FEATURES, &without.to_le_bytes(), &[]);
    let (channel, far) = UnixStream::pair().expect("a pair");
    front_end.say(code::SET_BACKEND_REQ_FD, &[], &[far.as_fd()]);
    grow(&world);
    assert_eq!(capacity(&front_end), 4096);
    assert_eq!(notify(&world).expect("notified"), Notice::Sent);
    assert_eq!(receive(&channel), (2, 1));
}

#[test]
fn without_a_front_end_nobody_is_notified() {
    let world = world();
    assert_eq!(notify(&world).expect("no session"), Notice::Nobody);
    let (front_end, _rings) = world.guest(Way::default());
    assert_eq!(notify(&world).expect("no channel"), Notice::Nobody);
    let channel = back_channel(&front_end);
    drop((front_end, _rings));
    until("the channel has gone with its session", || notify(&world).ok() == Some(Notice::Nobody));
    drop(channel);
    world.assert_serves();
}

#[test]
fn front_end_that_answers_wrongly_or_never_holds_nothing_up() {
    let world = world();
    let (front_end, mut rings) = world.guest(Way::default());
    let channel = back_channel(&front_end);
    let refused = || assert_eq!(notify(&world).unwrap_err().kind(), ErrorKind::Io);
    refused();
    assert_eq!(rings[0].write(8, &[7; 512]), 0);
    for (code, value) in [(2, 1), (3, 0)] {
        scope(|scope| {
            scope.spawn(refused);
            // The notices to which nothing was answered are there still.
            receive(&channel);
            pause(Duration::from_millis(50));
            reply(&channel, code, value);
        });
    }
    // An unsolicited message is not an answer.
    for _ in 0..100 {
        reply(&channel, 2, 0);
    }
    refused();
    drop(channel);
    refused();
    assert_eq!(rings[0].read(8, 512), (0, vec![7; 512]));
}

#[test]
fn channel_that_is_not_a_socket_is_refused() {
    let world = world();
    for _ in 0..50 {
        let (front_end, _rings) = world.guest(Way::default());
        let file = tempfile::tempfile().expect("a file");
        let taken = front_end.order(code::SET_BACKEND_REQ_FD, &[], &[file.as_fd()]);
        assert!(!taken.unwrap_or(false));
        let taken = world.connect().order(code::SET_BACKEND_REQ_FD, &[], &[]);
        assert!(!taken.unwrap_or(false));
        assert_eq!(notify(&world).expect("no channel"), Notice::Nobody);
    }
    world.assert_serves();
}

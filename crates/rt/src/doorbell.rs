//! Event descriptors of somebody else, rung without ever waiting.
//!
//! A write to an eventfd waits where its counter is full, unless the descriptor does not block; and
//! whoever else has it may make it block at any time. So it is not written: it is registered with a
//! ring of its own, in which an operation that does nothing completes, and for a completion the
//! kernel adds to the counter without waiting. Where the system refuses io_uring it is written,
//! after a look whether there is room: there, who fills it in between holds up the writer.

use io_uring::{IoUring, opcode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

/// An event descriptor that is rung.
pub struct Doorbell {
    fd: OwnedFd,
    /// Found out when it is first rung.
    way: OnceLock<Way>,
}

enum Way {
    Ring(Box<Mutex<IoUring>>),
    Write,
    /// It is no eventfd.
    Never,
}

impl Doorbell {
    /// For `fd`, an eventfd. Anything else is never rung.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, way: OnceLock::new() }
    }

    /// Adds one to the counter, unless it is full.
    pub fn ring(&self) {
        match self.way.get_or_init(|| Way::to(&self.fd)) {
            Way::Ring(ring) => {
                complete_one(&mut ring.lock().unwrap_or_else(PoisonError::into_inner));
            }
            Way::Write => write_if_room(&self.fd),
            Way::Never => {}
        }
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Doorbell({})", self.fd.as_raw_fd())
    }
}

impl Way {
    fn to(fd: &OwnedFd) -> Self {
        let Ok(ring) = IoUring::new(1) else { return Self::Write };
        match ring.submitter().register_eventfd(fd.as_raw_fd()) {
            Ok(()) => Self::Ring(Box::new(Mutex::new(ring))),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Self::Never,
            Err(_) => Self::Write,
        }
    }
}

fn complete_one(ring: &mut IoUring) {
    // What completed the last times.
    ring.completion().for_each(drop);
    let entry = opcode::Nop::new().build();
    // SAFETY: an operation that does nothing names no memory. If there is no room, what lies there
    // was not submitted for want of memory, and is now.
    let _ = unsafe { ring.submission().push(&entry) };
    // Nothing else can be done about a kernel that has no memory; the next ring makes up for it.
    let _ = ring.submit();
}

fn write_if_room(fd: &OwnedFd) {
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // One that is more than full says that it has an error.
    if poll(&mut fds, Some(&now)).is_ok() && fds[0].revents() == PollFlags::OUT {
        // One that refuses is none.
        let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).expect("it was rung");
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn each_ring_counts() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("an event");
        let bell = Doorbell::new(fd.try_clone().expect("a descriptor"));
        for _ in 0..1000 {
            bell.ring();
        }
        assert_eq!(count(&fd), 1000);
        write_if_room(&fd);
        assert_eq!(count(&fd), 1);
    }

    #[test]
    fn full_counter_of_a_descriptor_that_blocks_holds_nobody_up() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("an event");
        let bell = Doorbell::new(fd.try_clone().expect("a descriptor"));
        let full = u64::MAX - 1;
        rustix::io::write(&fd, &full.to_ne_bytes()).expect("there is room");
        for _ in 0..100 {
            bell.ring();
            write_if_room(&fd);
        }
        assert!(count(&fd) >= full);
        bell.ring();
        assert_eq!(count(&fd), 1, "it is rung again when there is room");
    }

    #[test]
    fn what_is_no_eventfd_is_never_rung() {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let (bell, other) = (Doorbell::new(reader), Doorbell::new(writer));
        bell.ring();
        other.ring();
    }
}

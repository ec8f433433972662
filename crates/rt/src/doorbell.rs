//! Event descriptors that belong to another process, rung without ever blocking.
//!
//! A write to an eventfd blocks while its counter is full, unless the descriptor is non-blocking;
//! and any other holder may make it blocking at any time. So it is not written: it is registered
//! with a ring of its own in which a no-op completes, and for a completion the kernel adds to the
//! counter without waiting. Where the system refuses io_uring it is written, after a check for
//! room: there, a process that fills it in between holds up the writer.
//!
//! A process that is about to lose the right to make rings makes them first
//! ([`prepare_doorbells`]), and one more, which bells beyond their number share: it is given the
//! descriptor for each time that one of them is rung.
//!
//! Invariants
//! - I1 Such a ring runs no-ops and signals an event descriptor, and can do nothing else.
//! - I2 A prepared ring is returned when its bell is dropped, and then has no descriptor. The
//!   shared one has none unless a bell is being rung.
//! - I3 Where there are rings, no bell is written.

use crate::restrict::enable;
use io_uring::{IoUring, opcode};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;

/// An event descriptor that is rung.
pub struct Doorbell {
    fd: OwnedFd,
    /// Determined when it is first rung.
    way: OnceLock<Way>,
}

enum Way {
    Ring {
        /// `None` once it was returned.
        ring: Box<Mutex<Option<IoUring>>>,
        is_prepared: bool,
    },
    /// By the ring that several bells share.
    Shared,
    Write,
    /// It is not an eventfd.
    Never,
}

impl Doorbell {
    /// For the eventfd `fd`. Anything else is never rung.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, way: OnceLock::new() }
    }

    /// Adds one to the counter, unless it is full.
    pub fn ring(&self) {
        match self.way.get_or_init(|| Way::to(&self.fd)) {
            Way::Ring { ring, .. } => {
                let mut ring = ring.lock();
                ring.as_mut().into_iter().for_each(complete_one);
            }
            Way::Shared => ring_by_shared(&self.fd),
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

/// Rings that were prepared; `None` if each bell makes its own.
static PREPARED: Mutex<Option<Prepared>> = Mutex::new(None);

#[derive(Default)]
struct Prepared {
    /// Those that no bell has.
    free: Vec<IoUring>,
    /// For bells that find none; `None` where the system refuses rings.
    shared: Option<IoUring>,
}

/// IORING_REGISTER_EVENTFD and IORING_UNREGISTER_EVENTFD of Linux.
const REGISTERS: [u8; 2] = [4, 5];

/// Makes rings for `count` bells, and one that any further bells that live at the same time share:
/// ringing them takes three system calls instead of one. From now on no bell makes a ring.
pub fn prepare_doorbells(count: usize) {
    let shared = make().ok();
    let made: Vec<_> = (0..count).map_while(|_| make().ok()).collect();
    let mut prepared = prepared();
    let prepared = prepared.get_or_insert_default();
    prepared.free.extend(made);
    prepared.shared = prepared.shared.take().or(shared);
}

fn prepared() -> MutexGuard<'static, Option<Prepared>> {
    PREPARED.lock()
}

fn make() -> io::Result<IoUring> {
    let ring = IoUring::builder().setup_r_disabled().build(1)?;
    enable(&ring, &[opcode::Nop::CODE], &REGISTERS)?;
    Ok(ring)
}

impl Way {
    fn to(fd: &OwnedFd) -> Self {
        let (ring, is_prepared) = match &mut *prepared() {
            Some(prepared) => match prepared.free.pop() {
                None if prepared.shared.is_some() => return Self::Shared,
                free => (free, true),
            },
            None => (make().ok(), false),
        };
        let Some(ring) = ring else { return Self::Write };
        match ring.submitter().register_eventfd(fd.as_raw_fd()) {
            Ok(()) => Self::Ring { ring: Box::new(Mutex::new(Some(ring))), is_prepared },
            Err(error) => {
                if is_prepared {
                    give_back(ring);
                }
                match error.kind() {
                    io::ErrorKind::InvalidInput => Self::Never,
                    _ if is_prepared => Self::Shared,
                    _ => Self::Write,
                }
            }
        }
    }
}

/// Rings a bell that has no ring. What is not an eventfd is not rung.
fn ring_by_shared(fd: &OwnedFd) {
    let mut prepared = prepared();
    let Some(ring) = prepared.as_mut().and_then(|prepared| prepared.shared.as_mut()) else {
        return;
    };
    if ring.submitter().register_eventfd(fd.as_raw_fd()).is_ok() {
        complete_one(ring);
        // Only a ring without a descriptor refuses.
        let _ = ring.submitter().unregister_eventfd();
    }
}

fn give_back(ring: IoUring) {
    prepared().get_or_insert_default().free.push(ring);
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        if let Some(Way::Ring { ring, is_prepared: true }) = self.way.get_mut()
            && let Some(ring) = ring.get_mut().take()
            && ring.submitter().unregister_eventfd().is_ok()
        {
            give_back(ring);
        }
    }
}

fn complete_one(ring: &mut IoUring) {
    // The completions of earlier rings.
    ring.completion().for_each(drop);
    let entry = opcode::Nop::new().build();
    // SAFETY: an operation that does nothing names no memory. If there is no room, what lies there
    // was not submitted for want of memory, and is now.
    let _ = unsafe { ring.submission().push(&entry) };
    // Nothing can be done about a kernel without memory; the next ring makes up for it.
    let _ = ring.submit();
}

fn write_if_room(fd: &OwnedFd) {
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // A counter that overflowed reports an error.
    if poll(&mut fds, Some(&now)).is_ok() && fds[0].revents() == PollFlags::OUT {
        // A descriptor that refuses is not an eventfd.
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
    fn full_counter_of_a_blocking_descriptor_does_not_block() {
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
    fn anything_but_an_eventfd_is_never_rung() {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let (bell, other) = (Doorbell::new(reader), Doorbell::new(writer));
        bell.ring();
        other.ring();
    }
}

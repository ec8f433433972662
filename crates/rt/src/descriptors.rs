//! Descriptors of the process. Whoever keeps files open only to be faster gives them up here when
//! somebody else would go without.
//!
//! Invariants
//! - I1 A connection is refused for lack of descriptors only if no holder has any to spare.
//! - I2 After each connection `HEADROOM` descriptors are free, as far as holders can spare them:
//!   what a client needs besides its connection comes later, and some of it (files that are passed
//!   in messages) is lost without an error where there is no room.

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

/// What is kept free for the descriptors that follow a connection.
const HEADROOM: usize = 64;

/// Somebody who keeps files open that can be opened again.
pub trait Holder: Send + Sync {
    /// Closes up to `count` of them, and returns how many.
    fn give_way(&self, count: usize) -> usize;
}

/// The holders, and how many files the process may have open.
struct Known {
    holders: Vec<Weak<dyn Holder>>,
    limit: usize,
}

static KNOWN: Mutex<Known> = Mutex::new(Known { holders: Vec::new(), limit: usize::MAX });

/// Asks `holder` for descriptors from now on, as long as it lives. The process may have `limit` of
/// them.
pub fn add_holder(holder: Weak<dyn Holder>, limit: usize) {
    let mut known = KNOWN.lock();
    known.holders.retain(|holder| holder.strong_count() > 0);
    known.holders.push(holder);
    known.limit = limit;
}

/// Accepts a connection, for which holders give way.
///
/// # Errors
/// Those of the system call.
pub fn accept(listener: impl AsFd) -> Result<OwnedFd, Errno> {
    loop {
        match accept_with(&listener, SocketFlags::CLOEXEC) {
            Err(Errno::MFILE | Errno::NFILE) if make_room() => {}
            Ok(connection) => {
                keep_headroom(connection.as_fd());
                return Ok(connection);
            }
            error => return error,
        }
    }
}

/// Makes room for what follows `newest`, a descriptor that was opened just now: its number is the
/// lowest that was free, and says how many others there are at least (I2).
pub fn keep_headroom(newest: BorrowedFd<'_>) {
    let number = usize::try_from(newest.as_raw_fd()).unwrap_or(0);
    let limit = KNOWN.lock().limit;
    if number.saturating_add(HEADROOM) >= limit {
        make_room();
    }
}

/// Whether this error number of the system says that no descriptor was left.
pub fn is_lack(errno: Option<i32>) -> bool {
    let lacks = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
    errno.is_some_and(|errno| lacks.contains(&errno))
}

/// Has holders close what they can spare, up to the headroom. False if that is nothing.
pub fn make_room() -> bool {
    let holders: Vec<Arc<dyn Holder>> = {
        let known = KNOWN.lock();
        known.holders.iter().filter_map(Weak::upgrade).collect()
    };
    let mut closed = 0;
    for holder in holders {
        closed += holder.give_way(HEADROOM - closed.min(HEADROOM));
    }
    closed > 0
}

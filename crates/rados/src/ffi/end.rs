//! The end of connections.
//!
//! Shutting one down takes a moment, and is not done on a thread of librados; so it has a thread of
//! its own. A process that ends meanwhile waits for it: librados crashes if its global data go
//! while it shuts down. It does not mind if they go while connections are open.

use libc::c_void;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

static ENDS: Mutex<Ends> = Mutex::new(Ends { under_way: 0, is_exiting: false });
static ENDED: Condvar = Condvar::new();

struct Ends {
    /// Shut-downs under way.
    under_way: usize,
    /// The process ends: what is open stays open.
    is_exiting: bool,
}

/// The end of a process does not wait for longer.
const WAIT_MAX: Duration = Duration::from_secs(5);

fn ends() -> MutexGuard<'static, Ends> {
    ENDS.lock()
}

/// Makes the end of the process wait. librados is loaded: so it goes after what this asks for.
pub(super) fn prepare() {
    // SAFETY: the function may be called at any time. If there is no room for it, nothing is lost
    // but the wait.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn at_exit() {
    let mut ends = ends();
    ends.is_exiting = true;
    // What this returns tells whether the time was enough: there is nothing else to do.
    ENDED.wait_while_for(&mut ends, |ends| ends.under_way > 0, WAIT_MAX);
}

/// Shuts down the connection at `raw`, which was exposed, and which nothing uses any more.
pub(super) fn shut_down(raw: usize, by: unsafe extern "C" fn(*mut c_void)) {
    let mut ends = ends();
    if ends.is_exiting {
        return;
    }
    ends.under_way += 1;
    drop(ends);
    let end = move || {
        let raw = std::ptr::with_exposed_provenance_mut(raw);
        // SAFETY: the caller's promise.
        unsafe { by(raw) };
        over();
    };
    // Without a thread it stays open until the process ends.
    if std::thread::Builder::new().name("mica-rados-end".to_owned()).spawn(end).is_err() {
        over();
    }
}

fn over() {
    ends().under_way -= 1;
    ENDED.notify_all();
}

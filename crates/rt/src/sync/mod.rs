//! Synchronization of tasks on any thread: one kind of waiting in each file.
//!
//! Nothing here blocks a thread: locks are held for a few steps in memory only, and a task that has
//! to wait leaves a waker.

mod claims;
mod group;
mod in_flight;
mod mutex;
mod notify;
mod shared_lock;
mod signal;
#[cfg(test)]
mod testing;
mod turns;
mod waiters;

pub use claims::{Claim, Claims, Mode};
pub use group::GroupSync;
pub use in_flight::{EndedPhase, InFlight, OwnedInFlight, Requests};
pub use mutex::{Locked, Mutex};
pub use notify::Notify;
pub use shared_lock::{Alone, SharedLock, Sharing};
pub use signal::{Signal, Subscription};
pub use turns::Turns;
pub use waiters::Waiters;

//! The vhost-user-blk server: a disk of mica as a virtio block device of a machine whose monitor
//! (QEMU, cloud-hypervisor, Firecracker) shares the guest's memory with us.
//!
//! ```text
//! server     socket, sessions one after the other               a task
//!   └ device     messages: features, memory, rings                a thread per session
//!       └ queue      ring ─▶ chain ─▶ request ─▶ disk ─▶ ring     a task per queue
//! ```
//!
//! A guest is not believed: every number that comes from its memory is checked against what the
//! guest has, and read once.

mod attention;
mod back_channel;
mod batch;
mod chain;
mod common;
mod config;
mod control;
mod device;
mod inflight;
mod log;
mod lost;
mod memory;
mod placement;
mod queue;
mod request;
mod server;
mod stats;
mod transfer;
mod vring;

#[cfg(any(test, feature = "fuzzing"))]
mod hostile;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use back_channel::Notice;
#[cfg(any(test, feature = "fuzzing"))]
pub use hostile::{survive, survive_chains};
pub use server::{Prepared, Running, Server, ServerConfig};
pub use stats::Counters;

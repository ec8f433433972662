//! The FUSE server: a disk of mica as a raw file, for foreign tools and for loop mounts.
//!
//! ```text
//! server     mounts, starts, and shuts down
//!   └ file       kernel ⇄ requests                      a thread of its own
//!       └ gate       how much may be under way
//!           └ request    request ─▶ disk ─▶ answer      a task on one of the executors
//! mounts     mounting and unmounting, perhaps by another process
//!   └ mount      what is mounted where
//! ```
//!
//! The file has to exist: it is mounted over, as by QEMU's FUSE export, and reappears when the
//! server ends. What is read and written is not cached (`FOPEN_DIRECT_IO`, no writeback cache), so
//! that what other servers write to the same disk is visible at once, and acknowledged writes have
//! reached the disk. What programs map into their memory is: of a disk that has other servers they
//! cannot share such memory ([`Mapping`]). What they map for themselves (`MAP_PRIVATE`) shows the
//! disk as it was when the kernel read it.

mod attributes;
mod export;
mod file;
mod gate;
mod mount;
mod mounts;
mod request;
mod server;
mod stats;

#[cfg(test)]
mod tests;

pub use attributes::AllowOther;
pub use export::Mapping;
pub use mount::check_file;
pub use mounts::{MountRequest, Mounted, Mounts, MountsHere};
pub use server::{Running, Server, ServerConfig};
pub use stats::Counters;

//! The NBD server: any disk of mica, for any NBD client. Beside it, the [`client`] of other
//! servers.
//!
//! ```text
//! address    a listening socket; no disk owns it
//!   ├ exports      the table of an address: a seat for each disk
//!   └ connection   one task: negotiate, with TLS in between where that is so, then
//!       └ session  input ─▶ requests in flight ─▶ outgoing
//! server     one disk: takes its seats, and ends its sessions
//!   └ entry        what the sessions of an export share
//! ```
//!
//! Sections that are cited are those of the NBD protocol document (`doc/proto.md` of
//! NetworkBlockDevice/nbd). What a client may cost is in [`limits`](Limits).

mod address;
mod channel;
mod check;
pub mod client;
mod connection;
mod contexts;
mod entry;
mod export;
mod exports;
mod handshake;
mod input;
mod limits;
mod negotiate;
mod protocol;
mod read;
mod reply;
mod server;
mod session;
mod shared;
mod stats;
mod status;
mod write;

#[cfg(any(test, feature = "fuzzing"))]
mod hostile;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), expect(dead_code, unused_imports, reason = "the tests use all of it"))]
mod testing;

#[cfg(any(test, feature = "fuzzing"))]
pub use hostile::survive;

pub use crate::discard::Discard;
pub use address::Address;
pub use contexts::{Context, Part};
pub use export::Export;
pub use exports::{Exports, Seat};
pub use limits::Limits;
pub use server::{Prepared, Running, Server, ServerConfig};
pub use stats::Counters;

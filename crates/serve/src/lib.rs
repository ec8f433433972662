//! Servers: they know protocols and guest addresses, and no format. Internal crate.

mod counters;
mod discard;
mod edges;
pub mod fuse;
mod limit;
mod listener;
pub mod nbd;
mod parts;
mod sectors;
mod signal;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), expect(dead_code, reason = "the tests use all of it"))]
mod testing;
pub mod vhost_user;
mod tls;
mod wake;
mod workers;

pub use discard::Discard;
pub use limit::Rates;
pub use listener::Listener;
pub use workers::Workers;
pub use tls::{Clients, Tls, TlsPolicy};

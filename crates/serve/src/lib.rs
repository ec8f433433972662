//! Servers: they know protocols and guest addresses, and no format. Internal crate.

mod budget;
mod counter;
mod counters;
mod discard;
pub mod fuse;
mod idle;
mod latency;
mod limit;
mod listener;
pub mod nbd;
mod prepared;
mod scarce;
mod sectors;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), expect(dead_code, reason = "the tests use all of it"))]
mod testing;
mod throttled;
mod tls;
pub mod vhost_user;
mod wake;
mod workers;

pub use discard::Discard;
pub use latency::{Latencies, Latency};
pub use limit::{Limiter, Rates};
pub use listener::{Clearing, Listener, SocketUsers, check_socket_place, find_dead_sockets_with};
pub use prepared::Prepared;
pub use scarce::warn_of_lack;
pub use throttled::Throttled;
pub use tls::{CERTIFICATE_FILES, CertificateSource, Clients, OpenFile, Tls, TlsPolicy};
pub use workers::{Spawned, Workers};

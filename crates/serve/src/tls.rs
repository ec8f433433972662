//! TLS 1.2 and 1.3 for servers of streams: who a server is, whom it lets in, and records over a
//! stream.
//!
//! The protocol and the cryptography are rustls with ring. Here are the files
//! ([`credentials`](Tls::load)) and how records meet the runtime ([`TlsStream`]). Pre-shared keys
//! are not served: rustls has none.

mod credentials;
mod stream;

pub use credentials::{Clients, Tls};
pub(crate) use stream::TlsStream;

/// Whether clients of a listener have to use TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsPolicy {
    /// Who asks for it gets it. Anybody on the path can keep a client from asking.
    Offered,
    /// Nothing is told and nothing is served without it.
    Required,
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

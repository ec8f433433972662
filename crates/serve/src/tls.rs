//! TLS 1.2 and 1.3 for servers of streams: the server's identity, the clients that it admits, and
//! records over a stream; and what a client trusts.
//!
//! The protocol and the cryptography are rustls with ring. Here are the files
//! ([`credentials`](Tls::load), [`Trust`]) and how records meet the runtime ([`TlsStream`]).
//! Pre-shared keys are not served: rustls has none.

mod credentials;
mod stream;
mod trust;

pub use credentials::{CERTIFICATE_FILES, CertificateSource, Clients, OpenFile, Tls};
pub(crate) use stream::TlsStream;
pub use trust::Trust;

/// Whether clients of a listener have to use TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsPolicy {
    /// Clients that ask for it get it. Anybody on the path can keep a client from asking.
    Offered,
    /// Nothing is disclosed and nothing is served without it.
    Required,
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

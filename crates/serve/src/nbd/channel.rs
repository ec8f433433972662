//! The transport of a connection: the plain socket, or TLS over it.
//!
//! The handshake and the session are compiled for each of the two, so that a connection in plain
//! text pays nothing for TLS.

use crate::tls::TlsStream;
use mica_rt::{Buf, Stream};
use std::collections::VecDeque;
use std::future::Future;
use std::io;

/// A stream of bytes in both directions; see [`Stream`] for what its methods do.
pub(super) trait Channel {
    fn recv(&self, buf: Buf) -> impl Future<Output = (io::Result<usize>, Buf)>;
    fn send(&self, bufs: VecDeque<Buf>) -> impl Future<Output = io::Result<()>>;
    fn send_now(&self, bufs: VecDeque<Buf>) -> impl Future<Output = io::Result<()>>;
}

impl Channel for Stream {
    fn recv(&self, buf: Buf) -> impl Future<Output = (io::Result<usize>, Buf)> {
        Self::recv(self, buf)
    }

    fn send(&self, bufs: VecDeque<Buf>) -> impl Future<Output = io::Result<()>> {
        Self::send(self, bufs)
    }

    fn send_now(&self, bufs: VecDeque<Buf>) -> impl Future<Output = io::Result<()>> {
        Self::send_now(self, bufs)
    }
}

impl Channel for TlsStream<'_> {
    fn recv(&self, buf: Buf) -> impl Future<Output = (io::Result<usize>, Buf)> {
        Self::recv(self, buf)
    }

    fn send(&self, bufs: VecDeque<Buf>) -> impl Future<Output = io::Result<()>> {
        Self::send(self, bufs)
    }

    fn send_now(&self, bufs: VecDeque<Buf>) -> impl Future<Output = io::Result<()>> {
        Self::send_now(self, bufs)
    }
}

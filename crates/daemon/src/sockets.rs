//! Where servers listen.

use mica_block::{Error, ErrorKind, Result};
use mica_serve::Listener;
use std::net::SocketAddr;
use std::path::Path;

/// Listens where NBD clients are to connect: the path of a unix socket, or `tcp:ADDRESS:PORT`.
pub(crate) fn listen_nbd(name: &str) -> Result<Listener> {
    let Some(address) = name.strip_prefix("tcp:") else {
        return Listener::unix(Path::new(name));
    };
    let address: SocketAddr = address.parse().map_err(|_| {
        let context = format!("--nbd {name}: write a TCP address like tcp:127.0.0.1:10809");
        Error::new(ErrorKind::Invalid, context)
    })?;
    if !address.ip().is_loopback() {
        let context = format!("--nbd {name}: NBD without TLS is served on the loopback only");
        return Err(Error::new(ErrorKind::Denied, context));
    }
    Listener::tcp(address)
}

//! Where clients connect, in a form that can be compared.

use mica_serve::Listener;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// An address in a form that can be compared.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Address {
    /// A unix socket, or a file.
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl Address {
    pub(crate) fn unix(path: &Path) -> Option<Self> {
        std::path::absolute(path).ok().map(Self::Unix)
    }

    pub(crate) fn of(listener: &Listener) -> Option<Self> {
        let path = listener.path().and_then(Self::unix);
        path.or_else(|| listener.tcp_address().map(Self::Tcp))
    }

    /// Whether the system chooses the port: every disk that asks for that gets one of its own.
    pub(crate) fn is_any_port(&self) -> bool {
        matches!(self, Self::Tcp(address) if address.port() == 0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

//! Listening sockets that this process holds, and where each came from.

use mica_serve::Listener;

/// How this process got a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// This process created it.
    Here,
    /// A systemd socket unit created it and owns it.
    Unit,
    /// An earlier process created it and systemd stored it.
    Store,
    /// It was handed over by the process that is taken over.
    Takeover,
}

/// A listening socket and its purpose.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) name: String,
    pub(crate) origin: Origin,
    pub(crate) listener: Listener,
    /// Whether this process has stored it with systemd.
    pub(crate) is_stored: bool,
}

impl Held {
    pub(crate) fn new(name: String, origin: Origin, listener: Listener) -> Self {
        Self { name, origin, listener, is_stored: false }
    }

    /// Where clients connect, as it is written on the command line.
    pub(crate) fn place(&self) -> String {
        match (self.listener.path(), self.listener.tcp_address()) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(address)) => format!("tcp:{address}"),
            (None, None) => "a socket without a name".to_owned(),
        }
    }
}

//! Listening sockets that this process holds, their names, and where each came from.

use mica_serve::Listener;

/// Suffix of the name of a device's socket.
pub(crate) const DEVICE: &str = ".vhost-user";
/// The name of the control socket.
pub(crate) const CONTROL: &str = "mica.control";
/// The name of the socket for figures.
pub(crate) const METRICS: &str = "mica.metrics";

/// The name of the socket of a disk's device.
pub(crate) fn device_name(disk: &str) -> String {
    format!("{disk}{DEVICE}")
}

/// Whether a disk of this name could not be told from a socket that is not its own.
pub(crate) fn is_socket_name(name: &str) -> bool {
    name.ends_with(DEVICE) || [CONTROL, METRICS].contains(&name)
}

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

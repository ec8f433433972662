//! Listening sockets that this process holds, wherever they come from.

use mica_serve::Listener;

/// Where a socket comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// This process made it.
    Here,
    /// A socket unit of systemd made it, and keeps it.
    Unit,
    /// A process before this one made it, and systemd kept it.
    Store,
    /// The process that is taken over had it.
    Takeover,
}

/// A listening socket, and what it is for.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) name: String,
    pub(crate) origin: Origin,
    pub(crate) listener: Listener,
    /// Whether systemd was asked to keep it, by this process.
    pub(crate) is_stored: bool,
}

impl Held {
    pub(crate) fn new(name: String, origin: Origin, listener: Listener) -> Self {
        Self { name, origin, listener, is_stored: false }
    }
}

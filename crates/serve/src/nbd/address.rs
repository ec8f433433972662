//! An address at which clients connect: a listening socket, and the clients that have not chosen an
//! export yet. No disk owns it: it knows only the table of exports.
//!
//! The first executor accepts and hands connections out in turn. The socket is closed, and the file
//! of a unix socket removed if it is ours and still the same, when the [`Address`] is dropped.

use super::connection::{Door, serve};
use super::exports::Exports;
use super::handshake::Handshakes;
use super::limits::Limits;
use crate::listener::{Family, Listener, tune};
use crate::scarce::warn_of_lack;
use crate::workers::Workers;
use mica_block::Result;
use mica_rt::sync::Signal;
use mica_rt::{Handle, Socket, Stream, sleep};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Pause after an accept that failed for lack of resources (descriptors, memory).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An address at which clients connect. Dropping it closes it; sessions that have begun go on.
pub struct Address {
    listener: Listener,
    closing: Arc<Signal>,
}

impl Address {
    /// Lets clients in at `listener` whenever one of `exports` is served.
    ///
    /// # Errors
    /// `Denied` if that would send plain text beyond this machine unasked.
    pub fn open(
        listener: Listener,
        exports: &Arc<Exports>,
        workers: &Workers,
        limits: &Limits,
    ) -> Result<Self> {
        listener.check_secured()?;
        let closing = Arc::<Signal>::default();
        let hall = Hall {
            door: Arc::new(Door::new(Arc::clone(exports), listener.security.tls.clone(), *limits)),
            closing: Arc::clone(&closing),
            handles: workers.handles().to_vec(),
            next: AtomicUsize::new(0),
            handshakes: Arc::default(),
        };
        let (socket, family) = (Arc::clone(&listener.socket), listener.family);
        workers.handles()[0].spawn_with(move || async move {
            let closing = Arc::clone(&hall.closing);
            closing.unless_raised(hall.accept_all(&socket, family)).await;
        });
        Ok(Self { listener, closing })
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        self.closing.raise();
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({:?})", self.listener)
    }
}

/// Where clients are until they have chosen an export.
struct Hall {
    door: Arc<Door>,
    /// Raised when the address closes.
    closing: Arc<Signal>,
    handles: Vec<Handle>,
    next: AtomicUsize,
    handshakes: Arc<Handshakes>,
}

impl Hall {
    async fn accept_all(&self, listener: &Arc<Socket>, family: Family) {
        loop {
            let dismissed = self.door.exports.opened().await;
            while let Some(accepted) = dismissed.unless_raised(listener.accept()).await {
                match accepted {
                    Ok(socket) => self.hand_over(socket, family, &dismissed),
                    Err(error) => {
                        warn_of_lack("an NBD client", &error);
                        sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        }
    }

    fn hand_over(&self, socket: Socket, family: Family, dismissed: &Arc<Signal>) {
        let Some(handshake) = self.handshakes.enter() else {
            // Runs on the first executor, whose counter this is.
            if let Some(first) = self.door.exports.only() {
                first.stats(0).connections_refused.add(1);
            }
            tracing::debug!("closed a connection: too many have not chosen an export");
            return;
        };
        let queue = self.next.fetch_add(1, Ordering::Relaxed) % self.handles.len();
        tune(&socket, family);
        let door = Arc::clone(&self.door);
        let dismissed = [Arc::clone(dismissed), Arc::clone(&self.closing)];
        self.handles[queue].spawn_with(move || async move {
            serve(Stream::Socket(Arc::new(socket)), door, dismissed, queue, handshake).await;
        });
    }
}

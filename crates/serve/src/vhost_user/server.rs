//! The server of one device: its socket, the thread that takes its messages while a front end is
//! connected, the executors of its queues, and shutdown.
//!
//! A device without a front end costs no thread: a task waits at its socket.

use super::back_channel::{self, BackChannel, Notice};
use super::batch::BusyQueues;
use super::common::Common;
use super::config::CONFIG_BYTES;
use super::device::{Device, QUEUES_MAX};
use super::placement::Placement;
use super::request::ID_BYTES;
use super::stats::Counters;
use crate::budget::Party;
use crate::discard::Discard;
use crate::limit::Limiter;
use crate::listener::Listener;
use crate::scarce::warn_of_lack;
use crate::workers::Workers;
use mica_block::{Disk, Error, ErrorKind, Result};
use mica_rt::sync::{Notify, SharedLock, Signal};
use mica_rt::{Socket, sleep};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;
use std::fmt;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;
use vhost::vhost_user::BackendReqHandler;

const _: () = assert!(CONFIG_BYTES <= 256, "the protocol's own bound");

/// A device and where it is served.
pub struct ServerConfig {
    /// Where the front end connects: one at a time.
    pub listener: Listener,
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Virtqueues; each runs on one of the executors.
    pub queues: u16,
    /// The serial number that is shown to the driver; at most 20 bytes count.
    pub serial: String,
    /// What happens to space that the guest no longer needs.
    pub discard: Discard,
    /// The lock of changes at the edges of sectors, if other servers of the disk make such changes:
    /// what a guest writes in between would be lost.
    pub edges: Option<Arc<SharedLock>>,
    /// How much the guest may do, with whatever else shares it.
    pub limiter: Option<Arc<Limiter>>,
    /// The executors.
    pub workers: Arc<Workers>,
}

/// Starts servers.
#[derive(Debug)]
pub struct Server;

impl Server {
    /// Starts serving.
    ///
    /// # Errors
    /// As [`Server::prepare`].
    pub fn start(config: ServerConfig) -> Result<Running> {
        Ok(Self::prepare(config)?.start())
    }

    /// Does all that can fail, and serves nobody yet: a front end that connects waits.
    ///
    /// # Errors
    /// `Invalid` for a configuration that makes no sense; else any error of the system.
    pub fn prepare(config: ServerConfig) -> Result<Prepared> {
        let ServerConfig { listener, disk, queues, serial, discard, edges, limiter, workers } =
            config;
        if !(1..=QUEUES_MAX).contains(&queues) {
            let context = format!("a vhost-user device has between 1 and {QUEUES_MAX} queues");
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        let mut id = [0; ID_BYTES as usize];
        id.iter_mut().zip(serial.bytes()).for_each(|(to, byte)| *to = byte);
        let stats = (0..queues).map(|_| Default::default()).collect();
        let common = Arc::new(Common {
            disk,
            stats,
            discard,
            edges,
            limiter,
            back_channel: BackChannel::default(),
            losses: Default::default(),
            logs: Default::default(),
            party: Party::new(workers.pool()),
            busy_queues: BusyQueues::default(),
            placement: Placement::new(&workers),
            is_ending: Default::default(),
            id,
        });
        let served = Arc::new(Served { common, sessions: Arc::default() });
        Ok(Prepared(Running { served, listener: Some(listener), _workers: workers }))
    }
}

/// A device that only has to be told to start.
#[derive(Debug)]
pub struct Prepared(Running);

impl Prepared {
    /// Starts serving.
    pub fn start(self) -> Running {
        let Self(running) = self;
        let Running { served, listener, .. } = &running;
        if let Some(listener) = listener {
            let (socket, sessions) = (Arc::clone(&listener.socket), Arc::clone(&served.sessions));
            let weak = Arc::downgrade(served);
            // Accepting takes a moment; what may take long is done on the thread of the session.
            let home = served.common.placement.home();
            home.spawn_with(move || accept_all(socket, sessions, weak));
        }
        running
    }
}

/// A device that is served. Dropping it ends that.
pub struct Running {
    served: Arc<Served>,
    listener: Option<Listener>,
    /// They run for as long as it does.
    _workers: Arc<Workers>,
}

/// What the threads of sessions share. The task that accepts does not hold it: it ends on its next
/// turn, and a worker that has none would keep the disk open.
struct Served {
    common: Arc<Common>,
    sessions: Arc<Sessions>,
}

impl Running {
    #[cfg(test)]
    pub(super) fn placement(&self) -> &Placement {
        &self.served.common.placement
    }

    /// Its counters so far.
    pub fn counters(&self) -> Counters {
        self.served.common.counters()
    }

    /// Notifies the front end of a new length of the disk, after [`mica_block::Manage::resize`].
    /// Waits for its answer, for a few seconds at most; not to be called on a thread that the guest
    /// waits for.
    ///
    /// # Errors
    /// `Io` if a front end is there and does not take it: it goes on with the length that it
    /// knows, until it asks again.
    pub fn notify_resize(&self) -> Result<Notice> {
        self.served.common.back_channel.notify()
    }

    /// [`Running::notify_resize`] for callers that cannot hold the device while it waits.
    pub fn resize_notifier(&self) -> impl FnOnce() -> Result<Notice> + Send + use<> {
        let common = Arc::clone(&self.served.common);
        move || common.back_channel.notify()
    }

    /// Whether a front end is connected.
    pub fn is_connected(&self) -> bool {
        self.served.sessions.lock().stream.is_some()
    }

    /// Whether the device is no longer served, because its front end took away memory that it had
    /// shared. A front end that reconnects is served.
    pub fn is_broken(&self) -> bool {
        self.served.common.is_broken()
    }

    /// Takes no more requests, waits for those in flight, and ends the session. Requests that were
    /// not taken stay in the guest's rings, for the next server; so does the rest of what would
    /// take long.
    pub fn shutdown(mut self) -> Counters {
        self.stop_and_wait();
        self.counters()
    }

    fn stop_and_wait(&mut self) {
        self.served.common.end();
        self.listener = None;
        self.served.sessions.stop_and_wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop_and_wait();
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({} queues)", self.served.common.stats.len())
    }
}

/// The sessions of a device, of which there is one at a time.
#[derive(Default)]
struct Sessions {
    /// Raised when there are to be no more.
    stop: Signal,
    /// Set when one has ended.
    ended: Notify,
    state: Mutex<SessionState>,
    none: Condvar,
}

#[derive(Default)]
struct SessionState {
    /// The connection of the session, by which it is ended.
    stream: Option<UnixStream>,
    /// Whether a thread serves one.
    is_running: bool,
    is_over: bool,
}

/// The session of a thread; it has ended when this is dropped.
struct Session(Arc<Served>);

impl Sessions {
    /// Ends the session and waits for that. There will be no other.
    fn stop_and_wait(&self) {
        let mut state = self.lock();
        state.is_over = true;
        if let Some(stream) = &state.stream {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.stop.raise();
        self.none.wait_while(&mut state, |state| state.is_running);
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock()
    }
}

impl Session {
    /// Begins one with this connection; `None` if there are to be no more.
    fn begin(served: &Arc<Served>, stream: UnixStream) -> Option<Self> {
        let mut state = served.sessions.lock();
        if state.is_over {
            return None;
        }
        (state.stream, state.is_running) = (Some(stream), true);
        Some(Self(Arc::clone(served)))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a device's thread panicked");
        }
        let sessions = &self.0.sessions;
        let mut state = sessions.lock();
        (state.stream, state.is_running) = (None, false);
        sessions.none.notify_all();
        drop(state);
        sessions.ended.set();
    }
}

/// Serves one front end after the other.
///
/// The socket stays open until this has its next turn after the stop, which nobody waits for: its
/// file is gone by then, so that another may listen at that path, and a front end that had found
/// the file before sees its connection closed as soon as this ends. It is never taken: there is no
/// session any more. The socket must not be shut down, as another process may listen on it.
async fn accept_all(socket: Arc<Socket>, sessions: Arc<Sessions>, served: Weak<Served>) {
    while let Some(ready) = sessions.stop.unless_raised(socket.readable()).await {
        let accepted = ready.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let accepted = accepted.and_then(|()| mica_rt::descriptors::accept(&*socket));
        match accepted {
            Ok(fd) => serve(UnixStream::from(fd), &sessions, &served).await,
            // It has gone, or another process that listens here was faster.
            Err(Errno::CONNABORTED | Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                warn_of_lack("a front end", &error.into());
                // For lack of descriptors or memory. It is still there after a while.
                let _ = sessions.stop.unless_raised(sleep(ACCEPT_PAUSE)).await;
            }
        }
    }
}

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves a front end on a thread of its own, and waits for its end.
async fn serve(stream: UnixStream, sessions: &Sessions, served: &Weak<Served>) {
    let Ok(clone) = stream.try_clone() else { return };
    let begun = served.upgrade().and_then(|served| Session::begin(&served, clone));
    let Some(session) = begun else { return };
    let work = Arc::new(Mutex::new(Some((stream, session))));
    loop {
        let body = {
            let work = Arc::clone(&work);
            move || {
                let work = work.lock().take();
                let Some((stream, session)) = work else { return };
                self::session(stream, &session.0.common);
            }
        };
        match std::thread::Builder::new().name("mica-vhost".to_owned()).spawn(body) {
            Ok(_) => break,
            Err(error) => {
                warn_of_lack("a front end, which needs a thread,", &error);
                let paused = sessions.stop.unless_raised(sleep(ACCEPT_PAUSE)).await;
                if paused.is_none() {
                    return;
                }
            }
        }
    }
    let _ = sessions.stop.unless_raised(sessions.ended.wait()).await;
}

/// Serves a front end until it disconnects.
pub(super) fn session(stream: UnixStream, common: &Arc<Common>) {
    let serial = common.serial();
    if let Some(omitted) = common.logs.arrivals.admit() {
        tracing::info!("front end connected to {serial:?}{omitted}");
    }
    // The library knows this kind of lock.
    let device = Arc::new(std::sync::Mutex::new(Device::new(Arc::clone(common))));
    let Ok(peeked) = stream.try_clone() else { return };
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&device));
    let why = loop {
        let back_channel_fd = back_channel::peek(&peeked);
        device.lock().unwrap_or_else(PoisonError::into_inner).peeked = back_channel_fd;
        if let Err(error) = handler.handle_request() {
            break error;
        }
    };
    common.back_channel.close();
    // The queues end before the connection does: a front end that sees it close knows that nothing
    // is in flight any more.
    device.lock().unwrap_or_else(PoisonError::into_inner).stop_all();
    if let Some(omitted) = common.logs.departures.admit() {
        tracing::info!("front end left {serial:?}: {why}{omitted}");
    }
}

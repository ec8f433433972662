//! The server of one device: its socket, the thread that takes its messages, the executors of its
//! queues, and shutdown.

use super::back_channel::{self, BackChannel, Notice};
use super::batch::BusyQueues;
use super::common::Common;
use super::config::CONFIG_BYTES;
use super::device::{Device, QUEUES_MAX};
use super::request::ID_BYTES;
use super::stats::Counters;
use crate::budget::Party;
use crate::discard::Discard;
use crate::limit::{Limiter, Rates};
use crate::listener::Listener;
use crate::prepared::Prepared;
use crate::workers::Workers;
use mica_block::{Disk, Error, ErrorKind, Result};
use mica_rt::{Handle, Socket};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
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
    /// How much the guest may do.
    pub rates: Rates,
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
    pub fn prepare(config: ServerConfig) -> Result<Prepared<Running>> {
        let ServerConfig { listener, disk, queues, serial, discard, rates, workers } = config;
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
            limiter: Limiter::new(rates),
            back_channel: BackChannel::default(),
            losses: Default::default(),
            party: Party::new(workers.pool()),
            busy_queues: BusyQueues::default(),
            is_ending: Default::default(),
            id,
        });
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = stop.map_err(|error| Error::from_io("starting a device", error.into()))?;
        let stop = Arc::new(Stop { fd: stop, session: Mutex::default() });
        let socket = Arc::clone(&listener.socket);
        let (served, stopping) = (Arc::clone(&common), Arc::clone(&stop));
        let (start, started) = mpsc::channel();
        let serving = move || {
            if started.recv().is_ok() {
                accept_all(&socket, &served, &workers, &stopping);
            }
        };
        let thread = std::thread::Builder::new()
            .name("mica-vhost".to_owned())
            .spawn(serving)
            .map_err(|error| Error::from_io("starting a device", error))?;
        let running = Running { common, stop, listener: Some(listener), thread: Some(thread) };
        Ok(Prepared::new(start, running))
    }
}

/// A device that is served. Dropping it ends that.
pub struct Running {
    common: Arc<Common>,
    stop: Arc<Stop>,
    listener: Option<Listener>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// Its counters so far.
    pub fn counters(&self) -> Counters {
        self.common.counters()
    }

    /// Notifies the front end of a new length of the disk, after [`mica_block::Manage::resize`].
    /// Waits for its answer, for a few seconds at most; not to be called on a thread that the guest
    /// waits for.
    ///
    /// # Errors
    /// `Io` if a front end is there and does not take it: it goes on with the length that it
    /// knows, until it asks again.
    pub fn notify_resize(&self) -> Result<Notice> {
        self.common.back_channel.notify()
    }

    /// [`Running::notify_resize`] for callers that cannot hold the device while it waits.
    pub fn resize_notifier(&self) -> impl FnOnce() -> Result<Notice> + Send + use<> {
        let common = Arc::clone(&self.common);
        move || common.back_channel.notify()
    }

    /// Whether a front end is connected.
    pub fn is_connected(&self) -> bool {
        self.stop.session.lock().unwrap_or_else(PoisonError::into_inner).0.is_some()
    }

    /// Whether the device is no longer served, because its front end took away memory that it had
    /// shared. A front end that reconnects is served.
    pub fn is_broken(&self) -> bool {
        self.common.is_broken()
    }

    /// Takes no more requests, waits for those in flight, and ends the session. Requests that were
    /// not taken stay in the guest's rings, for the next server; so does the rest of what would
    /// take long.
    pub fn shutdown(mut self) -> Counters {
        self.stop_and_join();
        self.counters()
    }

    fn stop_and_join(&mut self) {
        self.common.end();
        self.listener = None;
        self.stop.raise();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a device's thread panicked");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({} queues)", self.common.stats.len())
    }
}

/// How the thread of a device is stopped, wherever it waits.
struct Stop {
    fd: OwnedFd,
    /// The connection of the session, and whether there may be another.
    session: Mutex<(Option<UnixStream>, bool)>,
}

impl Stop {
    fn raise(&self) {
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        session.1 = true;
        if let Some(stream) = session.0.take() {
            // It may have ended by itself.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }

    /// Remembers the connection; false if there may be none any more.
    fn begin(&self, stream: UnixStream) -> bool {
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        session.0 = Some(stream);
        !session.1
    }

    fn end(&self) {
        self.session.lock().unwrap_or_else(PoisonError::into_inner).0 = None;
    }
}

/// Serves one front end after the other.
fn accept_all(listener: &Socket, common: &Arc<Common>, workers: &Workers, stop: &Stop) {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(stop.fd.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return tracing::error!(%error, "stopped serving a device"),
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        match rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
            Ok(fd) => serve(UnixStream::from(fd), common, workers, stop),
            // It has gone, or another process that listens here was faster.
            Err(Errno::CONNABORTED | Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a front end");
                // For lack of descriptors or memory. It is still there after a while.
                let _ = poll(&mut fds[..1], Some(&ACCEPT_PAUSE));
            }
        }
    }
}

const ACCEPT_PAUSE: rustix::event::Timespec =
    rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

fn serve(stream: UnixStream, common: &Arc<Common>, workers: &Workers, stop: &Stop) {
    let Ok(clone) = stream.try_clone() else { return };
    if !stop.begin(clone) {
        return;
    }
    session(stream, common, workers.handles());
    stop.end();
}

/// Serves a front end until it disconnects.
pub(super) fn session(stream: UnixStream, common: &Arc<Common>, workers: &[Handle]) {
    let serial = common.serial();
    tracing::info!("front end connected to {serial:?}");
    let device = Device::new(Arc::clone(common), workers.to_vec());
    let device = Arc::new(Mutex::new(device));
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
    tracing::info!("front end left {serial:?}: {why}");
}

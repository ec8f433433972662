//! What is sent to systemd and what it passes on: see sd_notify(3) and sd_listen_fds(3).
//!
//! Sockets that this process creates are stored with systemd, so that they stay open if it crashes:
//! clients that connect then wait for the next server instead of being refused.
//!
//! Invariants
//! - I1 A socket that is no longer served is no longer stored: clients would wait in vain,
//!   and the store would fill up. What another process now serves stays stored.
//! - I2 In a takeover the old process tells systemd of the new main process before it ends: the
//!   end of the main process would be the end of the service. It does not say that it stops:
//!   `STOPPING=1` is about the service, whichever process sends it.
//! - I3 The new process is watched as the old one was, though systemd gave the watchdog period
//!   to the old one only.

use crate::held::{Held, Origin};
use crate::messages::send_with_fds;
use listenfd::ListenFd;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::Handle;
use mica_serve::Listener;
use rustix::io::FdFlags;
use sd_notify::NotifyState;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// Prefix of the names of stored sockets. No disk's name contains its `@`.
const STORED: &str = "stored@";
/// Maximum number of sockets that are accepted.
const SOCKETS_MAX: usize = 4096;

/// Whether systemd passed sockets to this process.
pub fn has_inherited_sockets() -> bool {
    let process = std::env::var("LISTEN_PID").ok().and_then(|process| process.parse().ok());
    process == Some(std::process::id())
}

/// The sockets that systemd passed.
///
/// # Errors
/// `Invalid` if one is not a listening stream socket.
pub(crate) fn sockets() -> Result<Vec<Held>> {
    if !has_inherited_sockets() {
        return Ok(Vec::new());
    }
    let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
    let count = std::env::var("LISTEN_FDS").ok().and_then(|count| count.parse().ok());
    if count.is_some_and(|count: usize| count > SOCKETS_MAX) {
        return invalid(format!("systemd passed more than {SOCKETS_MAX} sockets (LISTEN_FDS)"));
    }
    let mut inherited = ListenFd::from_env();
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut sockets = Vec::new();
    for index in 0..inherited.len() {
        let name = names.next().unwrap_or_default();
        let fd: OwnedFd = match (inherited.take_unix_listener(index), index) {
            (Ok(Some(socket)), _) => socket.into(),
            (_, index) => match inherited.take_tcp_listener(index) {
                Ok(Some(socket)) => socket.into(),
                _ => {
                    return invalid(format!(
                        "descriptor {index} that systemd passed, {name:?}, is not a stream socket"
                    ));
                }
            },
        };
        let (name, origin) = match name.strip_prefix(STORED) {
            Some(name) => (name, Origin::Store),
            None => (name, Origin::Unit),
        };
        let listener = Listener::inherited(fd).map_err(|error| error.wrap(format!("{name:?}")))?;
        // Children must not inherit them.
        rustix::io::fcntl_setfd(&listener, FdFlags::CLOEXEC).map_err(|error| {
            Error::from_io("marking an inherited socket close-on-exec", error.into())
        })?;
        sockets.push(Held::new(name.to_owned(), origin, listener));
    }
    Ok(sockets)
}

/// Notifies systemd, if it listens.
pub(crate) fn notify(states: &[NotifyState<'_>]) {
    let lines: Vec<_> = states.iter().map(ToString::to_string).collect();
    if let Err(error) = send(&lines.join("\n"), &[]) {
        tracing::warn!(%error, "cannot notify systemd: {states:?}");
    }
}

/// Stores a socket with systemd, unless a unit of systemd owns it.
pub(crate) fn store(held: &mut Held) {
    if held.origin == Origin::Unit {
        return;
    }
    held.is_stored = true;
    let message = format!("FDSTORE=1\nFDNAME={STORED}{}", held.name);
    if let Err(error) = send(&message, &[held.listener.as_fd()]) {
        tracing::warn!(%error, "cannot store the socket {:?} with systemd", held.name);
    }
}

/// Removes the sockets called `name` from systemd's store.
pub(crate) fn forget(name: &str) {
    notify(&[NotifyState::Custom(&format!("FDSTOREREMOVE=1\nFDNAME={STORED}{name}"))]);
}

/// Closes sockets that no process serves any longer, and removes them from systemd's store (I1).
pub(crate) fn close(sockets: impl IntoIterator<Item = Held>) {
    for held in sockets {
        if held.is_stored {
            forget(&held.name);
        }
    }
}

/// The connection to systemd, if it listens. Inside the sandbox no new one can be made.
static NOTIFIED: OnceLock<Option<UnixDatagram>> = OnceLock::new();

/// Connects to systemd, if it listens.
///
/// # Errors
/// Those of the system calls.
pub(crate) fn connect() -> Result<()> {
    if NOTIFIED.get().is_none() {
        let failed = |error| Error::from_io("connecting to systemd (NOTIFY_SOCKET)", error);
        let socket = connected().map_err(failed)?;
        // Another thread may have been faster.
        let _ = NOTIFIED.set(socket);
    }
    Ok(())
}

fn connected() -> io::Result<Option<UnixDatagram>> {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let datagram = UnixDatagram::unbound()?;
    match socket.as_encoded_bytes().strip_prefix(b"@") {
        Some(name) => datagram.connect_addr(&SocketAddr::from_abstract_name(name)?)?,
        None => datagram.connect(&socket)?,
    }
    Ok(Some(datagram))
}

/// Sends to systemd, if it listens.
fn send(message: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    match NOTIFIED.get() {
        Some(Some(socket)) => send_with_fds(socket, message.as_bytes(), fds),
        Some(None) | None => Ok(()),
    }
}

/// How often systemd expects a watchdog message, if it watches this process. `before` is the period
/// of the process that is taken over, which systemd watches now.
pub(crate) fn watch_period(before: Option<Duration>) -> Option<Duration> {
    let is_heard = std::env::var_os("NOTIFY_SOCKET").is_some();
    let own = sd_notify::watchdog_enabled().filter(|period| !period.is_zero());
    own.or(before).filter(|_| is_heard)
}

/// Sends watchdog messages to systemd while the workers make progress. Ends when dropped.
pub(crate) struct Watchdog {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts it with the `period` of [`watch_period`], if systemd watches.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn start(workers: &[Handle], period: Option<Duration>) -> Result<Option<Self>> {
        let Some(period) = period else { return Ok(None) };
        Self::watch(workers, period, || notify(&[NotifyState::Watchdog])).map(Some)
    }

    fn watch(
        workers: &[Handle],
        period: Duration,
        say: impl Fn() + Send + 'static,
    ) -> Result<Self> {
        let workers: Vec<_> = workers.iter().map(|worker| (worker.clone(), answered())).collect();
        let (stop, stopped) = mpsc::channel();
        let body = move || loop {
            // Killing a process does not help a thread that waits for a file system: it would not
            // even die.
            let is_well = |(worker, answered): &(Handle, Arc<AtomicBool>)| {
                answered.load(Ordering::Acquire) || worker.is_writing()
            };
            if workers.iter().all(is_well) {
                say();
                for (worker, answered) in &workers {
                    if answered.load(Ordering::Acquire) {
                        ask(worker, answered);
                    }
                }
            } else {
                tracing::warn!("a worker is stuck: withholding the watchdog message from systemd");
            }
            // Two messages may be late before systemd acts.
            match stopped.recv_timeout(period / 3) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        };
        let thread = std::thread::Builder::new().name("mica-watchdog".to_owned()).spawn(body);
        let thread = thread.map_err(|error| Error::from_io("starting the watchdog", error))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

fn answered() -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(true))
}

/// Asks a worker to answer on its next turn. It is not asked again until it has.
fn ask(worker: &Handle, answered: &Arc<AtomicBool>) {
    answered.store(false, Ordering::Release);
    let answered = Arc::clone(answered);
    worker.spawn_with(move || async move { answered.store(true, Ordering::Release) });
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::warn!("the watchdog thread panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_rt::Backend;
    use mica_serve::Workers;

    const PERIOD: Duration = Duration::from_millis(60);
    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn watchdog_falls_silent_while_a_worker_hangs() {
        let workers = Workers::start(2, Backend::Pool).expect("executors");
        let (said, heard) = mpsc::channel();
        let say = move || said.send(()).unwrap_or_default();
        let watchdog = Watchdog::watch(workers.handles(), PERIOD, say).expect("a thread");
        for _ in 0..5 {
            heard.recv_timeout(PATIENCE).expect("all is well");
        }

        let (release, hanging) = mpsc::channel::<()>();
        let (hangs, begun) = mpsc::channel();
        workers.handles()[1].spawn_with(move || async move {
            hangs.send(()).expect("awaited");
            // It does not yield until it is released.
            let _ = hanging.recv();
        });
        begun.recv_timeout(PATIENCE).expect("it hangs");
        // An answer from before it hung may still be reported.
        let mut count = 0;
        while heard.recv_timeout(PERIOD * 5).is_ok() {
            count += 1;
        }
        assert!(count <= 2, "{count} times while a worker hung");

        drop(release);
        heard.recv_timeout(PATIENCE).expect("all is well again");
        drop(watchdog);
        while heard.try_recv().is_ok() {}
        assert_eq!(heard.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected), "it ended");
    }
}

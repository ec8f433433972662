//! How the process is asked and told: JSON over HTTP on a unix socket, and the figures alone over
//! TCP. One thread of its own, which no disk waits for.
//!
//! ```text
//! unix socket ─▶ who is it? ─┬▶ routes: status, stats, metrics, page; resize, drain, log-level
//!                            └▶ 403
//! TCP ──────────────────────▶ routes: status, stats, metrics, page
//! ```
//!
//! Invariants
//! - I1 Only root and the user of this process tell it to do something. The socket's mode says so,
//!   and the kernel's word of who is at its other end, which counts.
//! - I2 Over TCP nothing can be changed: those routes are not there.
//! - I3 What a client costs is bounded: connections, the time each may take, headers, bodies, and
//!   what is done for clients at one time. A connection brings one request.
//! - I4 This thread waits for no disk: what may take long is done by others, [`ACTS_MAX`] at most.

mod figures;
mod log;
mod metrics;
mod reply;
mod routes;
mod sources;
#[cfg(test)]
mod tests;

pub use log::{LogLevel, LogSwitch};

use crate::held::Held;
use crate::shared::Shared;
use crate::sockets::Places;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use mica_block::{Error, Result};
use mica_serve::Listener;
use sources::Sources;
use std::net::TcpListener as StdTcpListener;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};

/// Connections of each listener at one time. Others wait in its backlog.
const CONNECTIONS_MAX: u32 = 32;
/// How long a request's head may take, and then its body.
const REQUEST_WAIT: Duration = Duration::from_secs(5);
/// How long a connection of a collector or a browser may take.
const READER_WAIT: Duration = Duration::from_secs(30);
/// How long a connection of the control socket may take: a drain may flush gigabytes. What was
/// begun is done in any case.
const CONTROL_WAIT: Duration = Duration::from_secs(600);
/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// What is done for clients at one time.
const ACTS_MAX: usize = 4;
/// What is done or waits for that: who goes away leaves it there, so that connections do not bound
/// it.
const ACTS_ADMITTED_MAX: usize = 16;
/// After an accept that failed for want of something (descriptors, memory).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long the last answers may take at the end.
const LAST_ANSWERS_WAIT: Duration = Duration::from_secs(2);
/// Strangers that are logged.
const STRANGERS_LOGGED_MAX: u32 = 16;

/// The thread.
pub(crate) struct Control {
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
    /// Its socket's file goes with it.
    _listeners: Vec<Listener>,
    #[cfg(test)]
    metrics_at: Option<std::net::SocketAddr>,
}

impl Control {
    /// Starts it, if it is to listen anywhere.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn start(
        places: &Places,
        shared: &Arc<Shared>,
        log: Arc<dyn LogSwitch>,
    ) -> Result<Option<Self>> {
        if places.iter().next().is_none() {
            return Ok(None);
        }
        let failed = |error| Error::from_io("starting the control socket", error);
        let clone = |held: &Held| held.listener.as_fd().try_clone_to_owned().map_err(failed);
        let unix = places.control.as_ref().map(clone).transpose()?;
        let unix = unix.map(std::os::unix::net::UnixListener::from);
        let tcp = places.metrics.as_ref().map(clone).transpose()?.map(StdTcpListener::from);
        let metrics_at = tcp.as_ref().and_then(|tcp| tcp.local_addr().ok());
        if let Some(address) = metrics_at {
            tracing::info!(%address, "figures are served");
        }
        let (stop, stopping) = watch::channel(false);
        let sources = Sources::new(Arc::clone(shared), log);
        let body = move || {
            if let Err(error) = serve(unix, tcp, sources, stopping) {
                tracing::error!(%error, "the control socket is served no more");
            }
        };
        let thread = std::thread::Builder::new().name("mica-control".to_owned()).spawn(body);
        let thread = thread.map_err(failed)?;
        Ok(Some(Self {
            stop,
            thread,
            _listeners: places.iter().map(|held| held.listener.clone()).collect(),
            #[cfg(test)]
            metrics_at,
        }))
    }

    /// Where the figures are.
    #[cfg(test)]
    pub(crate) fn metrics_at(&self) -> Option<std::net::SocketAddr> {
        self.metrics_at
    }

    /// Takes no more requests, and waits for the answers that are being sent.
    pub(crate) fn stop(self) {
        // It may have ended by a failure of its own.
        let _ = self.stop.send(true);
        if self.thread.join().is_err() {
            tracing::error!("the control thread ended by a failure in the server");
        }
    }
}

fn serve(
    unix: Option<std::os::unix::net::UnixListener>,
    tcp: Option<StdTcpListener>,
    sources: Sources,
    stopping: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(ACTS_MAX)
        .thread_name("mica-control")
        .build()?;
    let served = runtime.block_on(async {
        let unix =
            unix.map(|unix| unix.set_nonblocking(true).and_then(|()| UnixListener::from_std(unix)));
        let tcp =
            tcp.map(|tcp| tcp.set_nonblocking(true).and_then(|()| TcpListener::from_std(tcp)));
        let (unix, tcp) = (unix.transpose()?, tcp.transpose()?);
        let reading = routes::reading(&sources);
        let control = reading.clone().merge(routes::acting(&sources));
        let told = unix.map(|unix| {
            let accept = UnixAccept { listener: unix, control, strangers: AtomicU32::new(0) };
            tokio::spawn(accept_all(accept, stopping.clone()))
        });
        let read = tcp.map(|tcp| {
            let is_local = tcp.local_addr().is_ok_and(|at| at.ip().to_canonical().is_loopback());
            let routes = if is_local { routes::local_only(reading) } else { reading };
            tokio::spawn(accept_all(TcpAccept { listener: tcp, routes }, stopping))
        });
        for task in [told, read].into_iter().flatten() {
            task.await?;
        }
        Ok(())
    });
    // What is being done for a client that is gone goes on; the end of the process waits for it
    // where that matters.
    runtime.shutdown_background();
    served
}

/// Where connections come from, and what they get.
trait Accept: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// How long a connection may take.
    const WAIT: Duration;

    fn accept(&self) -> impl Future<Output = std::io::Result<(Self::Stream, Router)>> + Send;
}

struct UnixAccept {
    listener: UnixListener,
    control: Router,
    strangers: AtomicU32,
}

impl Accept for UnixAccept {
    type Stream = UnixStream;

    const WAIT: Duration = CONTROL_WAIT;

    async fn accept(&self) -> std::io::Result<(UnixStream, Router)> {
        let (stream, _) = self.listener.accept().await?;
        let user = stream.peer_cred().map(|credentials| credentials.uid());
        let is_known = user.as_ref().is_ok_and(|user| is_master(*user));
        if !is_known {
            let before = self.strangers.fetch_add(1, Ordering::Relaxed);
            if before < STRANGERS_LOGGED_MAX {
                tracing::warn!(?user, "a stranger at the control socket is refused");
            } else {
                // Counting on would wrap one day, and the log begin anew.
                self.strangers.store(STRANGERS_LOGGED_MAX, Ordering::Relaxed);
            }
        }
        Ok((stream, if is_known { self.control.clone() } else { routes::refusing() }))
    }
}

/// Whether `user` may tell this process what to do (I1).
fn is_master(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

struct TcpAccept {
    listener: TcpListener,
    routes: Router,
}

impl Accept for TcpAccept {
    type Stream = tokio::net::TcpStream;

    const WAIT: Duration = READER_WAIT;

    async fn accept(&self) -> std::io::Result<(Self::Stream, Router)> {
        Ok((self.listener.accept().await?.0, self.routes.clone()))
    }
}

/// Serves connections until it is to stop, and then until the last have their answers.
async fn accept_all<A: Accept>(accept: A, mut stopping: watch::Receiver<bool>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX as usize));
    let accepting = async {
        loop {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            match accept.accept().await {
                Ok((stream, router)) => {
                    tokio::spawn(async move {
                        let _ = tokio::time::timeout(A::WAIT, connection(stream, router)).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a control client could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    // An error says that nobody is left to stop it.
    let stopped = stopping.wait_for(|stop| *stop);
    // The accepting one drops its permit when it is dropped.
    first(accepting, stopped).await;
    let _ = tokio::time::timeout(LAST_ANSWERS_WAIT, room.acquire_many(CONNECTIONS_MAX)).await;
}

/// Waits for either.
async fn first(one: impl Future, other: impl Future) {
    let (mut one, mut other) = (std::pin::pin!(one), std::pin::pin!(other));
    std::future::poll_fn(|context| {
        let is_over =
            one.as_mut().poll(context).is_ready() || other.as_mut().poll(context).is_ready();
        if is_over { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// Serves one connection: one request (I3).
async fn connection<S>(stream: S, router: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_WAIT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a control client broke off");
    }
}

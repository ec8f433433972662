//! The control socket: JSON over HTTP on a unix socket, and the figures alone over TCP. It has a
//! thread of its own, which no disk waits for.
//!
//! ```text
//! unix socket ─▶ who is it? ─┬▶ routes: status, stats, metrics, page; resize, drain, log-level
//!                            └▶ 403
//! TCP ──────────────────────▶ routes: status, stats, metrics, page
//! every 10 seconds ─────────▶ history: an hour of the figures
//! ```
//!
//! Invariants
//! - I1 Only root and the user of this process may give commands. The socket's mode says so, and
//!   so do the kernel's peer credentials, which decide.
//! - I2 Nothing can be changed over TCP: those routes do not exist there.
//! - I3 The cost of a client is bounded: connections, the time each may take, headers, bodies,
//!   and the actions performed at the same time. A connection carries one request.
//! - I4 This thread waits for no disk: slow actions run on other threads (`actions.rs`).

mod actions;
mod backups;
mod compression;
mod extents;
mod figures;
mod health;
mod history;
mod log;
mod merges;
mod metrics;
mod page;
mod perform;
mod reply;
mod room;
mod routes;
mod snapshots;
mod sources;
#[cfg(test)]
mod tests;
mod tree;

pub use log::{LogLevel, LogSwitch};

use crate::held::Held;
use crate::shared::Shared;
use crate::sockets::ControlSockets;
use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use mica_block::{Error, Result};
use mica_rt::LogLimit;
use mica_rt::descriptors::{is_lack, keep_headroom, make_room};
use mica_serve::{Listener, warn_of_lack};
use room::{Place, Room};
use sources::Sources;
use std::net::TcpListener as StdTcpListener;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::watch;

/// Maximum number of connections of each listener. Others wait in its backlog if all of these have
/// sent a request.
const CONNECTIONS_MAX: u32 = 32;
/// Time limit for a request's head, and again for its body.
const REQUEST_WAIT: Duration = Duration::from_secs(5);
/// Time limit for a connection of a metrics collector or a browser.
const READER_WAIT: Duration = Duration::from_secs(30);
/// Time limit for a client of the control socket to send its request, and again to take the answer.
/// What is done for it takes as long as it takes: a drain may flush gigabytes, and a handover is
/// given its time by who asks for it. An action that has started completes in any case.
const CONTROL_WAIT: Duration = Duration::from_secs(600);
/// Maximum size of a request's head, in bytes.
const HEAD_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// Pause after an accept that failed for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time limit for the last answers at the end.
const LAST_ANSWERS_WAIT: Duration = Duration::from_secs(2);

/// The thread.
pub(crate) struct Control {
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
    /// Removes the socket files when dropped.
    _listeners: Vec<Listener>,
    #[cfg(test)]
    metrics_at: Option<std::net::SocketAddr>,
}

impl Control {
    /// Starts it if there is a socket to serve.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn start(
        sockets: &ControlSockets,
        shared: &Arc<Shared>,
        log: Arc<dyn LogSwitch>,
    ) -> Result<Option<Self>> {
        if sockets.iter().next().is_none() {
            return Ok(None);
        }
        let failed = |error| Error::from_io("starting the control socket", error);
        let clone = |held: &Held| held.listener.as_fd().try_clone_to_owned().map_err(failed);
        let unix = sockets.control.as_ref().map(clone).transpose()?;
        let unix = unix.map(std::os::unix::net::UnixListener::from);
        let tcp = sockets.metrics.as_ref().map(clone).transpose()?.map(StdTcpListener::from);
        let metrics_at = tcp.as_ref().and_then(|tcp| tcp.local_addr().ok());
        if let Some(address) = metrics_at {
            tracing::info!(%address, "serving metrics");
        }
        let (stop, stopping) = watch::channel(false);
        let sources = Sources::new(Arc::clone(shared), log)?;
        let body = move || {
            if let Err(error) = serve(unix, tcp, sources, stopping) {
                tracing::error!(%error, "stopped serving the control socket");
            }
        };
        let thread = std::thread::Builder::new().name("mica-control".to_owned()).spawn(body);
        let thread = thread.map_err(failed)?;
        Ok(Some(Self {
            stop,
            thread,
            _listeners: sockets.iter().map(|held| held.listener.clone()).collect(),
            #[cfg(test)]
            metrics_at,
        }))
    }

    /// The address of the figures.
    #[cfg(test)]
    pub(crate) fn metrics_at(&self) -> Option<std::net::SocketAddr> {
        self.metrics_at
    }

    /// Stops accepting requests, and waits for the answers that are being sent.
    pub(crate) fn stop(self) {
        // The thread may have failed on its own.
        let _ = self.stop.send(true);
        if self.thread.join().is_err() {
            tracing::error!("the control thread panicked");
        }
    }
}

fn serve(
    unix: Option<std::os::unix::net::UnixListener>,
    tcp: Option<StdTcpListener>,
    sources: Sources,
    stopping: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(async {
        let unix =
            unix.map(|unix| unix.set_nonblocking(true).and_then(|()| UnixListener::from_std(unix)));
        let tcp =
            tcp.map(|tcp| tcp.set_nonblocking(true).and_then(|()| TcpListener::from_std(tcp)));
        let (unix, tcp) = (unix.transpose()?, tcp.transpose()?);
        let read_only = routes::read_only(&sources);
        let control = read_only.clone().merge(routes::commands(&sources));
        let unix = unix.map(|unix| {
            let accept = UnixAccept { listener: unix, control, refusals: LogLimit::failures() };
            tokio::spawn(accept_all(accept, stopping.clone()))
        });
        // It ends with this thread.
        tokio::spawn(keep_history(sources));
        let tcp = tcp.map(|tcp| {
            let is_local = tcp.local_addr().is_ok_and(|at| at.ip().to_canonical().is_loopback());
            let routes = if is_local { routes::local_only(read_only) } else { read_only };
            tokio::spawn(accept_all(TcpAccept { listener: tcp, routes }, stopping))
        });
        for task in [unix, tcp].into_iter().flatten() {
            task.await?;
        }
        Ok(())
    })
}

async fn keep_history(sources: Sources) {
    loop {
        tokio::time::sleep(history::PERIOD).await;
        sources.sample();
    }
}

/// Time limit for a connection.
#[derive(Clone, Copy)]
enum Limit {
    /// Of all of it.
    Whole(Duration),
    /// Until its request is there, and again from the answer on.
    AroundAction(Duration),
}

impl Limit {
    /// Waits for the connection at `place`, which is `served`, as long as the limit lets it.
    async fn hold(self, place: &Place, served: impl Future) {
        let over = async {
            let (Self::Whole(limit) | Self::AroundAction(limit)) = self;
            tokio::time::sleep(limit).await;
            if let Self::AroundAction(limit) = self {
                place.answered().await;
                tokio::time::sleep(limit).await;
            }
        };
        first(served, over).await;
    }
}

/// A source of connections, and the routes that they get.
trait Accept: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    const LIMIT: Limit;

    fn accept(&self) -> impl Future<Output = std::io::Result<(Self::Stream, Router)>> + Send;
}

struct UnixAccept {
    listener: UnixListener,
    control: Router,
    refusals: LogLimit,
}

impl Accept for UnixAccept {
    type Stream = UnixStream;

    const LIMIT: Limit = Limit::AroundAction(CONTROL_WAIT);

    async fn accept(&self) -> std::io::Result<(UnixStream, Router)> {
        let (stream, _) = self.listener.accept().await?;
        keep_headroom(stream.as_fd());
        let user = stream.peer_cred().map(|credentials| credentials.uid());
        let is_authorized_peer = user.as_ref().is_ok_and(|user| is_authorized(*user));
        if !is_authorized_peer && let Some(omitted) = self.refusals.admit() {
            tracing::warn!(?user, "refused an unauthorized user at the control socket{omitted}");
        }
        Ok((stream, if is_authorized_peer { self.control.clone() } else { routes::forbidden() }))
    }
}

/// Whether `user` may give this process commands (I1).
fn is_authorized(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

struct TcpAccept {
    listener: TcpListener,
    routes: Router,
}

impl Accept for TcpAccept {
    type Stream = tokio::net::TcpStream;

    const LIMIT: Limit = Limit::Whole(READER_WAIT);

    async fn accept(&self) -> std::io::Result<(Self::Stream, Router)> {
        let (stream, _) = self.listener.accept().await?;
        keep_headroom(stream.as_fd());
        Ok((stream, self.routes.clone()))
    }
}

/// Serves connections until told to stop, and then until the last ones have their answers.
async fn accept_all<A: Accept>(accept: A, mut stopping: watch::Receiver<bool>) {
    let room = Room::new(CONNECTIONS_MAX);
    let accepting = async {
        loop {
            match accept.accept().await {
                Ok((stream, router)) => {
                    let Some(place) = room.place().await else { return };
                    tokio::spawn(async move {
                        let served = connection(stream, router, &place);
                        first(A::LIMIT.hold(&place, served), place.dismissed()).await;
                    });
                }
                Err(error) if is_lack(error.raw_os_error()) && make_room() => {}
                Err(error) => {
                    warn_of_lack("a control client", &error);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    // An error means that nobody is left to stop it.
    let stopped = stopping.wait_for(|stop| *stop);
    first(accepting, stopped).await;
    let _ = tokio::time::timeout(LAST_ANSWERS_WAIT, room.empty()).await;
}

/// Waits for either future.
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
async fn connection<S>(stream: S, router: Router, place: &Place)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let routes = TowerToHyperService::new(router);
    let service = service_fn(|request: Request<Incoming>| {
        place.hear();
        let answer = routes.call(request);
        async move {
            let answer = answer.await;
            place.answer();
            answer
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_WAIT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a control client disconnected early");
    }
}

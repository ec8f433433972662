//! One connection from accept to close: handshake, session, and the log of its end.

use super::channel::Channel;
use super::export::Export;
use super::limits::{BUDGET_BYTES, Limits, RESERVE_BYTES, TLS_HANDSHAKES};
use super::negotiate::{Negotiated, Refused, Security, haggle, negotiate};
use super::session::{Ended, Traffic, Transmission, transmit};
use super::stats::QueueStats;
use crate::budget::{Party, Pool, Share};
use crate::limit::Limiter;
use crate::tls::{Tls, TlsPolicy, TlsStream};
use mica_block::Disk;
use mica_rt::sync::SharedLock;
use mica_rt::sync::Signal;
use mica_rt::{Elapsed, Stream, now, sleep, timeout};
use rustix::net::getpeername;
use std::net::SocketAddr;
use std::sync::Arc;

/// What the connections on one executor share with the rest of the server.
#[derive(Default)]
pub(super) struct QueueShared {
    pub(super) stats: QueueStats,
}

/// What the connections of a queue have in common.
pub(super) struct Common {
    pub(super) exports: Vec<Arc<Export>>,
    /// One for each export, in the same order.
    edges: Vec<SharedLock>,
    pub(super) limits: Limits,
    /// The memory of the process that its clients hold.
    pub(super) party: Arc<Party>,
    /// How often strangers may make a queue compute a TLS handshake.
    tls_handshakes: Limiter,
    pub(super) stop: Arc<Signal>,
}

impl Common {
    pub(super) fn new(
        exports: Vec<Export>,
        limits: Limits,
        stop: Arc<Signal>,
        pool: &Arc<Pool>,
    ) -> Self {
        let exports: Vec<_> = exports.into_iter().map(Arc::new).collect();
        let edges = exports.iter().map(|_| SharedLock::default()).collect();
        let tls_handshakes = Limiter::new(TLS_HANDSHAKES).expect("there is a limit");
        Self { exports, edges, limits, party: Party::new(pool), tls_handshakes, stop }
    }

    /// The lock of changes of `disk`. Exports of one disk share that of the first.
    fn edges(&self, disk: &Arc<dyn Disk>) -> &SharedLock {
        let is_of = |export: &Arc<Export>| Arc::ptr_eq(&export.disk, disk);
        let index = self.exports.iter().position(is_of).expect("the disk of an export");
        &self.edges[index]
    }
}

/// The TLS of a listener, if it has any.
pub(super) type Secured = Option<(Tls, TlsPolicy)>;

/// Serves `stream` until it ends, and closes it. A panic ends this connection only.
pub(super) async fn serve(
    stream: Stream,
    secured: Secured,
    common: Arc<Common>,
    queue: Arc<QueueShared>,
) {
    let stats = &queue.stats;
    stats.connections.add(1);
    let closer = stream.clone();
    let body = {
        let queue = Arc::clone(&queue);
        async move { serve_inner(&stream, secured.as_ref(), &common, &queue.stats).await }
    };
    if mica_rt::catch_panic(body).await.is_err() {
        stats.panics.add(1);
        tracing::error!("the server panicked on a connection");
    }
    closer.shutdown();
}

async fn serve_inner(
    stream: &Stream,
    secured: Option<&(Tls, TlsPolicy)>,
    common: &Common,
    stats: &QueueStats,
) {
    let handshake = timeout(common.limits.handshake_deadline, shake_hands(stream, secured, common));
    let Some(outcome) = common.stop.unless_raised(handshake).await else {
        tracing::debug!("aborted a handshake: the server is stopping");
        return;
    };
    let peer = peer_of(stream);
    match outcome {
        Ok(Ok(Begun::Plain(transmission))) => {
            run((stream, &peer), transmission, common, stats).await;
        }
        Ok(Ok(Begun::Tls(tls, transmission))) => {
            // Boxed, so that it does not enlarge connections in plain text.
            Box::pin(run((&tls, &peer), transmission, common, stats)).await;
            tls.close().await;
        }
        Ok(Err(refused)) => {
            if matches!(refused, Refused::Malformed(_) | Refused::TooMuch | Refused::Tls(_)) {
                stats.protocol_errors.add(1);
            }
            tracing::debug!(why = %refused, "a handshake ended");
        }
        Err(Elapsed) => {
            stats.deadlines_passed.add(1);
            tracing::debug!("a handshake took too long");
        }
    }
}

/// Where the client is, for people.
fn peer_of(stream: &Stream) -> String {
    let Stream::Socket(socket) = stream else { return "memory".to_owned() };
    let address = getpeername(socket).ok().flatten();
    match address.and_then(|address| SocketAddr::try_from(address).ok()) {
        Some(address) => address.to_string(),
        None => "a unix socket".to_owned(),
    }
}

/// The result of a handshake.
enum Begun<'a> {
    Plain(Transmission),
    Tls(TlsStream<'a>, Transmission),
}

async fn shake_hands<'a>(
    stream: &'a Stream,
    secured: Option<&(Tls, TlsPolicy)>,
    common: &Common,
) -> Result<Begun<'a>, Refused> {
    let exports = &common.exports;
    let security = match secured {
        None => Security::Plain,
        Some((_, TlsPolicy::Offered)) => Security::Offered,
        Some((_, TlsPolicy::Required)) => Security::Required,
    };
    let flags = match negotiate(stream, exports, security).await? {
        Negotiated::Transmission(transmission) => return Ok(Begun::Plain(transmission)),
        Negotiated::StartTls { flags } => flags,
    };
    let (tls, _) = secured.expect("it was offered");
    while let Err(wait) = common.tls_handshakes.admit(0, now()) {
        sleep(wait).await;
    }
    let tls = TlsStream::accept(stream, tls).await.map_err(Refused::Tls)?;
    match Box::pin(haggle(&tls, exports, flags)).await {
        Ok(transmission) => Ok(Begun::Tls(tls, transmission)),
        Err(refused) => {
            tls.close().await;
            Err(refused)
        }
    }
}

/// The transmission phase, and the log of its end.
async fn run(
    (channel, peer): (&impl Channel, &str),
    transmission: Transmission,
    common: &Common,
    stats: &QueueStats,
) {
    stats.sessions.add(1);
    let export = Arc::clone(&transmission.export);
    let name = &export.name;
    tracing::info!("client at {peer} connected to {name:?}");
    let edges = common.edges(&export.disk);
    let (limits, stop) = (common.limits, &common.stop);
    let share = Share::new(&common.party, RESERVE_BYTES, BUDGET_BYTES);
    let (ended, traffic) =
        transmit(channel, transmission, (edges, share), limits, stop, stats).await;
    match ended {
        Ended::Malformed => stats.protocol_errors.add(1),
        Ended::TooSlow => stats.deadlines_passed.add(1),
        _ => {}
    }
    let Traffic { requests, read_bytes, written_bytes } = traffic;
    tracing::info!(requests, read_bytes, written_bytes, "client at {peer} left {name:?}: {ended}");
}

#[cfg(test)]
mod tests;

//! One connection from accept to close: handshake, session, and the log of its end.

use super::channel::Channel;
use super::entry::Entry;
use super::exports::Exports;
use super::handshake::Handshake;
use super::limits::{BUDGET_BYTES, Limits, RESERVE_BYTES, TLS_HANDSHAKES};
use super::negotiate::{Negotiated, Reception, Refused, Security, haggle, negotiate};
use super::session::{Ended, Traffic, Transmission, transmit};
use super::stats::QueueStats;
use crate::budget::Share;
use crate::limit::Limiter;
use crate::tls::{Tls, TlsPolicy, TlsStream};
use mica_rt::sync::Signal;
use mica_rt::{Elapsed, LogLimit, Stream, now, sleep, timeout};
use rustix::net::getpeername;
use std::cell::OnceCell;
use std::net::SocketAddr;
use std::sync::Arc;

/// What the connections of an address have in common.
pub(super) struct Door {
    pub(super) exports: Arc<Exports>,
    secured: Secured,
    limits: Limits,
    /// How often strangers may make a queue compute a TLS handshake.
    tls_handshakes: Limiter,
}

impl Door {
    pub(super) fn new(exports: Arc<Exports>, secured: Secured, limits: Limits) -> Self {
        let tls_handshakes = Limiter::new(TLS_HANDSHAKES).expect("there is a limit");
        Self { exports, secured, limits, tls_handshakes }
    }
}

/// The TLS of a listener, if it has any.
pub(super) type Secured = Option<(Tls, TlsPolicy)>;

/// Serves `stream` until it ends, and closes it. A panic ends this connection only. When one of
/// `dismissed` is raised, it ends unless it has chosen an export.
pub(super) async fn serve(
    stream: Stream,
    door: Arc<Door>,
    dismissed: [Arc<Signal>; 2],
    queue: usize,
    handshake: Handshake,
) {
    let closer = stream.clone();
    let (chosen, exports) = (OnceCell::new(), Arc::clone(&door.exports));
    let body = async { serve_inner(&stream, &door, dismissed, queue, (handshake, &chosen)).await };
    if mica_rt::catch_panic(body).await.is_err() {
        count(chosen.get(), &exports, queue, |stats| stats.panics.add(1));
        static LIMIT: LogLimit = LogLimit::failures();
        if let Some(omitted) = LIMIT.admit() {
            tracing::error!("the server panicked on a connection{omitted}");
        }
    }
    closer.shutdown();
}

/// Counts for the export that was `chosen`, or else for the only one of the address. Where several
/// share it, a client that never names one is nobody's.
fn count(
    chosen: Option<&Arc<Entry>>,
    exports: &Exports,
    queue: usize,
    count: impl FnOnce(&QueueStats),
) {
    if let Some(entry) = chosen.cloned().or_else(|| exports.only()) {
        count(entry.stats(queue));
    }
}

async fn serve_inner(
    stream: &Stream,
    door: &Door,
    [shut, closed]: [Arc<Signal>; 2],
    queue: usize,
    (here, chosen): (Handshake, &OnceCell<Arc<Entry>>),
) {
    let handshake = shake_hands(stream, door, (queue, &here));
    let handshake = timeout(door.limits.handshake_deadline, handshake);
    let handshake = here.dismissed().unless_raised(handshake);
    let outcome = closed.unless_raised(shut.unless_raised(handshake)).await.flatten();
    drop(here);
    let begun = match &outcome {
        Some(Some(Ok(Ok(Begun::Plain(transmission) | Begun::Tls(_, transmission))))) => {
            Some(transmission.client.entry())
        }
        _ => None,
    };
    begun.into_iter().for_each(|entry| drop(chosen.set(Arc::clone(entry))));
    let count = |add: &dyn Fn(&QueueStats)| count(chosen.get(), &door.exports, queue, add);
    count(&|stats| stats.connections.add(1));
    let Some(outcome) = outcome else {
        tracing::debug!("aborted a handshake: nothing is served here any longer");
        return;
    };
    let Some(outcome) = outcome else {
        count(&|stats| stats.connections_refused.add(1));
        tracing::debug!("closed a connection that said nothing: others came");
        return;
    };
    let peer = peer_of(stream);
    match outcome {
        Ok(Ok(Begun::Plain(transmission))) => run((stream, &peer), transmission, queue).await,
        Ok(Ok(Begun::Tls(tls, transmission))) => {
            // Boxed, so that it does not enlarge connections in plain text.
            Box::pin(run((&tls, &peer), transmission, queue)).await;
            tls.close().await;
        }
        Ok(Err(refused)) => {
            if matches!(refused, Refused::Malformed(_) | Refused::TooMuch | Refused::Tls(_)) {
                count(&|stats| stats.protocol_errors.add(1));
            }
            tracing::debug!(why = %refused, "a handshake ended");
        }
        Err(Elapsed) => {
            count(&|stats| stats.deadlines_passed.add(1));
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
    door: &Door,
    (queue, here): (usize, &Handshake),
) -> Result<Begun<'a>, Refused> {
    let reception = Reception { exports: &door.exports, queue, here };
    let security = match &door.secured {
        None => Security::Plain,
        Some((_, TlsPolicy::Offered)) => Security::Offered,
        Some((_, TlsPolicy::Required)) => Security::Required,
    };
    let flags = match negotiate(stream, reception, security).await? {
        Negotiated::Transmission(transmission) => return Ok(Begun::Plain(transmission)),
        Negotiated::StartTls { flags } => flags,
    };
    let (tls, _) = door.secured.as_ref().expect("it was offered");
    while let Err(wait) = door.tls_handshakes.admit(0, now()) {
        sleep(wait).await;
    }
    let tls = TlsStream::accept(stream, tls).await.map_err(Refused::Tls)?;
    match Box::pin(haggle(&tls, reception, flags)).await {
        Ok(transmission) => Ok(Begun::Tls(tls, transmission)),
        Err(refused) => {
            tls.close().await;
            Err(refused)
        }
    }
}

/// The transmission phase, and the log of its end.
async fn run((channel, peer): (&impl Channel, &str), transmission: Transmission, queue: usize) {
    let entry = Arc::clone(transmission.client.entry());
    let stats = entry.stats(queue);
    stats.sessions.add(1);
    let name = &entry.export.name;
    if let Some(omitted) = entry.arrivals.admit() {
        tracing::info!("client at {peer} connected to {name:?}{omitted}");
    }
    let share = Share::new(&entry.party, RESERVE_BYTES, BUDGET_BYTES);
    let session = transmit(channel, &transmission, share, entry.limits, &entry.stop, stats);
    let Some((ended, traffic)) = entry.given_up.unless_raised(session).await else { return };
    match ended {
        Ended::Malformed => stats.protocol_errors.add(1),
        Ended::TooSlow => stats.deadlines_passed.add(1),
        _ => {}
    }
    let Traffic { requests, read_bytes, written_bytes } = traffic;
    if let Some(omitted) = entry.departures.admit() {
        tracing::info!(
            requests,
            read_bytes,
            written_bytes,
            "client at {peer} left {name:?}: {ended}{omitted}"
        );
    }
}

#[cfg(test)]
mod tests;

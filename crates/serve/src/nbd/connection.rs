//! One connection from accept to close: handshake, session, and what is said about its end.

use super::edges::Edges;
use super::limits::Limits;
use super::negotiate::{Refused, negotiate};
use super::server::{Export, QueueShared};
use super::session::{Ended, transmit};
use super::stats::QueueStats;
use crate::signal::Signal;
use mica_block::Disk;
use mica_rt::{Elapsed, Stream, timeout};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

/// What the connections of a queue have in common.
pub(super) struct Common {
    pub(super) exports: Vec<Arc<Export>>,
    /// Of each export, in the same order.
    edges: Vec<Edges>,
    pub(super) limits: Limits,
    pub(super) stop: Arc<Signal>,
}

impl Common {
    pub(super) fn new(exports: Vec<Export>, limits: Limits, stop: Arc<Signal>) -> Self {
        let exports: Vec<_> = exports.into_iter().map(Arc::new).collect();
        let edges = exports.iter().map(|_| Edges::default()).collect();
        Self { exports, edges, limits, stop }
    }

    /// What the changes of `disk` have in common. Exports of one disk have it from the first.
    fn edges(&self, disk: &Arc<dyn Disk>) -> &Edges {
        let is_of = |export: &Arc<Export>| Arc::ptr_eq(&export.disk, disk);
        let index = self.exports.iter().position(is_of).expect("the disk of an export");
        &self.edges[index]
    }
}

/// Serves `stream` until it ends, and closes it. A panic ends this connection only.
pub(super) async fn serve(stream: Stream, common: Arc<Common>, queue: Arc<QueueShared>) {
    let stats = &queue.stats;
    stats.connections.add(1);
    let closer = stream.clone();
    let body = {
        let queue = Arc::clone(&queue);
        async move { serve_inner(&stream, &common, &queue.stats).await }
    };
    if mica_rt::catch_panic(body).await.is_err() {
        stats.panics.add(1);
        tracing::error!("a connection ended by a failure in the server");
    }
    closer.shutdown();
}

async fn serve_inner(stream: &Stream, common: &Common, stats: &QueueStats) {
    let limits = common.limits;
    let handshake = timeout(limits.handshake_deadline, negotiate(stream, &common.exports));
    let Some(outcome) = unless_stopped(&common.stop, handshake).await else {
        tracing::debug!("a handshake was broken off: the server stops");
        return;
    };
    let transmission = match outcome {
        Ok(Ok(transmission)) => transmission,
        Ok(Err(refused)) => {
            if matches!(refused, Refused::Malformed(_) | Refused::TooMuch) {
                stats.protocol_errors.add(1);
            }
            tracing::debug!(why = %refused, "a handshake ended");
            return;
        }
        Err(Elapsed) => {
            stats.deadlines_passed.add(1);
            tracing::debug!("a handshake took too long");
            return;
        }
    };
    stats.sessions.add(1);
    let edges = common.edges(&transmission.disk);
    let ended = transmit(stream, transmission, edges, limits, &common.stop, stats).await;
    match ended {
        Ended::Malformed => stats.protocol_errors.add(1),
        Ended::TooSlow => stats.deadlines_passed.add(1),
        _ => {}
    }
    tracing::debug!(why = %ended, "a session ended");
}

/// Runs `future`, or gives it up when `stop` is raised.
pub(super) async fn unless_stopped<F: Future>(stop: &Arc<Signal>, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut stopped = pin!(stop.raised());
    poll_fn(|context| {
        if stopped.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        future.as_mut().poll(context).map(Some)
    })
    .await
}

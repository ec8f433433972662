//! What the sessions and the queues of a device have in common.

use super::back_channel::BackChannel;
use super::batch::BusyQueues;
use super::placement::Placement;
use super::request::ID_BYTES;
use super::stats::{Counters, QueueStats};
use crate::budget::Party;
use crate::discard::Discard;
use crate::limit::Limiter;
use mica_block::Disk;
use mica_rt::LogLimit;
use mica_rt::sync::{SharedLock, Sharing};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the queues of a device have in common.
pub(super) struct Common {
    pub(super) disk: Arc<dyn Disk>,
    /// One for each queue.
    pub(super) stats: Vec<QueueStats>,
    pub(super) discard: Discard,
    /// Shared by all changes, if there are other servers.
    pub(super) edges: Option<Arc<SharedLock>>,
    pub(super) limiter: Option<Arc<Limiter>>,
    pub(super) back_channel: BackChannel,
    /// The disk's serial number, as shown to the driver.
    pub(super) id: [u8; ID_BYTES as usize],
    pub(super) losses: Losses,
    pub(super) logs: DeviceLogs,
    /// The memory of the process that its queues hold.
    pub(super) party: Arc<Party>,
    pub(super) busy_queues: BusyQueues,
    pub(super) placement: Placement,
    /// Whether the server ends: what would take long is left off.
    pub(super) is_ending: AtomicBool,
}

/// What is logged of the guests and the front ends of a device, one after the other: those that
/// connect again get no lines of their own.
pub(super) struct DeviceLogs {
    pub(super) failures: LogLimit,
    /// Queues that broke.
    pub(super) breaks: LogLimit,
    /// Requests that are repeated.
    pub(super) replays: LogLimit,
    /// Messages of front ends that were refused.
    pub(super) refusals: LogLimit,
    /// Front ends that come, and that go.
    pub(super) arrivals: LogLimit,
    pub(super) departures: LogLimit,
    losses: LogLimit,
    pub(super) panics: LogLimit,
}

impl Default for DeviceLogs {
    fn default() -> Self {
        Self {
            failures: LogLimit::failures(),
            breaks: LogLimit::failures(),
            replays: LogLimit::visits(),
            refusals: LogLimit::failures(),
            arrivals: LogLimit::visits(),
            departures: LogLimit::visits(),
            losses: LogLimit::failures(),
            panics: LogLimit::failures(),
        }
    }
}

/// Sessions that lost some of their memory.
#[derive(Default)]
pub(super) struct Losses {
    /// Whether the current or last one did.
    pub(super) is_broken: AtomicBool,
    count: AtomicU64,
}

impl Common {
    pub(super) fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        self.stats.iter().for_each(|queue| queue.add_to(&mut sum));
        sum.memory_losses = self.losses.count.load(Ordering::Relaxed);
        sum
    }

    /// The serial number, for people.
    pub(super) fn serial(&self) -> String {
        String::from_utf8_lossy(&self.id).trim_end_matches('\0').to_owned()
    }

    /// Waits until no other server changes a part of a sector, and keeps it so.
    pub(super) async fn share(&self) -> Option<Sharing<'_>> {
        match &self.edges {
            Some(edges) => Some(edges.share().await),
            None => None,
        }
    }

    /// As [`Self::share`], if that takes no waiting.
    #[inline]
    pub(super) fn try_share(&self) -> Option<Option<Sharing<'_>>> {
        match &self.edges {
            Some(edges) => edges.try_share().map(Some),
            None => Some(None),
        }
    }

    /// The server ends.
    pub(super) fn end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// Whether it does.
    #[inline]
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Memory of the session is gone: the device is broken until there is another session.
    pub(super) fn note_lost(&self) {
        if !self.losses.is_broken.swap(true, Ordering::Relaxed) {
            self.losses.count.fetch_add(1, Ordering::Relaxed);
            let Some(omitted) = self.logs.losses.admit() else { return };
            tracing::error!(
                "the front end took away memory that it had shared (it truncated the file, or the \
                 memory behind it ran out): the device is broken until it reconnects{omitted}"
            );
        }
    }

    /// Whether the device is broken.
    pub(super) fn is_broken(&self) -> bool {
        self.losses.is_broken.load(Ordering::Relaxed)
    }
}

//! What a server did, counted per queue and summed when someone asks.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a server since its start.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Every counter with its name.
            pub fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }

        /// The counters of one queue, written by its thread only.
        #[derive(Default)]
        #[repr(align(128))]
        pub(super) struct QueueStats {
            $(pub(super) $name: Counter,)*
        }

        impl QueueStats {
            /// Adds this queue's counters to `sum`.
            pub(super) fn add_to(&self, sum: &mut Counters) {
                $(sum.$name += self.$name.get();)*
            }
        }
    };
}

counters! {
    /// Connections that were accepted.
    connections,
    /// Connections that were closed at once because there were too many.
    connections_refused,
    /// Connections that came through the handshake.
    sessions,
    /// Connections that ended because the client broke the protocol.
    protocol_errors,
    /// Connections that ended because the client let a deadline pass.
    deadlines_passed,
    /// Connections that ended because the server's own code failed.
    panics,
    /// Requests that were taken, whatever became of them.
    requests,
    /// Reads among them that were done.
    reads,
    /// Bytes of those reads.
    read_bytes,
    /// Writes that were done.
    writes,
    /// Bytes of those writes.
    written_bytes,
    /// Requests to write zeros that were done.
    zeroes,
    /// Requests to discard that were done.
    discards,
    /// Flushes that were done, besides those of single requests (FUA).
    flushes,
    /// Requests that were answered with an error.
    errors,
}

/// A counter with one writer.
#[derive(Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`. Only the thread of the queue calls this, so nothing is lost between the two
    /// halves.
    #[inline]
    pub(super) fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

//! Counters with one writer each, summed when someone asks.

use std::sync::atomic::{AtomicU64, Ordering};

/// Makes the counters of a server: `Counters`, a plain sum, and `QueueStats`, which the thread of
/// one queue writes.
macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)*) => {
        /// Counters of a server since its start.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)*
            /// How long requests took.
            pub latencies: $crate::Latencies,
        }

        impl Counters {
            /// What every counter counts, in the order of [`Counters::fields`].
            pub const HELP: &[&str] = &[$(concat!($($doc),+),)*];

            /// Every counter with its name.
            pub fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }

        /// The counters of one queue, written by its thread only.
        #[derive(Default)]
        #[repr(align(128))]
        pub(super) struct QueueStats {
            $(pub(super) $name: $crate::counters::Counter,)*
            pub(super) latencies: $crate::latency::LatencyCounters,
        }

        impl QueueStats {
            /// Adds this queue's counters to `sum`.
            pub(super) fn add_to(&self, sum: &mut Counters) {
                $(sum.$name += self.$name.get();)*
                self.latencies.add_to(&mut sum.latencies);
            }
        }
    };
}

pub(crate) use counters;

/// A counter with one writer.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `count`. Only the thread of the queue calls this, so nothing is lost between the two
    /// halves.
    #[inline]
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

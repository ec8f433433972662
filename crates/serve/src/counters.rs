//! The counters of a server, summed over its queues when someone asks.

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
            $(pub(super) $name: $crate::counter::Counter,)*
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

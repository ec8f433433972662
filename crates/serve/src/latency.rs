//! How long requests take, in buckets on a logarithmic scale.
//!
//! Each queue has its own, with one writer, as its counters: what a request costs for it is two
//! additions in memory that this thread has in its cache. A time is that between two turns of the
//! queue, so that the clock is read once a turn and not twice a request: what begins and ends in
//! one turn is in the first bucket.

use crate::counter::Counter;
use mica_rt::Instant;
use std::fmt;

/// Buckets of an octave: a time is known to a quarter of itself.
const PARTS: usize = 4;
const PARTS_BITS: u32 = PARTS.ilog2();
/// The first octave ends at as many microseconds as it has buckets, the last at 67 seconds.
const OCTAVES: usize = 25;
/// Times beyond are in the last bucket.
const BUCKETS: usize = OCTAVES * PARTS;

/// Times of requests, written by the thread of one queue.
pub(crate) struct LatencyCounter {
    buckets: [Counter; BUCKETS],
    sum_ns: Counter,
}

impl Default for LatencyCounter {
    fn default() -> Self {
        Self { buckets: [const { Counter::new() }; BUCKETS], sum_ns: Counter::new() }
    }
}

impl LatencyCounter {
    /// Adds a request.
    #[inline]
    pub(crate) fn add(&self, began: Instant, ended: Instant) {
        let time = ended.saturating_since(began);
        let ns = time.as_secs().saturating_mul(1_000_000_000) + u64::from(time.subsec_nanos());
        self.buckets[bucket_of(ns / 1000)].add(1);
        self.sum_ns.add(ns);
    }

    fn add_to(&self, sum: &mut Latency) {
        for (sum, counter) in sum.buckets.iter_mut().zip(&self.buckets) {
            *sum += counter.get();
        }
        sum.sum_ns = sum.sum_ns.wrapping_add(self.sum_ns.get());
    }
}

/// Times of all requests of one kind since the start of a server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    buckets: [u64; BUCKETS],
    sum_ns: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS], sum_ns: 0 }
    }
}

impl Latency {
    /// All times together, in nanoseconds.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Requests.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Each bucket: the time below which its requests were, in microseconds, and their number.
    /// Only the last also has longer ones.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        self.buckets.iter().enumerate().map(|(index, count)| (end_of(index), *count))
    }
}

impl fmt::Debug for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Latency({} in {} ns)", self.count(), self.sum_ns)
    }
}

/// Times of the kinds of requests that one waits for.
#[derive(Default)]
pub(crate) struct LatencyCounters {
    pub(crate) read: LatencyCounter,
    pub(crate) write: LatencyCounter,
    pub(crate) flush: LatencyCounter,
}

impl LatencyCounters {
    pub(crate) fn add_to(&self, sum: &mut Latencies) {
        self.read.add_to(&mut sum.read);
        self.write.add_to(&mut sum.write);
        self.flush.add_to(&mut sum.flush);
    }
}

/// Times of the requests of a server, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Latencies {
    /// Reads.
    pub read: Latency,
    /// Writes.
    pub write: Latency,
    /// Flushes.
    pub flush: Latency,
}

impl Latencies {
    /// Each with its name.
    pub fn each(&self) -> [(&'static str, &Latency); 3] {
        [("read", &self.read), ("write", &self.write), ("flush", &self.flush)]
    }
}

/// The bucket of a time in microseconds.
#[inline]
fn bucket_of(us: u64) -> usize {
    let index = match us.checked_ilog2() {
        Some(octave) if octave >= PARTS_BITS => {
            let shift = octave - PARTS_BITS;
            u64::from(shift) * PARTS as u64 + (us >> shift)
        }
        _ => us,
    };
    usize::try_from(index).map_or(BUCKETS - 1, |index| index.min(BUCKETS - 1))
}

/// Where bucket `index` ends, in microseconds.
fn end_of(index: usize) -> u64 {
    let (index, parts) = (index as u64, PARTS as u64);
    match (index / parts).checked_sub(1) {
        Some(octave) => (parts + index % parts + 1) << octave,
        None => index + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_rt::{Backend, Executor, now};
    use std::time::Duration;

    #[test]
    fn every_time_is_in_the_bucket_whose_ends_enclose_it() {
        let edges = (0..40).flat_map(|shift| [1_u64 << shift, (1 << shift) + 1, (1 << shift) - 1]);
        for us in edges.chain(0..5000) {
            let index = bucket_of(us);
            let begin = if index == 0 { 0 } else { end_of(index - 1) };
            assert!(begin <= us, "{us}: the bucket from {begin}");
            assert!(us < end_of(index) || index == BUCKETS - 1, "{us}: up to {}", end_of(index));
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(end_of(BUCKETS - 1), 1 << 26, "67 seconds");
    }

    #[test]
    fn times_are_summed_over_queues() {
        Executor::new(Backend::Sim { seed: 1 }).unwrap().block_on(async {
            let queues = [LatencyCounters::default(), LatencyCounters::default()];
            let start = now();
            for (queue, us) in queues.iter().zip([3, 100]) {
                queue.read.add(start, start.after(Duration::from_micros(us)));
            }
            queues[0].flush.add(start.after(Duration::from_secs(1)), start);
            let mut sum = Latencies::default();
            queues.iter().for_each(|queue| queue.add_to(&mut sum));
            assert_eq!((sum.read.count(), sum.read.sum_ns()), (2, 103_000));
            let filled: Vec<_> = sum.read.buckets().filter(|(_, count)| *count > 0).collect();
            assert_eq!(filled, [(4, 1), (112, 1)]);
            assert_eq!(sum.write, Latency::default());
            assert_eq!((sum.flush.count(), sum.flush.sum_ns()), (1, 0), "a clock that steps back");
        });
    }
}

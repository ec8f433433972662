//! Latencies of a load.

use hdrhistogram::Histogram as HdrHistogram;
use std::time::Duration;

/// Decimal digits to which a latency is known.
const DIGITS: u8 = 3;
/// Buckets of the distribution per power of two.
const BUCKETS_PER_OCTAVE: f64 = 4.0;
/// The end of the distribution's first bucket.
const FIRST_BUCKET_NS: u64 = 250;

/// How often each latency was seen.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    nanoseconds: HdrHistogram<u64>,
    sum: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        let nanoseconds = HdrHistogram::new(DIGITS).expect("5 digits at most");
        Self { nanoseconds, sum: Duration::ZERO }
    }
}

impl Histogram {
    /// Counts `latency`.
    #[inline]
    pub(crate) fn add(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.record(ns).expect("it grows with what it holds");
        self.sum += latency;
    }

    /// Counts everything that `other` has counted, too.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.nanoseconds.add(&other.nanoseconds).expect("it grows with what it holds");
        self.sum += other.sum;
    }

    /// How many were counted.
    pub(crate) fn total(&self) -> u64 {
        self.nanoseconds.len()
    }

    /// The mean, in microseconds.
    pub(crate) fn mean_us(&self) -> f64 {
        self.sum.as_secs_f64() * 1e6 / ratio(self.total().max(1), 1)
    }

    /// The highest, in microseconds.
    pub(crate) fn max_us(&self) -> f64 {
        ratio(self.nanoseconds.max(), 1000)
    }

    /// What `part` (0.0 to 1.0) of the latencies does not exceed, in microseconds.
    pub(crate) fn quantile_us(&self, part: f64) -> f64 {
        ratio(self.nanoseconds.value_at_quantile(part), 1000)
    }

    /// The distribution as points (microseconds, part of all latencies), in buckets a quarter of a
    /// power of two wide.
    pub(crate) fn distribution(&self) -> Vec<[f64; 2]> {
        let step = (1.0 / BUCKETS_PER_OCTAVE).exp2();
        self.nanoseconds
            .iter_log(FIRST_BUCKET_NS, step)
            .filter(|bucket| bucket.count_since_last_iteration() > 0)
            .map(|bucket| {
                let middle_us = ratio(bucket.value_iterated_to(), 1000) / step.sqrt();
                [middle_us, ratio(bucket.count_since_last_iteration(), self.total())]
            })
            .collect()
    }
}

/// A quotient of counts.
#[expect(clippy::cast_precision_loss, reason = "counts of a measurement are below 2^53")]
pub(crate) fn ratio(count: u64, of: u64) -> f64 {
    count as f64 / of as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_histograms_count_as_one() {
        let (mut low, mut high) = (Histogram::default(), Histogram::default());
        (1..=50).for_each(|us| low.add(Duration::from_micros(us)));
        (51..=100).for_each(|us| high.add(Duration::from_micros(us)));
        low.merge(&high);
        assert_eq!(low.total(), 100);
        assert!((low.quantile_us(0.99) - 99.0).abs() < 1.5);
        assert!((low.mean_us() - 50.5).abs() < 0.01);
    }

    #[test]
    fn quantiles_of_a_hundred_are_the_hundredths() {
        let mut histogram = Histogram::default();
        (1..=100).for_each(|us| histogram.add(Duration::from_micros(us)));
        assert!((histogram.quantile_us(0.5) - 50.0).abs() < 1.0);
        assert!((histogram.quantile_us(0.99) - 99.0).abs() < 1.5);
        assert!((histogram.mean_us() - 50.5).abs() < 0.01);
        let all: f64 = histogram.distribution().iter().map(|point| point[1]).sum();
        assert!((all - 1.0).abs() < 1e-9);
    }
}

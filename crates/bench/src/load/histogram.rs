//! Latencies, counted in buckets that are 1/64 wide of what they hold.

use std::time::Duration;

/// Buckets per power of two.
const STEPS: u64 = 64;
const STEPS_BITS: u32 = STEPS.trailing_zeros();

/// How often each latency was seen.
#[derive(Clone, Default, Debug)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: Duration,
    max: Duration,
}

impl Histogram {
    /// Counts `latency`.
    #[inline]
    pub(crate) fn add(&mut self, latency: Duration) {
        let index = bucket(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
        if index >= self.counts.len() {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += 1;
        self.total += 1;
        self.sum += latency;
        self.max = self.max.max(latency);
    }

    /// Counts all that `other` has counted, too.
    pub(crate) fn merge(&mut self, other: &Self) {
        if other.counts.len() > self.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.total += other.total;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// How many were counted.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The mean, in microseconds.
    pub(crate) fn mean_us(&self) -> f64 {
        micros(self.sum) / ratio(self.total.max(1), 1)
    }

    /// The highest, in microseconds.
    pub(crate) fn max_us(&self) -> f64 {
        micros(self.max)
    }

    /// What `part` (0.0 to 1.0) of the latencies does not exceed, in microseconds.
    pub(crate) fn quantile_us(&self, part: f64) -> f64 {
        let wanted = part * ratio(self.total, 1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if *count > 0 && ratio(seen, 1) >= wanted {
                return middle_us(index);
            }
        }
        0.0
    }

    /// The distribution as points (microseconds, part of all latencies), in buckets a quarter of a
    /// power of two wide.
    pub(crate) fn distribution(&self) -> Vec<[f64; 2]> {
        let quarter = usize::try_from(STEPS / 4).unwrap_or(1);
        self.counts
            .chunks(quarter)
            .enumerate()
            .map(|(index, counts)| (index, counts.iter().sum::<u64>()))
            .filter(|(_, count)| *count > 0)
            .map(|(index, count)| {
                [middle_us(index * quarter + quarter / 2), ratio(count, self.total)]
            })
            .collect()
    }
}

/// A quotient of counts.
#[expect(clippy::cast_precision_loss, reason = "counts of a measurement are below 2^53")]
pub(crate) fn ratio(count: u64, of: u64) -> f64 {
    count as f64 / of as f64
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn bucket(nanoseconds: u64) -> usize {
    let bits = u64::BITS - nanoseconds.leading_zeros();
    let shift = bits.saturating_sub(STEPS_BITS + 1);
    // Below 2 * STEPS the shift is zero and the bucket is the number itself.
    let index = u64::from(shift) * STEPS + (nanoseconds >> shift);
    usize::try_from(index).unwrap_or(usize::MAX)
}

fn middle_us(index: usize) -> f64 {
    let index = index as u64;
    let shift = (index / STEPS).saturating_sub(1);
    let lowest = (index - shift * STEPS) << shift;
    (ratio(lowest, 1) + ratio(1 << shift, 2)) / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_what_it_says() {
        for nanoseconds in [0, 1, 63, 64, 127, 128, 1000, 12_345, 1 << 20, 987_654_321] {
            let middle = middle_us(bucket(nanoseconds)) * 1e3;
            let off = (middle - ratio(nanoseconds, 1)).abs();
            assert!(off <= 0.5 + ratio(nanoseconds, 64), "{nanoseconds} falls on {middle}");
        }
        assert!((0..100_000).is_sorted_by_key(bucket));
    }

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

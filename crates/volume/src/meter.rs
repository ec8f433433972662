//! How long requests took: all of them together, and how slow the last ones were.

use mica_block::Times;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Of how many the percentiles are.
const LAST_MAX: usize = 512;

/// See the module.
#[derive(Default)]
pub(crate) struct Meter {
    count: AtomicU64,
    sum_ns: AtomicU64,
    /// In microseconds, the oldest first.
    last_us: Mutex<VecDeque<u32>>,
}

impl Meter {
    /// One took so long.
    pub(crate) fn note(&self, took: Duration) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(took_ns, Ordering::Relaxed);
        let mut last = self.last_us.lock();
        if last.len() >= LAST_MAX {
            last.pop_front();
        }
        last.push_back(u32::try_from(took.as_micros()).unwrap_or(u32::MAX));
    }

    pub(crate) fn times(&self) -> Times {
        let mut last: Vec<u32> = {
            let last = self.last_us.lock();
            last.iter().copied().collect()
        };
        last.sort_unstable();
        let part = |of_100: usize| {
            let at = (last.len() * of_100).div_ceil(100).saturating_sub(1);
            last.get(at).copied().unwrap_or(0).into()
        };
        Times {
            count: self.count.load(Ordering::Relaxed),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
            p50_us: part(50),
            p99_us: part(99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_last_ones_and_sums_of_all() {
        let meter = Meter::default();
        assert_eq!(meter.times(), Times::default());
        meter.note(Duration::from_secs(100));
        assert_eq!(meter.times().p50_us, 100_000_000);
        for us in 1..=512 {
            meter.note(Duration::from_micros(us));
        }
        let times = meter.times();
        assert_eq!((times.count, times.p50_us, times.p99_us), (513, 256, 507));
        assert_eq!(times.sum_ns, 100_000_000_000 + 1000 * 512 * 513 / 2);
    }
}

//! Rate limits of a disk's clients: operations and bytes per second, with a burst.
//!
//! A bucket of tokens for each. A request that finds its bucket in debt waits until it is not; the
//! request that empties it may take more than there is, so that one of any size gets through.

use mica_rt::{Instant, now, sleep};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Rates; zero means no limit.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Rates {
    /// Operations per second.
    pub iops: u64,
    /// Bytes per second, read and written together.
    pub bps: u64,
    /// Burst of operations; a tenth of a second's worth if it is zero.
    pub iops_burst: u64,
    /// Burst of bytes; a tenth of a second's worth if it is zero.
    pub bps_burst: u64,
}

/// Limits one disk, over all its queues and servers.
#[derive(Debug)]
pub struct Limiter {
    buckets: Mutex<[Bucket; 2]>,
    /// Requests that [`Self::wait`] kept waiting.
    delayed: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    rate: u64,
    burst: u64,
    /// In billionths of a token, as many as a rate of one adds in a second, so that slow rates fill
    /// evenly and of fast ones nothing is lost between two requests.
    tokens: i128,
    /// When it was filled last.
    filled: Option<Instant>,
}

const BILLION: i128 = 1_000_000_000;

impl Bucket {
    fn new(rate: u64, burst: u64) -> Self {
        let burst = if burst == 0 { (rate / 10).max(1) } else { burst };
        Self { rate, burst, tokens: i128::from(burst) * BILLION, filled: None }
    }

    fn fill(&mut self, now: Instant) {
        let before = self.filled.unwrap_or(now);
        let passed = now.saturating_since(before).as_nanos();
        self.filled = Some(now.max(before));
        let full = i128::from(self.burst) * BILLION;
        let passed = i128::try_from(passed).unwrap_or(i128::MAX);
        let filled = passed.saturating_mul(i128::from(self.rate));
        self.tokens = full.min(self.tokens.saturating_add(filled));
    }

    /// How many microseconds until it is out of debt.
    fn wait(&self) -> u64 {
        if self.rate == 0 || self.tokens > 0 {
            return 0;
        }
        let rate = i128::from(self.rate);
        let nanoseconds = (1 - self.tokens + rate - 1) / rate;
        u64::try_from(nanoseconds).unwrap_or(u64::MAX).div_ceil(1000)
    }

    fn take(&mut self, count: u64) {
        if self.rate > 0 {
            self.tokens -= i128::from(count) * BILLION;
        }
    }
}

impl Limiter {
    /// Nothing if `rates` limit nothing.
    pub(crate) fn new(rates: Rates) -> Option<Self> {
        let buckets =
            [Bucket::new(rates.iops, rates.iops_burst), Bucket::new(rates.bps, rates.bps_burst)];
        (rates.iops > 0 || rates.bps > 0)
            .then(|| Self { buckets: Mutex::new(buckets), delayed: AtomicU64::new(0) })
    }

    /// One that several servers of a disk share.
    pub fn shared(rates: Rates) -> Option<Arc<Self>> {
        Self::new(rates).map(Arc::new)
    }

    /// Admits one request that moves `bytes`, or returns how long it has to wait.
    pub(crate) fn admit(&self, bytes: u64, now: Instant) -> Result<(), Duration> {
        let mut buckets = self.buckets.lock();
        let [operations, moved] = &mut *buckets;
        operations.fill(now);
        moved.fill(now);
        let wait = operations.wait().max(moved.wait());
        if wait > 0 {
            return Err(Duration::from_micros(wait));
        }
        operations.take(1);
        moved.take(bytes);
        Ok(())
    }

    /// Waits until one request that moves `bytes` is admitted.
    pub(crate) async fn wait(&self, bytes: u64) {
        let mut is_delayed = false;
        while let Err(wait) = self.admit(bytes, now()) {
            if !std::mem::replace(&mut is_delayed, true) {
                self.delayed.fetch_add(1, Ordering::Relaxed);
            }
            sleep(wait).await;
        }
    }

    /// Requests of NBD clients and of files that waited. A device counts its own.
    pub fn delayed(&self) -> u64 {
        self.delayed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many requests of `bytes` get through in ten seconds.
    fn through(rates: Rates, bytes: u64) -> u64 {
        let executor = mica_rt::Executor::new(mica_rt::Backend::Sim { seed: 1 }).unwrap();
        executor.block_on(async {
            let limiter = Limiter::new(rates).unwrap();
            let end = mica_rt::now().after(Duration::from_secs(10));
            let mut count = 0;
            while mica_rt::now() < end {
                match limiter.admit(bytes, mica_rt::now()) {
                    Ok(()) => count += 1,
                    Err(wait) => mica_rt::sleep(wait).await,
                }
            }
            count
        })
    }

    #[test]
    fn rates_hold_over_time_and_bursts_come_on_top() {
        let iops = Rates { iops: 100, iops_burst: 50, ..Rates::default() };
        assert!((1049..=1052).contains(&through(iops, 1 << 20)));
        let bps = Rates { bps: 1 << 20, bps_burst: 1 << 20, ..Rates::default() };
        assert!((11 * 256..=11 * 256 + 2).contains(&through(bps, 4096)));
        // A request that is larger than the burst gets through, and is paid for.
        assert!((2..=4).contains(&through(bps, 4 << 20)));
        assert!(Limiter::new(Rates::default()).is_none());
    }

    /// Once, what a microsecond had begun was lost with each request.
    #[test]
    fn requests_that_are_less_than_microseconds_apart_get_all_of_a_high_rate() {
        let executor = mica_rt::Executor::new(mica_rt::Backend::Sim { seed: 1 }).unwrap();
        executor.block_on(async {
            let rates = Rates { iops: 500_000, iops_burst: 1, ..Rates::default() };
            let limiter = Limiter::new(rates).unwrap();
            let began = mica_rt::now();
            let is_admitted = |count: &u64| {
                let at = began.after(Duration::from_nanos(count * 1500));
                limiter.admit(0, at).is_ok()
            };
            let admitted = (0..666_667).filter(is_admitted).count();
            assert!((499_000..=500_002).contains(&admitted), "{admitted}");
        });
    }
}

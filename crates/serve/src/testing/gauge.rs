//! A gauge of what disks hold now, and held at the most.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number and its highest value.
#[derive(Default)]
pub(crate) struct Gauge {
    now: AtomicU64,
    most: AtomicU64,
}

impl Gauge {
    fn add(&self, count: u64) {
        let now = self.now.fetch_add(count, Ordering::Relaxed) + count;
        self.most.fetch_max(now, Ordering::Relaxed);
    }

    fn remove(&self, count: u64) {
        self.now.fetch_sub(count, Ordering::Relaxed);
    }

    pub(crate) fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    pub(crate) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }
}

/// A part of a gauge, until it is dropped.
pub(crate) struct Held {
    gauge: Arc<Gauge>,
    count: u64,
}

impl Held {
    pub(crate) fn new(gauge: &Arc<Gauge>, count: u64) -> Self {
        gauge.add(count);
        Self { gauge: Arc::clone(gauge), count }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.remove(self.count);
    }
}

//! What answers come from.

use super::{ACTS_ADMITTED_MAX, log::LogSwitch};
use crate::shared::Shared;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// What answers come from.
#[derive(Clone)]
pub(super) struct Sources {
    pub(super) shared: Arc<Shared>,
    pub(super) log: Arc<dyn LogSwitch>,
    /// Room for what is done for clients, or waits to be.
    pub(super) acts: Arc<Semaphore>,
    started: Instant,
}

impl Sources {
    #[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
    pub(super) fn new(shared: Arc<Shared>, log: Arc<dyn LogSwitch>) -> Self {
        let acts = Arc::new(Semaphore::new(ACTS_ADMITTED_MAX));
        Self { shared, log, acts, started: Instant::now() }
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}

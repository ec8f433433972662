//! What the routes answer from: the state of the process and its log.

use super::{ACTIONS_ADMITTED_MAX, log::LogSwitch};
use crate::shared::Shared;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// What the routes answer from.
#[derive(Clone)]
pub(super) struct Sources {
    pub(super) shared: Arc<Shared>,
    pub(super) log: Arc<dyn LogSwitch>,
    /// Permits for actions, performed or queued.
    pub(super) actions: Arc<Semaphore>,
    started: Instant,
}

impl Sources {
    #[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
    pub(super) fn new(shared: Arc<Shared>, log: Arc<dyn LogSwitch>) -> Self {
        let actions = Arc::new(Semaphore::new(ACTIONS_ADMITTED_MAX));
        Self { shared, log, actions, started: Instant::now() }
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}

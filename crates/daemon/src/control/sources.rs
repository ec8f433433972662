//! What the routes answer from: the state of the process and its log.

use super::actions::Actions;
use super::log::LogSwitch;
use crate::shared::Shared;
use mica_block::Result;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the routes answer from.
#[derive(Clone)]
pub(super) struct Sources {
    pub(super) shared: Arc<Shared>,
    pub(super) log: Arc<dyn LogSwitch>,
    pub(super) actions: Arc<Actions>,
    started: Instant,
}

impl Sources {
    /// # Errors
    /// If the system refuses a thread for actions.
    #[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
    pub(super) fn new(shared: Arc<Shared>, log: Arc<dyn LogSwitch>) -> Result<Self> {
        let actions = Arc::new(Actions::start()?);
        Ok(Self { shared, log, actions, started: Instant::now() })
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}

//! What the routes answer from: the state of the process and its log.

use super::actions::Actions;
use super::history::History;
use super::log::LogSwitch;
use super::tree::Looks;
use crate::shared::Shared;
use mica_block::Result;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of disks that are changed at the same time.
const ACTION_THREADS_MAX: usize = 4;

/// What the routes answer from.
#[derive(Clone)]
pub(super) struct Sources {
    pub(super) shared: Arc<Shared>,
    pub(super) log: Arc<dyn LogSwitch>,
    /// What changes a disk.
    pub(super) actions: Arc<Actions>,
    /// Takeovers, and the end of the process: they wait for no disk's action to end.
    pub(super) endings: Arc<Actions>,
    /// The right to look at what is in a store, for those who may only look.
    pub(super) looks: Arc<Looks>,
    history: Arc<Mutex<History>>,
    started: Instant,
}

impl Sources {
    /// # Errors
    /// If the system refuses a thread for actions.
    #[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
    pub(super) fn new(shared: Arc<Shared>, log: Arc<dyn LogSwitch>) -> Result<Self> {
        let actions = Arc::new(Actions::start(ACTION_THREADS_MAX)?);
        let endings = Arc::new(Actions::start(1)?);
        let (history, looks) = (Arc::default(), Arc::default());
        Ok(Self { shared, log, actions, endings, looks, history, started: Instant::now() })
    }

    /// Only the control thread locks it.
    pub(super) fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock()
    }

    /// Adds the present to the history.
    pub(super) fn sample(&self) {
        let disks = self.shared.disks.all();
        let totals = disks.iter().map(|served| (&*served.name, served.counts().totals()));
        self.history().sample(self.uptime(), &self.shared.own_process.figures(), totals);
    }

    pub(super) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}

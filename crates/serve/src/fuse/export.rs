//! The served disk, as the handlers of its requests see it.

use super::attributes::Attributes;
use super::gate::Gate;
use super::stats::QueueStats;
use crate::discard::Discard;
use crate::failure_log::FailureLog;
use mica_rt::sync::SharedLock;
use std::sync::Arc;

/// The target of the kernel's requests.
pub(super) struct Export {
    pub(super) gate: Arc<Gate>,
    pub(super) attributes: Attributes,
    pub(super) discard: Discard,
    pub(super) edges: Arc<SharedLock>,
    /// One for each executor, and the last for the thread that takes requests.
    pub(super) stats: Box<[QueueStats]>,
    pub(super) failures: FailureLog,
}

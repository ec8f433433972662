//! What is served as a file, for all that handle its requests.

use super::attributes::Attributes;
use super::gate::Gate;
use super::stats::QueueStats;
use crate::discard::Discard;
use mica_rt::sync::SharedLock;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// What the kernel's requests are about.
pub(super) struct Export {
    pub(super) gate: Arc<Gate>,
    pub(super) attributes: Attributes,
    pub(super) discard: Discard,
    pub(super) edges: SharedLock,
    /// For each executor, and last for the thread that takes requests.
    pub(super) stats: Box<[QueueStats]>,
    pub(super) failures_logged: AtomicU32,
}

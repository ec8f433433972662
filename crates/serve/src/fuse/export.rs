//! The served disk, as the handlers of its requests see it.

use super::attributes::Attributes;
use super::gate::Gate;
use super::stats::QueueStats;
use crate::discard::Discard;
use mica_rt::LogLimit;
use mica_rt::sync::SharedLock;
use std::sync::Arc;

/// Whether programs may map the file into their memory and share that with others (`MAP_SHARED`).
/// The kernel keeps what is mapped: what is written there reaches the disk when the kernel writes
/// it back, as of any file, and what comes to the disk in other ways does not show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mapping {
    /// They may, if the kernel lets them (Linux 6.6).
    Allowed,
    /// They may not: the disk has other servers.
    Refused,
}

/// The target of the kernel's requests.
pub(super) struct Export {
    pub(super) gate: Arc<Gate>,
    pub(super) attributes: Attributes,
    pub(super) discard: Discard,
    pub(super) mapping: Mapping,
    pub(super) edges: Arc<SharedLock>,
    /// One for each executor, and the last for the thread that takes requests.
    pub(super) stats: Box<[QueueStats]>,
    pub(super) failures: LogLimit,
}

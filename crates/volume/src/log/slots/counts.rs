//! How many logs there are: asked for with each write, so that they are not counted then.

use super::Phase;

/// Logs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Counts {
    /// Those that are not over.
    pub(super) there: usize,
    /// Those of them that a segment is kept clean for.
    pub(super) in_need: usize,
}

impl Counts {
    /// What a log that is this counts for.
    pub(super) fn of(phase: Option<Phase>) -> Self {
        match phase {
            Some(Phase::Found | Phase::Open { has_records: true }) => Self { there: 1, in_need: 1 },
            Some(Phase::Open { has_records: false }) => Self { there: 1, in_need: 0 },
            Some(Phase::Over(_)) | None => Self::default(),
        }
    }
}

/// How much of a device is used.
pub(in crate::log) struct Usage {
    /// Segments that logs use.
    pub(in crate::log) used: usize,
    /// All that they may.
    pub(in crate::log) all: usize,
    /// Logs that are not over.
    pub(in crate::log) logs: usize,
}

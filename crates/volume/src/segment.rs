//! A stretch of what was done to a volume, and where snapshots are taken in it.
//!
//! Invariants
//! - I1 What is in a segment was done before its cuts, and all that came later is in later ones.
//! - I2 Segments become one extent while they weigh less than [`WEIGHT_MAX`] together; what is
//!   added then may go beyond by a little. An extent has room for twice as much.

use crate::format::snapshot::Origin;
use crate::recent::Batch;
use std::sync::Arc;

/// What an extent holds, in blocks of data, cleared ranges and cuts: each of them takes no more of
/// it than a block with two paths of nodes.
pub(crate) const WEIGHT_MAX: usize = 2048;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    /// What was done to blocks.
    pub(crate) batch: Arc<Batch>,
    /// Length of the disk after it, in bytes.
    pub(crate) len: u64,
    /// `State::records` after it.
    pub(crate) records: u64,
    /// When the last of it was done, in nanoseconds since 1970.
    pub(crate) time_ns: u64,
    /// What was done to snapshots after it, in order.
    pub(crate) cuts: Vec<Cut>,
}

/// A change of a volume's snapshots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Cut {
    /// A snapshot of everything before.
    Take {
        /// The volume's next one.
        number: u64,
        /// Checked: no other snapshot of the volume has it, unless it is empty.
        label: String,
        /// When it was taken, in nanoseconds since 1970.
        time_ns: u64,
        /// If it was received: of a volume without a log, as all that is received.
        origin: Option<Origin>,
    },
    /// This snapshot is no more.
    Drop {
        /// Which.
        number: u64,
    },
    /// This snapshot has another label.
    Label {
        /// Which.
        number: u64,
        /// As in `Take`.
        label: String,
    },
    /// The disk is again what this snapshot has. Only of a volume that no guest has.
    Rollback {
        /// Which.
        number: u64,
    },
}

impl Cut {
    /// The snapshot that it is about.
    pub(crate) fn number(&self) -> u64 {
        let (Self::Take { number, .. }
        | Self::Drop { number }
        | Self::Label { number, .. }
        | Self::Rollback { number }) = self;
        *number
    }
}

impl Segment {
    /// `State::records` before its cut `index`: each is a record.
    pub(crate) fn records_before(&self, index: usize) -> u64 {
        self.records - (self.cuts.len() - index) as u64
    }

    /// What it takes of [`WEIGHT_MAX`].
    pub(crate) fn weight(&self) -> usize {
        self.batch.weight() + self.cuts.len()
    }
}

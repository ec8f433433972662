//! What readers of a layer have to know of whoever writes it. It stands below the layer, so that a
//! layer knows no writer.

mod held;
mod ranges;

use std::sync::Arc;

pub(crate) use held::{Held, HeldClusters};
pub(crate) use ranges::{MetadataRanges, TableKind};

/// What the writer of a layer says to those who read it.
#[derive(Clone)]
pub(crate) struct Live {
    /// Clusters of the guest that are not written in place for now.
    pub(crate) held: Arc<HeldClusters>,
    /// Where the image's metadata is.
    pub(crate) ranges: Arc<MetadataRanges>,
}

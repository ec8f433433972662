//! What readers of a layer need to know of its writer. This stands below the layer, so that a layer
//! knows no writer.

mod held;
mod ranges;

use std::sync::Arc;

pub(crate) use held::{Held, HeldClusters};
pub(crate) use ranges::{MetadataRanges, TableKind};

/// What the writer of a layer publishes to its readers.
#[derive(Clone)]
pub(crate) struct Live {
    /// Clusters of the guest that are not written in place at present.
    pub(crate) held: Arc<HeldClusters>,
    /// Where the image's metadata is.
    pub(crate) ranges: Arc<MetadataRanges>,
}

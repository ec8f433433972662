//! What readers of a layer have to know of whoever writes it. It stands below the layer, so that a
//! layer knows no writer.

mod held;
mod ranges;

pub(crate) use held::{Held, HeldClusters};
pub(crate) use ranges::{MetadataRanges, TableKind};

//! One layer as a file.
//!
//! A qcow2 file is laid out as header, refcount table, refcount blocks, L1 table, L2 tables, data.
//! How many clusters the data takes is not known before it is compressed, so there are refcount
//! blocks for the most that it can take; some may legally stay zero.
//!
//! - I1. Every cluster of the file has as many references counted as there are, and no other
//!   cluster has any.
//! - I2. A refcount flag (COPIED) is set exactly where the count is one.

mod qcow2;
mod refcounts;

use crate::content;
use crate::expand::Entry;
use crate::manifest::LayerEntry;
use crate::plan::{LayerKind, LayerShape};
use crate::sink::Sink;
use crate::spec::DataMode;
use mica_block::Result;
use mica_units::ClusterBits;
use mica_units::Rng;
use std::path::Path;

/// All that is needed to write a layer.
pub(crate) struct Image<'a> {
    /// Folder of the chain.
    pub(crate) dir: &'a Path,
    /// What the layer is like.
    pub(crate) shape: &'a LayerShape,
    /// What its files are called.
    pub(crate) names: &'a LayerEntry,
    /// The layer below.
    pub(crate) below: Option<&'a LayerEntry>,
    /// Clusters in which a raw layer is held.
    pub(crate) plan_bits: ClusterBits,
    /// What it holds, ascending.
    pub(crate) entries: &'a [Entry],
    /// Whether data is written.
    pub(crate) data: DataMode,
    /// Puts data clusters in its random order, if there is one.
    pub(crate) order: Option<Rng>,
}

/// Writes the layer's file, and its data file if it has one.
pub(crate) fn write(image: &Image<'_>) -> Result<()> {
    match &image.shape.kind {
        LayerKind::Raw => write_raw(image),
        LayerKind::Qcow2(shape) => qcow2::write(image, shape),
    }
}

fn write_raw(image: &Image<'_>) -> Result<()> {
    let mut sink = Sink::create(&image.dir.join(&image.names.file))?;
    let bytes = image.plan_bits.bytes();
    for entry in image.entries {
        let start = entry.cluster << image.plan_bits.bits();
        let len = usize::try_from(bytes.min(image.shape.len - start)).unwrap_or(usize::MAX);
        if image.data == DataMode::Written {
            content::fill(sink.room(start, len)?, start, image.shape.number);
        }
    }
    sink.finish(image.shape.len)
}

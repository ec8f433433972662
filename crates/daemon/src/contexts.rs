//! What NBD clients can ask about the parts of a chain besides where data is.

use mica_block::{Extent, LocalFuture, Manage, Result, Survey};
use mica_serve::nbd::{Context, Part};
use mica_units::GuestRange;
use std::sync::Arc;

/// `qemu:allocation-depth`: which layer has a part, the active one being 1; 0 if none has it.
pub(crate) struct Depth(pub(crate) Arc<dyn Manage>);

/// `qemu:dirty-bitmap:X`: what layers above that of the kept state X have.
pub(crate) struct ChangedSince {
    name: String,
    disk: Arc<dyn Manage>,
    /// The position of that layer, from the base.
    position: usize,
}

/// The flag of a part that has changed.
const DIRTY: u32 = 1;

impl ChangedSince {
    pub(crate) fn new(state: &str, disk: Arc<dyn Manage>, position: usize) -> Self {
        Self { name: format!("qemu:dirty-bitmap:{state}"), disk, position }
    }
}

impl Context for Depth {
    fn name(&self) -> &'static str {
        "qemu:allocation-depth"
    }

    fn parts(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Part>>> {
        let Self(disk) = self;
        let depth = |extent: &Extent| {
            let above = disk.layer_count() - disk.layer_position(extent.layer);
            if extent.kind.is_present() { u32::try_from(above).unwrap_or(u32::MAX) } else { 0 }
        };
        Box::pin(parts(&**disk, range, depth))
    }
}

impl Context for ChangedSince {
    fn name(&self) -> &str {
        &self.name
    }

    fn parts(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Part>>> {
        // Also what no layer has, if one above hides what is beneath because it is too short.
        let flags = |extent: &Extent| match is_above(&*self.disk, extent, self.position) {
            true => DIRTY,
            false => 0,
        };
        Box::pin(parts(&*self.disk, range, flags))
    }
}

/// Whether a layer above the one at `position` determines what is at `extent`.
pub(crate) fn is_above(disk: &dyn Manage, extent: &Extent, position: usize) -> bool {
    disk.layer_position(extent.layer) > position
}

async fn parts(
    disk: &dyn Manage,
    range: GuestRange,
    flags: impl Fn(&Extent) -> u32,
) -> Result<Vec<Part>> {
    let extents = Survey::new(disk, range).next().await?.unwrap_or_default();
    Ok(extents.iter().map(|extent| Part { len: extent.len, flags: flags(extent) }).collect())
}

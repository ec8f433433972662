//! What NBD clients can ask about the parts of a chain besides where data is.

use crate::settings::{DiskSettings, Size};
use mica_block::{Disk, Error, ErrorKind, Extent, LocalFuture, Manage, Result, Survey, View};
use mica_serve::nbd::{Context, Part};
use mica_stack::{WindowPlace, find_partition};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use std::sync::Arc;

/// A disk of layers, and which of them is where.
#[derive(Clone)]
pub(crate) enum Layered {
    /// One that is served, to which layers may be added.
    Live(Arc<dyn Manage>),
    /// One that keeps the layers that it has.
    Fixed { disk: Arc<dyn Disk>, positions: Arc<[Option<usize>]>, count: usize },
}

impl Layered {
    pub(crate) fn fixed(view: View) -> Self {
        let View { disk, layers } = view;
        let slots = layers.iter().map(|number| number.index() + 1).max().unwrap_or(0);
        let mut positions = vec![None; slots];
        for (position, number) in layers.iter().enumerate() {
            positions[number.index()] = Some(position);
        }
        Self::Fixed { disk, positions: positions.into(), count: layers.len() }
    }

    pub(crate) fn disk(&self) -> &dyn Disk {
        match self {
            Self::Live(disk) => &**disk,
            Self::Fixed { disk, .. } => &**disk,
        }
    }

    /// How many layers are beneath the one of this `extent`.
    fn position(&self, extent: &Extent) -> usize {
        match self {
            Self::Live(disk) => disk.layer_position(extent.layer),
            Self::Fixed { positions, .. } => {
                let position = positions.get(extent.layer.index()).copied().flatten();
                position.expect("a layer of the disk")
            }
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::Live(disk) => disk.layer_count(),
            Self::Fixed { count, .. } => *count,
        }
    }

    /// Whether a layer above the one at `position` determines what is at `extent`.
    pub(crate) fn is_above(&self, extent: &Extent, position: usize) -> bool {
        self.position(extent) > position
    }
}

/// `qemu:allocation-depth`: which layer has a part, the active one being 1; 0 if none has it. What
/// lies beyond the end of a layer, and no layer above has, is that layer's, as QEMU has it.
pub(crate) struct Depth(pub(crate) Layered);

/// `qemu:dirty-bitmap:X`: what layers above that of the kept state X have.
pub(crate) struct ChangedSince {
    name: String,
    disk: Layered,
    /// The position of that layer, from the base.
    position: usize,
}

/// `qemu:dirty-bitmap:NAME`: the dirty bitmaps of that name that the layers have, as they are now.
struct Dirty {
    name: String,
    bitmap: String,
    disk: Arc<dyn Manage>,
}

/// A context of the whole disk, for clients that see it from a byte on.
struct Moved {
    context: Arc<dyn Context>,
    start: u64,
}

/// The flag of a part that has changed.
const DIRTY: u32 = 1;

impl ChangedSince {
    pub(crate) fn new(state: &str, disk: Layered, position: usize) -> Self {
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
            let position = disk.position(extent);
            let above = disk.count() - position;
            let depth = match extent.kind.is_present() {
                true => above,
                false if position == 0 => 0,
                // The search ended above a layer that is too short.
                false => above + 1,
            };
            u32::try_from(depth).unwrap_or(u32::MAX)
        };
        Box::pin(parts(disk.disk(), range, depth))
    }
}

impl Context for ChangedSince {
    fn name(&self) -> &str {
        &self.name
    }

    fn parts(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Part>>> {
        // Also what no layer has, if one above hides what is beneath because it is too short.
        let flags = |extent: &Extent| match self.disk.is_above(extent, self.position) {
            true => DIRTY,
            false => 0,
        };
        Box::pin(parts(self.disk.disk(), range, flags))
    }
}

impl Context for Dirty {
    fn name(&self) -> &str {
        &self.name
    }

    fn parts(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Part>>> {
        Box::pin(async move {
            let bitmaps = self.disk.bitmaps().expect("a chain stays one");
            let runs = bitmaps.dirty(&self.bitmap, range).await?;
            let part = |(len, is_dirty): (u64, bool)| Part { len, flags: u32::from(is_dirty) };
            Ok(runs.into_iter().map(part).collect())
        })
    }
}

impl Context for Moved {
    fn name(&self) -> &str {
        self.context.name()
    }

    fn parts(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Part>>> {
        let start = range.start().checked_add(self.start);
        let moved = start.and_then(|start| GuestRange::new(start, range.len()));
        self.context.parts(moved.expect("a part of the disk"))
    }
}

/// The same contexts, as clients see them that see only `part` of the disk.
pub(crate) fn moved(
    all: Vec<Arc<dyn Context>>,
    part: Option<WindowPlace>,
) -> Vec<Arc<dyn Context>> {
    let Some(WindowPlace { start, .. }) = part else { return all };
    let moved = |context| -> Arc<dyn Context> { Arc::new(Moved { context, start }) };
    all.into_iter().map(moved).collect()
}

/// The part of `disk` that its settings ask for.
///
/// # Errors
/// `Invalid` if they contradict each other; as [`find_partition`].
pub(crate) async fn part_of(
    disk: &dyn Disk,
    settings: &DiskSettings,
) -> Result<Option<WindowPlace>> {
    if !settings.has_part() {
        return Ok(None);
    }
    if let Some(number) = settings.partition {
        if settings.offset.is_some() || settings.size.is_some() {
            let what = "a partition has its own place: leave out offset and size";
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let found = find_partition(disk, number).await;
        return found.map(Some).map_err(|error| error.wrap(format!("--partition {number}")));
    }
    let start = settings.offset.map_or(0, |Size(start)| start);
    let len = settings.size.map(|Size(len)| len);
    Ok(Some(WindowPlace { start, len }))
}

/// Those that the settings of a disk ask for, which is open.
///
/// # Errors
/// `Unsupported` if it has no bitmaps; as [`mica_block::ManageBitmaps::dirty`].
pub(crate) async fn of_settings(
    disk: &Arc<dyn Manage>,
    settings: &DiskSettings,
) -> Result<Vec<Arc<dyn Context>>> {
    let mut all: Vec<Arc<dyn Context>> = Vec::new();
    if settings.allocation_depth {
        all.push(Arc::new(Depth(Layered::Live(Arc::clone(disk)))));
    }
    if settings.bitmap.is_empty() {
        return Ok(all);
    }
    let Some(bitmaps) = disk.bitmaps() else {
        let what = "--bitmap: only a qcow2 image has dirty bitmaps";
        return Err(Error::new(ErrorKind::Unsupported, what));
    };
    for name in &settings.bitmap {
        let first = GuestRange::new(GuestOffset::ZERO, SECTOR_BYTES).expect("a sector");
        bitmaps.dirty(name, first).await?;
        let (disk, bitmap) = (Arc::clone(disk), name.clone());
        all.push(Arc::new(Dirty { name: format!("qemu:dirty-bitmap:{name}"), bitmap, disk }));
    }
    Ok(all)
}

async fn parts(
    disk: &dyn Disk,
    range: GuestRange,
    flags: impl Fn(&Extent) -> u32,
) -> Result<Vec<Part>> {
    let extents = Survey::new(disk, range).next().await?.unwrap_or_default();
    Ok(extents.iter().map(|extent| Part { len: extent.len, flags: flags(extent) }).collect())
}

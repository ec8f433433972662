//! What is left of a disk whose image is closed: its last figures.

use mica_block::{
    Detail, Disk, Error, ErrorKind, Extent, Geometry, IoFuture, MapStats, Planned, WriteStats,
    ready,
};
use mica_rt::Buf;
use mica_stack::OpenDisk;
use mica_units::GuestRange;
use std::sync::Arc;

/// A disk that holds no file.
pub(crate) struct Remains {
    geometry: Geometry,
    is_writable: bool,
    map: MapStats,
    write: WriteStats,
}

impl Remains {
    pub(crate) fn of(opened: &OpenDisk) -> Arc<dyn Disk> {
        let disk = &opened.disk;
        Arc::new(Self {
            geometry: disk.geometry(),
            is_writable: disk.is_writable(),
            map: disk.map_stats(),
            write: disk.write_stats(),
        })
    }
}

/// Layers of a disk, and those beneath the active one that an index covers.
pub(crate) fn depth_of(opened: &OpenDisk) -> Option<(usize, usize)> {
    let chain = opened.chain.as_ref()?;
    Some((chain.layer_count(), chain.indexed_layers()))
}

impl Disk for Remains {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn plan<'a>(&'a self, _: GuestRange, _: Detail, _: &'a mut Vec<Extent>) -> Planned<'a> {
        Planned::Ready(Err(closed()))
    }

    fn read(&self, _: &Extent, buf: Buf) -> IoFuture {
        ready(Err(closed()), buf)
    }

    /// Whether it was: all that would write is refused.
    fn is_writable(&self) -> bool {
        self.is_writable
    }

    fn map_stats(&self) -> MapStats {
        self.map
    }

    fn write_stats(&self) -> WriteStats {
        self.write
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Denied, "the disk is closed")
}

//! A raw image: the bytes of the disk are the bytes of the store.

use mica_block::{
    Detail, Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, Images, IoFuture, Planned,
    Result, RunKind, Store,
};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber, SECTOR_BYTES};
use std::path::Path;
use std::sync::Arc;

/// A raw disk.
pub struct RawDisk {
    store: Arc<dyn Store>,
    geometry: Geometry,
}

/// The unit in which reads of a file are cheapest: a page.
const PREFERRED_BYTES: u32 = 4096;

/// Most runs that one plan asks the file system for; what lies beyond is called data, which is
/// always true enough.
const RUNS_MAX: usize = 1 << 14;

impl RawDisk {
    /// The disk in the raw image at `path`.
    ///
    /// # Errors
    /// What opening it gives.
    pub fn open(images: &dyn Images, path: &Path) -> Result<Self> {
        let image = images.open(path)?;
        Self::new(image.store)
    }

    /// The disk in `store`. Its length is rounded up to a whole sector; the bytes past the end of
    /// the store are zeros, as in QEMU.
    ///
    /// # Errors
    /// If the length cannot be had, or no disk is that long.
    pub fn new(store: Arc<dyn Store>) -> Result<Self> {
        let len = store.len().map_err(|error| error.wrap(store.name()))?;
        let len = len.checked_next_multiple_of(SECTOR_BYTES).ok_or_else(|| {
            Error::new(ErrorKind::Limit, format!("{} is longer than a disk may be", store.name()))
        })?;
        let geometry = Geometry { len, preferred_bytes: PREFERRED_BYTES };
        Ok(Self { store, geometry })
    }

    fn plan_now(&self, range: GuestRange, detail: Detail, extents: &mut Vec<Extent>) -> Result<()> {
        check_range(range, self.geometry)?;
        let mut at = range.start();
        let mut runs = 0;
        while at < range.end() {
            let left = range.end().bytes() - at.bytes();
            let (kind, len) = match detail {
                Detail::Read => (ExtentKind::Data, left),
                Detail::Allocation if runs == RUNS_MAX => (ExtentKind::Data, left),
                Detail::Allocation => {
                    let run = self.store.run_at(HostOffset::new(at.bytes()), left)?;
                    let kind = match run.kind {
                        RunKind::Data => ExtentKind::Data,
                        // Zeros by the file's word, and they have a place in it.
                        RunKind::Hole => ExtentKind::ZeroAllocated,
                    };
                    assert!(run.len > 0 && run.len <= left, "a store broke its contract");
                    (kind, run.len)
                }
            };
            runs += 1;
            Extent::push_joined(extents, extent_at(at, len, kind));
            at = GuestOffset::new(at.bytes() + len);
        }
        Ok(())
    }
}

impl Disk for RawDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn plan<'a>(
        &'a self,
        range: GuestRange,
        detail: Detail,
        extents: &'a mut Vec<Extent>,
    ) -> Planned<'a> {
        Planned::Ready(self.plan_now(range, detail, extents))
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        if extent.kind.reads_as_zero() {
            buf.fill(0);
            return mica_block::ready(Ok(()), buf);
        }
        self.store.read_at(buf, extent.host)
    }
}

pub(crate) fn check_range(range: GuestRange, geometry: Geometry) -> Result<()> {
    if range.end().bytes() <= geometry.len {
        return Ok(());
    }
    let (start, len) = (range.start(), range.len());
    let what = format!("{len} bytes at {start} are beyond the end of the disk");
    Err(Error::new(ErrorKind::Invalid, what))
}

fn extent_at(start: GuestOffset, len: u64, kind: ExtentKind) -> Extent {
    let host = if kind.has_host() { HostOffset::new(start.bytes()) } else { HostOffset::ZERO };
    Extent { start, len, kind, layer: LayerNumber::BASE, host }
}

#[cfg(test)]
mod tests;

//! A disk of zeros that costs no I/O: what a server can do at most.

use crate::raw::check_range;
use mica_block::{
    Detail, Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, IoFuture, Planned, Result, ready,
};
use mica_rt::Buf;
use mica_units::{GuestRange, HostOffset, LayerNumber, SECTOR_BYTES};

/// A disk of zeros.
pub struct NullDisk {
    geometry: Geometry,
}

impl NullDisk {
    /// A disk of `len` bytes.
    ///
    /// # Errors
    /// If that is no multiple of 512.
    pub fn new(len: u64) -> Result<Self> {
        if !len.is_multiple_of(SECTOR_BYTES) {
            let what = format!("a disk of {len} bytes: the length must be a multiple of 512");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(Self { geometry: Geometry { len, preferred_bytes: 4096 } })
    }
}

impl Disk for NullDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn plan<'a>(
        &'a self,
        range: GuestRange,
        detail: Detail,
        extents: &'a mut Vec<Extent>,
    ) -> Planned<'a> {
        if let Err(error) = check_range(range, self.geometry) {
            return Planned::Ready(Err(error));
        }
        let kind = match detail {
            // Called data, so that a server sends as many bytes as for a disk that has some.
            Detail::Read => ExtentKind::Data,
            Detail::Allocation => ExtentKind::Hole,
        };
        if !range.is_empty() {
            extents.push(Extent {
                start: range.start(),
                len: range.len(),
                kind,
                layer: LayerNumber::BASE,
                host: HostOffset::ZERO,
            });
        }
        Planned::Ready(Ok(()))
    }

    fn read(&self, _extent: &Extent, mut buf: Buf) -> IoFuture {
        buf.fill(0);
        ready(Ok(()), buf)
    }
}

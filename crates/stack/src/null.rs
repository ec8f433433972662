//! A disk of zeros that costs no I/O: the upper bound of what a server can do. Writes to it are
//! dropped.

use crate::raw::{beyond_the_end, check_range};
use mica_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, IoFuture, LocalFuture, Plan, Planned,
    Result, Unmanaged, Writing, Zeroes, ready,
};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};

/// A disk of zeros.
pub struct NullDisk {
    geometry: Geometry,
    is_writable: bool,
}

impl NullDisk {
    /// A disk of `len` bytes, for reading.
    ///
    /// # Errors
    /// If that is not a multiple of 512.
    pub fn new(len: u64) -> Result<Self> {
        if !len.is_multiple_of(SECTOR_BYTES) {
            let what = format!("a disk of {len} bytes: the length must be a multiple of 512");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(Self { geometry: Geometry { len, preferred_bytes: 4096 }, is_writable: false })
    }

    /// The same, for writing too.
    #[must_use]
    pub fn writable(self) -> Self {
        Self { is_writable: true, ..self }
    }

    fn check_write(&self, range: GuestRange) -> Result<()> {
        if !self.is_writable {
            return Err(Error::new(ErrorKind::Denied, "the disk was opened for reading only"));
        }
        check_range(range, self.geometry)
    }
}

impl Disk for NullDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn plan(&self, range: GuestRange, mut extents: Vec<Extent>) -> Planned<'_> {
        if let Err(error) = check_range(range, self.geometry) {
            return Planned::Ready(Err(error));
        }
        if !range.is_empty() {
            // Reported as data, so that a server sends as many bytes as for a disk that has some.
            extents.push(Extent::unplaced(range, ExtentKind::Data));
        }
        Planned::Ready(Ok(Plan::untracked(extents)))
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        let checked = check_range(range, self.geometry);
        let hole = (!range.is_empty()).then(|| Extent::unplaced(range, ExtentKind::Hole));
        Box::pin(std::future::ready(checked.map(|()| hole.into_iter().collect())))
    }

    fn read(&self, _extent: &Extent, mut buf: Buf) -> IoFuture {
        buf.fill(0);
        ready(Ok(()), buf)
    }

    fn is_writable(&self) -> bool {
        self.is_writable
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        let len = buf.len() as u64;
        let range = GuestRange::new(at, len).ok_or_else(|| beyond_the_end(at, len));
        Writing::Direct(ready(range.and_then(|range| self.check_write(range)), buf))
    }

    fn write_zeroes(&self, range: GuestRange, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.check_write(range)))
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.check_write(range)))
    }
}

impl Unmanaged for NullDisk {
    const LENGTH: &'static str = "the length of this disk cannot be changed while it is served";
}

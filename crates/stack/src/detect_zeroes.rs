//! A disk that looks at what is written: zeros become zeros of the image, which need no space.

use mica_block::{Disk, Extent, Geometry, IoFuture, LocalFuture, Planned, Result, Writing, Zeroes};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// What becomes of the space of zeros that were found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZeroSpace {
    /// It stays allocated where it is.
    Kept,
    /// It is given back.
    Freed,
}

/// A disk whose writes are looked at.
pub struct DetectZeroes {
    disk: Arc<dyn Disk>,
    how: Zeroes,
}

impl DetectZeroes {
    /// `disk`, with the space of zeros that are written to it treated as `space` says.
    pub fn new(disk: Arc<dyn Disk>, space: ZeroSpace) -> Self {
        let how = Zeroes { may_unmap: space == ZeroSpace::Freed, fast: false };
        Self { disk, how }
    }
}

/// Whether all of `bytes` are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Most data differs from zero early on; the rest is compared with itself shifted by one byte,
    // which memcmp does at memory speed.
    match bytes.split_first() {
        None => true,
        Some((first, rest)) => *first == 0 && bytes[..rest.len()] == *rest,
    }
}

impl Disk for DetectZeroes {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        self.disk.plan(range, extents)
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.disk.survey(range)
    }

    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        self.disk.read(extent, buf)
    }

    fn is_writable(&self) -> bool {
        self.disk.is_writable()
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        match GuestRange::new(at, buf.len() as u64) {
            Some(range) if is_zero(&buf) => Writing::Boxed(Box::pin(async move {
                (self.disk.write_zeroes(range, self.how).await, buf)
            })),
            _ => self.disk.write(at, buf),
        }
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.disk.write_zeroes(range, how)
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        self.disk.discard(range)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.disk.flush()
    }
}

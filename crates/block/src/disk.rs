//! What a guest sees: a block device with a length.

use crate::{Error, ErrorKind, Extent, InFlight, IoFuture, LocalFuture, Result};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Size and preferred units of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Length in bytes, a multiple of 512.
    pub len: u64,
    /// The unit in which requests are cheapest, in bytes; a power of two.
    pub preferred_bytes: u32,
}

/// Where the bytes of a range are, in order, without a gap, and exactly that range. No space that
/// it names is reused while it lives, so it is kept until the last read is done.
#[must_use = "what it says holds as long as it lives"]
pub struct Plan<'a> {
    extents: Vec<Extent>,
    in_flight: InFlight<'a>,
}

impl<'a> Plan<'a> {
    /// The plan of a read that counts as `in_flight`.
    #[inline]
    pub fn new(extents: Vec<Extent>, in_flight: InFlight<'a>) -> Self {
        Self { extents, in_flight }
    }

    /// The plan of a disk that never reuses space.
    #[inline]
    pub fn untracked(extents: Vec<Extent>) -> Self {
        Self { extents, in_flight: InFlight::untracked() }
    }

    /// The list, to be reused, and what has to be kept in place of the plan.
    #[inline]
    pub fn into_parts(self) -> (Vec<Extent>, InFlight<'a>) {
        (self.extents, self.in_flight)
    }
}

impl Deref for Plan<'_> {
    type Target = [Extent];

    #[inline]
    fn deref(&self) -> &[Extent] {
        &self.extents
    }
}

/// The outcome of planning: available at once if the map is in memory, or later.
#[must_use = "a plan that is pending has planned nothing yet"]
pub enum Planned<'a> {
    /// The plan is there, or planning failed.
    Ready(Result<Plan<'a>>),
    /// The map has to be read first.
    Pending(LocalFuture<'a, Result<Plan<'a>>>),
}

impl<'a> Planned<'a> {
    /// Waits for the plan.
    ///
    /// # Errors
    /// If the map cannot be read.
    #[inline]
    pub async fn finish(self) -> Result<Plan<'a>> {
        match self {
            Self::Ready(result) => result,
            Self::Pending(future) => future.await,
        }
    }
}

/// A disk. Shared by all queues that serve it.
pub trait Disk: Send + Sync {
    /// Its size, which [`crate::Manage::resize`] may change: each request is checked against what
    /// it is now.
    fn geometry(&self) -> Geometry;

    /// Where the bytes of `range` are. `extents` is an empty list that the plan may use.
    ///
    /// # Errors
    /// `Invalid` if `range` is beyond the end; otherwise why the map could not be read.
    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_>;

    /// Where the bytes of `range` are, and what of that has space, which can cost system calls: of
    /// as much of the range, from its start, as takes a bounded amount of memory. At least a byte,
    /// unless the range is empty. [`Survey`](crate::Survey) goes on to its end.
    ///
    /// The extents can be read as those of a plan, but only as long as nobody writes to the disk.
    ///
    /// A disk whose plans are short and know all of this can keep the default.
    ///
    /// # Errors
    /// As [`Disk::plan`], for the first byte: what fails later ends the survey.
    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        let planned = self.plan(range, Vec::new());
        Box::pin(async move { Ok(planned.finish().await?.into_parts().0) })
    }

    /// Reads all of `extent`, which belongs to a plan that is still held (or to a survey), or is a
    /// part of such an extent, into `buf`, whose length is the extent's. An extent that reads as
    /// zero fills `buf` with zeros.
    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture;

    /// Whether it takes [`Disk::write`], [`Disk::write_zeroes`] and [`Disk::discard`].
    fn is_writable(&self) -> bool {
        false
    }

    /// Writes all of `buf`, whose length is not zero and a multiple of a sector, at `at`.
    /// Overlapping writes in flight leave each sector as one of them wrote it.
    ///
    /// Errors: `Invalid` beyond the end, `Denied` if the disk is not writable, `NoSpace`; each
    /// sector is then old or new.
    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        let _ = at;
        Writing::Direct(ready(Err(not_writable()), buf))
    }

    /// Makes `range`, whose ends are multiples of a sector, read as zeros.
    ///
    /// Errors as [`Disk::write`]; `Unsupported` if [`Zeroes::fast`] is asked for and the zeros
    /// would have to be written out.
    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        let _ = (range, how);
        Box::pin(async { Err(not_writable()) })
    }

    /// The guest no longer needs `range`: parts of it may read as zeros from now on, and their
    /// space may be given back.
    ///
    /// Errors as [`Disk::write`].
    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        let _ = range;
        Box::pin(async { Err(not_writable()) })
    }

    /// Makes durable every write that completed before the call. On a disk that is not writable
    /// there is nothing to do.
    ///
    /// After an error the disk takes no more writes and no flush succeeds.
    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// How zeros are to be written.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Zeroes {
    /// The space may be given back; otherwise later writes to the range must not run out of space
    /// that the range has now.
    pub may_unmap: bool,
    /// Only if it is faster than writing the zeros out (`NBD_CMD_FLAG_FAST_ZERO`).
    pub fast: bool,
}

/// A write in flight. Resolves to the outcome and the buffer; to an empty one if the disk kept it.
#[must_use = "the buffer is returned only when awaited"]
pub enum Writing<'a> {
    /// Straight to one place.
    Direct(IoFuture),
    /// Anything that takes more steps.
    Boxed(LocalFuture<'a, (Result<()>, Buf)>),
}

impl Future for Writing<'_> {
    type Output = (Result<()>, Buf);

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Direct(future) => Pin::new(future).poll(context),
            Self::Boxed(future) => future.as_mut().poll(context),
        }
    }
}

fn not_writable() -> Error {
    Error::new(ErrorKind::Denied, "the disk was opened for reading only")
}

/// A future that is ready with `result` and `buf`.
pub fn ready(result: Result<()>, buf: Buf) -> IoFuture {
    IoFuture::Ready(Some((result, buf)))
}

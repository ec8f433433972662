//! What a guest sees: a block device with a length.

use crate::{Extent, IoFuture, LocalFuture, Result};
use mica_rt::Buf;
use mica_units::GuestRange;

/// Size and preferred units of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Length in bytes, a multiple of 512.
    pub len: u64,
    /// The unit in which requests are cheapest, in bytes; a power of two.
    pub preferred_bytes: u32,
}

/// How much a plan tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Detail {
    /// Enough to read.
    Read,
    /// Also which parts of a raw file are holes, which costs system calls.
    Allocation,
}

/// How well the map's cache does, counted since the disk was opened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MapStats {
    /// Look-ups answered from the cache.
    pub hits: u64,
    /// Look-ups that had to load a slice.
    pub misses: u64,
    /// Slices loaded from an index.
    pub index_loads: u64,
    /// Windows of slices resolved by walking the chain.
    pub walks: u64,
    /// Layers looked at by those walks.
    pub layers_walked: u64,
    /// Bytes of slices now in the cache.
    pub cached_bytes: u64,
    /// The most that the cache may hold, in bytes.
    pub budget_bytes: u64,
}

/// The outcome of planning: at once, when the map is in memory, or later.
#[must_use = "a plan that is pending has planned nothing yet"]
pub enum Planned<'a> {
    /// The extents are there, or planning failed.
    Ready(Result<()>),
    /// The map has to be read first.
    Pending(LocalFuture<'a, Result<()>>),
}

impl Planned<'_> {
    /// Waits for the plan.
    ///
    /// # Errors
    /// If the map cannot be read.
    #[inline]
    pub async fn finish(self) -> Result<()> {
        match self {
            Self::Ready(result) => result,
            Self::Pending(future) => future.await,
        }
    }
}

/// A disk. Shared by all queues that serve it.
pub trait Disk: Send + Sync {
    /// Its size.
    fn geometry(&self) -> Geometry;

    /// Appends to `extents` where the bytes of `range` are: in order, without a gap, and exactly
    /// `range`.
    ///
    /// # Errors
    /// `Invalid` if `range` is beyond the end; else what kept the map from being read.
    fn plan<'a>(
        &'a self,
        range: GuestRange,
        detail: Detail,
        extents: &'a mut Vec<Extent>,
    ) -> Planned<'a>;

    /// Reads all of `extent`, which came from [`Disk::plan`] or is a part of one that did, into
    /// `buf`, whose length is the extent's. An extent that reads as zero fills `buf` with zeros.
    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture;

    /// How its map's cache does.
    fn map_stats(&self) -> MapStats {
        MapStats::default()
    }
}

/// A future that is ready with `result` and `buf`.
pub fn ready(result: Result<()>, buf: Buf) -> IoFuture {
    IoFuture::Ready(Some((result, buf)))
}

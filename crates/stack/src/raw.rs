//! A raw image: the bytes of the disk are the bytes of the store.
//!
//! Writes go straight to the store, concurrently. All that remains after a write is a sync, which
//! flushes share. After a failed sync nobody knows which writes are durable: the disk is
//! **latched** then: it accepts no more writes, and no flush succeeds.
//!
//! The store keeps its length unless the disk is extended. If that is not a multiple of a sector,
//! the missing part of the last sector reads as zeros, and the first write to it completes it.

use mica_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, GroupSync, Haste, Images, IoFuture,
    LocalFuture, Manage, ManageIndex, ManageSnapshots, MapStats, Plan, Planned, Result, RunKind,
    Space, Store, StoreIdentity, WriteStats, Writing, Zeroes, check_longer,
};
use mica_crypt::luks::Payload;
use mica_qcow2::needed_passphrase;
use mica_rt::{Buf, Pace};
use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber, SECTOR_BYTES};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A raw disk.
pub struct RawDisk {
    store: Arc<dyn Store>,
    /// Length of the disk in bytes, a multiple of a sector.
    len: AtomicU64,
    /// Absent on a disk that is only read.
    writer: Option<Writer>,
    is_encrypted: bool,
}

/// The state for writing.
struct Writer {
    /// Length of the store in bytes, with all writes that began.
    store_len: AtomicU64,
    /// Whether the disk is being extended.
    is_resizing: AtomicBool,
    syncs: GroupSync,
    /// Syncs so far.
    syncs_done: AtomicU64,
    /// Why the disk is latched, if it is.
    latch: OnceLock<Error>,
}

/// The unit in which reads of a file are cheapest: a page.
const PREFERRED_BYTES: u32 = 4096;

/// Zeros that have to be written out are written in pieces of at most this size.
const ZEROES_BYTES_MAX: u64 = 512 << 10;

/// Runs that one survey queries the file system for; then it ends.
const RUNS_MAX: usize = 1 << 14;
/// Runs after which other tasks get a turn: each takes two system calls.
const RUNS_PER_TURN: u64 = 64;

impl RawDisk {
    /// The disk in the raw image at `path`.
    ///
    /// # Errors
    /// Any error of opening it.
    pub fn open(images: &dyn Images, path: &Path) -> Result<Self> {
        let image = images.open(path)?;
        Self::new(image.store)
    }

    /// As [`Self::open`], for writing too.
    ///
    /// # Errors
    /// Any error of opening it.
    pub fn open_writable(images: &dyn Images, path: &Path) -> Result<Self> {
        let image = images.open_writable(path)?;
        Self::new_writable(image.store)
    }

    /// The disk in the LUKS image at `path`.
    ///
    /// # Errors
    /// As [`Self::open`]; `Denied` if there is no passphrase for it, or a wrong one.
    pub async fn open_luks(images: &dyn Images, path: &Path) -> Result<Self> {
        let image = images.open(path)?;
        Self::new(unlocked(images, path, image.store).await?).map(Self::encrypted)
    }

    /// As [`Self::open_luks`], for writing too.
    ///
    /// # Errors
    /// As [`Self::open_luks`].
    pub async fn open_luks_writable(images: &dyn Images, path: &Path) -> Result<Self> {
        let image = images.open_writable(path)?;
        Self::new_writable(unlocked(images, path, image.store).await?).map(Self::encrypted)
    }

    fn encrypted(self) -> Self {
        Self { is_encrypted: true, ..self }
    }

    /// The disk in `store`. Its length is rounded up to a whole sector; the bytes past the end of
    /// the store are zeros, as in QEMU.
    ///
    /// # Errors
    /// If the length cannot be determined, or no disk is that long.
    pub fn new(store: Arc<dyn Store>) -> Result<Self> {
        let len = store.len().map_err(|error| error.wrap(store.name()))?;
        let len = len.checked_next_multiple_of(SECTOR_BYTES).ok_or_else(|| {
            Error::new(ErrorKind::Limit, format!("{} is longer than a disk may be", store.name()))
        })?;
        Ok(Self { store, len: AtomicU64::new(len), writer: None, is_encrypted: false })
    }

    /// As [`Self::new`], for writing too; `store` was opened for that.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn new_writable(store: Arc<dyn Store>) -> Result<Self> {
        let store_len = store.len().map_err(|error| error.wrap(store.name()))?;
        let disk = Self::new(store)?;
        let writer = Writer {
            store_len: AtomicU64::new(store_len),
            is_resizing: AtomicBool::new(false),
            syncs: GroupSync::new(),
            syncs_done: AtomicU64::new(0),
            latch: OnceLock::new(),
        };
        Ok(Self { writer: Some(writer), ..disk })
    }

    /// The state for writing `range`, if the disk accepts that.
    fn writer(&self, range: GuestRange) -> Result<&Writer> {
        let writer = self.usable_writer()?;
        check_range(range, self.geometry())?;
        Ok(writer)
    }

    /// Adds to `extents` what a plan of `range` has.
    pub(crate) fn extents_of(
        &self,
        range: GuestRange,
        mut extents: Vec<Extent>,
    ) -> Result<Vec<Extent>> {
        check_range(range, self.geometry())?;
        if !range.is_empty() {
            extents.push(extent_at(range.start(), range.len(), ExtentKind::Data));
        }
        Ok(extents)
    }

    /// Begins a write.
    pub(crate) fn begin_write(&self, at: GuestOffset, buf: Buf) -> IoFuture {
        let range = GuestRange::new(at, buf.len() as u64)
            .ok_or_else(|| beyond_the_end(at, buf.len() as u64));
        match range.and_then(|range| Ok((range, self.writer(range)?))) {
            Ok((range, writer)) => writer.completes_last_sector(range),
            Err(error) => return mica_block::ready(Err(error), buf),
        }
        self.store.write_at(buf, HostOffset::new(at.bytes()))
    }

    /// Which file it is.
    pub(crate) fn identity(&self) -> StoreIdentity {
        self.store.identity()
    }

    fn usable_writer(&self) -> Result<&Writer> {
        let writer = self.writer.as_ref().ok_or_else(opened_for_reading)?;
        writer.check_latch(&*self.store)?;
        Ok(writer)
    }

    /// Makes the store, whose length is `before`, `len` bytes long; the new part reads as zeros, or
    /// is truncated again. The last sector of before, which the store may have only a part of, is
    /// the guest's, who may be writing it now: it stays as it is.
    ///
    /// Where unwritten bytes read as anything, the store grows with the zeros that are written, and
    /// not before: a file that is cut off by a power cut may be shorter then, but has no part that
    /// nobody wrote.
    async fn extend(&self, before: u64, len: u64) -> Result<()> {
        if self.store.reads_unwritten_as_zeros() {
            return self.store.set_len(len).await;
        }
        let start = before.next_multiple_of(SECTOR_BYTES);
        let zeroed = write_out_zeroes(&*self.store, start, len - start).await;
        if zeroed.is_err() {
            self.store.set_len(start).await?;
        }
        zeroed
    }
}

/// What is behind the LUKS header of the image at `path`, whose file is `store`.
async fn unlocked(
    images: &dyn Images,
    path: &Path,
    store: Arc<dyn Store>,
) -> Result<Arc<dyn Store>> {
    let unlocking = async {
        let passphrase = needed_passphrase(images, path)?;
        Ok(Arc::new(Payload::unlock(&*store, &passphrase).await?.of(Arc::clone(&store))) as _)
    };
    unlocking.await.map_err(|error: Error| error.wrap(path.display().to_string()))
}

impl Disk for RawDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.len.load(Ordering::Acquire), preferred_bytes: PREFERRED_BYTES }
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        Planned::Ready(self.extents_of(range, extents).map(Plan::untracked))
    }

    /// Queries the file system for the runs of `range`.
    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            check_range(range, self.geometry())?;
            let mut pace = Pace::new(RUNS_PER_TURN);
            let mut extents = Vec::new();
            let mut at = range.start();
            for _ in 0..RUNS_MAX {
                let left = range.end().bytes() - at.bytes();
                if left == 0 {
                    break;
                }
                let run = match self.store.run_at(HostOffset::new(at.bytes()), left) {
                    Ok(run) => run,
                    // What is known is an answer; the next survey reports the failure.
                    Err(_) if !extents.is_empty() => break,
                    Err(error) => return Err(error),
                };
                let kind = match run.kind {
                    RunKind::Data => ExtentKind::Data,
                    // Zeros according to the file, and they have a place in it.
                    RunKind::Hole => ExtentKind::ZeroAllocated,
                };
                assert!(run.len > 0 && run.len <= left, "a store broke its contract");
                pace.steps(1).await;
                Extent::push_joined(&mut extents, extent_at(at, run.len, kind));
                at = GuestOffset::new(at.bytes() + run.len);
            }
            Ok(extents)
        })
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        if extent.kind.reads_as_zero() {
            buf.fill(0);
            return mica_block::ready(Ok(()), buf);
        }
        self.store.read_at(buf, extent.host)
    }

    fn is_writable(&self) -> bool {
        self.writer.is_some()
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        Writing::Direct(self.begin_write(at, buf))
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let writer = self.writer(range)?;
            let mut len = writer.bytes_there(range);
            let start = HostOffset::new(range.start().bytes());
            let space = if how.may_unmap { Space::Punch } else { Space::Zero };
            match self.store.space(space, start, len).await {
                Err(error) if error.kind() == ErrorKind::Unsupported && !how.fast => {
                    // What is missing of a sector need not read as zeros, once it is encrypted.
                    if !self.store.reads_unwritten_as_zeros() {
                        writer.completes_last_sector(range);
                        len = range.len();
                    }
                    write_out_zeroes(&*self.store, range.start().bytes(), len).await
                }
                result => result,
            }
        })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let len = self.writer(range)?.bytes_there(range);
            let start = HostOffset::new(range.start().bytes());
            match self.store.space(Space::Punch, start, len).await {
                // It was a hint, and nothing has changed.
                Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
                result => result,
            }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            let Some(writer) = &self.writer else { return Ok(()) };
            let sync = async || {
                writer.check_latch(&*self.store)?;
                writer.syncs_done.fetch_add(1, Ordering::Relaxed);
                self.store.sync().await.inspect_err(|error| {
                    // Only the first reason counts; runs follow each other, so there is one.
                    let _ = writer.latch.set(error.clone());
                })
            };
            writer.syncs.run(sync).await
        })
    }
}

impl Manage for RawDisk {
    /// A block device has a fixed length: it was extended elsewhere, and here that is noticed.
    fn resize(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let writer = self.usable_writer()?;
            check_longer(self.geometry().len, len)?;
            let Some(_resizing) = Resizing::begin(&writer.is_resizing) else {
                let what = "the disk is already being extended";
                return Err(Error::new(ErrorKind::Invalid, what));
            };
            let done = async {
                // Whoever extended it has already put the right contents there.
                let before = self.store.len()?;
                if before < len {
                    self.extend(before, len).await?;
                }
                self.flush().await
            };
            done.await.map_err(|error| error.wrap(self.store.name()))?;
            writer.store_len.fetch_max(len, Ordering::AcqRel);
            self.len.fetch_max(len, Ordering::AcqRel);
            Ok(())
        })
    }

    /// The store's operations are all there are: nothing else runs in the background.
    fn idle(&self) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.flush()
    }

    fn hasten(&self, _haste: Haste) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn latch(&self) -> Option<Error> {
        let writer = self.writer.as_ref()?;
        writer.check_latch(&*self.store).err()
    }

    fn weakness(&self) -> Option<Cow<'static, str>> {
        None
    }

    fn write_stats(&self) -> WriteStats {
        let syncs = self.writer.as_ref().map_or(0, |it| it.syncs_done.load(Ordering::Relaxed));
        // Each sync makes one group durable.
        WriteStats { syncs, groups: syncs, ..WriteStats::default() }
    }

    fn map_stats(&self) -> MapStats {
        MapStats::default()
    }

    fn layer_count(&self) -> usize {
        1
    }

    fn layer_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn data_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn is_encrypted(&self, _position: usize) -> bool {
        self.is_encrypted
    }

    fn layer_position(&self, _layer: LayerNumber) -> usize {
        0
    }

    fn index(&self) -> Option<&dyn ManageIndex> {
        None
    }

    fn chain(&self) -> Option<&dyn mica_block::ManageChain> {
        None
    }

    fn bitmaps(&self) -> Option<&dyn mica_block::ManageBitmaps> {
        None
    }

    fn snapshots(&self) -> Option<&dyn ManageSnapshots> {
        None
    }

    fn volume(&self) -> Option<&dyn mica_block::ManageVolume> {
        None
    }

    fn tend(&self) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// Present while a disk is being extended.
struct Resizing<'a>(&'a AtomicBool);

impl<'a> Resizing<'a> {
    fn begin(is_resizing: &'a AtomicBool) -> Option<Self> {
        (!is_resizing.swap(true, Ordering::AcqRel)).then_some(Self(is_resizing))
    }
}

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Writer {
    /// Something is about to be written to `range`, perhaps beyond the end of the store: from now
    /// on that is zeroed, too, whether the write is done by then or not.
    #[inline]
    fn completes_last_sector(&self, range: GuestRange) {
        let end = range.end().bytes();
        if end > self.store_len.load(Ordering::Acquire) {
            self.store_len.fetch_max(end, Ordering::AcqRel);
        }
    }

    /// How much of `range` lies in the store, counted from its start: all of it, except in an
    /// incomplete last sector that nobody wrote to.
    fn bytes_there(&self, range: GuestRange) -> u64 {
        let end = range.end().bytes().min(self.store_len.load(Ordering::Acquire));
        end.saturating_sub(range.start().bytes())
    }

    fn check_latch(&self, store: &dyn Store) -> Result<()> {
        match self.latch.get() {
            None => Ok(()),
            Some(error) => {
                let name = store.name();
                let what = format!("{name} is no longer written, because a sync of it failed");
                Err(error.clone().wrap(what))
            }
        }
    }
}

async fn write_out_zeroes(store: &dyn Store, start: u64, len: u64) -> Result<()> {
    let mut at = start;
    let mut zeros = Buf::zeroed(usize::try_from(len.min(ZEROES_BYTES_MAX)).expect("small"));
    while at < start + len {
        let left = usize::try_from(start + len - at).unwrap_or(usize::MAX);
        zeros.truncate(left.min(zeros.len()));
        let count = zeros.len() as u64;
        let (result, buf) = store.write_at(zeros, HostOffset::new(at)).await;
        result?;
        zeros = buf;
        at += count;
    }
    Ok(())
}

fn opened_for_reading() -> Error {
    Error::new(ErrorKind::Denied, "the disk was opened for reading only")
}

pub(crate) fn check_range(range: GuestRange, geometry: Geometry) -> Result<()> {
    if range.end().bytes() <= geometry.len {
        return Ok(());
    }
    Err(beyond_the_end(range.start(), range.len()))
}

pub(crate) fn beyond_the_end(start: GuestOffset, len: u64) -> Error {
    let what = format!("{len} bytes at {start} are beyond the end of the disk");
    Error::new(ErrorKind::Invalid, what)
}

fn extent_at(start: GuestOffset, len: u64, kind: ExtentKind) -> Extent {
    let host = if kind.has_host() { HostOffset::new(start.bytes()) } else { HostOffset::ZERO };
    Extent { start, len, kind, layer: LayerNumber::BASE, host }
}

#[cfg(test)]
mod tests;

//! The kernel's requests, executed on an executor.
//!
//! Requests beyond the end are handled as by a block device: reads and writes are truncated, and a
//! write that begins at the end or beyond finds no space. Nothing changes the length of the disk.

use super::attributes::Access;
use super::export::Export;
use super::gate::Entered;
use super::stats::QueueStats;
use crate::discard::Discard;
use crate::sectors::{self, pieces};
use fuser::Errno;
use mica_block::{
    Disk, Error, ErrorKind, Extent, REQUEST_BYTES_MAX, Survey, Zeroes, read_extents, windows,
};
use mica_rt::{Buf, FallocateFlags, now, yield_now};
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// A request under way, on its executor.
pub(super) struct Task {
    pub(super) export: Arc<Export>,
    pub(super) entered: Entered,
    /// The index of the executor.
    pub(super) worker: usize,
}

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The request is invalid or unsupported.
    Refused(Errno),
    /// The disk failed.
    Failed(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

type Outcome<T> = std::result::Result<T, Failure>;

/// The target of an `lseek`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seek {
    Data,
    Hole,
}

/// When a write is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Durability {
    /// When it is done.
    Done,
    /// When it is durable, as requested when the file was opened (`O_SYNC`, `O_DSYNC`).
    Durable,
}

/// What `fallocate` does to a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FallocateMode {
    Punch,
    Zero,
}

impl Task {
    fn disk(&self) -> &dyn Disk {
        self.entered.disk()
    }

    fn disk_len(&self) -> u64 {
        self.disk().geometry().len
    }

    pub(super) fn stats(&self) -> &QueueStats {
        &self.export.stats[self.worker]
    }

    /// Counts and logs a failure, and returns its errno.
    pub(super) fn settle<T>(&self, outcome: Outcome<T>) -> std::result::Result<T, Errno> {
        outcome.map_err(|failure| match failure {
            Failure::Refused(errno) => {
                self.stats().refused.add(1);
                errno
            }
            Failure::Failed(error) => {
                self.stats().failed.add(1);
                if let Some(omitted) = self.export.failures.admit() {
                    tracing::warn!(?error, "a request of a FUSE file failed{omitted}");
                }
                errno_of(&error)
            }
        })
    }

    /// Reads `len` bytes at `at`, or as many as there are.
    pub(super) async fn read(&self, at: u64, len: u32) -> Outcome<Buf> {
        self.stats().reads.add(1);
        let began = now();
        let Some(range) = self.cut(at, len.into()) else { return Ok(Buf::new(0)) };
        let disk = self.disk();
        let extents = disk.plan(range, Vec::new()).finish().await?;
        let buf = Buf::new(usize::try_from(range.len()).expect("a request's length"));
        let read = read_extents(disk, &extents, buf).await?;
        self.stats().read_bytes.add(range.len());
        self.stats().latencies.read.add(began, now());
        Ok(read)
    }

    /// Writes `payload` at `at`, as far as there is room. Returns how many bytes it wrote.
    pub(super) async fn write(
        &self,
        at: u64,
        mut payload: Buf,
        durability: Durability,
    ) -> Outcome<u32> {
        self.must_be_writable()?;
        self.stats().writes.add(1);
        if payload.is_empty() {
            return Ok(0);
        }
        let began = now();
        let range = self.cut(at, payload.len() as u64).ok_or(Failure::Refused(Errno::ENOSPC))?;
        payload.truncate(usize::try_from(range.len()).expect("within the payload"));
        sectors::write(self.disk(), &self.export.edges, range, payload).await?;
        self.export.attributes.touch();
        self.stats().written_bytes.add(range.len());
        self.stats().latencies.write.add(began, now());
        if durability == Durability::Durable {
            self.flush().await?;
        }
        Ok(u32::try_from(range.len()).expect("within the payload"))
    }

    /// Makes durable what was acknowledged.
    pub(super) async fn flush(&self) -> Outcome<()> {
        self.stats().flushes.add(1);
        let began = now();
        self.disk().flush().await?;
        self.stats().latencies.flush.add(began, now());
        Ok(())
    }

    /// `fallocate(mode, at, len)`.
    pub(super) async fn fallocate(&self, at: u64, len: u64, mode: i32) -> Outcome<()> {
        self.must_be_writable()?;
        let mode = u32::try_from(mode).ok().and_then(FallocateFlags::from_bits);
        let keep = FallocateFlags::KEEP_SIZE;
        let is_inside = at.checked_add(len).is_some_and(|end| end <= self.disk_len());
        let wanted = match mode {
            Some(mode) if mode == FallocateFlags::PUNCH_HOLE | keep => FallocateMode::Punch,
            Some(mode) if mode == FallocateFlags::ZERO_RANGE | keep => FallocateMode::Zero,
            Some(FallocateFlags::ZERO_RANGE) if is_inside => FallocateMode::Zero,
            // Anything that would extend the disk.
            Some(mode) if mode.is_empty() || mode == FallocateFlags::ZERO_RANGE => {
                let errno = if is_inside { Errno::EOPNOTSUPP } else { Errno::ENOSPC };
                return Err(Failure::Refused(errno));
            }
            _ => return Err(Failure::Refused(Errno::EOPNOTSUPP)),
        };
        let stats = self.stats();
        let may_unmap = match wanted {
            FallocateMode::Punch => {
                stats.discards.add(1);
                self.export.discard == Discard::Unmap
            }
            FallocateMode::Zero => {
                stats.zeroes.add(1);
                false
            }
        };
        // Written out where the image has no mark for zeros: a hole has to read as zeros.
        let how = Zeroes { may_unmap, fast: false };
        match self.cut(at, len) {
            Some(range) => self.empty(range, how).await,
            None => Ok(()),
        }
    }

    async fn empty(&self, range: GuestRange, how: Zeroes) -> Outcome<()> {
        for piece in pieces(range) {
            if self.entered.is_closing() {
                return Err(Failure::Refused(Errno::ESHUTDOWN));
            }
            sectors::write_zeroes(self.disk(), &self.export.edges, piece, how).await?;
            self.export.attributes.touch();
            if piece.end() < range.end() {
                yield_now().await;
            }
        }
        Ok(())
    }

    /// The start of the next data, or the next hole, from `from` on. There is a hole at the end.
    pub(super) async fn seek(&self, from: i64, what: Seek) -> Outcome<i64> {
        let beyond = || Failure::Refused(Errno::ENXIO);
        let from = u64::try_from(from).map_err(|_| beyond())?;
        let end = self.disk_len();
        if from >= end {
            return Err(beyond());
        }
        let searched = GuestRange::between(GuestOffset::new(from), GuestOffset::new(end));
        for window in windows(searched.ok_or_else(beyond)?, REQUEST_BYTES_MAX) {
            if self.entered.is_closing() {
                return Err(Failure::Refused(Errno::ESHUTDOWN));
            }
            let mut survey = Survey::new(self.disk(), window);
            while let Some(extents) = survey.next().await? {
                let is_it = |extent: &&Extent| extent.kind.reads_as_zero() == (what == Seek::Hole);
                if let Some(found) = extents.iter().find(is_it) {
                    return offset_of(found.start.bytes());
                }
            }
            // A large disk has many windows: other tasks run between them.
            yield_now().await;
        }
        if what == Seek::Hole { offset_of(end) } else { Err(beyond()) }
    }

    fn must_be_writable(&self) -> Outcome<()> {
        match self.export.attributes.access() {
            Access::ReadWrite => Ok(()),
            Access::Read => Err(Failure::Refused(Errno::EROFS)),
        }
    }

    /// The part of `len` bytes at `at` that is on the disk.
    fn cut(&self, at: u64, len: u64) -> Option<GuestRange> {
        let len = self.disk_len().checked_sub(at)?.min(len);
        GuestRange::new(GuestOffset::new(at), len).filter(|range| !range.is_empty())
    }
}

fn offset_of(at: u64) -> Outcome<i64> {
    i64::try_from(at).map_err(|_| Failure::Refused(Errno::EOVERFLOW))
}

fn errno_of(error: &Error) -> Errno {
    match error.kind() {
        ErrorKind::NoSpace => Errno::ENOSPC,
        ErrorKind::Denied => Errno::EROFS,
        ErrorKind::Unsupported => Errno::EOPNOTSUPP,
        ErrorKind::Invalid => Errno::EINVAL,
        // The usual error of a disk that cannot be read or written.
        _ => Errno::EIO,
    }
}

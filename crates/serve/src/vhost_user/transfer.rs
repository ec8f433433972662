//! Reads and writes between a disk and pieces of guest memory, in place where possible.
//!
//! A transfer goes in windows, so that what it holds is bounded: by its window, and by what the
//! queue may hold for it ([`Cost`]). Other tasks run between two windows. Within a window
//! each part that is one extent and one piece is one operation on the guest's own memory. Where a
//! driver divides its memory so that pieces are not whole sectors, or so finely that an operation
//! each would cost more than a copy, the window goes through one of our own buffers.

use super::chain::{DESCRIPTORS_MAX, Piece};
use super::memory::Memory;
use mica_block::{Disk, Error, ErrorKind, Extent, Result, read_extents};
use mica_rt::{Buf, yield_now};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use vm_memory::Address;

/// Maximum number of bytes under way for one request.
const WINDOW_BYTES: usize = 1 << 20;
/// Bytes under way where there is little room.
const WINDOW_BYTES_MIN: usize = 128 << 10;
/// Maximum number of pieces of a window that are operations of their own.
const PIECES_MAX: usize = 8;

/// Memory of this process that one request takes.
#[derive(Clone, Copy)]
pub(super) struct Cost {
    /// For the list of its pieces, as received and as divided.
    pieces: usize,
    /// For a window that goes through a buffer.
    window: usize,
}

impl Cost {
    /// Of a transfer of `len` bytes between the disk and `pieces` of `memory`.
    pub(super) fn of(len: u64, pieces: &[Piece], memory: &Memory) -> Self {
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        // What a piece is divided into, where regions meet, need not be whole sectors.
        let is_direct = is_direct(pieces) && pieces.iter().all(|piece| memory.is_in_one(*piece));
        let window = if is_direct { 0 } else { len.min(WINDOW_BYTES) };
        Self { pieces: pieces.len() * PIECE_COST, window }
    }

    pub(super) fn bytes(self) -> usize {
        self.pieces + self.window
    }

    /// How long a window may be where there are `bytes` for all of it.
    pub(super) fn window_within(self, bytes: usize) -> u64 {
        let window = bytes.saturating_sub(self.pieces).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES);
        // Whole pages: a window ends with a sector.
        (window / 4096 * 4096) as u64
    }
}

/// What a queue needs for the largest request, window by window.
pub(super) const COST_MIN: usize = DESCRIPTORS_MAX as usize * PIECE_COST + WINDOW_BYTES_MIN;

/// A piece is in the chain, in the request, and in what that is divided into.
const PIECE_COST: usize = 3 * size_of::<Piece>();

/// Reads `range` into `pieces`, which are as long, in windows of `window_bytes`.
pub(super) async fn read(
    disk: &dyn Disk,
    memory: &Memory,
    (range, pieces): (GuestRange, Vec<Piece>),
    window_bytes: u64,
) -> Result<()> {
    let first = range.start();
    let mut windows = Windows::new(memory, (range, pieces), window_bytes);
    while let Some((range, pieces)) = windows.next()? {
        if range.start() > first {
            yield_now().await;
        }
        let extents = disk.plan(range, Vec::new()).finish().await?;
        let mut bufs = bufs_of(memory, &pieces)?;
        if is_direct(&pieces) {
            read_into(disk, &extents, bufs).await?;
            continue;
        }
        let mut read = read_extents(disk, &extents, Buf::new(bytes_len(range.len()))).await?;
        for buf in &mut bufs {
            let count = buf.len();
            buf.put(0, read.get(..count).ok_or_else(too_short)?);
            read.advance(count);
        }
    }
    Ok(())
}

/// Reads `extents` into `bufs`, which are as long together.
async fn read_into(disk: &dyn Disk, extents: &[Extent], bufs: Vec<Buf>) -> Result<()> {
    let mut reads = Vec::new();
    let mut bufs = bufs.into_iter();
    let mut buf = Buf::new(0);
    for extent in extents {
        let mut at = extent.start;
        let end = extent.range().end();
        while at < end {
            if buf.is_empty() {
                buf = bufs.next().ok_or_else(too_short)?;
            }
            let count = (buf.len() as u64).min(end.bytes() - at.bytes());
            let part = GuestRange::new(at, count).and_then(|range| extent.within(range));
            let part = part.ok_or_else(too_short)?;
            reads.push(
                disk.read(&part, buf.split_to(usize::try_from(count).expect("within a buffer"))),
            );
            at = part.range().end();
        }
    }
    mica_rt::join_all(reads).await.into_iter().try_for_each(|(result, _)| result)
}

/// Writes `pieces` to `range`, which is as long, in windows of `window_bytes`.
pub(super) async fn write(
    disk: &dyn Disk,
    memory: &Memory,
    (range, pieces): (GuestRange, Vec<Piece>),
    window_bytes: u64,
) -> Result<()> {
    let first = range.start();
    let mut windows = Windows::new(memory, (range, pieces), window_bytes);
    while let Some((range, pieces)) = windows.next()? {
        if range.start() > first {
            yield_now().await;
        }
        let bufs = bufs_of(memory, &pieces)?;
        let bufs = match is_direct(&pieces) {
            true => bufs,
            false => {
                let mut whole = Buf::new(bytes_len(range.len()));
                let mut done = 0;
                for buf in bufs {
                    whole.put(done, &buf);
                    done += buf.len();
                }
                if memory.is_lost() {
                    let what = "the guest's memory is gone";
                    return Err(Error::new(ErrorKind::Io, what));
                }
                vec![whole]
            }
        };
        let mut at = range.start();
        let mut writes = Vec::with_capacity(bufs.len());
        for buf in bufs {
            let next = at.checked_add(buf.len() as u64).ok_or_else(too_short)?;
            writes.push(disk.write(at, buf));
            at = next;
        }
        let results = mica_rt::join_all(writes).await;
        results.into_iter().try_for_each(|(result, _)| result)?;
    }
    Ok(())
}

/// Whether each piece may be an operation of its own.
fn is_direct(pieces: &[Piece]) -> bool {
    let is_whole = |piece: &Piece| u64::from(piece.len).is_multiple_of(SECTOR_BYTES);
    pieces.len() <= PIECES_MAX && pieces.iter().all(is_whole)
}

/// The guest's bytes themselves.
fn bufs_of(memory: &Memory, pieces: &[Piece]) -> Result<Vec<Buf>> {
    let buf = |piece: &Piece| {
        memory.buf(*piece).ok_or_else(|| {
            let context = format!("{} bytes at {:#x} are not guest memory", piece.len, piece.at.0);
            Error::new(ErrorKind::Invalid, context)
        })
    };
    pieces.iter().map(buf).collect()
}

/// Divides a transfer.
struct Windows {
    window_bytes: u64,
    at: GuestOffset,
    end: GuestOffset,
    pieces: std::vec::IntoIter<Piece>,
    rest: Option<Piece>,
}

impl Windows {
    fn new(memory: &Memory, (range, pieces): (GuestRange, Vec<Piece>), window_bytes: u64) -> Self {
        let pieces = memory.divide(pieces).into_iter();
        Self { window_bytes, at: range.start(), end: range.end(), pieces, rest: None }
    }

    fn next(&mut self) -> Result<Option<(GuestRange, Vec<Piece>)>> {
        if self.at >= self.end {
            return Ok(None);
        }
        let len = (self.end.bytes() - self.at.bytes()).min(self.window_bytes);
        let mut left = len;
        let mut pieces = Vec::new();
        while left > 0 {
            let piece = self.rest.take().or_else(|| self.pieces.next()).ok_or_else(too_short)?;
            let count = u32::try_from(left).unwrap_or(u32::MAX).min(piece.len);
            pieces.push(Piece { at: piece.at, len: count });
            if count < piece.len {
                let at = piece.at.checked_add(u64::from(count)).ok_or_else(too_short)?;
                self.rest = Some(Piece { at, len: piece.len - count });
            }
            left -= u64::from(count);
        }
        let range = GuestRange::new(self.at, len).ok_or_else(too_short)?;
        self.at = range.end();
        Ok(Some((range, pieces)))
    }
}

fn bytes_len(len: u64) -> usize {
    usize::try_from(len).expect("within a window")
}

/// A request and the memory for it contradict each other.
fn too_short() -> Error {
    Error::new(ErrorKind::Invalid, "a request and its buffer differ in length")
}

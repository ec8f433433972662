//! Requests that change the disk or make changes durable, beyond the plain write, which the session
//! does by itself.
//!
//! Clients may change single bytes: the export's minimum is 1, because there are clients that ask
//! for it where they copy a file of odd length. The disk changes whole sectors; [`super::edges`]
//! says how neighbours in one sector do not lose each other's bytes.
//!
//! Zeros and discards of up to 4 GiB are divided into pieces that need no memory of their own, one
//! after the other. A request with FUA is answered after a flush: NBD asks for this request's bytes
//! only, the disk flushes all there is, together with whoever else waits for a flush.

use super::limits::PIECE_BYTES;
use super::protocol::ErrorCode;
use super::shared::{Charge, Failure, Shared};
use mica_block::{Detail, Disk, ErrorKind, Zeroes};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use std::rc::Rc;

/// When a change is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// When it is done.
    Done,
    /// When it is durable (`NBD_CMD_FLAG_FUA`).
    Durable,
}

/// A write that was found valid.
#[derive(Clone, Copy)]
pub(super) struct Write {
    pub(super) cookie: u64,
    pub(super) range: GuestRange,
    pub(super) answer: Answer,
}

/// A request that changes the disk without a payload, found valid.
#[derive(Clone, Copy)]
pub(super) struct Change {
    pub(super) cookie: u64,
    pub(super) kind: ChangeKind,
    pub(super) answer: Answer,
}

/// What it does.
#[derive(Clone, Copy)]
pub(super) enum ChangeKind {
    Flush,
    Zeroes(GuestRange, Zeroes),
    Discard(GuestRange),
}

/// What a long request did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// Read so many bytes; its reply is put.
    Read(u64),
    /// Told something; its reply is put.
    Told,
    /// Wrote so many bytes.
    Written(u64),
    Flushed,
    Zeroed,
    Discarded,
}

/// Whether `range` consists of whole sectors.
#[inline]
pub(super) fn is_whole(range: GuestRange) -> bool {
    (range.start().bytes() | range.len()).is_multiple_of(SECTOR_BYTES)
}

/// Does `write`, whose bytes are `payload`, where that is more than one call of the disk.
pub(super) async fn write_long<'a>(
    shared: Rc<Shared<'a>>,
    write: Write,
    payload: Buf,
    charge: Charge<'a>,
) -> Result<Outcome, Failure> {
    let (disk, edges, range) = (shared.disk, shared.edges, write.range);
    let at = range.start();
    let result = if is_whole(range) {
        let _sharing = edges.share().await;
        write_whole(disk, at, payload).await
    } else {
        let _alone = edges.alone().await;
        write_parts(disk, range, &payload).await
    };
    drop(charge);
    result.map_err(|error| Failure::at(error, at))?;
    if write.answer == Answer::Durable {
        flush(disk, at).await?;
    }
    Ok(Outcome::Written(range.len()))
}

async fn write_whole(disk: &dyn Disk, at: GuestOffset, buf: Buf) -> mica_block::Result<()> {
    let _in_flight = disk.enter();
    disk.write(at, buf).await.0
}

/// Writes `bytes` to `range`, which cuts sectors: their other bytes are read and written back.
async fn write_parts(disk: &dyn Disk, range: GuestRange, bytes: &[u8]) -> mica_block::Result<()> {
    let (start, end) = (range.start().bytes(), range.end().bytes());
    let first = start - start % SECTOR_BYTES;
    // The disk ends with a whole sector.
    let outer_len = end.next_multiple_of(SECTOR_BYTES) - first;
    let last = first + outer_len - SECTOR_BYTES;
    let mut buf = Buf::new(usize::try_from(outer_len).expect("a payload and a bit"));
    let at = |offset: u64| usize::try_from(offset - first).expect("within the buffer");
    if start != first {
        buf[..SECTOR].copy_from_slice(&read_sector(disk, first).await?);
    }
    if !end.is_multiple_of(SECTOR_BYTES) && (last != first || start == first) {
        buf[at(last)..].copy_from_slice(&read_sector(disk, last).await?);
    }
    buf[at(start)..at(end)].copy_from_slice(bytes);
    write_whole(disk, GuestOffset::new(first), buf).await
}

async fn read_sector(disk: &dyn Disk, at: u64) -> mica_block::Result<Buf> {
    let _in_flight = disk.enter();
    let range = GuestRange::new(GuestOffset::new(at), SECTOR_BYTES).expect("on the disk");
    let mut extents = Vec::new();
    disk.plan(range, Detail::Read, &mut extents).finish().await?;
    let mut left = Buf::new(SECTOR);
    let mut sector = left.split_to(0);
    for extent in extents {
        let part = left.split_to(usize::try_from(extent.len).expect("within a sector"));
        let (result, part) = disk.read(&extent, part).await;
        result?;
        sector.join(part);
    }
    assert!(left.is_empty(), "a plan covers what was asked");
    Ok(sector)
}

/// Does `change`.
pub(super) async fn change<'a>(
    shared: Rc<Shared<'a>>,
    change: Change,
    charge: Charge<'a>,
) -> Result<Outcome, Failure> {
    let disk = shared.disk;
    let (outcome, at) = match change.kind {
        ChangeKind::Flush => {
            disk.flush().await.map_err(Failure::whole)?;
            return Ok(Outcome::Flushed);
        }
        ChangeKind::Zeroes(range, how) => {
            write_zeroes(&shared, range, how).await?;
            (Outcome::Zeroed, range.start())
        }
        ChangeKind::Discard(range) => {
            discard(&shared, range).await?;
            (Outcome::Discarded, range.start())
        }
    };
    drop(charge);
    if change.answer == Answer::Durable {
        flush(disk, at).await?;
    }
    Ok(outcome)
}

/// For a request whose range starts at `at`.
async fn flush(disk: &dyn Disk, at: GuestOffset) -> Result<(), Failure> {
    disk.flush().await.map_err(|error| Failure::at(error, at))
}

async fn write_zeroes(shared: &Shared<'_>, range: GuestRange, how: Zeroes) -> Result<(), Failure> {
    let Shared { disk, edges, .. } = *shared;
    let mut at = range.start();
    while at < range.end() {
        let piece = next_piece(at, range.end());
        let result = if is_whole(piece) {
            let (_sharing, _in_flight) = (edges.share().await, disk.enter());
            disk.write_zeroes(piece, how).await
        } else {
            let _alone = edges.alone().await;
            let zeros = Buf::zeroed(usize::try_from(piece.len()).expect("less than a sector"));
            write_parts(disk, piece, &zeros).await
        };
        result.map_err(|error| {
            let is_slow = how.fast && error.kind() == ErrorKind::Unsupported;
            let failure = Failure::at(error, at);
            // "NBD_CMD_FLAG_FAST_ZERO": the client writes them itself, or asks without the flag.
            Failure { code: if is_slow { ErrorCode::NotSup } else { failure.code }, ..failure }
        })?;
        at = piece.end();
    }
    Ok(())
}

/// Discards the whole sectors of `range`.
async fn discard(shared: &Shared<'_>, range: GuestRange) -> Result<(), Failure> {
    let Shared { disk, edges, .. } = *shared;
    let mut at = range.start();
    while at < range.end() {
        let piece = next_piece(at, range.end());
        if is_whole(piece) {
            let (_sharing, _in_flight) = (edges.share().await, disk.enter());
            disk.discard(piece).await.map_err(|error| Failure::at(error, at))?;
        }
        at = piece.end();
    }
    Ok(())
}

/// The next piece of what ends at `end`: whole sectors, or a part of one.
fn next_piece(at: GuestOffset, end: GuestOffset) -> GuestRange {
    let unit = if at.bytes().is_multiple_of(SECTOR_BYTES) { PIECE_BYTES } else { SECTOR_BYTES };
    let boundary = (at.bytes() / unit + 1).checked_mul(unit).map_or(end, GuestOffset::new);
    let last = end.bytes() - end.bytes() % SECTOR_BYTES;
    let stop = match boundary.min(end) {
        // The last sector is only begun: it is a piece of its own.
        stop if stop == end && at.bytes() < last => GuestOffset::new(last),
        stop => stop,
    };
    GuestRange::between(at, stop).expect("a piece starts before its end")
}

/// Bytes of a sector, as a length in memory.
const SECTOR: usize = 512;

#[cfg(test)]
mod tests;

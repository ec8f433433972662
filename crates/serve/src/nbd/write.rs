//! Requests that change the disk or make changes durable, beyond the plain write, which the session
//! does by itself.
//!
//! Zeros and discards of up to 4 GiB are divided into pieces that need no memory of their own, one
//! after the other. A request with FUA is answered after a flush: NBD asks for this request's bytes
//! only, the disk flushes all there is, together with whoever else waits for a flush.

use super::limits::PIECE_BYTES;
use super::protocol::ErrorCode;
use super::shared::{Charge, Failure, Shared};
use mica_block::{Disk, ErrorKind, InFlight, Writing, Zeroes};
use mica_units::{GuestOffset, GuestRange};
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

/// Waits for `writing`, then makes it durable.
pub(super) async fn write_durably<'a>(
    shared: Rc<Shared<'a>>,
    range: GuestRange,
    writing: Writing<'a>,
    in_flight: InFlight<'a>,
    charge: Charge<'a>,
) -> Result<Outcome, Failure> {
    let at = range.start();
    let (result, buf) = writing.await;
    drop((in_flight, buf, charge));
    result.map_err(|error| Failure::at(error, at))?;
    flush(shared.disk, at).await?;
    Ok(Outcome::Written(range.len()))
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
            flush(disk, GuestOffset::ZERO).await?;
            return Ok(Outcome::Flushed);
        }
        ChangeKind::Zeroes(range, how) => {
            write_zeroes(disk, range, how).await?;
            (Outcome::Zeroed, range.start())
        }
        ChangeKind::Discard(range) => {
            discard(disk, range).await?;
            (Outcome::Discarded, range.start())
        }
    };
    drop(charge);
    if change.answer == Answer::Durable {
        flush(disk, at).await?;
    }
    Ok(outcome)
}

async fn flush(disk: &dyn Disk, at: GuestOffset) -> Result<(), Failure> {
    disk.flush().await.map_err(|error| Failure::at(error, at))
}

async fn write_zeroes(disk: &dyn Disk, range: GuestRange, how: Zeroes) -> Result<(), Failure> {
    let mut at = range.start();
    while at < range.end() {
        let piece = next_piece(at, range.end());
        let _in_flight = disk.enter();
        disk.write_zeroes(piece, how).await.map_err(|error| {
            let is_slow = how.fast && error.kind() == ErrorKind::Unsupported;
            let failure = Failure::at(error, at);
            // "NBD_CMD_FLAG_FAST_ZERO": the client writes them itself, or asks without the flag.
            Failure { code: if is_slow { ErrorCode::NotSup } else { failure.code }, ..failure }
        })?;
        at = piece.end();
    }
    Ok(())
}

async fn discard(disk: &dyn Disk, range: GuestRange) -> Result<(), Failure> {
    let mut at = range.start();
    while at < range.end() {
        let piece = next_piece(at, range.end());
        let _in_flight = disk.enter();
        disk.discard(piece).await.map_err(|error| Failure::at(error, at))?;
        at = piece.end();
    }
    Ok(())
}

fn next_piece(at: GuestOffset, end: GuestOffset) -> GuestRange {
    let boundary = (at.bytes() / PIECE_BYTES + 1).checked_mul(PIECE_BYTES);
    let boundary = boundary.map_or(end, GuestOffset::new);
    GuestRange::between(at, boundary.min(end)).expect("a piece starts before its end")
}

#[cfg(test)]
mod tests;

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

use super::protocol::ErrorCode;
use super::shared::{Charge, Failure, Shared};
pub(super) use crate::sectors::is_whole;
use crate::sectors::{self, next_piece};
use mica_block::{Disk, ErrorKind, Zeroes};
use mica_rt::Buf;
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

/// Does `write`, whose bytes are `payload`, where that is more than one call of the disk.
pub(super) async fn write_long<'a>(
    shared: Rc<Shared<'a>>,
    write: Write,
    payload: Buf,
    charge: Charge<'a>,
) -> Result<Outcome, Failure> {
    let (disk, range) = (shared.disk, write.range);
    let at = range.start();
    let result = sectors::write(disk, shared.edges, range, payload).await;
    drop(charge);
    result.map_err(|error| Failure::at(error, at))?;
    if write.answer == Answer::Durable {
        flush(disk, at).await?;
    }
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
        sectors::write_zeroes(disk, edges, piece, how).await.map_err(|error| {
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

#[cfg(test)]
mod tests;

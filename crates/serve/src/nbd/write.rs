//! Requests that change the disk or make changes durable, beyond the plain write, which the session
//! does by itself.
//!
//! Clients may change single bytes: the export's minimum is 1, because there are clients that ask
//! for it where they copy a file of odd length. The disk changes whole sectors;
//! [`crate::sectors`] says how neighbours in one sector do not lose each other's bytes.
//!
//! A write whose payload is more than the session may hold is **divided**: its pieces are written
//! as they arrive, and it is answered once, when the last of them is done. A client that goes away
//! in between leaves a part of it written, as with any write that was not answered.
//!
//! Zeros and discards of up to 4 GiB are divided into pieces that need no memory of their own, one
//! after the other. A request with FUA is answered after a flush: NBD asks for this request's bytes
//! only, the disk flushes everything, together with all others that wait for a flush.

use super::limits::{PIECE_ALIGN, PIECE_BYTES};
use super::protocol::ErrorCode;
use super::shared::{Charge, Failure, Shared};
pub(super) use crate::sectors::is_whole;
use crate::sectors::{self, pieces};
use mica_block::{Disk, ErrorKind, Zeroes};
use mica_rt::{Buf, yield_now};
use mica_units::{GuestOffset, GuestRange};
use std::cell::{Cell, RefCell};
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
    /// Read this many bytes; its reply is queued.
    Read(u64),
    /// Answered something; its reply is put.
    Answered,
    /// Wrote a piece; another one answers for all.
    Piece,
    /// Wrote this many bytes.
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

/// A write that is done piece by piece, as its payload arrives.
pub(super) struct Divided {
    write: Write,
    /// Where the next piece begins.
    at: Cell<GuestOffset>,
    /// Pieces that are being written, and one until the last has arrived.
    left: Cell<usize>,
    /// Why the first piece failed that did.
    failure: RefCell<Option<Failure>>,
}

impl Divided {
    pub(super) fn new(write: Write) -> Rc<Self> {
        let at = Cell::new(write.range.start());
        Rc::new(Self { write, at, left: Cell::new(1), failure: RefCell::default() })
    }

    /// What has not begun to arrive.
    pub(super) fn rest(&self) -> GuestRange {
        GuestRange::between(self.at.get(), self.write.range.end()).expect("within the request")
    }

    /// Whether what is still to come is not worth writing.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    pub(super) fn cookie(&self) -> u64 {
        self.write.cookie
    }

    /// Takes the next piece, for which there are `bytes` of room.
    pub(super) fn next_piece(&self, bytes: usize) -> GuestRange {
        let rest = self.rest();
        let (start, end) = (rest.start().bytes(), rest.end().bytes());
        let len = if is_whole(rest) { bytes } else { bytes / 2 };
        let most = start + len.min(PIECE_BYTES) as u64;
        let stop = if most >= end { end } else { most / PIECE_ALIGN * PIECE_ALIGN };
        assert!(stop > start, "a share has room for more than that");
        self.at.set(GuestOffset::new(stop));
        if stop < end {
            self.left.set(self.left.get() + 1);
        }
        GuestRange::between(rest.start(), GuestOffset::new(stop)).expect("it goes on")
    }

    /// Takes the rest, which is not written. Gives its length.
    pub(super) fn skip_rest(&self) -> usize {
        let rest = self.rest();
        self.at.set(rest.end());
        usize::try_from(rest.len()).expect("within a payload")
    }
}

/// Writes a piece of `write`, or nothing where the last that arrived is skipped.
/// Whichever piece is done last answers for all.
pub(super) async fn write_piece<'a>(
    shared: Rc<Shared<'a>>,
    write: Rc<Divided>,
    piece: Option<(GuestRange, Buf, Charge<'a>)>,
) -> Result<Outcome, Failure> {
    if let Some((range, payload, charge)) = piece {
        let at = range.start();
        if let Err(error) = sectors::write(shared.disk, shared.edges, range, payload).await {
            write.failure.borrow_mut().get_or_insert(Failure::at(error, at));
        }
        drop(charge);
    }
    let left = write.left.get() - 1;
    write.left.set(left);
    if left > 0 {
        return Ok(Outcome::Piece);
    }
    if let Some(failure) = write.failure.take() {
        return Err(failure);
    }
    let Write { range, answer, .. } = write.write;
    if answer == Answer::Durable {
        flush(shared.disk, range.start()).await?;
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

/// Flushes for a request whose range starts at `at`.
async fn flush(disk: &dyn Disk, at: GuestOffset) -> Result<(), Failure> {
    disk.flush().await.map_err(|error| Failure::at(error, at))
}

async fn write_zeroes(shared: &Shared<'_>, range: GuestRange, how: Zeroes) -> Result<(), Failure> {
    let Shared { disk, edges, .. } = *shared;
    for piece in pieces(range) {
        sectors::write_zeroes(disk, edges, piece, how).await.map_err(|error| {
            let is_slow = how.fast && error.kind() == ErrorKind::Unsupported;
            let failure = Failure::at(error, piece.start());
            // "NBD_CMD_FLAG_FAST_ZERO": the client writes them itself, or asks without the flag.
            Failure { code: if is_slow { ErrorCode::NotSup } else { failure.code }, ..failure }
        })?;
        if piece.end() < range.end() {
            // Other tasks run between the pieces.
            yield_now().await;
        }
    }
    Ok(())
}

/// Discards the whole sectors of `range`.
async fn discard(shared: &Shared<'_>, range: GuestRange) -> Result<(), Failure> {
    let Shared { disk, edges, .. } = *shared;
    for piece in pieces(range) {
        if is_whole(piece) {
            let _sharing = edges.share().await;
            disk.discard(piece).await.map_err(|error| Failure::at(error, piece.start()))?;
        }
        if piece.end() < range.end() {
            yield_now().await;
        }
    }
    Ok(())
}

#[cfg(test)]
mod scarce;
#[cfg(test)]
mod tests;

//! What came of a request so far, and where its outcome goes.
//!
//! Invariant
//! - R1 A reply has a bounded number of chunks, and each takes bounded work: one that adds nothing,
//!   or says again what was said, is refused. Only errors may come several times, as they do if
//!   several places of a request cannot be read, and there is a maximum of those.

use super::{Part, broken, parts};
use futures_channel::oneshot::Sender;
use mica_block::{Error, Result};
use mica_rt::Buf;
use std::ops::Range;
use std::sync::Arc;

/// Ranges of a buffer that have come, apart from each other. Servers send most in order.
const RANGES_MAX: usize = 4096;
/// Errors of one reply.
const ERRORS_MAX: u32 = 4096;

/// The reply to one request, until it is complete.
pub(super) enum Reply {
    Read(ReadReply),
    Status(StatusReply),
}

/// To a read.
pub(super) struct ReadReply {
    pub(super) at: u64,
    pub(super) buf: Buf,
    /// What came of it: in order, apart from each other (I3).
    got: Vec<Range<usize>>,
    errors: Errors,
    answer: Sender<(Result<()>, Buf)>,
}

/// To a question for the status.
pub(super) struct StatusReply {
    contexts: Arc<[u32]>,
    len: u64,
    told: Vec<Option<Vec<(u64, u32)>>>,
    errors: Errors,
    answer: Sender<Result<Vec<Part>>>,
}

/// What the server reports for a request.
#[derive(Default)]
struct Errors {
    first: Option<Error>,
    count: u32,
}

impl ReadReply {
    pub(super) fn new(at: u64, buf: Buf, answer: Sender<(Result<()>, Buf)>) -> Self {
        Self { at, buf, got: Vec::new(), errors: Errors::default(), answer }
    }

    /// Where in the buffer the `len` bytes at `at` of the export belong, which come now.
    pub(super) fn place(&mut self, at: u64, len: u32) -> Result<Range<usize>> {
        let start = at.checked_sub(self.at).and_then(|start| usize::try_from(start).ok());
        let end = start.zip(usize::try_from(len).ok()).and_then(|(at, len)| at.checked_add(len));
        let (Some(start), Some(end)) = (start, end.filter(|end| *end <= self.buf.len())) else {
            return Err(broken("the server sends data from another offset"));
        };
        let place = start..end;
        if place.is_empty() {
            return Err(broken("the server sends no data"));
        }
        let after = self.got.partition_point(|got| got.start < start);
        let overlaps = |got: Option<&Range<usize>>| {
            got.is_some_and(|got| got.start < place.end && place.start < got.end)
        };
        if overlaps(self.got.get(after)) || overlaps(self.got[..after].last()) {
            return Err(broken("the server sends data twice"));
        }
        let ranges = self.got.len();
        match self.got[..after].last_mut().filter(|before| before.end == start) {
            Some(before) => before.end = end,
            None if ranges >= RANGES_MAX => {
                return Err(broken("the server sends data in too many pieces"));
            }
            None => self.got.insert(after, place.clone()),
        }
        let joined = self.got.partition_point(|got| got.start < end);
        if let Some(next) = self.got.get(joined).filter(|next| next.start == end) {
            self.got[joined - 1].end = next.end;
            self.got.remove(joined);
        }
        Ok(place)
    }

    fn is_whole(&self) -> bool {
        let len = self.buf.len();
        len == 0 || matches!(&*self.got, [all] if all.start == 0 && all.end == len)
    }
}

impl StatusReply {
    pub(super) fn new(contexts: Arc<[u32]>, len: u64, answer: Sender<Result<Vec<Part>>>) -> Self {
        let told = vec![None; contexts.len()];
        Self { contexts, len, told, errors: Errors::default(), answer }
    }

    /// What the context `id` says.
    pub(super) fn tell(&mut self, id: u32, parts: Vec<(u64, u32)>) -> Result<()> {
        let context = self.contexts.iter().position(|context| *context == id);
        let context = context.ok_or_else(|| broken("a block status of another context"))?;
        match self.told[context].replace(parts) {
            None => Ok(()),
            Some(_) => Err(broken("the server sends a status twice")),
        }
    }
}

impl Reply {
    /// The server reports `error` for the request, whatever else comes.
    ///
    /// # Errors
    /// If it has reported too many.
    pub(super) fn note(&mut self, error: Error) -> Result<()> {
        let (Self::Read(ReadReply { errors, .. }) | Self::Status(StatusReply { errors, .. })) =
            self;
        errors.first.get_or_insert(error);
        errors.count += 1;
        match errors.count <= ERRORS_MAX {
            true => Ok(()),
            false => Err(broken("the server reports too many errors for one request")),
        }
    }

    /// Everything has come: hands the outcome to the task that waits for it, unless that is gone.
    ///
    /// # Errors
    /// If it is not complete, which is then the outcome, too.
    pub(super) fn complete(self) -> Result<()> {
        match self {
            Self::Read(mut reply) => {
                let outcome = match reply.errors.first.take() {
                    Some(error) => Err(error),
                    None if !reply.is_whole() => {
                        let error = broken("the server sends too few bytes");
                        let _ = reply.answer.send((Err(error.clone()), reply.buf));
                        return Err(error);
                    }
                    None => Ok(()),
                };
                let _ = reply.answer.send((outcome, reply.buf));
                Ok(())
            }
            Self::Status(mut reply) => {
                if let Some(error) = reply.errors.first.take() {
                    let _ = reply.answer.send(Err(error));
                    return Ok(());
                }
                let told: Option<Vec<_>> = reply.told.into_iter().collect();
                let told = told.ok_or_else(|| broken("a block status lacks a context"));
                let parts = told.and_then(|told| parts::merged(&told, reply.len));
                let failed = parts.as_ref().err().cloned();
                let _ = reply.answer.send(parts);
                failed.map_or(Ok(()), Err)
            }
        }
    }

    /// Nothing more comes.
    pub(super) fn fail(self, error: Error) {
        match self {
            Self::Read(reply) => {
                let _ = reply.answer.send((Err(error), reply.buf));
            }
            Self::Status(reply) => {
                let _ = reply.answer.send(Err(error));
            }
        }
    }
}

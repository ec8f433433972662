//! A request in flight, and how it is driven.

use crate::vhost_user::chain::Piece;
use crate::vhost_user::memory::Memory;
use mica_block::{InFlight, IoFuture, LocalFuture, Result, Writing};
use mica_rt::Instant;
use mica_rt::sync::Sharing;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use vm_memory::GuestAddress;

/// A request in flight.
pub(super) struct Slot<'a> {
    pub(super) head: u16,
    pub(super) status_at: GuestAddress,
    /// What the device writes of the guest's memory.
    pub(super) written: Vec<Piece>,
    pub(super) memory: Arc<Memory>,
    pub(super) kind: Kind,
    pub(super) began: Instant,
    /// Memory that is used for it.
    pub(super) cost: usize,
    pub(super) work: Work<'a>,
}

/// What is timed apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    Other,
}

pub(super) enum Work<'a> {
    Read {
        io: IoFuture,
        _in_flight: InFlight<'a>,
    },
    Write {
        io: Writing<'a>,
        _sharing: Option<Sharing<'a>>,
    },
    Long(LocalFuture<'a, Result<()>>),
    /// A discard, or a write of zeros.
    Empty(LocalFuture<'a, Result<Progress>>),
}

/// How far a request got that did not fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    Done,
    /// The server ends, and did not wait for the rest.
    LeftOff,
}

impl Work<'_> {
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Progress>> {
        let done = |result: Result<()>| result.map(|()| Progress::Done);
        match self {
            Self::Read { io, .. } => Pin::new(io).poll(context).map(|(result, _)| done(result)),
            Self::Write { io, .. } => Pin::new(io).poll(context).map(|(result, _)| done(result)),
            Self::Long(future) => future.as_mut().poll(context).map(done),
            Self::Empty(future) => future.as_mut().poll(context),
        }
    }
}

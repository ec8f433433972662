//! The requests of a session that are in flight.

use super::super::limits::SLOTS_MAX;
use super::super::shared::{Charge, Failure};
use super::super::write::Outcome;
use crate::wake::WakeSet;
use mica_block::{InFlight, IoFuture, LocalFuture, Result, Writing};
use mica_rt::sync::Sharing;
use mica_rt::{Buf, Instant};
use mica_units::{GuestOffset, GuestRange};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A request in flight. Each read holds its [`InFlight`] until its last I/O is
/// done.
pub(super) enum Work<'a> {
    None,
    /// A read of one extent, which is nearly every read: nothing is allocated for it but its data.
    Read {
        io: IoFuture,
        cookie: u64,
        offset: GuestOffset,
        _held: (Charge<'a>, InFlight<'a>),
    },
    /// A write that is over when the disk has taken it, which is nearly every write.
    Write {
        io: Writing<'a>,
        cookie: u64,
        range: GuestRange,
        _held: (Charge<'a>, Sharing<'a>),
    },
    /// Anything longer. One that changes the disk is completed, whatever the client does.
    Long {
        future: LocalFuture<'a, std::result::Result<Outcome, Failure>>,
        cookie: u64,
        changes: bool,
    },
}

/// A request that is done, and when it began.
pub(super) type Timed = (Finished, Instant);

/// How a request ended.
pub(super) enum Finished {
    Read { cookie: u64, offset: GuestOffset, result: Result<()>, buf: Buf },
    Write { cookie: u64, range: GuestRange, result: Result<()> },
    Long { cookie: u64, result: std::result::Result<Outcome, Failure> },
}

/// A request in flight, or the room for one.
struct Slot<'a> {
    waker: Waker,
    began: Instant,
    work: Work<'a>,
}

/// Room for [`SLOTS_MAX`] requests; slots are made when they are first needed.
pub(super) struct Slots<'a> {
    list: Vec<Slot<'a>>,
    free: Vec<usize>,
    wake_set: Arc<WakeSet>,
}

impl<'a> Slots<'a> {
    /// Slot n is woken by bit n of `wake_set`.
    pub(super) fn new(wake_set: Arc<WakeSet>) -> Self {
        Self { list: Vec::new(), free: Vec::new(), wake_set }
    }

    /// Requests in flight.
    pub(super) fn used(&self) -> usize {
        self.list.len() - self.free.len()
    }

    /// Starts `work`, at `began`; gives it back if it is done on the spot.
    pub(super) fn start(&mut self, work: Work<'a>, began: Instant) -> Option<Timed> {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = self.list.len();
            assert!(index < SLOTS_MAX, "admitted without room");
            self.list.push(Slot { waker: self.wake_set.waker(index), began, work: Work::None });
            index
        });
        self.list[index].work = work;
        self.list[index].began = began;
        self.poll(index)
    }

    /// Polls slot `index`; gives what was in it if that is done.
    pub(super) fn poll(&mut self, index: usize) -> Option<Timed> {
        let slot = &mut self.list[index];
        let mut context = Context::from_waker(&slot.waker);
        let finished = match &mut slot.work {
            // A stale wake-up.
            Work::None => return None,
            Work::Read { io, cookie, offset, .. } => match Pin::new(io).poll(&mut context) {
                Poll::Pending => return None,
                Poll::Ready((result, buf)) => {
                    Finished::Read { cookie: *cookie, offset: *offset, result, buf }
                }
            },
            Work::Write { io, cookie, range, .. } => match Pin::new(io).poll(&mut context) {
                Poll::Pending => return None,
                Poll::Ready((result, _)) => {
                    Finished::Write { cookie: *cookie, range: *range, result }
                }
            },
            Work::Long { future, cookie, .. } => match future.as_mut().poll(&mut context) {
                Poll::Pending => return None,
                Poll::Ready(result) => Finished::Long { cookie: *cookie, result },
            },
        };
        let ended = (finished, slot.began);
        slot.work = Work::None;
        self.free.push(index);
        Some(ended)
    }

    /// Drops every request that only reads.
    pub(super) fn drop_reads(&mut self) {
        for (index, slot) in self.list.iter_mut().enumerate() {
            if matches!(slot.work, Work::Read { .. } | Work::Long { changes: false, .. }) {
                slot.work = Work::None;
                self.free.push(index);
            }
        }
    }
}

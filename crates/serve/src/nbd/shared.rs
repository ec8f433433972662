//! What a session shares with its requests: the disk, the replies, the budget.

use super::contexts::Context;
use super::protocol::ErrorCode;
use super::reply::Outgoing;
use crate::budget::Share;
use mica_block::{Disk, Error};
use mica_rt::sync::{SharedLock, Waiters};
use mica_units::GuestOffset;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Why a request failed, and at which byte of its range.
pub(super) struct Failure {
    pub(super) error: Error,
    /// `None` for a request that has no range: clients take no offset there.
    pub(super) offset: Option<GuestOffset>,
    /// The code that the client gets.
    pub(super) code: ErrorCode,
    /// Whether the reply has begun in a way that cannot be taken back.
    pub(super) ends_connection: bool,
}

impl Failure {
    pub(super) fn at(error: Error, offset: GuestOffset) -> Self {
        Self { offset: Some(offset), ..Self::whole(error) }
    }

    pub(super) fn whole(error: Error) -> Self {
        let code = ErrorCode::of(&error);
        Self { error, offset: None, code, ends_connection: false }
    }
}

/// What a session shares with its requests.
pub(super) struct Shared<'a> {
    pub(super) disk: &'a dyn Disk,
    /// Those that the export has of its own.
    pub(super) contexts: &'a [Arc<dyn Context>],
    pub(super) edges: &'a SharedLock,
    pub(super) outgoing: RefCell<Outgoing>,
    /// How much the session may hold.
    pub(super) share: Share,
    /// Bytes that requests hold, or may still put into `outgoing`.
    charged_bytes: Cell<usize>,
    /// Requests that wait for `outgoing` to shrink.
    room: Waiters,
    /// A reply is sent as it is read, and any other would land in the middle of it.
    is_streaming: Cell<bool>,
}

/// What a session is about.
pub(super) struct Subject<'a> {
    pub(super) disk: &'a dyn Disk,
    /// Those that its export has of its own.
    pub(super) contexts: &'a [Arc<dyn Context>],
    pub(super) edges: &'a SharedLock,
    /// How much the session may hold.
    pub(super) share: Share,
}

impl<'a> Shared<'a> {
    pub(super) fn new(subject: Subject<'a>, outgoing: Outgoing) -> Rc<Self> {
        let Subject { disk, contexts, edges, share } = subject;
        Rc::new(Self {
            disk,
            contexts,
            edges,
            outgoing: RefCell::new(outgoing),
            share,
            charged_bytes: Cell::new(0),
            room: Waiters::default(),
            is_streaming: Cell::new(false),
        })
    }

    /// Waits until `outgoing` holds at most `bytes`.
    pub(super) async fn room(&self, bytes: usize) {
        let has_room = || self.outgoing.borrow().held_bytes() <= bytes;
        self.room.until(|| has_room().then_some(())).await;
    }

    /// A batch was sent: requests that wait for room check again.
    pub(super) fn sent(&self) {
        self.outgoing.borrow_mut().sent();
        self.room.wake_all();
    }

    /// Bytes that the session holds, or may still come to hold for what it has admitted.
    pub(super) fn used_bytes(&self) -> usize {
        self.charged_bytes.get() + self.outgoing.borrow().held_bytes()
    }

    /// Keeps `outgoing` for one reply, which is sent as it is read, until what this returns is
    /// dropped.
    pub(super) fn stream(self: &Rc<Self>) -> Streaming<'a> {
        let was_streaming = self.is_streaming.replace(true);
        assert!(!was_streaming, "a reply that is streamed runs alone");
        Streaming { shared: Rc::clone(self) }
    }

    /// Whether `outgoing` is kept for one reply.
    pub(super) fn is_streaming(&self) -> bool {
        self.is_streaming.get()
    }

    /// Charges `bytes` until the returned charge is dropped.
    pub(super) fn charge(self: &Rc<Self>, bytes: usize) -> Charge<'a> {
        self.charged_bytes.set(self.charged_bytes.get() + bytes);
        Charge { shared: Rc::clone(self), bytes }
    }
}

/// A request's share of the budget, released when dropped.
pub(super) struct Charge<'a> {
    shared: Rc<Shared<'a>>,
    bytes: usize,
}

impl Charge<'_> {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Charges `bytes` more, if the session may hold them now.
    pub(super) fn grow(&mut self, bytes: usize) -> bool {
        let is_covered = self.shared.share.covers(self.shared.used_bytes() + bytes);
        if is_covered {
            self.bytes += bytes;
            self.shared.charged_bytes.set(self.shared.charged_bytes.get() + bytes);
        }
        is_covered
    }

    /// Releases `bytes` of it.
    pub(super) fn release(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes, "more was released than charged");
        self.bytes -= bytes;
        self.shared.charged_bytes.set(self.shared.charged_bytes.get() - bytes);
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.release(self.bytes);
    }
}

/// The right to put replies, while only one request has it.
pub(super) struct Streaming<'a> {
    shared: Rc<Shared<'a>>,
}

impl Drop for Streaming<'_> {
    fn drop(&mut self) {
        self.shared.is_streaming.set(false);
    }
}

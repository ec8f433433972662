//! Operations as futures.

use crate::buf::Buf;
use crate::core::{Core, current};
use crate::op::{OpKey, OpKind, SlotState, result_of};
use std::any::Any;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

/// An operation as a future: resolves to the count or the error, and returns the buffer.
///
/// Dropping it does not free the buffer before the kernel is done with it.
#[must_use = "the operation runs, but its buffer is returned only when awaited"]
pub struct Op {
    raw: RawOp,
}

impl Op {
    pub(crate) fn start(kind: OpKind) -> Self {
        Self { raw: RawOp::start(kind) }
    }

    /// Drops `guard` when the operation is complete, not before: even if this future is dropped
    /// while the kernel still works on it.
    pub fn hold(&mut self, guard: Box<dyn Any>) {
        let Some(key) = self.raw.key else { return };
        let mut ops = self.raw.core.ops.borrow_mut();
        let slot = ops.slot_mut(key);
        if matches!(slot.state, SlotState::InFlight { .. }) {
            slot.held = Some(guard);
        }
    }
}

impl Future for Op {
    type Output = (io::Result<usize>, Buf);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.raw.poll_done(context).map(|(code, kind)| {
            match kind {
                // The code cannot hold a count beyond 2 GiB.
                OpKind::Read { buf, done, .. } | OpKind::Write { buf, done, .. } => {
                    (result_of(code).map(|_| done), buf)
                }
                OpKind::Recv { buf, .. } | OpKind::Simulated { buf, .. } => (result_of(code), buf),
                OpKind::Send { .. }
                | OpKind::Readable { .. }
                | OpKind::SyncData { .. }
                | OpKind::ReadAhead { .. }
                | OpKind::SetLen { .. }
                | OpKind::Call { .. }
                | OpKind::Fallocate { .. } => unreachable!("no buffer is returned"),
            }
        })
    }
}

/// The part that all futures of operations share.
pub(crate) struct RawOp {
    core: Rc<Core>,
    key: Option<OpKey>,
}

impl RawOp {
    pub(crate) fn start(kind: OpKind) -> Self {
        let core = current();
        let key = core.ops.borrow_mut().insert(kind);
        core.submit(key);
        Self { core, key: Some(key) }
    }

    pub(crate) fn poll_done(&mut self, context: &mut Context<'_>) -> Poll<(i32, OpKind)> {
        let key = self.key.expect("polled after it was ready");
        let mut ops = self.core.ops.borrow_mut();
        match &mut ops.slot_mut(key).state {
            SlotState::InFlight { waker, .. } => {
                let replaced = match waker {
                    Some(waker) if waker.will_wake(context.waker()) => None,
                    waker => waker.replace(context.waker().clone()),
                };
                // Outside of the borrow: dropping a foreign waker may drop operations.
                drop(ops);
                drop(replaced);
                Poll::Pending
            }
            SlotState::Done { .. } => {
                self.key = None;
                let SlotState::Done { kind, code } = ops.release(key.index) else {
                    unreachable!("matched above");
                };
                Poll::Ready((code, kind))
            }
            SlotState::Free { .. } => unreachable!("a future outlived its slot"),
        }
    }
}

impl RawOp {
    /// Waits for an operation that returns nothing but its outcome.
    pub(crate) async fn outcome(mut self) -> io::Result<()> {
        let (code, _) = std::future::poll_fn(|context| self.poll_done(context)).await;
        result_of(code).map(drop)
    }
}

impl Drop for RawOp {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut ops = self.core.ops.borrow_mut();
        let (cancel, waker) = match &mut ops.slot_mut(key).state {
            SlotState::InFlight { kind, abandoned, waker } => {
                *abandoned = true;
                (kind.waits_for_a_peer(), waker.take())
            }
            SlotState::Done { .. } => {
                let state = ops.release(key.index);
                drop(ops);
                drop(state);
                return;
            }
            SlotState::Free { .. } => unreachable!("a future outlived its slot"),
        };
        drop(ops);
        drop(waker);
        if cancel {
            self.core.cancel(key);
        }
    }
}

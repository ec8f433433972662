//! Operations in flight: their buffers, and the tasks that wait for them.
//!
//! Invariants
//! - I1 From submission to completion the operation's slot owns its buffers and its file, or the
//!   thread that was given them does: dropping the future marks the slot abandoned and frees
//!   nothing.
//! - I2 A slot is freed exactly once: by the future that takes the result, or at completion if the
//!   future is gone.
//! - I3 A key is never given to a second operation while the kernel may still name it.

use crate::buf::{BUF_ALIGN, Buf};
use crate::file::{Access, File, Way};
use crate::send::SendParts;
use crate::socket::Socket;
use rustix::fs::FallocateFlags;
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// What an operation does, with everything that it needs until it is complete.
pub(crate) enum OpKind {
    Read { file: Arc<File>, buf: Buf, offset: u64, done: usize, way: Way },
    Write { file: Arc<File>, buf: Buf, offset: u64, done: usize, way: Way },
    SyncData { file: Arc<File>, way: Way },
    ReadAhead { file: Arc<File>, offset: u64, len: u32, way: Way },
    Fallocate { file: Arc<File>, mode: FallocateFlags, offset: u64, len: u64, way: Way },
    SetLen { file: Arc<File>, len: u64 },
    Call { file: Arc<File>, work: Option<Call> },
    Recv { socket: Arc<Socket>, buf: Buf },
    Send { socket: Arc<Socket>, parts: SendParts },
    Readable { socket: Arc<Socket> },
    Simulated { work: Option<SimWork>, buf: Buf, latency: Duration },
}

/// What a thread of the executor does with a file, where there is no operation for it.
pub(crate) type Call = Box<dyn FnOnce(&File) + Send>;

/// What a simulated operation does at the moment at which it completes.
pub type SimWork = Box<dyn FnOnce(&mut Buf) -> io::Result<usize>>;

/// What to do with an operation after the kernel answered.
pub(crate) enum Next {
    /// Submit it again: it was short, or interrupted.
    Again,
    Complete(i32),
}

impl OpKind {
    /// Processes the kernel's answer and decides whether the operation is complete.
    pub(crate) fn advance(&mut self, code: i32) -> Next {
        if code < 0
            && let Some(way) = self.way_mut()
        {
            // Nobody cancels what is awaited: the kernel found no thread for it. And only an
            // attempt that may wait says for certain what is wrong.
            if *way == Way::Try || (*way == Way::Ring && code == -libc::ECANCELED) {
                *way = Way::Thread;
                return Next::Again;
            }
        }
        if code == -libc::EINTR || (code == -libc::EAGAIN && !self.has_waited()) {
            return Next::Again;
        }
        match self {
            Self::Read { file, buf, done, .. } | Self::Write { file, buf, done, .. } => {
                let Ok(count) = usize::try_from(code) else { return Next::Complete(code) };
                let before = *done;
                *done = before.max(resume_at(file, before) + count);
                assert!(*done <= buf.len(), "the kernel moved more than was asked");
                if *done == before || *done == buf.len() {
                    Next::Complete(clamp_count(*done))
                } else {
                    Next::Again
                }
            }
            Self::Send { parts, .. } => match usize::try_from(code) {
                Err(_) => Next::Complete(code),
                Ok(count) => {
                    parts.advance(count);
                    if parts.bufs.is_empty() {
                        Next::Complete(clamp_count(parts.sent))
                    } else if count == 0 {
                        Next::Complete(-libc::EPIPE)
                    } else {
                        Next::Again
                    }
                }
            },
            Self::SyncData { .. }
            | Self::ReadAhead { .. }
            | Self::Fallocate { .. }
            | Self::SetLen { .. }
            | Self::Call { .. }
            | Self::Recv { .. }
            | Self::Readable { .. }
            | Self::Simulated { .. } => Next::Complete(code),
        }
    }

    fn way_mut(&mut self) -> Option<&mut Way> {
        match self {
            Self::Read { way, .. }
            | Self::Write { way, .. }
            | Self::SyncData { way, .. }
            | Self::ReadAhead { way, .. }
            | Self::Fallocate { way, .. } => Some(way),
            _ => None,
        }
    }

    /// Whether a thread of ours carried it out, which waits where it has to.
    fn has_waited(&mut self) -> bool {
        matches!(self, Self::SetLen { .. } | Self::Call { .. })
            || self.way_mut() == Some(&mut Way::Thread)
    }

    /// Whether it may wait for a peer forever, and so has to be cancelled when nobody waits for it.
    pub(crate) fn waits_for_a_peer(&self) -> bool {
        matches!(self, Self::Recv { .. } | Self::Send { .. } | Self::Readable { .. })
    }
}

/// Where a read or write resumes after `done` bytes. With O_DIRECT that must be aligned, so some of
/// them are transferred again; no progress then means the end of the file, or that the device
/// accepts no more.
pub(crate) fn resume_at(file: &File, done: usize) -> usize {
    match file.access() {
        Access::Buffered => done,
        Access::Direct => done - done % BUF_ALIGN,
    }
}

fn clamp_count(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// Name of an operation: its slot, and a generation that tells a stale name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct OpKey {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl OpKey {
    pub(crate) fn to_user_data(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the two halves of the number")]
    pub(crate) fn from_user_data(data: u64) -> Self {
        Self { index: data as u32, generation: (data >> 32) as u32 }
    }
}

pub(crate) enum SlotState {
    Free { next: Option<u32> },
    InFlight { kind: OpKind, waker: Option<Waker>, abandoned: bool },
    Done { kind: OpKind, code: i32 },
}

pub(crate) struct Slot {
    generation: u32,
    pub(crate) state: SlotState,
    /// Dropped when the operation is complete, even if nobody waits for it; see
    /// [`crate::Op::hold`].
    pub(crate) held: Option<Box<dyn Any>>,
}

/// The outcome of a completion: a waker to wake if a task waits, and what the caller has to drop
/// outside of any borrow.
pub(crate) struct Completed {
    pub(crate) waker: Option<Waker>,
    _abandoned: Option<OpKind>,
    _held: Option<Box<dyn Any>>,
}

/// All operations of one executor.
#[derive(Default)]
pub(crate) struct Ops {
    slots: Vec<Slot>,
    free: Option<u32>,
    in_flight: usize,
}

impl Ops {
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(crate) fn insert(&mut self, kind: OpKind) -> OpKey {
        let state = SlotState::InFlight { kind, waker: None, abandoned: false };
        self.in_flight += 1;
        if let Some(index) = self.free {
            let slot = &mut self.slots[index as usize];
            let SlotState::Free { next } = slot.state else {
                unreachable!("the free list names a slot in use");
            };
            self.free = next;
            slot.generation = slot.generation.wrapping_add(1) & 0x7fff_ffff;
            slot.state = state;
            return OpKey { index, generation: slot.generation };
        }
        let index = u32::try_from(self.slots.len()).expect("fewer than 2^32 operations");
        self.slots.push(Slot { generation: 0, state, held: None });
        OpKey { index, generation: 0 }
    }

    pub(crate) fn release(&mut self, index: u32) -> SlotState {
        let slot = &mut self.slots[index as usize];
        let state = std::mem::replace(&mut slot.state, SlotState::Free { next: self.free });
        self.free = Some(index);
        state
    }

    pub(crate) fn slot_mut(&mut self, key: OpKey) -> &mut Slot {
        let slot = &mut self.slots[key.index as usize];
        assert_eq!(slot.generation, key.generation, "an answer for an operation that is gone");
        slot
    }

    pub(crate) fn kind_mut(&mut self, key: OpKey) -> &mut OpKind {
        match &mut self.slot_mut(key).state {
            SlotState::InFlight { kind, .. } => kind,
            _ => unreachable!("an operation that is complete was submitted again"),
        }
    }

    pub(crate) fn is_abandoned(&mut self, key: OpKey) -> bool {
        matches!(self.slot_mut(key).state, SlotState::InFlight { abandoned: true, .. })
    }

    /// Records the answer.
    pub(crate) fn complete(&mut self, key: OpKey, code: i32) -> Completed {
        self.in_flight -= 1;
        let free = self.free;
        let slot = self.slot_mut(key);
        let held = slot.held.take();
        let state = std::mem::replace(&mut slot.state, SlotState::Free { next: free });
        let SlotState::InFlight { kind, waker, abandoned } = state else {
            unreachable!("an operation completed twice");
        };
        if abandoned {
            self.free = Some(key.index);
            return Completed { waker: None, _abandoned: Some(kind), _held: held };
        }
        slot.state = SlotState::Done { kind, code };
        Completed { waker, _abandoned: None, _held: held }
    }

    /// Every operation that is still in flight.
    pub(crate) fn keys_in_flight(&self) -> Vec<OpKey> {
        let in_flight = |(index, slot): (usize, &Slot)| match slot.state {
            SlotState::InFlight { .. } => Some(OpKey {
                index: u32::try_from(index).expect("fewer than 2^32 operations"),
                generation: slot.generation,
            }),
            _ => None,
        };
        self.slots.iter().enumerate().filter_map(in_flight).collect()
    }
}

/// Turns a negative errno, as io_uring gives it, into a result.
pub(crate) fn result_of(code: i32) -> io::Result<usize> {
    usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_of(len: usize, access: Access) -> OpKind {
        let null = std::fs::File::open("/dev/null").expect("a device");
        let file = Arc::new(File::new(null.into(), access));
        OpKind::Write { file, buf: Buf::zeroed(len), offset: 0, done: 0, way: Way::Thread }
    }

    /// The progress of an operation, and its code if it is complete.
    fn after(kind: &mut OpKind, code: i32) -> (usize, Option<i32>) {
        let next = kind.advance(code);
        let OpKind::Write { done, .. } = kind else { unreachable!("made as a write") };
        match next {
            Next::Again => (*done, None),
            Next::Complete(code) => (*done, Some(code)),
        }
    }

    #[test]
    fn short_write_continues_until_all_is_written() {
        let mut write = write_of(10_000, Access::Buffered);
        assert_eq!(after(&mut write, 4000), (4000, None));
        assert_eq!(after(&mut write, -libc::EINTR), (4000, None));
        assert_eq!(after(&mut write, 6000), (10_000, Some(10_000)));
    }

    #[test]
    fn write_that_makes_no_progress_is_complete_and_short() {
        let mut write = write_of(10_000, Access::Buffered);
        assert_eq!(after(&mut write, 4000), (4000, None));
        assert_eq!(after(&mut write, 0), (4000, Some(4000)));
    }

    #[test]
    fn short_direct_write_resumes_at_a_page() {
        let mut write = write_of(3 * BUF_ALIGN, Access::Direct);
        assert_eq!(after(&mut write, 4096 + 512), (4608, None));
        let OpKind::Write { file, done, .. } = &write else { unreachable!("made as a write") };
        assert_eq!(resume_at(file, *done), 4096);
        assert_eq!(after(&mut write, 8192), (12_288, Some(12_288)));
    }

    #[test]
    fn attempt_that_must_not_wait_is_followed_by_one_that_may() {
        for error in [libc::EAGAIN, libc::EOPNOTSUPP, libc::ENOSPC] {
            let mut write = write_of(10_000, Access::Buffered);
            *write.way_mut().expect("a write has one") = Way::Try;
            assert_eq!(after(&mut write, 4096), (4096, None));
            assert_eq!(after(&mut write, -error), (4096, None));
            assert_eq!(write.way_mut(), Some(&mut Way::Thread));
            assert_eq!(after(&mut write, -libc::EIO), (4096, Some(-libc::EIO)));
        }
    }

    #[test]
    fn what_a_thread_may_not_wait_for_is_an_error() {
        let mut write = write_of(10_000, Access::Buffered);
        assert_eq!(after(&mut write, -libc::EINTR), (0, None));
        assert_eq!(after(&mut write, -libc::EAGAIN), (0, Some(-libc::EAGAIN)));
    }

    #[test]
    fn what_the_kernel_found_no_thread_for_gets_one_of_ours() {
        let OpKind::Write { file, .. } = write_of(1, Access::Buffered) else {
            unreachable!("made as a write")
        };
        let mut sync = OpKind::SyncData { file, way: Way::Ring };
        assert!(matches!(sync.advance(-libc::ECANCELED), Next::Again));
        assert_eq!(sync.way_mut(), Some(&mut Way::Thread));
        assert!(matches!(sync.advance(-libc::EIO), Next::Complete(code) if code == -libc::EIO));
    }

    #[test]
    fn error_after_a_part_was_written_is_the_outcome() {
        let mut write = write_of(10_000, Access::Buffered);
        assert_eq!(after(&mut write, 4000), (4000, None));
        assert_eq!(after(&mut write, -libc::ENOSPC), (4000, Some(-libc::ENOSPC)));
    }
}

//! How a request is returned: its status, the used ring, the dirty log, the driver's call.

use super::slot::{Kind, Progress, Slot};
use super::{PARTS, Running};
use crate::vhost_user::chain::{Malformed, Piece};
use crate::vhost_user::log::DirtyLog;
use crate::vhost_user::memory::Memory;
use crate::vhost_user::request::Status;
use mica_block::{ErrorKind, Result};
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

/// The driver's flag against calls (virtio 1.2, section 2.7.6).
const VRING_AVAIL_F_NO_INTERRUPT: u16 = 1;

/// A request that is to be returned.
pub(super) struct Ended {
    pub(super) head: u16,
    pub(super) status_at: GuestAddress,
    pub(super) memory: Arc<Memory>,
    pub(super) status: Status,
    pub(super) written: Vec<Piece>,
}

impl<'a> Running<'a> {
    pub(super) fn end_slot(&mut self, slot: Slot<'a>, result: Result<Progress>) {
        let Slot { head, status_at, written, memory, kind, began, cost, work } = slot;
        drop(work);
        self.used_bytes -= cost;
        self.is_full = false;
        let latencies = &self.stats.latencies;
        match kind {
            Kind::Read => latencies.read.add(began, self.turn_at),
            Kind::Write => latencies.write.add(began, self.turn_at),
            Kind::Flush => latencies.flush.add(began, self.turn_at),
            Kind::Other => {}
        }
        let status = match result {
            // A copy of memory that went away is zeros, which may be on the disk now.
            Ok(Progress::Done) if kind == Kind::Write && memory.is_lost() => {
                self.stats.failed.add(1);
                Status::IoError
            }
            Ok(Progress::Done) => Status::Ok,
            // It stays marked for the next server (I1).
            Ok(Progress::LeftOff) if self.inflight.is_some() => return,
            // Its monitor keeps no marks, so that nobody would do the rest.
            Ok(Progress::LeftOff) => {
                self.stats.failed.add(1);
                Status::IoError
            }
            Err(error) => {
                self.stats.failed.add(1);
                // Memory that the kernel found gone, not the disk.
                if error.raw_os_error() == Some(libc::EFAULT) {
                    self.lost.set();
                }
                if let Some(omitted) = self.common.logs.failures.admit() {
                    tracing::warn!(%error, "a request failed{omitted}");
                }
                if error.kind() == ErrorKind::Unsupported {
                    Status::Unsupported
                } else {
                    Status::IoError
                }
            }
        };
        self.end(&Ended { head, status_at, memory, status, written });
    }

    /// Waits, after a panic, for what is in flight: the kernel may use the guest's memory for it
    /// until then (I3). Nothing is returned, so that all of it stays marked for the next server.
    pub(super) async fn abandon(&mut self) {
        poll_fn(|context| {
            self.wake_set.set_task(context.waker());
            for word in 0..(self.slots.len() + PARTS).div_ceil(64) {
                self.wake_set.take(word);
            }
            let mut is_quiet = true;
            for (slot, waker) in self.slots.iter_mut().zip(&self.wakers) {
                // The one that panicked does so again, when it is polled or dropped.
                let ends = catch_unwind(AssertUnwindSafe(|| {
                    let Some(held) = slot else { return true };
                    if held.work.poll(&mut Context::from_waker(waker)).is_pending() {
                        return false;
                    }
                    drop(slot.take());
                    true
                }));
                is_quiet &= ends.unwrap_or_else(|_| {
                    // If its drop has panicked, it is gone already.
                    let _ = catch_unwind(AssertUnwindSafe(|| drop(slot.take())));
                    true
                });
            }
            if is_quiet { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Returns a request (I2).
    pub(super) fn end(&mut self, ended: &Ended) {
        let Ended { head, status_at, memory, status, written } = ended;
        let bytes: u32 = written.iter().fold(0, |sum, piece| sum.saturating_add(piece.len));
        // Memory that went away takes nothing; the used ring may still be there.
        let answered = memory.guest.write_obj(*status as u8, *status_at);
        // A page that is marked before it is written may be copied in between.
        if let Some(log) = &self.settings.log {
            written.iter().for_each(|piece| log.mark(piece.at, u64::from(piece.len)));
            log.mark(*status_at, 1);
        }
        let len = if answered.is_ok() { bytes.saturating_add(1) } else { 0 };
        self.give_back(*head, len);
    }

    pub(super) fn refuse_malformed(&mut self, head: u16, why: Malformed) {
        self.stats.malformed.add(1);
        tracing::debug!(%why, head, "a request is malformed");
        self.give_back(head, 0);
    }

    pub(super) fn give_back(&mut self, head: u16, len: u32) {
        let memory = Arc::clone(&self.settings.memory);
        let is_head = head < self.queue.size();
        if is_head && let Some(inflight) = &self.inflight {
            inflight.about_to_end(head);
        }
        if let Err(error) = self.queue.add_used(&memory.guest, head, len) {
            return self.break_off(&error);
        }
        if is_head && let Some(inflight) = &self.inflight {
            inflight.ended(head, self.queue.next_used());
        }
        if let Some(log) = &self.settings.log {
            self.log_used(log);
        }
    }

    /// Logs that the index was written up to which the driver need not kick.
    pub(super) fn log_avail_event(&self) {
        if let (Some(log), Some(at)) = (&self.settings.log, self.settings.used_log_at) {
            let after = 4 + u64::from(self.queue.size()) * 8;
            let at = if self.queue.event_idx_enabled() { at.wrapping_add(after) } else { at };
            log.mark(GuestAddress(at), 2);
        }
    }

    fn log_used(&self, log: &DirtyLog) {
        let size = u64::from(self.queue.size());
        let slot = u64::from(self.queue.next_used().wrapping_sub(1)) % size;
        let Some(at) = self.settings.used_log_at else { return };
        log.mark(GuestAddress(at.wrapping_add(2)), 2);
        log.mark(GuestAddress(at.wrapping_add(4 + slot * 8)), 8);
    }

    pub(super) fn call_if(&mut self, ended: bool) {
        if !ended {
            return;
        }
        match self.queue.needs_notification(&self.settings.memory.guest) {
            Ok(needed) => {
                let needed = needed && !self.wants_no_calls();
                self.batch.note_answers(needed);
                self.attention.answered();
                if needed {
                    self.settings.call();
                }
            }
            Err(error) => self.break_off(&error),
        }
    }

    /// Whether the driver polls for its answers: without `VIRTIO_RING_F_EVENT_IDX`, with which it
    /// names the answer that it waits for, it says so in a flag, which the library does not read.
    fn wants_no_calls(&self) -> bool {
        let flags_at = GuestAddress(self.queue.avail_ring());
        // What cannot be read is called for.
        !self.queue.event_idx_enabled()
            && self
                .settings
                .memory
                .guest
                .load::<u16>(flags_at, Ordering::Relaxed)
                .is_ok_and(|flags| u16::from_le(flags) & VRING_AVAIL_F_NO_INTERRUPT != 0)
    }
}

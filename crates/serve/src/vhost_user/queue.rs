//! One virtqueue: a task that takes requests from the ring, does them and gives them back.
//!
//! ```text
//! kick ─▶ take heads ─▶ parse ─▶ slots in flight ─▶ status, used ring ─▶ call, if the driver wants
//! ```
//!
//! Invariants
//! - I1 Every head that was taken is given back exactly once, whatever became of its request.
//! - I2 The status and the data of a request are in guest memory before the used ring names it.
//! - I3 A queue that is told to stop takes nothing more, and has stopped when nothing of it is in
//!   flight: then the device touches no guest memory for it any more.
//! - I4 Before the task waits it has asked to be notified and looked at the ring after that, so
//!   that no request lies there unseen.

use super::chain::{Chain, Malformed, Piece, Table};
use super::config::{F_RING_EVENT_IDX, has};
use super::control::{Control, Told};
use super::device::Common;
use super::inflight::InflightQueue;
use super::log::DirtyLog;
use super::memory::Memory;
use super::request::{Action, Emptied, ID_BYTES, Request, Rules, Status};
use super::stats::QueueStats;
use super::transfer;
use crate::wake::{WakeSet, ones};
use mica_block::{
    Detail, Disk, ErrorKind, Extent, InFlight, IoFuture, LocalFuture, Planned, Result, Writing,
    Zeroes,
};
use mica_rt::{Sleep, Socket};
use mica_units::GuestRange;
use std::future::{Future, poll_fn};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Most bytes that a request in place moves with one operation.
const DIRECT_BYTES_MAX: u64 = 1 << 20;

/// What a queue starts with.
pub(super) struct Setup {
    pub(super) common: Arc<Common>,
    /// The queue's number.
    pub(super) index: usize,
    pub(super) control: Arc<Control>,
    pub(super) queue: Queue,
    pub(super) features: u64,
    pub(super) kick: Arc<Socket>,
    pub(super) inflight: Option<InflightQueue>,
}

/// Serves a queue until it is told to stop.
pub(super) async fn serve(setup: Setup) {
    let Setup { common, index, control, mut queue, features, kick, inflight } = setup;
    queue.set_event_idx(has(features, F_RING_EVENT_IDX));
    queue.set_ready(true);
    let disk = &*common.disk;
    let size = usize::from(queue.size());
    let wake_set = WakeSet::new(size + PARTS);
    let ending = Ending(&control);
    let told = control.told();
    let mut running = Running {
        disk,
        stats: &common.stats[index],
        common: &common,
        rules: Rules { disk_len: disk.geometry().len, is_writable: disk.is_writable() },
        table: Table { at: GuestAddress(queue.desc_table()), entries: u32::from(queue.size()) },
        wakers: (0..size).map(|index| wake_set.waker(index)).collect(),
        part_wakers: Parts { kick: wake_set.waker(size), timer: wake_set.waker(size + 1) },
        wake_set,
        slots: (0..size).map(|_| None).collect(),
        free: (0..size).rev().collect(),
        chain: Chain::default(),
        extents: Vec::new(),
        waiting: Vec::new(),
        kicked: None,
        timer: None,
        is_broken: false,
        queue,
        kick,
        inflight,
        told,
    };
    running.recover();
    let base = poll_fn(|context| {
        running.wake_set.set_task(context.waker());
        control.set_waker(context.waker());
        running.poll(&control)
    })
    .await;
    drop(running);
    ending.0.stopped(base);
}

/// Whoever waits for the queue to stop learns of its end, also if its executor ends first.
struct Ending<'a>(&'a Control);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.ended();
    }
}

/// The parts of the task that are not slots.
struct Parts {
    kick: Waker,
    timer: Waker,
}

const PARTS: usize = 2;

/// A request in flight.
struct Slot<'a> {
    head: u16,
    status_at: GuestAddress,
    /// What the device writes of the guest's memory.
    written: Vec<Piece>,
    memory: Arc<Memory>,
    work: Work<'a>,
}

enum Work<'a> {
    Read { io: IoFuture, _in_flight: InFlight<'a> },
    Write { io: Writing<'a>, _in_flight: InFlight<'a> },
    Long(LocalFuture<'a, Result<()>>),
}

impl Work<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        match self {
            Self::Read { io, .. } => Pin::new(io).poll(context).map(|(result, _)| result),
            Self::Write { io, .. } => Pin::new(io).poll(context).map(|(result, _)| result),
            Self::Long(future) => future.as_mut().poll(context),
        }
    }
}

struct Running<'a> {
    disk: &'a dyn Disk,
    common: &'a Common,
    stats: &'a QueueStats,
    rules: Rules,
    queue: Queue,
    table: Table,
    kick: Arc<Socket>,
    inflight: Option<InflightQueue>,
    told: Told,
    wake_set: Arc<WakeSet>,
    wakers: Vec<Waker>,
    part_wakers: Parts,
    slots: Vec<Option<Slot<'a>>>,
    free: Vec<usize>,
    /// Reused for every request.
    chain: Chain,
    /// Reused by every plan.
    extents: Vec<Extent>,
    /// Heads that were taken, the next one last, and not begun yet.
    waiting: Vec<u16>,
    kicked: Option<LocalFuture<'static, std::io::Result<()>>>,
    /// Until the rate lets the next request through.
    timer: Option<Pin<Box<Sleep>>>,
    /// The ring contradicts itself: nothing is taken from it any more.
    is_broken: bool,
}

impl<'a> Running<'a> {
    fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes up what a server before this one left.
    fn recover(&mut self) {
        let Some(inflight) = &mut self.inflight else { return };
        let guest = &self.told.memory.guest;
        let Ok(used_idx) = self.queue.used_idx(guest, Ordering::Acquire) else { return };
        let mut heads = inflight.recover(used_idx.0);
        self.queue.set_next_used(used_idx.0);
        let taken = u16::try_from(heads.len()).expect("at most the queue's size");
        self.queue.set_next_avail(used_idx.0.wrapping_add(taken));
        if !heads.is_empty() {
            tracing::info!(count = heads.len(), "requests that were in flight are done again");
        }
        heads.reverse();
        self.waiting = heads;
    }

    /// Ready with the index of the next request when the queue has stopped.
    fn poll(&mut self, control: &Control) -> Poll<u16> {
        loop {
            self.told.refresh(control);
            let ended = self.poll_slots();
            self.poll_timer();
            if self.told.stop {
                self.call_if(ended);
                return match self.used() {
                    0 => Poll::Ready(self.base()),
                    _ => Poll::Pending,
                };
            }
            self.poll_kick();
            let ended_at_once = match self.told.enabled && !self.is_broken {
                true => self.take_requests(),
                false => false,
            };
            self.call_if(ended || ended_at_once);
            // I4
            if !self.told.enabled || self.is_broken || !self.may_take() || !self.has_more() {
                return Poll::Pending;
            }
        }
    }

    /// The index of the first request that was not begun.
    fn base(&self) -> u16 {
        let waiting = u16::try_from(self.waiting.len()).expect("at most the queue's size");
        self.queue.next_avail().wrapping_sub(waiting)
    }

    fn may_take(&self) -> bool {
        self.timer.is_none() && !self.free.is_empty()
    }

    /// Asks to be notified, and whether there is something already.
    fn has_more(&mut self) -> bool {
        if !self.waiting.is_empty() {
            return true;
        }
        match self.queue.enable_notification(&self.told.memory.guest) {
            Ok(more) => more,
            Err(error) => {
                self.break_off(&error);
                false
            }
        }
    }

    fn break_off(&mut self, why: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.is_broken, true) {
            self.stats.broken_queues.add(1);
            tracing::warn!(%why, "a queue is broken and is not served until it is set up anew");
            self.told.tell_error();
        }
    }

    fn poll_kick(&mut self) {
        loop {
            let kicked = self.kicked.get_or_insert_with(|| {
                let kick = Arc::clone(&self.kick);
                Box::pin(async move { kick.readable().await })
            });
            let mut context = Context::from_waker(&self.part_wakers.kick);
            let Poll::Ready(result) = kicked.as_mut().poll(&mut context) else { return };
            self.kicked = None;
            let mut count = [0; 8];
            let read = result.and_then(|()| Ok(rustix::io::read(self.kick.as_fd(), &mut count)?));
            match read {
                Ok(8) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(_) => return self.break_off(&"its kick descriptor is no eventfd"),
                Err(error) => return self.break_off(&error),
            }
            if self.is_broken {
                return;
            }
        }
    }

    fn poll_timer(&mut self) {
        let Some(timer) = &mut self.timer else { return };
        let mut context = Context::from_waker(&self.part_wakers.timer);
        if timer.as_mut().poll(&mut context).is_ready() {
            self.timer = None;
        }
    }

    /// Takes what is there. Whether a request has ended already.
    fn take_requests(&mut self) -> bool {
        if self.waiting.is_empty()
            && let Err(error) = self.take_heads()
        {
            self.break_off(&error);
        }
        let mut ended = false;
        while self.may_take() {
            let Some(head) = self.waiting.pop() else { break };
            match self.begin(head) {
                Begun::InFlight => {}
                Begun::Ended => ended = true,
                Begun::Later => {
                    self.waiting.push(head);
                    break;
                }
            }
        }
        ended
    }

    /// Takes heads from the ring.
    fn take_heads(&mut self) -> std::result::Result<(), virtio_queue::Error> {
        let memory = Arc::clone(&self.told.memory);
        let room = self.free.len();
        let mut heads = std::mem::take(&mut self.waiting);
        for chain in self.queue.iter(&memory.guest)?.take(room) {
            heads.push(chain.head_index());
        }
        let size = self.queue.size();
        for head in &heads {
            if *head < size
                && let Some(inflight) = &mut self.inflight
            {
                inflight.taken(*head);
            }
        }
        heads.reverse();
        self.waiting = heads;
        Ok(())
    }

    /// Begins the request at `head`.
    fn begin(&mut self, head: u16) -> Begun {
        let memory = Arc::clone(&self.told.memory);
        let request = self
            .chain
            .read(&memory.guest, self.table, head)
            .and_then(|()| Request::parse(&memory.guest, &mut self.chain, self.rules));
        let request = match request {
            Ok(request) => request,
            Err(why) => {
                self.refuse_malformed(head, why);
                return Begun::Ended;
            }
        };
        if let Some(limiter) = &self.common.limiter {
            let bytes = match &request.action {
                Action::Read(range) | Action::Write(range) => range.len(),
                _ => 0,
            };
            if let Err(wait) = limiter.admit(bytes, mica_rt::now()) {
                let mut timer = Box::pin(mica_rt::sleep(wait));
                let mut context = Context::from_waker(&self.part_wakers.timer);
                if timer.as_mut().poll(&mut context).is_pending() {
                    self.timer = Some(timer);
                    self.stats.delayed.add(1);
                }
                return Begun::Later;
            }
        }
        self.start(head, request, memory)
    }

    fn start(&mut self, head: u16, request: Request, memory: Arc<Memory>) -> Begun {
        let status_at = request.status_at;
        let mut written = Vec::new();
        let work = match request.action {
            Action::Refuse(status) => {
                self.stats.refused.add(1);
                let slot = Ended { head, status_at, memory, status, written };
                self.end(&slot);
                return Begun::Ended;
            }
            Action::GetId => {
                let status = self.give_id(&memory, &mut written);
                self.end(&Ended { head, status_at, memory, status, written });
                return Begun::Ended;
            }
            Action::Read(range) => {
                self.stats.reads.add(1);
                self.stats.read_bytes.add(range.len());
                written = std::mem::take(&mut self.chain.writable);
                self.read(range, &memory, &written)
            }
            Action::Write(range) => {
                self.stats.writes.add(1);
                self.stats.written_bytes.add(range.len());
                let pieces = std::mem::take(&mut self.chain.readable);
                self.write(range, &memory, pieces)
            }
            Action::Flush => {
                self.stats.flushes.add(1);
                Work::Long(self.disk.flush())
            }
            Action::Discard(ranges) => {
                self.stats.discards.add(1);
                Work::Long(Box::pin(discard(self.disk, ranges)))
            }
            Action::WriteZeroes(ranges) => {
                self.stats.zeroes.add(1);
                Work::Long(Box::pin(write_zeroes(self.disk, ranges)))
            }
        };
        let index = self.free.pop().expect("looked before it was taken");
        let mut slot = Slot { head, status_at, written, memory, work };
        let mut context = Context::from_waker(&self.wakers[index]);
        match slot.work.poll(&mut context) {
            Poll::Pending => {
                self.slots[index] = Some(slot);
                Begun::InFlight
            }
            Poll::Ready(result) => {
                self.free.push(index);
                self.end_slot(slot, result);
                Begun::Ended
            }
        }
    }

    /// A read of one extent into one piece is one operation; all else takes longer.
    fn read(&mut self, range: GuestRange, memory: &Arc<Memory>, pieces: &[Piece]) -> Work<'a> {
        let in_flight = self.disk.enter();
        if let [piece] = pieces
            && range.len() <= DIRECT_BYTES_MAX
            && let Some(buf) = memory.buf(*piece)
        {
            self.extents.clear();
            let is_planned = {
                let plan = self.disk.plan(range, Detail::Read, &mut self.extents);
                matches!(plan, Planned::Ready(Ok(())))
            };
            if is_planned && let [extent] = self.extents[..] {
                let io = self.disk.read(&extent, buf);
                return Work::Read { io, _in_flight: in_flight };
            }
        }
        let (disk, memory, pieces) = (self.disk, Arc::clone(memory), pieces.to_vec());
        Work::Long(Box::pin(async move { transfer::read(disk, &memory, range, pieces).await }))
    }

    fn write(&mut self, range: GuestRange, memory: &Arc<Memory>, pieces: Vec<Piece>) -> Work<'a> {
        let in_flight = self.disk.enter();
        if let [piece] = pieces[..]
            && range.len() <= DIRECT_BYTES_MAX
            && let Some(buf) = memory.buf(piece)
        {
            let io = self.disk.write(range.start(), buf);
            return Work::Write { io, _in_flight: in_flight };
        }
        let (disk, memory) = (self.disk, Arc::clone(memory));
        Work::Long(Box::pin(async move { transfer::write(disk, &memory, range, pieces).await }))
    }

    fn give_id(&mut self, memory: &Memory, written: &mut Vec<Piece>) -> Status {
        let id = self.common.id;
        let mut done = 0;
        for piece in std::mem::take(&mut self.chain.writable) {
            let count = (piece.len as usize).min(id.len() - done);
            if memory.guest.write_slice(&id[done..done + count], piece.at).is_err() {
                return Status::IoError;
            }
            done += count;
            written.push(Piece { len: u32::try_from(count).unwrap_or(ID_BYTES), ..piece });
        }
        Status::Ok
    }

    fn poll_slots(&mut self) -> bool {
        let mut ended = false;
        for word in 0..self.slots.len().div_ceil(64) {
            for bit in ones(self.wake_set.take(word)) {
                let index = word * 64 + bit;
                let Some(Some(slot)) = self.slots.get_mut(index) else { continue };
                let mut context = Context::from_waker(&self.wakers[index]);
                let Poll::Ready(result) = slot.work.poll(&mut context) else { continue };
                let slot = self.slots[index].take().expect("looked at above");
                self.free.push(index);
                self.end_slot(slot, result);
                ended = true;
            }
        }
        // The bits of the other parts share the last words, and say nothing by themselves.
        for word in self.slots.len().div_ceil(64)..(self.slots.len() + PARTS).div_ceil(64) {
            self.wake_set.take(word);
        }
        ended
    }

    fn end_slot(&mut self, slot: Slot<'a>, result: Result<()>) {
        let Slot { head, status_at, written, memory, work } = slot;
        drop(work);
        let status = match result {
            Ok(()) => Status::Ok,
            Err(error) => {
                self.stats.failed.add(1);
                tracing::warn!(%error, "a request failed");
                if error.kind() == ErrorKind::Unsupported {
                    Status::Unsupported
                } else {
                    Status::IoError
                }
            }
        };
        self.end(&Ended { head, status_at, memory, status, written });
    }

    /// Gives a request back (I2).
    fn end(&mut self, ended: &Ended) {
        let Ended { head, status_at, memory, status, written } = ended;
        let bytes: u32 = written.iter().fold(0, |sum, piece| sum.saturating_add(piece.len));
        if let Some(log) = &self.told.log {
            written.iter().for_each(|piece| log.mark(piece.at, u64::from(piece.len)));
            log.mark(*status_at, 1);
        }
        // Memory that went away takes nothing; the used ring may still be there.
        let told = memory.guest.write_obj(*status as u8, *status_at);
        let len = if told.is_ok() { bytes.saturating_add(1) } else { 0 };
        self.give_back(*head, len);
    }

    fn refuse_malformed(&mut self, head: u16, why: Malformed) {
        self.stats.malformed.add(1);
        tracing::debug!(%why, head, "a request is malformed");
        self.give_back(head, 0);
    }

    fn give_back(&mut self, head: u16, len: u32) {
        let memory = Arc::clone(&self.told.memory);
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
        if let Some(log) = &self.told.log {
            self.log_used(log);
        }
    }

    fn log_used(&self, log: &DirtyLog) {
        let size = u64::from(self.queue.size());
        let slot = u64::from(self.queue.next_used().wrapping_sub(1)) % size;
        let Some(at) = self.told.used_log_at else { return };
        log.mark(GuestAddress(at.wrapping_add(2)), 2);
        log.mark(GuestAddress(at.wrapping_add(4 + slot * 8)), 8);
    }

    fn call_if(&mut self, ended: bool) {
        if !ended {
            return;
        }
        match self.queue.needs_notification(&self.told.memory.guest) {
            Ok(true) => self.told.call(),
            Ok(false) => {}
            Err(error) => self.break_off(&error),
        }
    }
}

/// A request that is to be given back.
struct Ended {
    head: u16,
    status_at: GuestAddress,
    memory: Arc<Memory>,
    status: Status,
    written: Vec<Piece>,
}

/// What became of a request at first.
enum Begun {
    InFlight,
    Ended,
    /// The rate does not let it through yet.
    Later,
}

async fn discard(disk: &dyn Disk, ranges: Vec<Emptied>) -> Result<()> {
    for Emptied { range, .. } in ranges {
        let _in_flight = disk.enter();
        disk.discard(range).await?;
    }
    Ok(())
}

async fn write_zeroes(disk: &dyn Disk, ranges: Vec<Emptied>) -> Result<()> {
    for Emptied { range, may_unmap } in ranges {
        let _in_flight = disk.enter();
        disk.write_zeroes(range, Zeroes { may_unmap, fast: false }).await?;
    }
    Ok(())
}

//! One virtqueue: a task that takes requests from the ring, executes and returns them.
//!
//! ```text
//! kick ─▶ take heads ─▶ parse ─▶ slots in flight ─▶ status, used ring ─▶ call, if the driver wants
//! ```
//!
//! Invariants
//! - I1 Every head that was taken is returned exactly once, whatever the outcome of its request;
//!   but discards and zeros that the end of the server cuts short, which may have gigabytes to go,
//!   stay marked as in flight, and the next server does them again.
//! - I2 The status and the data of a request are in guest memory before the used ring names it.
//! - I3 A queue that is asked to stop takes nothing more, and has stopped when nothing of it is in
//!   flight: then the device touches no guest memory for it any more. Nor does it when it has ended
//!   after a panic, except perhaps for the request that panicked.
//! - I4 Before the task waits it has asked to be notified and looked at the ring after that, so
//!   that no request lies there unseen.
//! - I5 One turn is bounded: a driver that always has more lets the other queues of the executor
//!   run in between.
//! - I6 What the requests in flight take of our own memory is at most what the queue's share of the
//!   process's budget covers. A request that is larger runs alone, in smaller windows; one for
//!   which there is no room waits for others of its queue, and for nobody else.
//! - I7 A queue that has stopped, or moves, leaves a ring whose driver notifies of what it adds.
//!   What is there already the next device finds when it begins, as after a kill, which leaves the
//!   ring as it is.
//! - I8 A queue moves to another executor (`placement`) when nothing of it is in flight, so that it
//!   runs on one at a time. To have that it takes nothing more for a while, unless something is in
//!   flight that may take long; if that was too short, it waits until it happens by itself. A
//!   broken queue stays.
//! - I9 What a driver writes that sends no flushes is durable when it is answered (virtio 1.3,
//!   section 5.2.6.2).

mod begin;
mod end;
mod slot;

use super::attention::{Attention, Pause};
use super::batch::{Batch, Busy};
use super::chain::{Chain, Table};
use super::common::Common;
use super::config::{F_FLUSH, F_RING_EVENT_IDX, has};
use super::control::{Control, Ending, QueueSettings};
use super::inflight::InflightQueue;
use super::lost::Lost;
use super::placement::Account;
use super::stats::QueueStats;
use super::transfer;
use crate::budget::Share;
use crate::wake::{WakeSet, ones};
use begin::Begun;
use mica_block::{Disk, Extent, LocalFuture};
use mica_rt::{Instant, Sleep, Socket};
use rustix::io::{Errno, ReadWriteFlags};
use slot::{Kind, Slot};
use std::future::{Future, poll_fn};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;

/// What a queue starts with.
pub(super) struct Setup {
    pub(super) common: Arc<Common>,
    /// The queue's number.
    pub(super) index: usize,
    /// Whether memory of the session is gone.
    pub(super) lost: Arc<Lost>,
    /// The queue's control; dropped last.
    pub(super) ending: Ending,
    pub(super) queue: Queue,
    pub(super) features: u64,
    pub(super) kick: Arc<Socket>,
    pub(super) inflight: Option<InflightQueue>,
}

/// Starts a queue on the executor that is to serve it.
pub(super) fn start(setup: Setup) {
    let place = setup.common.placement.place_of(setup.index);
    let common = Arc::clone(&setup.common);
    common.placement.worker(place).spawn_with(move || serve(setup, place));
}

/// How a queue ended here.
enum End {
    /// Before the request of this index.
    Stopped(u16),
    Moves,
}

/// Serves a queue, on the executor at `place`, until it is asked to stop or moves.
async fn serve(setup: Setup, place: usize) {
    let Setup { common, index, lost, ending, mut queue, features, kick, inflight } = setup;
    let (control, size) = (&*ending.0, usize::from(queue.size()));
    queue.set_event_idx(has(features, F_RING_EVENT_IDX));
    queue.set_ready(true);
    let disk = &*common.disk;
    let wake_set = WakeSet::new(size + PARTS);
    let settings = control.settings();
    let mut running = Running {
        disk,
        stats: &common.stats[index],
        common: &common,
        lost,
        is_writable: disk.is_writable(),
        is_write_through: !has(features, F_FLUSH),
        table: Table { at: GuestAddress(queue.desc_table()), entries: u32::from(queue.size()) },
        wakers: (0..size).map(|index| wake_set.waker(index)).collect(),
        part_wakers: Parts { kick: wake_set.waker(size), timer: wake_set.waker(size + 1) },
        wake_set,
        slots: (0..size).map(|_| None).collect(),
        free: (0..size).rev().collect(),
        chain: Chain::default(),
        extents: Vec::new(),
        share: Share::new(&common.party, RESERVE_BYTES, BUDGET_BYTES),
        used_bytes: 0,
        is_full: false,
        waiting: Vec::new(),
        recovered: 0,
        attention: Attention::default(),
        batch: Batch::default(),
        busy: Busy::new(&common.busy_queues),
        kicked: None,
        timer: None,
        is_notified: true,
        is_broken: false,
        turn_at: mica_rt::now(),
        index,
        place,
        account: Account::new(index, mica_rt::now()),
        patience: Patience::default(),
        queue,
        kick,
        inflight,
        settings,
    };
    running.recover();
    let end = until_end(&mut running, control).await;
    if end.is_none() {
        running.abandon().await;
    }
    let (queue, kick, inflight, lost) = running.into_parts();
    if let Some(End::Moves) = end {
        start(Setup { common, index, lost, ending, queue, features, kick, inflight });
        return;
    }
    if let Some(End::Stopped(base)) = end {
        // Whoever waits for the end may be about to close the disk.
        drop(common);
        control.stopped(base);
    }
}

/// Runs the queue until it ends; returns nothing if it panicked.
async fn until_end(running: &mut Running<'_>, control: &Control) -> Option<End> {
    poll_fn(|context| {
        running.wake_set.set_task(context.waker());
        control.set_waker(context.waker());
        // A failure ends this queue, and not the others of this executor.
        let polled = catch_unwind(AssertUnwindSafe(|| running.poll(control).map(Some)));
        polled.unwrap_or_else(|_| {
            running.stats.panics.add(1);
            running.break_off(&"the server panicked");
            Poll::Ready(None)
        })
    })
    .await
}

/// How long a queue that is to move takes nothing more, at most.
const LEAVES_WITHIN: Duration = Duration::from_millis(20);

/// What is left of that.
#[derive(Default)]
enum Patience {
    #[default]
    Fresh,
    Waits(Pin<Box<Sleep>>),
    Over,
}

/// The parts of the task that are not slots.
struct Parts {
    kick: Waker,
    timer: Waker,
}

const PARTS: usize = 2;

/// Rounds of one turn at most (I5).
const ROUNDS_MAX: usize = 32;
/// Looks between two turns of the executor: a microsecond or so.
const LOOKS_IN_PLACE: usize = 24;
/// Memory that the requests of a queue take at most, where they are not done in place.
const BUDGET_BYTES: usize = 32 << 20;
/// As much of it as a queue has for itself, whatever others do.
const RESERVE_BYTES: usize = transfer::COST_MIN;
/// Kicks that one look takes at most.
const KICKS_MAX: usize = 4;

struct Running<'a> {
    disk: &'a dyn Disk,
    common: &'a Common,
    lost: Arc<Lost>,
    stats: &'a QueueStats,
    is_writable: bool,
    /// Whether the driver sends no flushes (I9).
    is_write_through: bool,
    queue: Queue,
    table: Table,
    kick: Arc<Socket>,
    inflight: Option<InflightQueue>,
    settings: QueueSettings,
    /// Memory for requests that are not done in place (I6): what it may have, and what is used.
    share: Share,
    used_bytes: usize,
    /// A request waits until there is room.
    is_full: bool,
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
    /// How many of them, the next ones, were taken by the previous server: they cannot be left in
    /// the ring, as it may have returned later ones.
    recovered: usize,
    attention: Attention,
    batch: Batch,
    busy: Busy<'a>,
    kicked: Option<LocalFuture<'static, std::io::Result<()>>>,
    /// Until the rate lets the next request through.
    timer: Option<Pin<Box<Sleep>>>,
    /// Whether the driver was asked to notify.
    is_notified: bool,
    /// The ring contradicts itself: nothing is taken from it any more.
    is_broken: bool,
    /// When this turn began: the clock is read once for all that a turn begins and ends.
    turn_at: Instant,
    index: usize,
    /// The executor that it runs on.
    place: usize,
    account: Account,
    patience: Patience,
}

impl<'a> Running<'a> {
    fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// What it goes on with elsewhere.
    fn into_parts(mut self) -> (Queue, Arc<Socket>, Option<InflightQueue>, Arc<Lost>) {
        // Heads that were not begun are taken again.
        self.queue.set_next_avail(self.base());
        (self.queue, self.kick, self.inflight, self.lost)
    }

    /// Whether it is to move, and may begin to (I8).
    fn leaves(&mut self) -> bool {
        let is_long = |slot: &Slot<'_>| !matches!(slot.kind, Kind::Read | Kind::Write);
        let is_elsewhere = self.common.placement.place_of(self.index) != self.place;
        if !is_elsewhere {
            self.patience = Patience::default();
        }
        is_elsewhere
            && !self.is_broken
            && self.recovered == 0
            && !self.slots.iter().flatten().any(is_long)
    }

    /// Whether it has waited long enough for a moment with nothing in flight.
    fn is_late(&mut self) -> bool {
        if let Patience::Fresh = self.patience {
            self.patience = Patience::Waits(Box::pin(mica_rt::sleep(LEAVES_WITHIN)));
        }
        if let Patience::Waits(until) = &mut self.patience {
            let mut context = Context::from_waker(&self.part_wakers.timer);
            if until.as_mut().poll(&mut context).is_pending() {
                return false;
            }
        }
        self.patience = Patience::Over;
        true
    }

    /// Recovers what the previous server left.
    fn recover(&mut self) {
        let Some(inflight) = &mut self.inflight else { return };
        let guest = &self.settings.memory.guest;
        let Ok(used_idx) = self.queue.used_idx(guest, Ordering::Acquire) else { return };
        let mut heads = inflight.recover(used_idx.0);
        self.queue.set_next_used(used_idx.0);
        let taken = u16::try_from(heads.len()).expect("at most the queue's size");
        self.queue.set_next_avail(used_idx.0.wrapping_add(taken));
        if !heads.is_empty()
            && let Some(omitted) = self.common.logs.replays.admit()
        {
            tracing::info!(count = heads.len(), "replaying in-flight requests{omitted}");
        }
        heads.reverse();
        self.recovered = heads.len();
        self.waiting = heads;
    }

    /// Ready when the queue has stopped, or moves.
    fn poll(&mut self, control: &Control) -> Poll<End> {
        let polled = self.poll_rounds(control);
        let takes = self.settings.enabled && !self.is_broken;
        self.busy.set(self.used() > 0 || takes && !self.waiting.is_empty());
        self.check_lost();
        polled
    }

    fn poll_rounds(&mut self, control: &Control) -> Poll<End> {
        for _ in 0..ROUNDS_MAX {
            self.settings.refresh(control);
            self.turn_at = mica_rt::now();
            self.account.report_if_due(&self.common.placement, self.place, self.turn_at);
            let ended = self.poll_slots();
            self.poll_timer();
            if self.settings.stop {
                let ended_at_once = self.settings.enabled && self.take_recovered();
                self.call_if(ended || ended_at_once);
                if self.used() > 0 {
                    return Poll::Pending;
                }
                self.want_kicks();
                return Poll::Ready(End::Stopped(self.base()));
            }
            if self.leaves() {
                if self.used() == 0 {
                    self.call_if(ended);
                    self.want_kicks();
                    return Poll::Ready(End::Moves);
                }
                if !self.is_late() {
                    self.call_if(ended);
                    return Poll::Pending;
                }
            }
            self.poll_kick();
            // Otherwise it has not been looked at.
            let looks = self.waiting.is_empty();
            let taken_before = self.queue.next_avail();
            // Whatever it was that found it gone.
            self.check_lost();
            let ended_at_once = match self.settings.enabled && !self.is_broken {
                true => self.take_requests(),
                false => false,
            };
            self.call_if(ended || ended_at_once);
            if !self.settings.enabled || self.is_broken {
                self.attention.look_away();
                return Poll::Pending;
            }
            if !self.may_take() {
                return Poll::Pending;
            }
            if !self.waiting.is_empty() {
                // Their turn comes when those that began are done, as far as that takes no waiting.
                break;
            }
            if looks && self.queue.next_avail() == taken_before && self.pauses() {
                return Poll::Pending;
            }
        }
        // I5
        self.part_wakers.kick.wake_by_ref();
        Poll::Pending
    }

    /// Whether there is nothing to do: then the task sleeps until it is notified (I4), or comes
    /// back with the next turn of the executor to look again.
    fn pauses(&mut self) -> bool {
        if !self.waiting.is_empty() {
            return false;
        }
        let pause = self.attention.pause(self.turn_at);
        match pause {
            // While requests are in flight the queue has not run dry, though the ring is empty.
            _ if self.used() > 0 => {}
            Pause::Begin | Pause::Look => self.batch.note_look(self.turn_at),
            Pause::Sleep => self.batch.note_sleep(self.turn_at),
        }
        if pause == Pause::Begin {
            self.want_no_kicks();
        }
        if pause == Pause::Sleep {
            return !self.has_more();
        }
        self.part_wakers.kick.wake_by_ref();
        !self.looks_in_place()
    }

    /// Polls the ring for a moment without a turn of the executor, if nothing is in flight here:
    /// with pauses in between, so that the driver's processor is not slowed down by ours. Returns
    /// whether something arrived.
    fn looks_in_place(&self) -> bool {
        let guest = &self.settings.memory.guest;
        let arrived = || {
            let avail = self.queue.avail_idx(guest, Ordering::Acquire);
            avail.is_ok_and(|index| index.0 != self.queue.next_avail())
        };
        self.used() == 0
            && (0..LOOKS_IN_PLACE).any(|_| {
                std::hint::spin_loop();
                arrived()
            })
    }

    /// The index of the first request that was not begun.
    fn base(&self) -> u16 {
        let waiting = u16::try_from(self.waiting.len()).expect("at most the queue's size");
        self.queue.next_avail().wrapping_sub(waiting)
    }

    fn may_take(&self) -> bool {
        // What is not begun when the server ends stays in the ring.
        let is_ending = self.common.is_ending();
        self.timer.is_none() && !self.is_full && !self.free.is_empty() && !is_ending
    }

    /// Asks to be notified, and whether there is something already.
    fn has_more(&mut self) -> bool {
        if !self.waiting.is_empty() {
            return true;
        }
        self.want_kicks()
    }

    /// Asks the driver to notify. Returns whether there is something already.
    fn want_kicks(&mut self) -> bool {
        self.is_notified = true;
        match self.queue.enable_notification(&self.settings.memory.guest) {
            Ok(more) => {
                self.log_avail_event();
                more
            }
            Err(error) => {
                self.break_off(&error);
                false
            }
        }
    }

    /// Asks the driver not to notify: the ring is looked at anyway, and each notification costs
    /// both sides a system call. With `VIRTIO_RING_F_EVENT_IDX` it notifies once at most, unasked.
    fn want_no_kicks(&mut self) {
        if std::mem::take(&mut self.is_notified)
            && let Err(error) = self.queue.disable_notification(&self.settings.memory.guest)
        {
            self.break_off(&error);
        }
    }

    fn break_off(&mut self, why: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.is_broken, true) {
            self.stats.broken_queues.add(1);
            if let Some(omitted) = self.common.logs.breaks.admit() {
                tracing::warn!(
                    %why,
                    "a queue is broken and is not served until it is set up again{omitted}"
                );
            }
            self.settings.report_error();
        }
    }

    /// A queue whose memory is gone is no longer served: its rings contain nothing real.
    fn check_lost(&mut self) {
        if self.lost.is_lost() && !self.is_broken {
            self.common.note_lost();
            self.break_off(&"its guest's memory is gone");
        }
    }

    fn poll_kick(&mut self) {
        // A descriptor that is always readable does not hold up the executor (I5).
        for _ in 0..KICKS_MAX {
            let kicked = self.kicked.get_or_insert_with(|| {
                let kick = Arc::clone(&self.kick);
                Box::pin(async move { kick.readable().await })
            });
            let mut context = Context::from_waker(&self.part_wakers.kick);
            let Poll::Ready(result) = kicked.as_mut().poll(&mut context) else { return };
            self.kicked = None;
            let mut count = [0; 8];
            let read = result.and_then(|()| Ok(read_now(self.kick.as_fd(), &mut count)?));
            match read {
                Ok(8) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(_) => return self.break_off(&"its kick descriptor is not an eventfd"),
                Err(error) => return self.break_off(&error),
            }
        }
        self.part_wakers.kick.wake_by_ref();
    }

    fn poll_timer(&mut self) {
        let Some(timer) = &mut self.timer else { return };
        let mut context = Context::from_waker(&self.part_wakers.timer);
        if timer.as_mut().poll(&mut context).is_ready() {
            self.timer = None;
        }
    }

    /// Begins what the previous server took. Returns whether a request has already ended.
    fn take_recovered(&mut self) -> bool {
        let mut ended = false;
        while self.recovered > 0
            && let Some(head) = self.waiting.pop()
        {
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

    /// Takes what is there. Returns whether a request has already ended.
    fn take_requests(&mut self) -> bool {
        if self.waiting.is_empty()
            && let Err(error) = self.take_heads()
        {
            self.break_off(&error);
        }
        let mut ended = false;
        // The heads may be zeros that were never there.
        let batch = match self.busy.are_others() {
            true => self.waiting.len(),
            false => self.batch.of(self.waiting.len()),
        };
        for _ in 0..batch {
            if !self.may_take() || self.lost.is_lost() {
                break;
            }
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
        let memory = Arc::clone(&self.settings.memory);
        let room = self.free.len();
        let mut heads = std::mem::take(&mut self.waiting);
        for chain in self.queue.iter(&memory.guest)?.take(room) {
            heads.push(chain.head_index());
        }
        if !heads.is_empty() {
            self.want_no_kicks();
            self.account.note(heads.len());
            self.attention.found(self.turn_at);
            match self.busy.are_others() {
                true => self.batch.note_busy(),
                false => self.batch.note_found(self.turn_at),
            }
        }
        heads.reverse();
        self.waiting = heads;
        Ok(())
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
        self.share.trim(self.used_bytes);
        // The bits of the other parts share the last words, and say nothing by themselves.
        for word in self.slots.len().div_ceil(64)..(self.slots.len() + PARTS).div_ceil(64) {
            self.wake_set.take(word);
        }
        ended
    }
}

/// Reads what is there, also from a descriptor that its other owner has made one that blocks.
fn read_now(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> rustix::io::Result<usize> {
    let mut parts = [IoSliceMut::new(bytes)];
    // An offset of -1 is none.
    match rustix::io::preadv2(fd, &mut parts, u64::MAX, ReadWriteFlags::NOWAIT) {
        // Before Linux 5.7 events do not know the flag.
        Err(Errno::OPNOTSUPP) => rustix::io::read(fd, bytes),
        result => result,
    }
}

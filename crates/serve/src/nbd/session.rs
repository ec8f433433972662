//! The transmission phase of one connection.
//!
//! ```text
//! socket ─▶ Input ─▶ admit ─▶ slots ─▶ Outgoing ─▶ socket
//!           bytes    room?    reads    batches
//!                             in flight
//! ```
//!
//! One task drives all of it. A receive brings many requests; those whose plan is in memory start
//! their read on the spot; whatever is complete by the end of a turn goes out in one send, and what
//! completes while a send is under way joins the next.
//!
//! Words: a request is **admitted** when it gets a slot (or is answered on the spot); until then it
//! is **held back**. **Draining**: no further request is admitted, the session ends when the
//! admitted ones are answered.
//!
//! Invariants
//! - I1 Every admitted request gets exactly one reply (a structured one may have many chunks, the
//!   last of them marked), unless the connection ends first.
//! - I2 Bytes being read and bytes waiting to be sent are together at most `BUDGET_BYTES`; a read
//!   that is larger than that runs alone and keeps its own pieces within the budget.
//! - I3 Nothing is received while a request is held back or input is left over: a client that does
//!   not take its replies is not read from, and what it sent costs one receive buffer.
//! - I4 One receive and one send are under way at most; replies leave in the order in which they
//!   were put, so no chunk interrupts another.
//! - I5 While the client owes something (the rest of a request, taking a batch of replies) a
//!   deadline runs; while it owes nothing none does.
//! - I6 Whatever ends the session, everything it holds goes with it: buffers that the kernel still
//!   uses stay with their operations.

use super::check::{Action, Rules};
use super::input::{Input, Next};
use super::limits::{
    BUDGET_BYTES, FAILURES_LOGGED_MAX, Limits, REPLIES_QUEUED_MAX, SLOTS_MAX, STATUS_CHARGE_BYTES,
    WINDOW_BYTES,
};
use super::protocol::{ErrorCode, command};
use super::read::{Read, read_long};
use super::reply::{Outgoing, ReplyStyle};
use super::signal::Signal;
use super::stats::QueueStats;
use super::status::block_status;
use super::wake::{WakeSet, ones};
use mica_block::{Detail, Disk, Error, Extent, IoFuture, LocalFuture, Planned};
use mica_rt::{Buf, Instant, Sleep, Stream, now, sleep};
use mica_units::GuestOffset;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// What the handshake settled.
pub(super) struct Transmission {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) style: ReplyStyle,
    /// Whether `base:allocation` was selected.
    pub(super) status: bool,
    /// Bytes that came right behind the last option.
    pub(super) leftover: Vec<u8>,
}

/// Why a session ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// The client said goodbye.
    Disconnected,
    /// The client closed the connection without a word.
    Closed,
    /// The server is shutting down.
    Stopped,
    /// The client broke the protocol.
    Malformed,
    /// The client did not finish a request, or did not take its replies, in time.
    TooSlow,
    /// A read failed after its reply had begun.
    ReplyBroken,
    /// The connection failed.
    Io(io::Error),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disconnected => f.write_str("the client said goodbye"),
            Self::Closed => f.write_str("the client closed the connection"),
            Self::Stopped => f.write_str("the server stops"),
            Self::Malformed => f.write_str("the client sent something that is no request"),
            Self::TooSlow => f.write_str("the client let a deadline pass"),
            Self::ReplyBroken => f.write_str("a read failed after its reply had begun"),
            Self::Io(error) => write!(f, "the connection failed: {error}"),
        }
    }
}

/// Why a request failed, and at which byte.
pub(super) struct Failure {
    pub(super) error: Error,
    pub(super) offset: GuestOffset,
    /// Whether the reply has begun in a way that cannot be taken back.
    pub(super) ends_connection: bool,
}

impl Failure {
    pub(super) fn at(error: Error, offset: GuestOffset) -> Self {
        Self { error, offset, ends_connection: false }
    }
}

/// What a session shares with its long-running requests.
pub(super) struct Shared {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) outgoing: RefCell<Outgoing>,
    /// Bytes that admitted requests may still put into `outgoing` (I2).
    charged_bytes: Cell<usize>,
    /// Requests that wait for `outgoing` to shrink.
    room_wakers: RefCell<Vec<Waker>>,
}

impl Shared {
    /// Waits until half of the budget is free in `outgoing`.
    pub(super) async fn room(&self) {
        poll_fn(|context| {
            if self.outgoing.borrow().held_bytes() <= BUDGET_BYTES / 2 {
                return Poll::Ready(());
            }
            self.room_wakers.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn charge(self: &Rc<Self>, bytes: usize) -> Charge {
        self.charged_bytes.set(self.charged_bytes.get() + bytes);
        Charge { shared: Rc::clone(self), bytes }
    }
}

/// A request's share of the budget, given back when dropped.
pub(super) struct Charge {
    shared: Rc<Shared>,
    bytes: usize,
}

impl Charge {
    /// Gives `bytes` of it back.
    pub(super) fn release(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes, "more was released than charged");
        self.bytes -= bytes;
        self.shared.charged_bytes.set(self.shared.charged_bytes.get() - bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.release(self.bytes);
    }
}

/// Runs the transmission phase over `stream` until it ends.
pub(super) async fn transmit(
    stream: &Stream,
    transmission: Transmission,
    limits: Limits,
    stop: &Arc<Signal>,
    stats: &QueueStats,
) -> Ended {
    let mut session = Session::new(transmission, limits, stats);
    let _stop = stop.subscribe(&session.wakers.stop);
    let mut receiving = pin!(None);
    let mut sending = pin!(None);
    let mut watch = pin!(None);
    let start_receive = |buf: Buf| stream.recv(buf);
    let start_send = |batch: VecDeque<Buf>, urgency| async move {
        match urgency {
            Urgency::Now => stream.send_now(batch).await,
            Urgency::WithTheTurn => stream.send(batch).await,
        }
    };
    poll_fn(|context| {
        session.wake_set.set_task(context.waker());
        let ended = session.poll(
            receiving.as_mut(),
            &start_receive,
            sending.as_mut(),
            &start_send,
            watch.as_mut(),
        );
        ended.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

/// How a send is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Urgency {
    /// By itself, for a client that sends a request only when it has the reply to the last one.
    Now,
    /// With the next receive in one system call. A client with many requests under way gets
    /// larger batches by it: what it sent meanwhile is taken in first.
    WithTheTurn,
}

/// So many receives in a row that brought one request each, with nothing else going on, tell a
/// client that waits for every reply.
const LONE_RECEIVES: u32 = 64;

/// A request in flight, or the room for one.
struct Slot {
    waker: Waker,
    work: Work,
}

enum Work {
    None,
    /// A read of one extent, which is nearly every read: nothing is allocated for it but its data.
    Read {
        io: IoFuture,
        cookie: u64,
        offset: GuestOffset,
        len: usize,
    },
    Long {
        future: LocalFuture<'static, Result<u64, Failure>>,
        cookie: u64,
    },
}

/// The wakers of the parts that are not slots.
struct Wakers {
    receive: Waker,
    send: Waker,
    watch: Waker,
    stop: Waker,
}

const SLOT_WORDS: usize = SLOTS_MAX / 64;
const RECEIVE: usize = SLOTS_MAX;
const SEND: usize = SLOTS_MAX + 1;
const WATCH: usize = SLOTS_MAX + 2;
const STOP: usize = SLOTS_MAX + 3;
const PARTS: usize = SLOTS_MAX + 4;

/// Which of those parts were woken.
struct Woken(u64);

impl Woken {
    fn has(&self, part: usize) -> bool {
        self.0 >> (part - SLOTS_MAX) & 1 == 1
    }
}

struct Session<'a> {
    shared: Rc<Shared>,
    rules: Rules,
    limits: Limits,
    stats: &'a QueueStats,
    wake_set: Arc<WakeSet>,
    wakers: Wakers,
    slots: Vec<Slot>,
    free: Vec<usize>,
    input: Input,
    /// The next request, while there is no room for it.
    held_back: Option<Action>,
    draining: Option<Ended>,
    /// Set by a request whose failure cannot be told to the client.
    broken: bool,
    /// When the request that is arriving began to, and the steps it had made by then.
    arriving: Option<(Instant, u64)>,
    send_began: Option<Instant>,
    failures_logged: u32,
    /// Requests taken so far.
    taken: u64,
    /// See [`LONE_RECEIVES`].
    lone_receives: u32,
    /// Reused by every plan.
    extents: Vec<Extent>,
}

impl<'a> Session<'a> {
    fn new(transmission: Transmission, limits: Limits, stats: &'a QueueStats) -> Self {
        let Transmission { disk, style, status, leftover } = transmission;
        let wake_set = WakeSet::new(PARTS);
        let wakers = Wakers {
            receive: wake_set.waker(RECEIVE),
            send: wake_set.waker(SEND),
            watch: wake_set.waker(WATCH),
            stop: wake_set.waker(STOP),
        };
        let disk_len = disk.geometry().len;
        let shared = Rc::new(Shared {
            disk,
            outgoing: RefCell::new(Outgoing::new(style)),
            charged_bytes: Cell::new(0),
            room_wakers: RefCell::default(),
        });
        Self {
            shared,
            rules: Rules { disk_len, style, status },
            limits,
            stats,
            wake_set,
            wakers,
            slots: Vec::new(),
            free: Vec::new(),
            input: Input::new(&leftover),
            held_back: None,
            draining: None,
            broken: false,
            arriving: None,
            send_began: None,
            failures_logged: 0,
            taken: 0,
            lone_receives: 0,
            extents: Vec::new(),
        }
    }

    /// One turn: everything that can be done now, and the reason to end if there is one.
    fn poll<R, S>(
        &mut self,
        mut receiving: Pin<&mut Option<R>>,
        start_receive: &impl Fn(Buf) -> R,
        mut sending: Pin<&mut Option<S>>,
        start_send: &impl Fn(VecDeque<Buf>, Urgency) -> S,
        mut watch: Pin<&mut Option<Sleep>>,
    ) -> Option<Ended>
    where
        R: Future<Output = (io::Result<usize>, Buf)>,
        S: Future<Output = io::Result<()>>,
    {
        loop {
            let woken = Woken(self.wake_set.take(SLOT_WORDS));
            if woken.has(STOP) {
                self.draining.get_or_insert(Ended::Stopped);
            }
            self.poll_slots();
            let outcome = self
                .poll_receive(receiving.as_mut(), start_receive, woken.has(RECEIVE))
                .and_then(|()| self.poll_send(sending.as_mut(), start_send, woken.has(SEND)))
                .and_then(|sent| {
                    self.poll_watch(watch.as_mut(), woken.has(WATCH))?;
                    Ok(sent)
                });
            let sent = match outcome {
                Ok(sent) => sent,
                Err(ended) => return Some(ended),
            };
            if self.broken {
                return Some(Ended::ReplyBroken);
            }
            if self.draining.is_some() && self.is_answered() {
                return self.draining.take();
            }
            // What was sent made room, which a request that is held back may be waiting for.
            if !(sent && self.held_back.is_some()) {
                return None;
            }
        }
    }

    /// Whether every admitted request is answered and every answer is out.
    fn is_answered(&self) -> bool {
        self.free.len() == self.slots.len() && self.shared.outgoing.borrow().is_empty()
    }

    fn poll_receive<R>(
        &mut self,
        mut receiving: Pin<&mut Option<R>>,
        start: &impl Fn(Buf) -> R,
        woken: bool,
    ) -> Result<(), Ended>
    where
        R: Future<Output = (io::Result<usize>, Buf)>,
    {
        let mut due = woken;
        loop {
            self.admit_all()?;
            if receiving.is_none() {
                if self.draining.is_some() || self.held_back.is_some() {
                    return Ok(());
                }
                let Some(buf) = self.input.take_buf() else { return Ok(()) };
                receiving.set(Some(start(buf)));
                due = true;
            }
            let Some(receive) = receiving.as_mut().as_pin_mut() else { return Ok(()) };
            if !std::mem::take(&mut due) {
                return Ok(());
            }
            let mut context = Context::from_waker(&self.wakers.receive);
            let Poll::Ready((result, buf)) = receive.poll(&mut context) else { return Ok(()) };
            receiving.set(None);
            match result {
                Ok(0) => return Err(Ended::Closed),
                Ok(count) => self.input.put_buf(buf, count),
                Err(error) => return Err(Ended::Io(error)),
            }
            let (taken, was_idle) = (self.taken, self.is_answered());
            self.admit_all()?;
            let is_lone = was_idle && self.taken == taken + 1;
            self.lone_receives = if is_lone { self.lone_receives.saturating_add(1) } else { 0 };
        }
    }

    /// Sends what waits. Tells whether a send ended.
    fn poll_send<S>(
        &mut self,
        mut sending: Pin<&mut Option<S>>,
        start: &impl Fn(VecDeque<Buf>, Urgency) -> S,
        woken: bool,
    ) -> Result<bool, Ended>
    where
        S: Future<Output = io::Result<()>>,
    {
        let mut due = woken;
        let mut sent = false;
        loop {
            if sending.is_none() {
                let mut outgoing = self.shared.outgoing.borrow_mut();
                if !outgoing.has_queued() {
                    return Ok(sent);
                }
                sending.set(Some(start(outgoing.take_batch(), self.urgency())));
                self.send_began = Some(now());
                due = true;
            }
            let Some(send) = sending.as_mut().as_pin_mut() else { return Ok(sent) };
            if !std::mem::take(&mut due) {
                return Ok(sent);
            }
            let mut context = Context::from_waker(&self.wakers.send);
            let Poll::Ready(result) = send.poll(&mut context) else { return Ok(sent) };
            sending.set(None);
            self.send_began = None;
            result.map_err(Ended::Io)?;
            self.shared.outgoing.borrow_mut().sent();
            let waiting = self.shared.room_wakers.take();
            waiting.into_iter().for_each(Waker::wake);
            sent = true;
        }
    }

    /// Ends the session when a deadline has passed (I5). The timer is set once and looked at when
    /// it fires: a client that is quick never makes it be set again.
    fn poll_watch(&mut self, mut watch: Pin<&mut Option<Sleep>>, woken: bool) -> Result<(), Ended> {
        let mut due = woken;
        loop {
            if watch.is_none() {
                let Some(deadline) = self.deadline() else { return Ok(()) };
                let now = now();
                if deadline <= now {
                    return Err(Ended::TooSlow);
                }
                watch.set(Some(sleep(deadline.saturating_since(now))));
                due = true;
            }
            let Some(timer) = watch.as_mut().as_pin_mut() else { return Ok(()) };
            if !std::mem::take(&mut due) {
                return Ok(());
            }
            let mut context = Context::from_waker(&self.wakers.watch);
            if timer.poll(&mut context).is_pending() {
                return Ok(());
            }
            watch.set(None);
        }
    }

    fn urgency(&self) -> Urgency {
        if self.lone_receives >= LONE_RECEIVES { Urgency::Now } else { Urgency::WithTheTurn }
    }

    /// When the client must have done what it owes.
    fn deadline(&self) -> Option<Instant> {
        let request = self.arriving.map(|(began, _)| began.after(self.limits.request_deadline));
        let send = self.send_began.map(|began| began.after(self.limits.send_deadline));
        [request, send].into_iter().flatten().min()
    }

    /// Admits requests as long as there are some and there is room for them.
    fn admit_all(&mut self) -> Result<(), Ended> {
        while self.draining.is_none() {
            let action = match self.held_back.take() {
                Some(action) => action,
                None => match self.input.next().map_err(|_| Ended::Malformed)? {
                    Next::NeedBytes => break,
                    Next::Request(request) => {
                        self.stats.requests.add(1);
                        self.taken += 1;
                        if request.command == command::DISC {
                            self.draining = Some(Ended::Disconnected);
                            break;
                        }
                        self.rules.check(&request)
                    }
                },
            };
            if !self.has_room(&action) {
                self.held_back = Some(action);
                break;
            }
            self.admit(action);
        }
        self.note_arrival();
        Ok(())
    }

    /// Starts, restarts or ends the deadline of a request that is arriving.
    fn note_arrival(&mut self) {
        if !self.input.is_partial() || self.held_back.is_some() || self.draining.is_some() {
            self.arriving = None;
        } else {
            let steps = self.input.steps();
            if self.arriving.is_none_or(|(_, before)| before != steps) {
                self.arriving = Some((now(), steps));
            }
        }
    }

    fn has_room(&self, action: &Action) -> bool {
        let outgoing = self.shared.outgoing.borrow();
        let charged = self.shared.charged_bytes.get();
        let slots_used = self.slots.len() - self.free.len();
        let held = outgoing.held_bytes();
        let is_alone = slots_used == 0 && held == 0;
        slots_used < SLOTS_MAX
            && outgoing.queued_parts() < REPLIES_QUEUED_MAX
            && (is_alone || charged + held + action.charge_bytes() <= BUDGET_BYTES)
    }

    fn admit(&mut self, action: Action) {
        match action {
            Action::Read(read) => self.read(read),
            Action::Status(status) => {
                let charge = self.shared.charge(STATUS_CHARGE_BYTES);
                let future = block_status(Rc::clone(&self.shared), status, charge);
                self.start_long(status.cookie, Box::pin(future));
            }
            Action::Succeed { cookie } => self.shared.outgoing.borrow_mut().success(cookie),
            Action::Refuse { cookie, error } => self.refuse(cookie, error, None),
        }
    }

    fn refuse(&mut self, cookie: u64, error: ErrorCode, offset: Option<GuestOffset>) {
        self.stats.errors.add(1);
        let offset = offset.map(GuestOffset::bytes);
        self.shared.outgoing.borrow_mut().error(cookie, error, offset);
    }

    fn read(&mut self, read: Read) {
        let mut plan = None;
        if read.range.len() <= WINDOW_BYTES {
            self.extents.clear();
            let planned = match self.shared.disk.plan(read.range, Detail::Read, &mut self.extents) {
                Planned::Ready(result) => Some(result),
                // The map has to be read first: planned again by the long way.
                Planned::Pending(_) => None,
            };
            match (planned, &self.extents[..]) {
                (Some(Ok(())), &[extent]) => return self.read_one(read, &extent),
                (Some(Ok(())), _) => plan = Some(std::mem::take(&mut self.extents)),
                (Some(Err(error)), _) => {
                    return self.fail(read.cookie, Failure::at(error, read.range.start()));
                }
                (None, _) => {}
            }
        }
        let charge = self.shared.charge(usize::try_from(read.range.len()).expect("checked"));
        let future = read_long(Rc::clone(&self.shared), read, plan, charge);
        self.start_long(read.cookie, Box::pin(future));
    }

    fn read_one(&mut self, read: Read, extent: &Extent) {
        let Read { cookie, range, .. } = read;
        assert_eq!(extent.range(), range, "a plan covers what was asked");
        let offset = range.start();
        if extent.kind.reads_as_zero() {
            let len = u32::try_from(range.len()).expect("checked");
            self.shared.outgoing.borrow_mut().zeros(cookie, offset.bytes(), len);
            self.note_read(range.len());
            return;
        }
        let len = usize::try_from(range.len()).expect("checked");
        let mut io = self.shared.disk.read(extent, Buf::new(len));
        let slot = self.free_slot();
        let mut context = Context::from_waker(&self.slots[slot].waker);
        match Pin::new(&mut io).poll(&mut context) {
            Poll::Ready((result, buf)) => {
                self.free.push(slot);
                self.finish_read(cookie, offset, result, buf);
            }
            Poll::Pending => {
                self.shared.charged_bytes.set(self.shared.charged_bytes.get() + len);
                self.slots[slot].work = Work::Read { io, cookie, offset, len };
            }
        }
    }

    fn finish_read(
        &mut self,
        cookie: u64,
        offset: GuestOffset,
        result: mica_block::Result<()>,
        buf: Buf,
    ) {
        match result {
            Ok(()) => {
                self.note_read(buf.len() as u64);
                self.shared.outgoing.borrow_mut().data(cookie, offset.bytes(), buf);
            }
            Err(error) => self.fail(cookie, Failure::at(error, offset)),
        }
    }

    fn note_read(&self, bytes: u64) {
        self.stats.reads.add(1);
        self.stats.read_bytes.add(bytes);
    }

    fn start_long(&mut self, cookie: u64, future: LocalFuture<'static, Result<u64, Failure>>) {
        let slot = self.free_slot();
        self.slots[slot].work = Work::Long { future, cookie };
        self.poll_slot(slot);
    }

    fn free_slot(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            let slot = self.slots.len();
            assert!(slot < SLOTS_MAX, "admitted without room");
            self.slots.push(Slot { waker: self.wake_set.waker(slot), work: Work::None });
            slot
        })
    }

    fn poll_slots(&mut self) {
        for word in 0..SLOT_WORDS {
            for bit in ones(self.wake_set.take(word)) {
                self.poll_slot(word * 64 + bit);
            }
        }
    }

    fn poll_slot(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let mut context = Context::from_waker(&slot.waker);
        match &mut slot.work {
            // Woken by what it no longer waits for.
            Work::None => {}
            Work::Read { io, cookie, offset, len } => {
                if let Poll::Ready((result, buf)) = Pin::new(io).poll(&mut context) {
                    let (cookie, offset, len) = (*cookie, *offset, *len);
                    slot.work = Work::None;
                    self.free.push(index);
                    self.shared.charged_bytes.set(self.shared.charged_bytes.get() - len);
                    self.finish_read(cookie, offset, result, buf);
                }
            }
            Work::Long { future, cookie } => {
                if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                    let cookie = *cookie;
                    slot.work = Work::None;
                    self.free.push(index);
                    match result {
                        // A block status reads nothing.
                        Ok(0) => {}
                        Ok(bytes) => self.note_read(bytes),
                        Err(failure) => self.fail(cookie, failure),
                    }
                }
            }
        }
    }

    /// The disk failed a request: tells the client which kind of failure, and the log which.
    fn fail(&mut self, cookie: u64, failure: Failure) {
        let Failure { error, offset, ends_connection } = failure;
        if self.failures_logged < FAILURES_LOGGED_MAX {
            self.failures_logged += 1;
            tracing::warn!(%offset, ?error, "a request failed");
        }
        if ends_connection {
            self.stats.errors.add(1);
            self.broken = true;
        } else {
            self.refuse(cookie, ErrorCode::of(&error), Some(offset));
        }
    }
}

#[cfg(test)]
mod tests;

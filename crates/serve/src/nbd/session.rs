//! The transmission phase of one connection.
//!
//! ```text
//! socket ─▶ Input ─▶ admit ─▶ Slots ─▶ Outgoing ─▶ socket
//!           bytes    room?    requests  batches
//!                             in flight
//! ```
//!
//! One task drives all of it. A receive brings many requests; those whose plan is in memory start
//! their read on the spot; whatever is complete by the end of a turn goes out in one send, and what
//! completes while a send is under way joins the next. Here is what drives them; `admit` starts
//! and ends requests, `slots` holds those in flight.
//!
//! Words: a request is **admitted** when it gets a slot (or is answered on the spot); until then it
//! is **held back**. A write that has room **awaits** its payload before it is admitted.
//! **Draining**: no further request is admitted, the session ends when the admitted ones are
//! answered.
//!
//! Invariants
//! - I1 Every admitted request gets exactly one reply (a structured one may have many chunks, the
//!   last of them marked), unless the connection ends first.
//! - I2 Payloads that arrive, bytes being written or read and bytes waiting to be sent are together
//!   at most what the session's share of the process's budget covers, which is never less than its
//!   reserve. A request that is larger runs alone and keeps its own pieces within that. No payload
//!   is received before it has room. Nobody waits for room that another session has.
//! - I3 Nothing is received while a request is held back or input is left over: a client that does
//!   not take its replies is not read from, and what it sent costs one receive buffer.
//! - I4 One receive and one send are under way at most; replies leave in the order in which they
//!   were put, so no chunk interrupts another.
//! - I5 While the client owes something (the rest of a request, taking a batch of replies) a
//!   deadline runs; while it owes nothing none does.
//! - I6 Whatever ends the session, everything it holds goes with it: buffers that the kernel still
//!   uses stay with their operations.
//! - I7 A request that changes the disk is not abandoned when its client disconnects: the session
//!   stays until it is done, so that the request counts as in flight while its I/O is.
//! - I8 While a reply whose length is promised is sent as it is read, nothing is admitted: another
//!   reply would become a part of its data. Nor is anything after such a reply has failed.

use super::channel::Channel;
use super::check::{Action, Rules};
use super::contexts::ContextNumber;
use super::entry::Client;
use super::export::Export;
use super::input::Input;
use super::limits::{Limits, SLOTS_MAX};
use super::reply::{Outgoing, ReplyStyle};
use super::shared::{Shared, Subject};
use super::stats::QueueStats;
use crate::budget::Share;
use crate::wake::{WakeSet, ones};
use admit::Awaited;
use mica_block::Extent;
use mica_rt::sync::Signal;
use mica_rt::{Buf, Instant, LogLimit, Sleep, now, sleep};
use slots::Slots;
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{self, Poll, Waker};

mod admit;
mod slots;

/// What the handshake settled.
pub(super) struct Transmission {
    /// Whose it is, and of which export.
    pub(super) client: Client,
    pub(super) style: ReplyStyle,
    /// The contexts that were selected.
    pub(super) contexts: Rc<[ContextNumber]>,
    /// Bytes received right behind the last option.
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
            Self::Disconnected => f.write_str("the client disconnected"),
            Self::Closed => f.write_str("the client closed the connection"),
            Self::Stopped => f.write_str("the server is stopping"),
            Self::Malformed => f.write_str("the client sent something that is not a request"),
            Self::TooSlow => f.write_str("the client missed a deadline"),
            Self::ReplyBroken => f.write_str("a read failed after its reply had begun"),
            Self::Io(error) => write!(f, "the connection failed: {error}"),
        }
    }
}

/// Runs the transmission phase over `channel` until it ends.
pub(super) async fn transmit(
    channel: &impl Channel,
    transmission: &Transmission,
    share: Share,
    limits: Limits,
    stop: &Arc<Signal>,
    stats: &QueueStats,
) -> (Ended, Traffic) {
    let entry = transmission.client.entry();
    let Export { disk, contexts, edges, .. } = &entry.export;
    let subject = Subject { disk: &**disk, contexts, edges, share };
    let mut session = Session::new(subject, transmission, limits, stats);
    let _stop = stop.subscribe(&session.wakers.stop);
    let mut receiving = pin!(None);
    let mut sending = pin!(None);
    let mut watch = pin!(None);
    let start_receive = |buf: Buf| channel.recv(buf);
    let start_send = |batch: VecDeque<Buf>, urgency| async move {
        match urgency {
            Urgency::Now => channel.send_now(batch).await,
            Urgency::WithTheTurn => channel.send(batch).await,
        }
    };
    let ended = poll_fn(|context| {
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
    .await;
    session.end_changes().await;
    let Session { taken: requests, read_bytes, written_bytes, .. } = session;
    (ended, Traffic { requests, read_bytes, written_bytes })
}

/// What a session did.
pub(super) struct Traffic {
    pub(super) requests: u64,
    pub(super) read_bytes: u64,
    pub(super) written_bytes: u64,
}

/// How a send is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Urgency {
    /// By itself, for a client that sends a request only when it has the reply to the last one.
    Now,
    /// With the next receive in one system call. A client with many requests under way gets larger
    /// batches that way: what it has sent in the meantime is processed first.
    WithTheTurn,
}

/// This many receives in a row that brought one request each, with nothing else under way, indicate
/// a client that waits for every reply.
const LONE_RECEIVES: u32 = 64;

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
    shared: Rc<Shared<'a>>,
    rules: Rules,
    /// Those that the client selected.
    contexts: Rc<[ContextNumber]>,
    limits: Limits,
    stats: &'a QueueStats,
    wake_set: Arc<WakeSet>,
    wakers: Wakers,
    slots: Slots<'a>,
    input: Input,
    /// The request whose payload is arriving.
    awaited: Option<Awaited<'a>>,
    /// The next request, while there is no room for it.
    held_back: Option<Action>,
    draining: Option<Ended>,
    /// Set by a request whose failure cannot be reported to the client.
    broken: bool,
    /// When the request that is arriving began to, and the steps it had made by then.
    arriving: Option<(Instant, u64)>,
    send_began: Option<Instant>,
    /// Of all clients of the export: one that connects again gets no lines of its own.
    failures: Arc<LogLimit>,
    /// Requests taken so far.
    taken: u64,
    read_bytes: u64,
    written_bytes: u64,
    /// See [`LONE_RECEIVES`].
    lone_receives: u32,
    /// Reused by every plan.
    extents: Vec<Extent>,
    /// When this turn was, if anybody asked: the clock is read once for all that begins and ends.
    turn_at: Option<Instant>,
}

impl<'a> Session<'a> {
    fn new(
        subject: Subject<'a>,
        transmission: &Transmission,
        limits: Limits,
        stats: &'a QueueStats,
    ) -> Self {
        let Transmission { ref client, style, ref contexts, .. } = *transmission;
        let disk = subject.disk;
        let discard = client.entry().export.discard;
        let wake_set = WakeSet::new(PARTS);
        let wakers = Wakers {
            receive: wake_set.waker(RECEIVE),
            send: wake_set.waker(SEND),
            watch: wake_set.waker(WATCH),
            stop: wake_set.waker(STOP),
        };
        let disk_len = disk.geometry().len;
        let is_writable = disk.is_writable();
        Self {
            shared: Shared::new(subject, Outgoing::new(style)),
            rules: Rules { disk_len, is_writable, discard, style, status: !contexts.is_empty() },
            contexts: Rc::clone(contexts),
            limits,
            stats,
            slots: Slots::new(Arc::clone(&wake_set)),
            wake_set,
            wakers,
            input: Input::new(&transmission.leftover),
            awaited: None,
            held_back: None,
            draining: None,
            broken: false,
            arriving: None,
            send_began: None,
            failures: Arc::clone(&client.entry().failures),
            taken: 0,
            read_bytes: 0,
            written_bytes: 0,
            lone_receives: 0,
            extents: Vec::new(),
            turn_at: None,
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
                self.shared.share.trim(self.shared.used_bytes());
                return None;
            }
        }
    }

    /// Whether every admitted request is answered and every answer is out.
    fn is_answered(&self) -> bool {
        self.slots.used() == 0 && self.shared.outgoing.borrow().is_empty()
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
            let mut context = task::Context::from_waker(&self.wakers.receive);
            let Poll::Ready((result, buf)) = receive.poll(&mut context) else { return Ok(()) };
            receiving.set(None);
            match result {
                Ok(0) => return Err(Ended::Closed),
                Ok(count) => self.input.put_buf(buf, count),
                Err(error) => return Err(Ended::Io(error)),
            }
            let (taken, was_idle) = (self.taken, self.is_answered());
            self.admit_all()?;
            // A receive that only brought more of a payload indicates nothing.
            if self.taken != taken {
                let is_lone = was_idle && self.taken == taken + 1;
                self.lone_receives = if is_lone { self.lone_receives.saturating_add(1) } else { 0 };
            }
        }
    }

    /// Sends what waits. Returns whether a send ended.
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
                self.send_began = Some(*self.turn_at.get_or_insert_with(now));
                due = true;
            }
            let Some(send) = sending.as_mut().as_pin_mut() else { return Ok(sent) };
            if !std::mem::take(&mut due) {
                return Ok(sent);
            }
            let mut context = task::Context::from_waker(&self.wakers.send);
            let Poll::Ready(result) = send.poll(&mut context) else { return Ok(sent) };
            sending.set(None);
            self.send_began = None;
            result.map_err(Ended::Io)?;
            self.shared.sent();
            sent = true;
        }
    }

    /// Ends the session when a deadline has passed (I5). The timer is set once and checked when
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
            let mut context = task::Context::from_waker(&self.wakers.watch);
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

    fn poll_slots(&mut self) {
        self.turn_at = None;
        for word in 0..SLOT_WORDS {
            for bit in ones(self.wake_set.take(word)) {
                if let Some(timed) = self.slots.poll(word * 64 + bit) {
                    self.finish(timed);
                }
            }
        }
    }

    /// Completes the requests that change the disk (I7). Nobody gets an answer.
    async fn end_changes(&mut self) {
        self.slots.drop_reads();
        poll_fn(|context| {
            self.wake_set.set_task(context.waker());
            self.poll_slots();
            if self.slots.used() == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

#[cfg(test)]
mod tests;

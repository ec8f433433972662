//! How requests begin and end in a session.

use super::super::check::Action;
use super::super::input::Next;
use super::super::limits::{PIECE_BYTES, REPLIES_QUEUED_MAX, SLOTS_MAX, WINDOW_BYTES};
use super::super::protocol::{ErrorCode, command};
use super::super::read::{Read, read_long};
use super::super::shared::{Charge, Failure};
use super::super::status::block_status;
use super::super::write::{
    Answer, Divided, Outcome, Write, change, is_whole, write_long, write_piece,
};
use super::slots::{Finished, Timed, Work};
use super::{Ended, Session};
use mica_block::{Extent, InFlight, LocalFuture, Planned};
use mica_rt::{Buf, Instant, now};
use mica_units::{GuestOffset, GuestRange};
use std::rc::Rc;

/// A request whose payload is arriving.
pub(super) enum Awaited<'a> {
    /// It has its room already.
    Write(Write, Charge<'a>),
    /// A piece of a write, and its room.
    Piece(Rc<Divided>, GuestRange, Charge<'a>),
    /// The payload is skipped.
    Refused(Action),
    /// The rest of a write that has failed is skipped.
    Failed(Rc<Divided>),
}

impl<'a> Session<'a> {
    /// Admits requests as long as there are some and there is room for them.
    pub(super) fn admit_all(&mut self) -> Result<(), Ended> {
        while self.draining.is_none() {
            let action = match self.held_back.take() {
                Some(action) => action,
                None => match self.next_action()? {
                    Some(action) => action,
                    None => break,
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

    /// The next request to admit. Writes whose payload is complete are started here: they had their
    /// room before it arrived.
    fn next_action(&mut self) -> Result<Option<Action>, Ended> {
        loop {
            let request = match self.input.next().map_err(|_| Ended::Malformed)? {
                Next::NeedBytes => return Ok(None),
                Next::Payload(payload) => match (self.awaited.take(), payload) {
                    (Some(Awaited::Write(write, charge)), Some(payload)) => {
                        self.write(write, payload, charge);
                        continue;
                    }
                    (Some(Awaited::Piece(write, piece, charge)), Some(payload)) => {
                        self.start_piece(&write, Some((piece, payload, charge)));
                        match write.rest().is_empty() {
                            true => continue,
                            false => return Ok(Some(Action::Rest(write))),
                        }
                    }
                    (Some(Awaited::Failed(write)), None) => {
                        self.start_piece(&write, None);
                        continue;
                    }
                    (Some(Awaited::Refused(action)), None) => return Ok(Some(action)),
                    _ => unreachable!("a payload is there only for a write that awaits it"),
                },
                Next::Request(request) => request,
            };
            self.stats.requests.add(1);
            self.taken += 1;
            if request.command == command::DISC {
                self.draining = Some(Ended::Disconnected);
                return Ok(None);
            }
            let action = self.rules.check(&request);
            if request.payload_len() == 0 || matches!(action, Action::Write(_)) {
                return Ok(Some(action));
            }
            self.input.skip(request.payload_len() as usize);
            self.awaited = Some(Awaited::Refused(action));
        }
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
        // Also a reply that costs nothing would end up within the one that is being sent (I8), or
        // in place of what is missing of it.
        if self.shared.is_streaming() || self.broken {
            return false;
        }
        let slots_used = self.slots.used();
        let used = self.shared.used_bytes();
        let is_alone = slots_used == 0 && used == 0;
        slots_used < SLOTS_MAX
            && self.shared.outgoing.borrow().queued_parts() < REPLIES_QUEUED_MAX
            && (is_alone || self.shared.share.covers(used + action.charge_bytes()))
    }

    fn admit(&mut self, action: Action) {
        // What runs alone may have less than it counts for, and keeps within that.
        let used = self.shared.used_bytes();
        let covered = self.shared.share.up_to(used + action.charge_bytes()) - used;
        let charge = self.shared.charge(covered);
        match action {
            Action::Read(read) => self.read(read, charge),
            Action::Status(status) => {
                let asked = (status, Rc::clone(&self.contexts));
                let future = block_status(Rc::clone(&self.shared), asked, charge);
                self.start_long(status.cookie, false, Box::pin(future));
            }
            Action::Write(write) => {
                let len = usize::try_from(write.range.len()).expect("within a payload");
                let needed = if is_whole(write.range) { len } else { 2 * len };
                if needed <= charge.bytes() && len <= PIECE_BYTES {
                    self.input.fill(len);
                    self.awaited = Some(Awaited::Write(write, charge));
                } else {
                    self.await_piece(Divided::new(write), charge);
                }
            }
            Action::Rest(write) if write.has_failed() => {
                self.input.skip(write.skip_rest());
                self.awaited = Some(Awaited::Failed(write));
            }
            Action::Rest(write) => self.await_piece(write, charge),
            Action::Change(what) => {
                let future = change(Rc::clone(&self.shared), what, charge);
                self.start_long(what.cookie, true, Box::pin(future));
            }
            Action::Succeed { cookie } => self.shared.outgoing.borrow_mut().success(cookie),
            Action::Refuse { cookie, error } => self.refuse(cookie, error, None),
        }
    }

    fn await_piece(&mut self, write: Rc<Divided>, charge: Charge<'a>) {
        let piece = write.next_piece(charge.bytes());
        self.input.fill(usize::try_from(piece.len()).expect("within a payload"));
        self.awaited = Some(Awaited::Piece(write, piece, charge));
    }

    fn start_piece(&mut self, write: &Rc<Divided>, piece: Option<(GuestRange, Buf, Charge<'a>)>) {
        let future = write_piece(Rc::clone(&self.shared), Rc::clone(write), piece);
        self.start_long(write.cookie(), true, Box::pin(future));
    }

    fn refuse(&mut self, cookie: u64, error: ErrorCode, offset: Option<GuestOffset>) {
        self.stats.errors.add(1);
        let offset = offset.map(GuestOffset::bytes);
        self.shared.outgoing.borrow_mut().error(cookie, error, offset);
    }

    fn read(&mut self, read: Read, charge: Charge<'a>) {
        let disk = self.shared.disk;
        let mut plan = None;
        if read.range.len() <= WINDOW_BYTES {
            self.extents.clear();
            let list = std::mem::take(&mut self.extents);
            match disk.plan(read.range, list) {
                Planned::Ready(Ok(planned)) => match *planned {
                    [extent] => {
                        let (list, in_flight) = planned.into_parts();
                        self.extents = list;
                        return self.read_one(read, &extent, charge, in_flight);
                    }
                    _ => plan = Some(planned),
                },
                Planned::Ready(Err(error)) => {
                    return self.fail(read.cookie, Failure::at(error, read.range.start()));
                }
                // The map has to be read first: planned again by the long way.
                Planned::Pending(_) => {}
            }
        }
        let future = read_long(Rc::clone(&self.shared), read, plan, charge);
        self.start_long(read.cookie, false, Box::pin(future));
    }

    fn read_one(
        &mut self,
        read: Read,
        extent: &Extent,
        charge: Charge<'a>,
        in_flight: InFlight<'a>,
    ) {
        let Read { cookie, range, .. } = read;
        assert_eq!(extent.range(), range, "a plan covers what was asked");
        let offset = range.start();
        if extent.kind.reads_as_zero() {
            let len = u32::try_from(range.len()).expect("checked");
            self.shared.outgoing.borrow_mut().zeros(cookie, offset.bytes(), len);
            let at = self.turn_at();
            self.note_read(range.len(), at);
            return;
        }
        let len = usize::try_from(range.len()).expect("checked");
        let io = self.shared.disk.read(extent, Buf::new(len));
        self.start(Work::Read { io, cookie, offset, _held: (charge, in_flight) });
    }

    fn write(&mut self, write: Write, payload: Buf, charge: Charge<'a>) {
        let Write { cookie, range, answer } = write;
        let (disk, edges) = (self.shared.disk, self.shared.edges);
        if answer == Answer::Done
            && is_whole(range)
            && let Some(sharing) = edges.try_share()
        {
            let io = disk.write(range.start(), payload);
            self.start(Work::Write { io, cookie, range, _held: (charge, sharing) });
        } else {
            let future = write_long(Rc::clone(&self.shared), write, payload, charge);
            self.start_long(cookie, true, Box::pin(future));
        }
    }

    fn start_long(
        &mut self,
        cookie: u64,
        changes: bool,
        future: LocalFuture<'a, Result<Outcome, Failure>>,
    ) {
        self.start(Work::Long { future, cookie, changes });
    }

    fn start(&mut self, work: Work<'a>) {
        let began = self.turn_at();
        if let Some(timed) = self.slots.start(work, began) {
            self.finish(timed);
        }
    }

    pub(super) fn turn_at(&mut self) -> Instant {
        *self.turn_at.get_or_insert_with(now)
    }

    /// Answers a request that is done.
    pub(super) fn finish(&mut self, (finished, began): Timed) {
        match finished {
            Finished::Read { cookie, offset, result: Ok(()), buf } => {
                self.note_read(buf.len() as u64, began);
                self.shared.outgoing.borrow_mut().data(cookie, offset.bytes(), buf);
            }
            Finished::Read { cookie, offset, result: Err(error), .. } => {
                self.fail(cookie, Failure::at(error, offset));
            }
            Finished::Write { cookie, range, result: Ok(()) } => {
                self.note_changed(cookie, Outcome::Written(range.len()), began);
            }
            Finished::Write { cookie, range, result: Err(error) } => {
                self.fail(cookie, Failure::at(error, range.start()));
            }
            Finished::Long { cookie, result: Ok(outcome) } => match outcome {
                Outcome::Read(bytes) => self.note_read(bytes, began),
                Outcome::Answered | Outcome::Piece => {}
                outcome => self.note_changed(cookie, outcome, began),
            },
            Finished::Long { cookie, result: Err(failure) } => self.fail(cookie, failure),
        }
    }

    fn note_read(&mut self, bytes: u64, began: Instant) {
        let ended = self.turn_at();
        self.stats.latencies.read.add(began, ended);
        self.stats.reads.add(1);
        self.stats.read_bytes.add(bytes);
        self.read_bytes += bytes;
    }

    fn note_changed(&mut self, cookie: u64, outcome: Outcome, began: Instant) {
        let ended = self.turn_at();
        match outcome {
            Outcome::Written(bytes) => {
                self.stats.latencies.write.add(began, ended);
                self.stats.writes.add(1);
                self.stats.written_bytes.add(bytes);
                self.written_bytes += bytes;
            }
            Outcome::Flushed => {
                self.stats.latencies.flush.add(began, ended);
                self.stats.flushes.add(1);
            }
            Outcome::Zeroed => self.stats.zeroes.add(1),
            Outcome::Discarded => self.stats.discards.add(1),
            Outcome::Read(_) | Outcome::Answered | Outcome::Piece => {
                unreachable!("that changes nothing")
            }
        }
        self.shared.outgoing.borrow_mut().success(cookie);
    }

    /// The disk failed a request: reports the kind of failure to the client, and the details to the
    /// log.
    fn fail(&mut self, cookie: u64, failure: Failure) {
        let Failure { error, offset, code, ends_connection } = failure;
        // That zeros would be slow is an answer.
        if code != ErrorCode::NotSup
            && let Some(omitted) = self.failures.admit()
        {
            let offset = offset.map(GuestOffset::bytes);
            tracing::warn!(?offset, ?error, "a request failed{omitted}");
        }
        if ends_connection {
            self.stats.errors.add(1);
            self.broken = true;
        } else {
            self.refuse(cookie, code, offset);
        }
    }
}

//! What a guest does to a volume: every change is a record, in the log if there is one, and in the
//! batch that fills.
//!
//! Invariants
//! - I1 Records get their numbers, and their places in the log and in the batches, in one step: the
//!   order is the same everywhere.
//! - I2 A change is answered when the log has it, if there is one: then it survives the death of
//!   the process. Nothing is answered once the volume is latched.
//! - I3 What is full makes writers wait, and never fails them: batches, the log.

use crate::known::{Change, Now};
use crate::log::{Log, NotPushed, Record, Ticket};
use crate::place::{BLOCK_BYTES, Place};
use crate::reader;
use crate::recent::{Block, Known};
use crate::segment::Cut;
use crate::shared::Shared;
use crate::state::Root;
use mica_block::{Error, Result};
use mica_rt::{Buf, sleep, yield_now};
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The longest that a change waits because the log is nearly full.
const DELAY_MAX: Duration = Duration::from_millis(100);

/// Blocks of a write that are recorded under one lock.
const BLOCKS_AT_ONCE: u64 = 64;

/// Why a change was not done yet.
enum NotYet {
    /// The batches are full; or there are too many of them for a cut.
    Batches { is_cut: bool },
    /// The log is full.
    Log,
    /// Snapshots of several volumes are being taken.
    Held,
    /// Nothing more is accepted.
    Refused(Error),
    /// The log has failed.
    Failed(Error),
}

impl Shared {
    /// Does `change` now, if there is room.
    fn record(&self, now: &mut Now, change: Change) -> std::result::Result<Option<Ticket>, NotYet> {
        self.may_record(now, matches!(change, Change::Cut(_)))?;
        let ticket = match self.log() {
            None => None,
            Some(log) => Some(push(log, &change)?),
        };
        debug_assert!(ticket.is_none_or(|ticket| ticket.number() == now.records), "one order");
        self.apply(now, change);
        Ok(ticket)
    }

    /// As [`Self::record`], of up to `count` blocks from `first` on, which become those from `data`
    /// on: returns how many there was room for, and why not for more.
    fn record_run(
        &self,
        now: &mut Now,
        (first, data, count): (u64, &Block, u64),
        last: &mut Option<Ticket>,
    ) -> (u64, Option<NotYet>) {
        if let Err(why) = self.may_record(now, false) {
            return (0, Some(why));
        }
        let (mut done, mut not_yet) = (0, None);
        match self.log() {
            None => done = count,
            Some(log) => {
                while done < count && not_yet.is_none() {
                    match log.push_block(first + done, &data.nth(done)) {
                        Ok(ticket) => {
                            debug_assert_eq!(ticket.number(), now.records + done, "one order");
                            (*last, done) = (Some(ticket), done + 1);
                        }
                        Err(why) => not_yet = Some(why.into()),
                    }
                }
            }
        }
        if done > 0 {
            self.apply(now, Change::Run(first, data.clone(), done));
        }
        (done, not_yet)
    }

    /// Makes room for a change, unless none is accepted now.
    fn may_record(&self, now: &mut Now, is_cut: bool) -> std::result::Result<(), NotYet> {
        if let Some(error) = now.stage.refusal() {
            return Err(NotYet::Refused(error));
        }
        if now.holds > 0 && !is_cut {
            return Err(NotYet::Held);
        }
        match now.make_room(is_cut, &self.heads.environment) {
            true => Ok(()),
            false => Err(NotYet::Batches { is_cut }),
        }
    }

    /// Does `change`, which the log has.
    fn apply(&self, now: &mut Now, change: Change) {
        let is_cut = matches!(change, Change::Cut(_));
        let is_awaited = std::mem::take(&mut now.is_awaited) || now.waiting().is_none();
        now.apply(change, &self.heads.environment);
        if is_awaited || is_cut {
            self.progress.wake_all();
        }
    }

    /// Waits until the volume has another number of records than `seen`.
    pub(crate) async fn record_after(&self, seen: u64) {
        let check = || {
            let mut now = self.now();
            now.is_awaited |= now.records == seen;
            (now.records != seen).then_some(())
        };
        self.progress.until(check).await;
    }

    /// Calls `act` until it has done all its changes; waits for room in between.
    pub(crate) async fn change<T>(
        self: &Arc<Self>,
        act: impl FnMut(&mut Recorder<'_>) -> Step<T>,
    ) -> Result<T> {
        let mut last = None;
        let done = self.make_changes(&mut last, act).await?;
        self.settle(last).await?;
        Ok(done)
    }

    /// As [`Self::change`], but for the wait until they may be answered: `last` is the ticket of
    /// the last of them then.
    async fn make_changes<T>(
        self: &Arc<Self>,
        last: &mut Option<Ticket>,
        mut act: impl FnMut(&mut Recorder<'_>) -> Step<T>,
    ) -> Result<T> {
        loop {
            let (step, not_yet) = {
                let mut now = self.now();
                let mut recorder = Recorder { shared: self, now: &mut now, last, not_yet: None };
                let step = act(&mut recorder);
                (step, recorder.not_yet)
            };
            self.drive();
            match (step, not_yet) {
                (_, Some(NotYet::Refused(error))) => return Err(error),
                (_, Some(NotYet::Failed(error))) => return Err(self.latch_with(error)),
                (_, Some(NotYet::Log)) => self.wait_for_log().await?,
                (_, Some(NotYet::Held)) => self.wait_for_group().await?,
                (_, Some(NotYet::Batches { is_cut })) => self.wait_for_batches(is_cut).await?,
                (Step::Again, None) => unreachable!("a step ends early only for lack of room"),
                (Step::Done(done), None) => return Ok(done),
            }
        }
    }

    /// Waits until the change with this ticket may be answered.
    async fn settle(self: &Arc<Self>, last: Option<Ticket>) -> Result<()> {
        if let (Some(log), Some(ticket)) = (self.log(), last) {
            log.written(ticket).await.map_err(|error| self.latch_with(error))?;
            if let Some(delay) = delay(log) {
                self.note_throttled();
                self.now().want();
                self.drive();
                // The end of the volume ends the wait; what was done is in the log.
                self.over.unless_raised(sleep(delay)).await;
            }
        }
        self.latch().map_or(Ok(()), Err)
    }

    fn note_throttled(&self) {
        if let Some(putter) = &self.writer {
            putter.counts.throttled.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn wait_for_batches(self: &Arc<Self>, is_cut: bool) -> Result<()> {
        self.note_throttled();
        self.now().want();
        self.drive();
        let check = || {
            let mut now = self.now();
            let has_room = now.make_room(is_cut, &self.heads.environment);
            let refusal = now.stage.refusal().map(Err);
            refusal.or(has_room.then_some(Ok(())))
        };
        self.progress.until(check).await
    }

    async fn wait_for_group(&self) -> Result<()> {
        let check = || {
            let now = self.now();
            now.stage.refusal().map(Err).or((now.holds == 0).then_some(Ok(())))
        };
        self.progress.until(check).await
    }

    async fn wait_for_log(self: &Arc<Self>) -> Result<()> {
        let Some(log) = self.log() else { return Ok(()) };
        self.note_throttled();
        // Its records leave it with extents.
        self.now().want();
        self.drive();
        match self.over.unless_raised(log.has_room()).await {
            Some(outcome) => outcome.map_err(|error| self.latch_with(error)),
            None => self.latch().map_or(Ok(()), Err),
        }
    }

    /// Writes all of `buf`, and keeps the whole blocks of it, unless they are a guest's memory.
    pub(crate) async fn write(self: &Arc<Self>, at: GuestOffset, mut buf: Buf) -> Result<()> {
        let size = BLOCK_BYTES as u64;
        let (at, end) = (at.bytes(), at.bytes() + buf.len() as u64);
        let within = usize::try_from(at % size).expect("less than a block");
        let head_len = match within {
            0 => 0,
            within => buf.len().min(BLOCK_BYTES - within),
        };
        let tail_len = (buf.len() - head_len) % BLOCK_BYTES;
        if buf.is_foreign() {
            buf = Buf::from_slice(&buf);
        }
        let head = buf.split_to(head_len);
        let whole = buf.split_to(buf.len() - tail_len);
        if !head.is_empty() {
            self.write_part(at / size, within, &head).await?;
        }
        if !whole.is_empty() {
            self.write_blocks(at.div_ceil(size), whole).await?;
        }
        if buf.is_empty() { Ok(()) } else { self.write_part(end / size, 0, &buf).await }
    }

    /// Writes whole blocks, some at a time: others have the lock in between.
    async fn write_blocks(self: &Arc<Self>, first: u64, bytes: Buf) -> Result<()> {
        let mut last = None;
        let (count, mut done) = ((bytes.len() / BLOCK_BYTES) as u64, 0);
        let data = Block::all_of(bytes, 0).next().expect("whole blocks");
        while done < count {
            let end = count.min(done + BLOCKS_AT_ONCE);
            let record_some = |recorder: &mut Recorder<'_>| {
                done += recorder.record_run(first + done, &data.nth(done), end - done);
                if done < end { Step::Again } else { Step::Done(()) }
            };
            self.make_changes(&mut last, record_some).await?;
            if done < count {
                yield_now().await;
            }
        }
        self.settle(last).await
    }

    /// Changes a part of a block: what else is in it is read first, if it has to be.
    async fn write_part(self: &Arc<Self>, block: u64, within: usize, part: &[u8]) -> Result<()> {
        let mut stored: Option<(Option<Place>, Block)> = None;
        loop {
            let make = |is| {
                let mut new = match (is, &stored) {
                    (Is::Recent(Known::Data(old)), _) => *old,
                    (Is::Recent(Known::Nothing) | Is::Stored(None), _) => [0; BLOCK_BYTES],
                    (Is::Stored(place), Some((at, old))) if *at == place => **old,
                    (Is::Stored(Some(_)), _) => return None,
                };
                new[within..within + part.len()].copy_from_slice(part);
                Some(Block::new(&new))
            };
            if self.change_block(block, make).await? {
                return Ok(());
            }
            let read = self.reading(async || {
                let (generation, map) = self.map_now();
                (generation, reader::stored_block(&self.tree, map, block).await)
            });
            stored = Some(read.await?);
        }
    }

    /// Puts what `make` makes of what `block` is, in one step; false if it makes nothing of it.
    /// What others do meanwhile to other blocks holds nobody up.
    pub(crate) async fn change_block(
        self: &Arc<Self>,
        block: u64,
        mut make: impl FnMut(Is) -> Option<Block>,
    ) -> Result<bool> {
        let mut found: Option<(u64, Option<Place>)> = None;
        loop {
            let done = self.change(|recorder| {
                let now = &*recorder.now;
                let is = match (now.recent(block), found) {
                    (Some(known), _) => Is::Recent(known),
                    (None, Some((of, place))) if of == now.generation => Is::Stored(place),
                    // The nodes on its path were read for the state before, or made since.
                    (None, _) => match self.tree.look_up_cached(now.state.map, block) {
                        Some(place) => Is::Stored(place),
                        None => return Step::Done(None),
                    },
                };
                let Some(new) = make(is) else { return Step::Done(Some(false)) };
                match recorder.record(Change::Data(block, new)) {
                    true => Step::Done(Some(true)),
                    false => Step::Again,
                }
            });
            if let Some(done) = done.await? {
                return Ok(done);
            }
            let look_up = self.reading(async || {
                let (generation, map) = self.map_now();
                let place = self.tree.look_up(map, block).await;
                (generation, place.map(|place| (generation, place)))
            });
            found = Some(look_up.await?);
        }
    }

    /// The map of the state, and of which generation it is.
    pub(crate) fn map_now(&self) -> (u64, Root) {
        let now = self.now();
        (now.generation, now.state.map)
    }

    /// Whole blocks of `range` have nothing from now on; what is left of it at its ends is written
    /// with zeros if `exact`.
    pub(crate) async fn clear(self: &Arc<Self>, range: GuestRange, exact: bool) -> Result<()> {
        let size = BLOCK_BYTES as u64;
        let (start, end) = (range.start().bytes(), range.end().bytes());
        let first = start.div_ceil(size);
        loop {
            // A disk's last block may be shorter than a block: nobody sees what is beyond.
            let is_at_end = end == self.len();
            let end_blocks = if is_at_end { end.div_ceil(size) } else { end / size };
            if first >= end_blocks {
                return if exact { self.write_zeros(start, end).await } else { Ok(()) };
            }
            if exact {
                self.write_zeros(start, first * size).await?;
                self.write_zeros((end_blocks * size).min(end), end).await?;
            }
            let cleared = self.change(|recorder| {
                // It may have grown since, and have something there.
                if is_at_end && recorder.now.len != end {
                    return Step::Done(false);
                }
                match recorder.record(Change::Nothing(first..end_blocks)) {
                    true => Step::Done(true),
                    false => Step::Again,
                }
            });
            if cleared.await? {
                return Ok(());
            }
        }
    }

    async fn write_zeros(self: &Arc<Self>, start: u64, end: u64) -> Result<()> {
        let len = usize::try_from(end - start).expect("less than two blocks");
        self.write(GuestOffset::new(start), Buf::zeroed(len)).await
    }

    pub(crate) async fn change_once(self: &Arc<Self>, change: Change) -> Result<()> {
        let step = |recorder: &mut Recorder<'_>| match recorder.record(change.clone()) {
            true => Step::Done(()),
            false => Step::Again,
        };
        self.change(step).await
    }
}

/// What a block is, for whoever changes it.
pub(crate) enum Is {
    /// It was written or cleared lately.
    Recent(Known),
    /// What the map of the state says: where its bytes are, if it has any.
    Stored(Option<Place>),
}

/// What a step of a change came to.
pub(crate) enum Step<T> {
    Done(T),
    /// There was no room.
    Again,
}

/// Does changes, under the lock of what the volume is now.
pub(crate) struct Recorder<'a> {
    shared: &'a Shared,
    pub(crate) now: &'a mut Now,
    last: &'a mut Option<Ticket>,
    not_yet: Option<NotYet>,
}

impl Recorder<'_> {
    /// Whether `change` was done; if not, the step ends.
    pub(crate) fn record(&mut self, change: Change) -> bool {
        match self.shared.record(self.now, change) {
            Ok(ticket) => {
                *self.last = ticket.or(*self.last);
                true
            }
            Err(why) => {
                self.not_yet = Some(why);
                false
            }
        }
    }

    /// How many of `count` blocks from `first` on have become those from `data` on; if not all, the
    /// step ends.
    fn record_run(&mut self, first: u64, data: &Block, count: u64) -> u64 {
        let run = (first, data, count);
        let (done, not_yet) = self.shared.record_run(self.now, run, self.last);
        self.not_yet = not_yet;
        done
    }
}

/// Whether changes wait for the log or the store now.
pub(crate) fn is_throttled(shared: &Shared, now: &Now) -> bool {
    shared.log().is_some_and(|log| delay(log).is_some()) || now.is_full()
}

/// How long a change waits so that the log does not become full all at once; nothing as long as it
/// is half empty.
fn delay(log: &Log) -> Option<Duration> {
    let room = log.room();
    let over = room.used.saturating_sub(room.len / 2);
    let part = over as f64 / (room.len - room.len / 2).max(1) as f64;
    (over > 0).then(|| DELAY_MAX.mul_f64((part * part).min(1.0)))
}

impl From<NotPushed> for NotYet {
    fn from(why: NotPushed) -> Self {
        match why {
            NotPushed::NoRoom => Self::Log,
            NotPushed::Failed(error) => Self::Failed(error),
        }
    }
}

fn push(log: &Log, change: &Change) -> std::result::Result<Ticket, NotPushed> {
    match change {
        Change::Data(block, bytes) => log.push_block(*block, bytes),
        change => log.push(as_record(change)),
    }
}

fn as_record(change: &Change) -> Record<'_> {
    match change {
        Change::Data(block, bytes) => Record::Data { block: *block, bytes },
        Change::Nothing(blocks) => {
            Record::Nothing { first: blocks.start, count: blocks.end - blocks.start }
        }
        Change::Length(bytes) => Record::Length { bytes: *bytes },
        Change::Cut(Cut::Take { number, label, time_ns, origin: None }) => {
            Record::Take { number: *number, time_ns: *time_ns, label }
        }
        Change::Cut(Cut::Drop { number }) => Record::Drop { number: *number },
        Change::Cut(Cut::Label { number, label }) => Record::Label { number: *number, label },
        Change::Run(..) => unreachable!("its blocks are records of their own"),
        Change::Cut(Cut::Rollback { .. } | Cut::Take { origin: Some(_), .. }) => {
            unreachable!("a volume with a log is not rolled back, and receives nothing")
        }
    }
}

/// What a record of a log did.
pub(crate) fn as_change(record: Record<'_>) -> Change {
    match record {
        Record::Data { block, bytes } => Change::Data(block, Block::new(bytes)),
        Record::Encrypted { .. } => unreachable!("a log decrypts what is read of it"),
        Record::Nothing { first, count } => Change::Nothing(first..first + count),
        Record::Length { bytes } => Change::Length(bytes),
        Record::Take { number, time_ns, label } => {
            Change::Cut(Cut::Take { number, label: label.to_owned(), time_ns, origin: None })
        }
        Record::Drop { number } => Change::Cut(Cut::Drop { number }),
        Record::Label { number, label } => {
            Change::Cut(Cut::Label { number, label: label.to_owned() })
        }
    }
}

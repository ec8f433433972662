//! The log of one volume that is open: what is pushed, written, synced and freed.
//!
//! ```text
//! push ─▶ group that fills ─▶ full groups, in order ─▶ one write at a time ─▶ sync of the device
//! ```
//!
//! Whoever waits for a record and finds no write under way leads the next one, in a task of its
//! own executor: what was pushed meanwhile goes out together.

use super::chain::Part;
use super::device::LogDevice;
use super::format::{BLOCK_LEN, GROUP_HEAD_BYTES, Kind, SegmentHeader};
use super::group::{Group, Place};
use super::record::{RECORD_BYTES_MAX, Record};
use super::scan::scan;
use super::slots::{LogKey, Phase, Purpose, Slots};
use crate::format::Id;
use crate::place::Writer;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::spawn;
use mica_rt::sync::Waiters;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Full groups that may wait for their write. Bounds the memory of a log.
const SEALED_MAX: usize = 8;
/// A group that takes the longest record, in the file.
const GROUP_BYTES_MIN: u64 =
    ((GROUP_HEAD_BYTES + RECORD_BYTES_MAX) as u64).next_multiple_of(BLOCK_LEN);

/// The log of one volume. Dropping it leaves what is in it to the next process, or the next
/// [`LogDevice::go_on`].
pub struct Log {
    inner: Arc<Inner>,
    recovered: Range<u64>,
}

/// Names a record that was pushed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ticket(u64);

impl Ticket {
    /// The record's number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// Why a record was not pushed.
#[derive(Clone, Debug)]
pub enum NotPushed {
    /// There is no room: wait for it ([`Log::has_room`]), and try again.
    NoRoom,
    /// The log takes no more records.
    Failed(Error),
}

/// How full a log is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Bytes that cannot be used now: what logs need, this one's and those of others.
    pub used: u64,
    /// All that can be used.
    pub len: u64,
}

struct Inner {
    device: Arc<LogDevice>,
    key: LogKey,
    store: Id,
    tail: Mutex<Tail>,
    /// What waits for writes of this log.
    waiters: Arc<Waiters>,
}

/// Held for a few steps in memory.
struct Tail {
    writers: Vec<Writer>,
    /// The number of the next record.
    next: u64,
    /// Records below are in the file.
    written: u64,
    /// Records below are not needed any more.
    freed: u64,
    /// The segments that have what is needed, in order; the last is the tail.
    parts: VecDeque<Part>,
    /// Where the next group begins in the tail, behind what is sealed.
    at: u64,
    /// Whether records may be put into the tail (I6 of the log).
    may_have_records: bool,
    filling: Option<Group>,
    sealed: VecDeque<Group>,
    is_writing: bool,
    /// The number of the last change of this log that was written.
    change: u64,
    /// The number of the last segment whose header was written.
    named: u64,
}

impl Log {
    /// A log with `parts` to which `segment` is added, whose header is written next.
    pub(super) fn new(
        device: Arc<LogDevice>,
        key: LogKey,
        parts: Vec<Part>,
        (slot, header): (usize, &SegmentHeader),
        recovered: Range<u64>,
    ) -> Self {
        let next = header.first;
        let mut parts = VecDeque::from(parts);
        if let Some(last) = parts.back_mut() {
            last.limit = next;
        }
        parts.push_back(part_of(slot, header));
        let tail = Tail {
            writers: header.writers.clone(),
            next,
            written: next,
            freed: recovered.start,
            parts,
            at: BLOCK_LEN,
            may_have_records: false,
            filling: None,
            sealed: VecDeque::new(),
            is_writing: false,
            change: 0,
            named: header.number,
        };
        let waiters = Arc::default();
        device.wake_on_latch(&waiters);
        let (store, tail) = (header.store, Mutex::new(tail));
        Self { inner: Arc::new(Inner { device, key, store, tail, waiters }), recovered }
    }

    /// The header of its tail is durable: other segments of the log are not needed any more.
    pub(super) fn is_named(&self) {
        let Inner { device, key, .. } = &*self.inner;
        let mut tail = self.inner.tail();
        let mut slots = device.slots();
        let needed = |at: usize| tail.parts.iter().any(|part| part.slot == at);
        let all: Vec<_> = slots.segments_of(*key).into_iter().map(|(at, _)| at).collect();
        all.into_iter().filter(|at| !needed(*at)).for_each(|at| slots.release(at));
        slots.set_phase(*key, Phase::Open { has_records: false });
        tail.trim(&mut slots);
    }

    /// The records that were found when it was opened: those from the one asked for on.
    pub fn recovered(&self) -> Range<u64> {
        self.recovered.clone()
    }

    /// The number that the next record gets.
    pub fn next(&self) -> u64 {
        self.inner.tail().next
    }

    /// Adds a record. Copies it, and never waits; the order of records is that of the calls. It is
    /// written when somebody waits for it, or for one that was pushed later.
    ///
    /// # Errors
    /// Nothing was pushed.
    ///
    /// # Panics
    /// If the record cannot be one of a volume.
    pub fn push(&self, record: Record<'_>) -> std::result::Result<Ticket, NotPushed> {
        assert!(record.is_valid(), "{record:?} is not a record of a volume");
        let len = record.encoded_len();
        let mut tail = self.inner.tail();
        if !tail.filling.as_ref().is_some_and(|group| group.has_room(len)) {
            self.inner.begin_group(&mut tail)?;
        }
        let group = tail.filling.as_mut().expect("there is one now");
        group.push(&record);
        let ticket = Ticket(tail.next);
        tail.next += 1;
        Ok(ticket)
    }

    /// Waits until there may be room for a record.
    ///
    /// # Errors
    /// Why the log takes no more records.
    pub async fn has_room(&self) -> Result<()> {
        let Inner { device, .. } = &*self.inner;
        loop {
            let (room_made, waits_for_sync) = {
                let slots = device.slots();
                slots.check()?;
                (slots.room_made, slots.waits_for_sync())
            };
            let (has_room, unwritten) = {
                let tail = self.inner.tail();
                let has_room = self.inner.room_for_group(&tail, &device.slots()).is_some();
                let fills =
                    tail.filling.as_ref().is_some_and(|group| group.has_room(RECORD_BYTES_MAX));
                (has_room || fills, tail.written < tail.next)
            };
            if has_room {
                return Ok(());
            }
            if unwritten {
                let next = self.next();
                self.inner.wait_until(|tail| tail.written >= next).await?;
            } else if waits_for_sync {
                device.sync().await?;
            } else {
                let changed = || {
                    let slots = device.slots();
                    (slots.latch.is_some() || slots.room_made != room_made).then_some(())
                };
                device.room.until(changed).await;
            }
        }
    }

    /// Waits until the record, and all before it, are in the file: they survive the death of the
    /// process.
    ///
    /// # Errors
    /// If a write or a sync on the device failed.
    pub async fn written(&self, ticket: Ticket) -> Result<()> {
        self.inner.wait_until(|tail| tail.written > ticket.0).await
    }

    /// Waits until everything that was pushed before this call is durable.
    ///
    /// # Errors
    /// As [`Self::written`].
    pub async fn sync(&self) -> Result<()> {
        let next = self.next();
        self.inner.wait_until(|tail| tail.written >= next).await?;
        let change = self.inner.tail().change;
        let is_durable = {
            let slots = self.inner.device.slots();
            slots.check()?;
            slots.durable() >= change
        };
        if is_durable { Ok(()) } else { self.inner.device.sync().await }
    }

    /// Records below `below` are not needed any more: all of them are in extents that were
    /// answered, without a gap.
    pub fn free(&self, below: u64) {
        let device = &self.inner.device;
        {
            let mut tail = self.inner.tail();
            tail.freed = tail.freed.max(below);
            tail.trim(&mut device.slots());
        }
        device.room.wake_all();
    }

    /// Calls `each` with every record from `from` on that is written and was not freed, and its
    /// number, in order.
    ///
    /// # Errors
    /// What the file reports, or `each`; `Corrupt` if a record is not as it was written.
    pub async fn read(
        &self,
        from: u64,
        mut each: impl FnMut(u64, Record<'_>) -> Result<()>,
    ) -> Result<()> {
        let (parts, written) = {
            let tail = self.inner.tail();
            (tail.parts.clone(), tail.written)
        };
        let device = &self.inner.device;
        for part in parts.into_iter().filter(|part| part.limit > from && part.first < written) {
            let part = Part { limit: part.limit.min(written), ..part };
            let mut wanted = |number, record: Record<'_>| match number < from {
                true => Ok(()),
                false => each(number, record),
            };
            let end = scan(&*device.file, &device.header, &part, &mut wanted).await?;
            if end < part.limit {
                let what = format!("the log {} has lost record {end}", device.file.name());
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        }
        Ok(())
    }

    /// How full it is, for back pressure.
    pub fn room(&self) -> Room {
        let tail = self.inner.tail();
        let (used, all) = self.inner.device.slots().usage();
        let segment_bytes = self.inner.device.header.segment_bytes;
        let left = segment_bytes - tail.end().min(segment_bytes);
        let used = (used as u64 * segment_bytes).saturating_sub(left);
        Room { used, len: all as u64 * segment_bytes }
    }

    /// Names another writer under which the log may go on, durably when this returns.
    ///
    /// # Errors
    /// `Limit` if it names too many; as [`Self::written`].
    pub async fn allow(&self, writer: Writer) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        spawn(async move { inner.allow(writer).await }).await
    }

    /// The volume is `writer`'s for certain: the log names no other from its next segment on.
    pub fn only(&self, writer: Writer) {
        self.inner.tail().writers = vec![writer];
    }

    /// Ends the log: the store has all of it. Durable when this returns.
    ///
    /// # Errors
    /// As [`Self::written`]. The log is found again then.
    pub async fn end(self) -> Result<()> {
        let inner = self.inner;
        spawn(async move {
            let next = inner.tail().next;
            inner.wait_until(|tail| tail.written >= next).await?;
            let writers = inner.tail().writers.clone();
            let header = inner.device.segment(inner.store, inner.key, next, writers);
            inner.device.end_log(Kind::Ended, header).await
        })
        .await
    }
}

/// Where a group can begin.
enum RoomForGroup {
    /// Here in the tail.
    Here(u64),
    /// Here in the tail, which has no records yet.
    First(u64),
    /// In a new segment, for this purpose.
    NewSegment(Purpose),
}

/// What a call does about a record that it waits for.
enum Role {
    Done,
    Failed(Error),
    Leads(Writing),
}

impl Inner {
    fn tail(&self) -> MutexGuard<'_, Tail> {
        // No code that may panic runs while it is half changed.
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn room_for_group(&self, tail: &Tail, slots: &Slots) -> Option<RoomForGroup> {
        if tail.filling.is_some() && tail.sealed.len() >= SEALED_MAX {
            return None;
        }
        let at = tail.end();
        if at + GROUP_BYTES_MIN > self.device.header.segment_bytes {
            let purpose = Purpose::Records { is_spent: tail.freed >= tail.next };
            return slots.may_take(purpose, self.key).then_some(RoomForGroup::NewSegment(purpose));
        }
        if tail.may_have_records {
            return Some(RoomForGroup::Here(at));
        }
        slots.may_begin(self.key).then_some(RoomForGroup::First(at))
    }

    /// Begins the next group, and seals the one that fills.
    fn begin_group(self: &Arc<Self>, tail: &mut Tail) -> std::result::Result<(), NotPushed> {
        let mut slots = self.device.slots();
        slots.check().map_err(NotPushed::Failed)?;
        let room = self.room_for_group(tail, &slots).ok_or(NotPushed::NoRoom)?;
        let segment_bytes = self.device.header.segment_bytes;
        let first = tail.next;
        let (at, header) = match room {
            RoomForGroup::Here(at) => (at, None),
            RoomForGroup::First(at) => {
                slots.begin(self.key);
                tail.may_have_records = true;
                (at, None)
            }
            RoomForGroup::NewSegment(purpose) => {
                let header = self.add_segment(tail, &mut slots, purpose);
                (0, Some(header.ok_or(NotPushed::NoRoom)?))
            }
        };
        tail.seal();
        let last = tail.parts.back().expect("there is a tail");
        let place = Place { slot: last.slot, segment: last.number, at };
        let room = segment_bytes - at;
        tail.filling = Some(Group::new(Group::buffer(), place, room, header.as_ref(), first));
        Ok(())
    }

    /// Makes a new segment the tail.
    fn add_segment(
        &self,
        tail: &mut Tail,
        slots: &mut Slots,
        purpose: Purpose,
    ) -> Option<SegmentHeader> {
        let header = self.device.segment(self.store, self.key, tail.next, tail.writers.clone());
        let (slot, header) = slots.take(purpose, |number| SegmentHeader { number, ..header })?;
        if let Some(last) = tail.parts.back_mut() {
            last.limit = header.first;
        }
        tail.parts.push_back(part_of(slot, &header));
        tail.trim(slots);
        Some(header)
    }

    /// Waits until `is_done`, and writes what was pushed if nobody else does.
    async fn wait_until(self: &Arc<Self>, is_done: impl Fn(&Tail) -> bool) -> Result<()> {
        loop {
            let role = self.waiters.until(|| self.role(&is_done)).await;
            match role {
                Role::Done => return Ok(()),
                Role::Failed(error) => return Err(error),
                Role::Leads(writing) => spawn(writing.run()).await,
            }
        }
    }

    fn role(self: &Arc<Self>, is_done: impl Fn(&Tail) -> bool) -> Option<Role> {
        let mut tail = self.tail();
        if let Err(error) = self.device.slots().check() {
            return Some(Role::Failed(error));
        }
        if is_done(&tail) {
            return Some(Role::Done);
        }
        if tail.is_writing {
            return None;
        }
        tail.is_writing = true;
        Some(Role::Leads(Writing(Arc::clone(self))))
    }

    async fn allow(self: Arc<Self>, writer: Writer) -> Result<()> {
        let number = loop {
            match self.begin_names(writer)? {
                Some(number) => break number,
                None => self.device.sync().await?,
            }
        };
        self.wait_until(|tail| tail.named >= number).await?;
        self.device.sync().await
    }

    /// Begins a segment that names `writer`, too; `None` if a sync has to come first. Returns its
    /// number.
    fn begin_names(self: &Arc<Self>, writer: Writer) -> Result<Option<u64>> {
        let mut tail = self.tail();
        let mut slots = self.device.slots();
        slots.check()?;
        if !tail.writers.contains(&writer) {
            self.device.check_names(&tail.writers)?;
            tail.writers.push(writer);
        }
        let Some(header) = self.add_segment(&mut tail, &mut slots, Purpose::Name) else {
            return if slots.waits_for_sync() { Ok(None) } else { Err(self.device.no_room()) };
        };
        slots.set_phase(self.key, Phase::Open { has_records: false });
        tail.may_have_records = false;
        tail.seal();
        let last = tail.parts.back().expect("there is a tail");
        let place = Place { slot: last.slot, segment: last.number, at: 0 };
        let segment_bytes = self.device.header.segment_bytes;
        let (buf, first) = (Group::buffer(), tail.next);
        tail.filling = Some(Group::new(buf, place, segment_bytes, Some(&header), first));
        tail.seal();
        Ok(Some(header.number))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.device.slots().abandon(self.key);
        self.device.room.wake_all();
    }
}

fn part_of(slot: usize, header: &SegmentHeader) -> Part {
    let SegmentHeader { number, session, first, .. } = *header;
    Part { slot, number, session, first, limit: u64::MAX }
}

impl Tail {
    /// Where the next group begins in the tail, behind the one that fills.
    fn end(&self) -> u64 {
        match &self.filling {
            Some(group) => group.place.at + group.padded_len() as u64,
            None => self.at,
        }
    }

    /// Nothing is added to the group that fills any more.
    fn seal(&mut self) {
        self.at = self.end();
        self.sealed.extend(self.filling.take());
    }

    /// Releases the segments that have nothing that is needed.
    fn trim(&mut self, slots: &mut Slots) {
        // What is not written yet may be freed already, but it is still to be written.
        let below = self.freed.min(self.written);
        while let Some(second) = self.parts.get(1)
            && second.first <= below
        {
            let first = self.parts.pop_front().expect("there are two");
            slots.release(first.slot);
        }
    }
}

/// The write that is under way of a log. However it ends, somebody else may lead the next one.
struct Writing(Arc<Inner>);

impl Writing {
    /// Writes what was pushed until now.
    async fn run(self) {
        let up_to = self.0.tail().next;
        while let Some(group) = self.next_group(up_to) {
            if !self.write(group).await {
                return;
            }
        }
    }

    fn next_group(&self, up_to: u64) -> Option<Group> {
        let mut tail = self.0.tail();
        if tail.sealed.is_empty() && tail.filling.as_ref().is_some_and(|group| group.first < up_to)
        {
            tail.seal();
        }
        tail.sealed.pop_front()
    }

    /// Returns whether it was written.
    async fn write(&self, group: Group) -> bool {
        let Inner { device, waiters, .. } = &*self.0;
        let (place, next) = (group.place, group.next());
        let begun = group.begins_segment().then_some(place.slot);
        let buf = group.finish(&device.header.id, &device.session);
        let (result, _) = device.write(buf, place.slot, place.at).await;
        let result = result.map_err(|error| error.wrap(device.file.name()));
        let Ok(change) = device.after_write(result, begun) else { return false };
        {
            let mut tail = self.0.tail();
            (tail.written, tail.change, tail.named) = (next, change, place.segment);
            tail.trim(&mut device.slots());
        }
        waiters.wake_all();
        true
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.tail().is_writing = false;
        self.0.waiters.wake_all();
    }
}

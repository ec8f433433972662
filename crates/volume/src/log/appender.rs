//! Puts what is pushed into the file.
//!
//! Whoever waits for a record and finds no write under way leads the next one, in a task of its own
//! executor: what was pushed meanwhile goes out together.

use super::background::Background;
use super::device::LogDevice;
use super::format::SegmentHeader;
use super::group::{Group, Place};
use super::slots::{LogKey, Purpose, Slots};
use super::tail::{GROUP_BYTES_MIN, SEALED_MAX, Tail};
use crate::crypt::{Cipher, LogCipher};
use crate::format::Id;
use mica_block::{Error, Result};
use mica_rt::spawn;
use mica_rt::sync::Waiters;
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, OnceLock};

/// What the users of a log share.
pub(super) struct Appender {
    pub(super) device: Arc<LogDevice>,
    pub(super) key: LogKey,
    pub(super) store: Id,
    tail: Mutex<Tail>,
    /// What waits for writes of this log.
    pub(super) waiters: Arc<Waiters>,
    pub(super) background: Arc<Background>,
    /// What the volume is encrypted with, and this process its records; nothing if it is not.
    pub(super) cipher: OnceLock<(Cipher, LogCipher)>,
}

/// Why a record was not pushed.
#[derive(Clone, Debug)]
pub enum NotPushed {
    /// There is no room: wait for it ([`super::Log::has_room`]), and try again.
    NoRoom,
    /// The log takes no more records.
    Failed(Error),
}

/// Where a group can begin.
pub(super) enum RoomForGroup {
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

impl Appender {
    pub(super) fn new(device: Arc<LogDevice>, key: LogKey, store: Id, tail: Tail) -> Self {
        let (waiters, background) = Default::default();
        device.wake_on_latch(&waiters);
        let cipher = OnceLock::new();
        Self { device, key, store, tail: Mutex::new(tail), waiters, background, cipher }
    }

    pub(super) fn tail(&self) -> MutexGuard<'_, Tail> {
        // No code that may panic runs while it is half changed.
        self.tail.lock()
    }

    pub(super) fn room_for_group(&self, tail: &Tail, slots: &Slots) -> Option<RoomForGroup> {
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
    pub(super) fn begin_group(
        self: &Arc<Self>,
        tail: &mut Tail,
    ) -> std::result::Result<(), NotPushed> {
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
        drop(slots);
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
        let (oldest, durable) = (tail.oldest_needed(), tail.durable_now(slots));
        let header = self.device.segment(self.store, self.key, tail.next, tail.writers.clone());
        let (slot, header) = slots.take(purpose, |number| SegmentHeader {
            number,
            oldest: oldest.unwrap_or(number),
            freed: tail.freed,
            durable,
            ..header
        })?;
        tail.add(slot, &header);
        tail.trim(slots);
        Some(header)
    }

    /// Waits until `is_done`, and writes what was pushed if nobody else does.
    pub(super) async fn wait_until(
        self: &Arc<Self>,
        is_done: impl Fn(&Tail) -> bool,
    ) -> Result<()> {
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
        Some(Role::Leads(Writing { of: Arc::clone(self), is_under_way: false }))
    }
}

impl Drop for Appender {
    fn drop(&mut self) {
        self.device.slots().abandon(self.key);
        self.device.room.wake_all();
    }
}

/// The writes of a log that one task leads. When they have ended, somebody else may lead the next.
struct Writing {
    of: Arc<Appender>,
    /// Whether a group is on its way: it is in no queue any more, and whether the file has it is
    /// not known.
    is_under_way: bool,
}

impl Writing {
    /// Writes what was pushed until now.
    async fn run(mut self) {
        let up_to = self.of.tail().next;
        while let Some(group) = self.next_group(up_to) {
            if !self.write(group).await {
                return;
            }
        }
    }

    fn next_group(&self, up_to: u64) -> Option<Group> {
        let mut tail = self.of.tail();
        if tail.sealed.is_empty() && tail.filling.as_ref().is_some_and(|group| group.first < up_to)
        {
            tail.seal();
        }
        tail.sealed.pop_front()
    }

    /// Returns whether it was written.
    async fn write(&mut self, group: Group) -> bool {
        let Self { of, is_under_way } = self;
        let Appender { device, waiters, .. } = &**of;
        *is_under_way = true;
        let (place, next) = (group.place, group.next());
        let begun = group.begins_segment().then_some(place.slot);
        let cipher = of.cipher.get().map(|(_, of_records)| of_records);
        let durable = of.tail().durable_now(&device.slots());
        let bytes = group.finish((&device.header.id, &device.session), durable, cipher);
        let result = device.write(bytes, place.slot, place.at).await;
        let result = result.map_err(|error| error.wrap(device.file.name()));
        let written = device.after_write(result, begun);
        if begun.is_some() && written.is_ok() {
            device.sync_headers(of.key, place.segment, &of.background);
        }
        *is_under_way = false;
        let Ok(change) = written else { return false };
        {
            let mut tail = of.tail();
            (tail.written, tail.change, tail.named) = (next, change, place.segment);
            tail.trim(&mut device.slots());
        }
        waiters.wake_all();
        device.room.wake_all();
        true
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if self.is_under_way {
            self.of.device.give_up();
        }
        self.of.tail().is_writing = false;
        self.of.waiters.wake_all();
    }
}

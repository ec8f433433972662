//! Which segment is whose: what is in memory of a device. No I/O.
//!
//! A segment that is not needed any more keeps its header until something else is written there,
//! and a power cut may bring the header back as long as what is written is not durable. Two things
//! follow (I3 of the log):
//!
//! - S1 A segment of a log that may be found again is given away only if a newer segment of the
//!   same log is durable: that one has the names of the writers, and where the log goes on.
//! - S2 The newest segment of a log that is over is given away only if no other segment has, or
//!   may have after a power cut, a header of that log.
//!
//! And room is kept (I6): for each log whose tail has records, and one more, a segment is free. A
//! process that goes on with a log takes one to name itself. It puts no records there before there
//! is room for that; until then the next process finds an empty tail, and replaces it. So logs can
//! go on after any number of crashes, however full the device is.

use super::format::{Kind, SegmentHeader};
use crate::format::Id;
use mica_block::{Error, Result};
use std::collections::BTreeMap;

/// Names a log: its volume, and the number of its first segment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct LogKey {
    pub(super) volume: Id,
    pub(super) root: u64,
}

impl SegmentHeader {
    pub(super) fn key(&self) -> LogKey {
        LogKey { volume: self.volume, root: self.root }
    }
}

/// What a log is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// It is on the device, and nobody has it.
    Found,
    /// A volume has it.
    Open {
        /// Whether there are records in its tail.
        has_records: bool,
    },
    /// It is over.
    Over(Kind),
}

/// What a segment is wanted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// Records of a log. If `is_spent`, nothing in its tail is needed any more.
    Records { is_spent: bool },
    /// A new log.
    Start,
    /// A header alone: names, or the end of a log.
    Name,
}

struct Slot {
    /// What was written here last, or will be.
    header: Option<SegmentHeader>,
    /// The change with which its header was written.
    change: u64,
    /// What was here before.
    before: Option<SegmentHeader>,
    /// Whether its log needs it.
    is_live: bool,
}

/// The change of what is not written yet.
const NEVER: u64 = u64::MAX;

/// See the module.
pub(super) struct Slots {
    slots: Vec<Slot>,
    logs: BTreeMap<LogKey, Phase>,
    next_number: u64,
    /// Changes that were written so far.
    written: u64,
    /// Those of them that are durable.
    durable: u64,
    /// Counts what may have made room.
    pub(super) room_made: u64,
    /// Why nothing is acknowledged any more.
    pub(super) latch: Option<Error>,
}

impl Slots {
    /// A device on which these segments were found.
    pub(super) fn new(found: Vec<Option<SegmentHeader>>) -> Self {
        let numbers = found.iter().flatten().map(|header| header.number);
        let next_number = numbers.max().map_or(1, |number| number + 1);
        let slot = |header| Slot { header, change: 0, before: None, is_live: false };
        let mut slots = Self {
            slots: found.into_iter().map(slot).collect(),
            logs: BTreeMap::new(),
            next_number,
            written: 0,
            durable: 0,
            room_made: 0,
            latch: None,
        };
        slots.judge();
        slots
    }

    /// Which logs there are, and which segments they need. The newest segment of a log says whether
    /// it is over; of logs of one volume the newest counts.
    fn judge(&mut self) {
        let mut newest: BTreeMap<LogKey, &SegmentHeader> = BTreeMap::new();
        for header in self.slots.iter().filter_map(|slot| slot.header.as_ref()) {
            let known = newest.entry(header.key()).or_insert(header);
            if known.number < header.number {
                *known = header;
            }
        }
        let mut last_of_volume: BTreeMap<Id, u64> = BTreeMap::new();
        for key in newest.keys() {
            // In order of roots.
            last_of_volume.insert(key.volume, key.root);
        }
        let phase = |key: &LogKey, header: &SegmentHeader| match header.kind {
            Kind::Records if last_of_volume.get(&key.volume) == Some(&key.root) => Phase::Found,
            Kind::Records => Phase::Over(Kind::SetAside),
            kind => Phase::Over(kind),
        };
        self.logs = newest.iter().map(|(key, header)| (*key, phase(key, header))).collect();
        for slot in &mut self.slots {
            let key = slot.header.as_ref().map(SegmentHeader::key);
            slot.is_live = key.is_some_and(|key| self.logs.get(&key) == Some(&Phase::Found));
        }
    }

    /// The log of `volume` that may go on.
    pub(super) fn log_of(&self, volume: Id) -> Option<(LogKey, Phase)> {
        let of_volume = LogKey { volume, root: 0 }..=LogKey { volume, root: u64::MAX };
        let logs = self.logs.range(of_volume).map(|(key, phase)| (*key, *phase));
        logs.filter(|(_, phase)| !matches!(phase, Phase::Over(_))).next_back()
    }

    /// Every log, and what it is.
    pub(super) fn logs(&self) -> impl Iterator<Item = (LogKey, Phase)> {
        self.logs.iter().map(|(key, phase)| (*key, *phase))
    }

    /// The segments of a log that are written and needed, or were when it was over, in their order.
    pub(super) fn segments_of(&self, key: LogKey) -> Vec<(usize, &SegmentHeader)> {
        let slots = self.slots.iter().enumerate();
        let mut segments: Vec<_> = slots
            .filter(|(_, slot)| slot.change != NEVER)
            .filter_map(|(at, slot)| Some((at, slot.header.as_ref()?)))
            .filter(|(_, header)| header.key() == key)
            .collect();
        segments.sort_by_key(|(_, header)| header.number);
        segments
    }

    pub(super) fn set_phase(&mut self, key: LogKey, phase: Phase) {
        self.logs.insert(key, phase);
        if matches!(phase, Phase::Over(_)) {
            for slot in &mut self.slots {
                slot.is_live &= slot.header.as_ref().map(SegmentHeader::key) != Some(key);
            }
            self.room_made += 1;
        }
    }

    /// The volume that had the log open is gone. What it took and did not write it has not.
    pub(super) fn abandon(&mut self, key: LogKey) {
        for slot in &mut self.slots {
            let is_its = slot.header.as_ref().map(SegmentHeader::key) == Some(key);
            if is_its && slot.change == NEVER {
                *slot =
                    Slot { header: slot.before.take(), change: 0, before: None, is_live: false };
            }
        }
        let is_there = !self.segments_of(key).is_empty();
        match self.logs.get(&key) {
            Some(Phase::Open { .. }) if is_there => _ = self.logs.insert(key, Phase::Found),
            Some(Phase::Open { .. }) => _ = self.logs.remove(&key),
            _ => {}
        }
        self.room_made += 1;
    }

    /// The number that the next segment gets.
    pub(super) fn next_number(&self) -> u64 {
        self.next_number
    }

    /// Whether the log `key` may take a segment.
    pub(super) fn may_take(&self, purpose: Purpose, key: LogKey) -> bool {
        let free = self.free_count();
        let has_room = match purpose {
            Purpose::Name => true,
            Purpose::Start => free > self.reserve(None),
            Purpose::Records { is_spent } => free + usize::from(is_spent) > self.reserve(Some(key)),
        };
        has_room && self.pick().is_some()
    }

    /// Takes a segment; `header` gets its number. `None` if there is no room.
    pub(super) fn take(
        &mut self,
        purpose: Purpose,
        header: impl FnOnce(u64) -> SegmentHeader,
    ) -> Option<(usize, SegmentHeader)> {
        let header = header(self.next_number);
        if !self.may_take(purpose, header.key()) {
            return None;
        }
        let at = self.pick()?;
        self.next_number += 1;
        // What is here may come back in the place of what was taken and is not durable.
        let before = self.slots[at].header.take();
        let header_here = Some(header.clone());
        self.slots[at] = Slot { header: header_here, change: NEVER, before, is_live: true };
        Some((at, header))
    }

    /// Whether records may be put into the tail of `key`, which has none yet.
    pub(super) fn may_begin(&self, key: LogKey) -> bool {
        self.free_count() >= self.reserve(Some(key))
    }

    /// The tail of `key` has records now.
    pub(super) fn begin(&mut self, key: LogKey) {
        self.logs.insert(key, Phase::Open { has_records: true });
    }

    /// Segments that are kept free: for each log with records in its tail, counting `with` as one,
    /// and one more.
    fn reserve(&self, with: Option<LogKey>) -> usize {
        let has_records = |(key, phase): (&LogKey, &Phase)| match phase {
            _ if Some(*key) == with => true,
            Phase::Found | Phase::Open { has_records: true } => true,
            Phase::Open { has_records: false } | Phase::Over(_) => false,
        };
        1 + self.logs.iter().filter(|log| has_records(*log)).count()
    }

    fn free_count(&self) -> usize {
        self.slots.iter().filter(|slot| !slot.is_live).count()
    }

    fn is_durable(&self, slot: &Slot) -> bool {
        slot.change <= self.durable
    }

    /// The free segment to be used next, if one may be. Logs that were set aside are kept for as
    /// long as possible, and of the others, what is oldest goes first.
    fn pick(&self) -> Option<usize> {
        let mut newest: BTreeMap<LogKey, u64> = BTreeMap::new();
        let mut uses: BTreeMap<LogKey, usize> = BTreeMap::new();
        for slot in &self.slots {
            let is_durable = self.is_durable(slot);
            let before = slot.before.as_ref().filter(|_| !is_durable);
            for header in slot.header.iter().chain(before) {
                *uses.entry(header.key()).or_default() += 1;
            }
            if let Some(header) = slot.header.as_ref().filter(|_| is_durable) {
                let newest = newest.entry(header.key()).or_default();
                *newest = header.number.max(*newest);
            }
        }
        let may_go = |header: &SegmentHeader| {
            let key = header.key();
            let is_replaced = newest.get(&key).is_some_and(|newest| *newest > header.number);
            let is_over = matches!(self.logs.get(&key), Some(Phase::Over(_)));
            is_replaced || (is_over && uses.get(&key) == Some(&1))
        };
        let order = |slot: &Slot| match &slot.header {
            None => Some((false, 0)),
            Some(header) => {
                let is_aside = self.logs.get(&header.key()) == Some(&Phase::Over(Kind::SetAside));
                may_go(header).then_some((is_aside, header.number))
            }
        };
        // What is not durable may have two headers after a power cut. A third would be too many.
        let is_candidate = |slot: &Slot| !slot.is_live && self.is_durable(slot);
        let candidates = self.slots.iter().enumerate().filter(|(_, slot)| is_candidate(slot));
        candidates.filter_map(|(at, slot)| Some((order(slot)?, at))).min().map(|(_, at)| at)
    }

    /// Whether a sync may make room: something that is free may not be used before it.
    pub(super) fn waits_for_sync(&self) -> bool {
        self.durable < self.written && self.pick().is_none()
    }

    /// Its log does not need the segment any more.
    pub(super) fn release(&mut self, at: usize) {
        self.slots[at].is_live = false;
        self.room_made += 1;
    }

    /// Something was written: the header of `begun`, if that is a segment. Returns the number of
    /// the change.
    pub(super) fn wrote(&mut self, begun: Option<usize>) -> u64 {
        self.written += 1;
        if let Some(at) = begun {
            self.slots[at].change = self.written;
        }
        self.written
    }

    /// # Errors
    /// Why nothing is acknowledged any more.
    pub(super) fn check(&self) -> Result<()> {
        self.latch.clone().map_or(Ok(()), Err)
    }

    /// How much is written now.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// What was written when `written` was as it is now `up_to` is durable.
    pub(super) fn synced(&mut self, up_to: u64) {
        self.durable = self.durable.max(up_to);
        self.room_made += 1;
    }

    /// How much is durable.
    pub(super) fn durable(&self) -> u64 {
        self.durable
    }

    /// Segments that logs use, and all that they may.
    pub(super) fn usage(&self) -> (usize, usize) {
        let all = self.slots.len();
        (all - self.free_count(), all.saturating_sub(self.reserve(None)).max(1))
    }
}

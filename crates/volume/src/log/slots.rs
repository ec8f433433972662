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
//! And room is kept (I6): for each log whose tail has records, and one more, a segment is
//! **clean**: free, and a process that finds the device after a power cut knows that. It takes one
//! to name itself when it goes on with a log. It puts no records there before there is room for
//! that; until then the next process finds an empty tail, and replaces it. So logs can go on after
//! any number of crashes, however full the device is. A segment that is free and not clean becomes
//! so when its log begins another one, whose header says so, or when its header is erased.
//!
//! That a segment's header is durable says nothing of the records behind it, and it is made durable
//! without them once the next segment is begun, while that is written: what S1 asks for must not
//! cost a sync of everything that was written, most of which is in the store by then, nor a wait of
//! writers before the log is full.
//!
//! - S3 A segment whose header is damaged stays as it is until somebody says otherwise: it may have
//!   what a log needs.

mod counts;

pub(super) use counts::Usage;

use super::chain::Part;
use super::format::{Kind, NUMBER_MAX, Remains, SegmentHeader};
use crate::format::Id;
use counts::Counts;
use mica_block::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

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
    /// A new log for which room was promised: one segment was kept clean for it.
    Promised,
    /// A header alone: names, or the end of a log.
    Name,
}

struct Slot {
    /// What was written here last, or will be; nothing if it was erased.
    header: Option<SegmentHeader>,
    /// The change with which its header was written.
    change: u64,
    /// What was here before.
    before: Option<SegmentHeader>,
    /// Whether its log needs it.
    is_live: bool,
    /// Whether its header is being written once more, to be durable: nobody takes it meanwhile.
    is_held: bool,
}

/// The change of what is not written yet.
const NEVER: u64 = u64::MAX;

/// See the module.
pub(super) struct Slots {
    slots: Vec<Slot>,
    /// How many of them are live.
    live: usize,
    /// Those whose headers are damaged (S3), and what is left of these.
    damaged: BTreeMap<usize, Remains>,
    logs: BTreeMap<LogKey, Phase>,
    /// How many of the logs are not over, and how many of those a segment is kept clean for.
    counts: Counts,
    /// How many logs have room that are not begun yet.
    promised: usize,
    next_number: u64,
    /// Changes that were written so far.
    written: u64,
    /// Those of them that are durable.
    durable: u64,
    /// Whether only what is durable says what is free.
    is_judging: bool,
    /// Counts what may have made room.
    pub(super) room_made: u64,
    /// Why nothing is acknowledged any more.
    pub(super) latch: Option<Error>,
}

impl Slots {
    /// A device on which these segments were found, some of them with `damaged` headers.
    pub(super) fn new(found: Vec<Option<SegmentHeader>>, damaged: Vec<(usize, Remains)>) -> Self {
        let numbers = found.iter().flatten().map(|header| header.number);
        let damaged_numbers = damaged.iter().map(|(_, remains)| remains.number);
        // One that nobody ever comes to is damaged itself.
        let numbers = numbers.chain(damaged_numbers.filter(|number| *number < NUMBER_MAX / 2));
        let next_number = numbers.max().map_or(1, |number| number + 1);
        let slot = |header| Slot { header, change: 0, before: None, is_live: true, is_held: false };
        let mut slots = Self {
            live: found.len(),
            slots: found.into_iter().map(slot).collect(),
            damaged: damaged.into_iter().collect(),
            logs: BTreeMap::new(),
            counts: Counts::default(),
            promised: 0,
            next_number,
            written: 0,
            durable: 0,
            is_judging: true,
            room_made: 0,
            latch: None,
        };
        slots.judge();
        slots.is_judging = false;
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
        let phases: Vec<_> =
            newest.iter().map(|(key, header)| (*key, phase(key, header))).collect();
        for (key, phase) in phases {
            self.note(key, Some(phase));
        }
        for at in self.clean(None) {
            self.set_live(at, self.damaged.contains_key(&at));
        }
    }

    /// The log `key` is this now; nothing, if it is not there any more.
    fn note(&mut self, key: LogKey, phase: Option<Phase>) {
        let before = match phase {
            Some(phase) => self.logs.insert(key, phase),
            None => self.logs.remove(&key),
        };
        let (before, now) = (Counts::of(before), Counts::of(phase));
        self.counts = Counts {
            there: self.counts.there - before.there + now.there,
            in_need: self.counts.in_need - before.in_need + now.in_need,
        };
    }

    fn set_live(&mut self, at: usize, is_live: bool) {
        let slot = &mut self.slots[at];
        self.live = self.live - usize::from(slot.is_live) + usize::from(is_live);
        slot.is_live = is_live;
    }

    /// The segments of the log `key`, whether they are written or not.
    fn all_of(&self, key: LogKey) -> Vec<usize> {
        let slots = self.slots.iter().enumerate();
        let is_its = |slot: &Slot| slot.header.as_ref().is_some_and(|header| header.key() == key);
        slots.filter(|(_, slot)| is_its(slot)).map(|(at, _)| at).collect()
    }

    /// The log of `volume` that may go on.
    pub(super) fn log_of(&self, volume: Id) -> Option<(LogKey, Phase)> {
        let of_volume = LogKey { volume, root: 0 }..=LogKey { volume, root: u64::MAX };
        let logs = self.logs.range(of_volume).map(|(key, phase)| (*key, *phase));
        logs.rev().find(|(_, phase)| !matches!(phase, Phase::Over(_)))
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
        self.note(key, Some(phase));
        if matches!(phase, Phase::Over(_)) {
            for at in self.all_of(key) {
                self.set_live(at, false);
            }
            self.room_made += 1;
        }
    }

    /// The volume that had the log open is gone. What it took and did not write it has not.
    pub(super) fn abandon(&mut self, key: LogKey) {
        for at in self.all_of(key) {
            let slot = &mut self.slots[at];
            if slot.change == NEVER {
                (slot.header, slot.change) = (slot.before.take(), 0);
                self.set_live(at, false);
            }
        }
        let is_there = !self.segments_of(key).is_empty();
        if let Some(Phase::Open { .. }) = self.logs.get(&key) {
            self.note(key, is_there.then_some(Phase::Found));
        }
        self.room_made += 1;
    }

    /// The number that the next segment gets.
    pub(super) fn next_number(&self) -> u64 {
        self.next_number
    }

    /// The segment that the log `key` may take.
    fn choose(&self, purpose: Purpose, key: LogKey) -> Option<usize> {
        let at = self.pick()?;
        let clean = || self.clean(Some(at)).count();
        let has_room = match purpose {
            Purpose::Name | Purpose::Promised => true,
            // It must be able to get going, whatever the others do that are there.
            Purpose::Start => clean() > self.there_soon() + 1,
            Purpose::Records { is_spent } => {
                clean() + usize::from(is_spent) >= self.reserve(Some(key))
            }
        };
        has_room.then_some(at)
    }

    /// Whether the log `key` may take a segment.
    pub(super) fn may_take(&self, purpose: Purpose, key: LogKey) -> bool {
        self.choose(purpose, key).is_some()
    }

    /// Keeps room for a log of `volume`, which is begun with [`Purpose::Promised`] once one of it
    /// that was found is set aside; false if there is none. From then on one more segment is kept
    /// clean. Of a log that is set aside all segments are clean then, its last one included, for
    /// which one was kept: room for one log less has to be kept.
    pub(super) fn promise_start(&mut self, volume: Id) -> bool {
        let may_start = match self.log_of(volume) {
            None => self.may_take(Purpose::Start, LogKey { volume, root: self.next_number }),
            Some((key, _)) => {
                let clean = self.clean(None).count() + self.live_of(key);
                clean > self.there_soon() + 1
            }
        };
        self.promised += usize::from(may_start);
        may_start
    }

    /// The segments that have to be clean for the logs that there are to get going. One that was
    /// promised takes one besides.
    fn there_soon(&self) -> usize {
        self.counts.there + 2 * self.promised
    }

    /// A log for which room was promised is not begun.
    pub(super) fn withdraw(&mut self) {
        self.promised -= 1;
        self.room_made += 1;
    }

    /// Takes a segment; `header` gets its number. `None` if there is no room.
    pub(super) fn take(
        &mut self,
        purpose: Purpose,
        header: impl FnOnce(u64) -> SegmentHeader,
    ) -> Option<(usize, SegmentHeader)> {
        let header = header(self.next_number);
        let at = self.choose(purpose, header.key())?;
        self.next_number += 1;
        self.promised -= usize::from(purpose == Purpose::Promised);
        self.forget_overwritten();
        // What is here may come back in the place of what was taken and is not durable.
        let slot = &mut self.slots[at];
        (slot.before, slot.change) = (slot.header.replace(header.clone()), NEVER);
        self.set_live(at, true);
        Some((at, header))
    }

    /// Logs that are over are known as long as something has their headers.
    fn forget_overwritten(&mut self) {
        let headers = self.slots.iter().flat_map(|slot| slot.header.iter().chain(&slot.before));
        let there: BTreeSet<_> = headers.map(SegmentHeader::key).collect();
        self.logs.retain(|key, phase| !matches!(phase, Phase::Over(_)) || there.contains(key));
    }

    /// Whether records may be put into the tail of `key`, which has none yet.
    pub(super) fn may_begin(&self, key: LogKey) -> bool {
        self.clean(None).count() >= self.reserve(Some(key))
    }

    /// The tail of `key` has records now.
    pub(super) fn begin(&mut self, key: LogKey) {
        self.note(key, Some(Phase::Open { has_records: true }));
    }

    /// Segments that are kept clean: for each log with records in its tail, counting `with` as one,
    /// for each that was promised, and one more.
    fn reserve(&self, with: Option<LogKey>) -> usize {
        let phase = with.and_then(|key| self.logs.get(&key).copied());
        let extra = usize::from(with.is_some()) - Counts::of(phase).in_need;
        1 + self.counts.in_need + self.promised + extra
    }

    fn is_durable(&self, slot: &Slot) -> bool {
        slot.change <= self.durable
    }

    /// The clean segments, if what is in `without` is overwritten: free, and what is durable says
    /// so. If nothing is known yet of what is free, only what is durable counts.
    fn clean(&self, without: Option<usize>) -> impl Iterator<Item = usize> + use<> {
        let durable = || {
            let slots = self.slots.iter().enumerate();
            slots.filter(|(at, slot)| Some(*at) != without && self.is_durable(slot))
        };
        let mut of_logs: BTreeMap<LogKey, Vec<&SegmentHeader>> = BTreeMap::new();
        for header in durable().filter_map(|(_, slot)| slot.header.as_ref()) {
            of_logs.entry(header.key()).or_default().push(header);
        }
        let mut needed = BTreeSet::new();
        for (key, mut headers) in of_logs {
            if matches!(self.logs.get(&key), Some(Phase::Over(_))) {
                continue;
            }
            headers.sort_by_key(|header| header.number);
            let oldest = headers.last().map_or(0, |newest| newest.oldest);
            let mut limit = u64::MAX;
            for header in headers.into_iter().rev() {
                if header.number >= oldest && header.first < limit {
                    needed.insert(header.number);
                    limit = header.first;
                }
            }
        }
        let is_needed = |slot: &Slot| {
            slot.header.as_ref().is_some_and(|header| needed.contains(&header.number))
        };
        let is_free = |slot: &Slot| !slot.is_live || self.is_judging;
        let clean = durable().filter(|(_, slot)| is_free(slot) && !is_needed(slot));
        clean.map(|(at, _)| at).collect::<Vec<_>>().into_iter()
    }

    /// The free segment to be used next, if one may be. What is clean is kept, and what was set
    /// aside for as long as possible; of the rest, what is oldest goes first.
    fn pick(&self) -> Option<usize> {
        let clean: BTreeSet<_> = self.clean(None).collect();
        let order = |at: usize, header: &Option<SegmentHeader>| {
            let key = header.as_ref().map(SegmentHeader::key);
            let phase = key.and_then(|key| self.logs.get(&key));
            let is_aside = phase == Some(&Phase::Over(Kind::SetAside));
            let number = header.as_ref().map_or(0, |header| header.number);
            (is_aside, clean.contains(&at), number, at)
        };
        let free = self.reusable();
        free.into_iter().min_by_key(|at| order(*at, &self.slots[*at].header))
    }

    /// The free segments that may be given away (S1, S2).
    fn reusable(&self) -> Vec<usize> {
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
        // What is not durable may have two headers after a power cut. A third would be too many.
        let is_candidate = |slot: &Slot| !slot.is_live && !slot.is_held && self.is_durable(slot);
        let candidates = self.slots.iter().enumerate().filter(|(_, slot)| is_candidate(slot));
        let reusable = candidates.filter(|(_, slot)| slot.header.as_ref().is_none_or(may_go));
        reusable.map(|(at, _)| at).collect()
    }

    /// Whether a sync may make room: something is written that is not durable.
    pub(super) fn may_sync(&self) -> bool {
        self.durable < self.written
    }

    /// Whether what was written when [`Self::written`] was `up_to` is durable.
    pub(super) fn is_synced(&self, up_to: u64) -> bool {
        up_to <= self.durable
    }

    /// Holds the oldest segment of the log `key` whose header is not durable, if it is older than
    /// segment `below` and no other of the log is held, until [`Self::header_synced`]. So headers
    /// of a log become durable in their order. Only that of its end may be durable before older
    /// ones: it is the newest, so that the log is over whether a power cut leaves those or not, and
    /// it is not given away before they are gone (S2).
    pub(super) fn hold_unsynced(
        &mut self,
        key: LogKey,
        below: u64,
    ) -> Option<(usize, SegmentHeader)> {
        let of_log = |(at, slot): (usize, &Slot)| {
            let header = slot.header.as_ref().filter(|header| header.key() == key)?;
            Some((header.number, at, slot.is_held, slot.change))
        };
        let all: Vec<_> = self.slots.iter().enumerate().filter_map(of_log).collect();
        if all.iter().any(|(.., is_held, _)| *is_held) {
            return None;
        }
        let unsynced = all.into_iter().filter(|(.., change)| *change > self.durable);
        let (number, at, _, change) = unsynced.min()?;
        if number >= below || change == NEVER {
            return None;
        }
        self.slots[at].is_held = true;
        Some((at, self.slots[at].header.clone()?))
    }

    /// Whether a header of the log `key` is becoming durable.
    pub(super) fn has_held(&self, key: LogKey) -> bool {
        self.all_of(key).into_iter().any(|at| self.slots[at].is_held)
    }

    /// The header of the segment that was held is durable; what is behind it may not be.
    pub(super) fn header_synced(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        (slot.change, slot.is_held) = (0, false);
        self.room_made += 1;
    }

    /// Takes a segment that is free, but not clean, to erase its header.
    pub(super) fn take_unclean(&mut self) -> Option<usize> {
        let clean: BTreeSet<_> = self.clean(None).collect();
        let at = self.reusable().into_iter().find(|at| !clean.contains(at))?;
        self.vacate(at);
        Some(at)
    }

    /// The header in `at` is about to be erased.
    fn vacate(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        (slot.before, slot.change) = (slot.header.take(), NEVER);
        self.set_live(at, true);
    }

    /// The segments whose headers are damaged.
    pub(super) fn damaged(&self) -> impl Iterator<Item = usize> {
        self.damaged.keys().copied()
    }

    /// A segment whose header is damaged and may be one of the log `key`: not if it seems to be
    /// another volume's that has a log here, nor if all its numbers are of before the log began.
    pub(super) fn damaged_of(&self, key: LogKey) -> Option<usize> {
        let is_anothers = |volume: Id| {
            volume != key.volume && self.logs.keys().any(|other| other.volume == volume)
        };
        let may_be = |remains: &Remains| {
            !is_anothers(remains.volume) && remains.root.max(remains.number) >= key.root
        };
        self.damaged.iter().find(|(_, remains)| may_be(remains)).map(|(at, _)| *at)
    }

    /// Takes a segment whose header is damaged, to erase it: nobody wants what is in it.
    pub(super) fn take_damaged(&mut self) -> Option<usize> {
        let (at, _) = self.damaged.pop_first()?;
        self.vacate(at);
        Some(at)
    }

    /// Its log does not need the segment any more.
    pub(super) fn release(&mut self, at: usize) {
        self.set_live(at, false);
        self.room_made += 1;
    }

    /// Of the log `key`, only `parts` are needed.
    pub(super) fn release_all_but(&mut self, key: LogKey, parts: &[Part]) {
        for at in self.all_of(key) {
            if parts.iter().all(|part| part.slot != at) {
                self.set_live(at, false);
            }
        }
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

    /// Segments that nobody else may use because of the log `key`.
    pub(super) fn live_of(&self, key: LogKey) -> usize {
        self.all_of(key).into_iter().filter(|at| self.slots[*at].is_live).count()
    }

    /// How much is used. Asked for with each write, and so nothing is counted.
    pub(super) fn usage(&self) -> Usage {
        let all = self.slots.len().saturating_sub(self.reserve(None)).max(1);
        Usage { used: self.live, all, logs: self.counts.there }
    }
}

#[cfg(test)]
mod tests;

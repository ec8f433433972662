//! The end of a log in memory: what is pushed and not written, and which segments have the rest. No
//! I/O.

use super::chain::Part;
use super::format::{BLOCK_LEN, GROUP_HEAD_BYTES, SegmentHeader};
use super::group::Group;
use super::record::RECORD_BYTES_MAX;
use super::slots::Slots;
use crate::place::Writer;
use std::collections::VecDeque;

/// Full groups that may wait for their write. Bounds the memory of a log.
pub(super) const SEALED_MAX: usize = 8;
/// A group that takes the longest record, in the file.
pub(super) const GROUP_BYTES_MIN: u64 =
    ((GROUP_HEAD_BYTES + RECORD_BYTES_MAX) as u64).next_multiple_of(BLOCK_LEN);

/// Held for a few steps in memory.
pub(super) struct Tail {
    pub(super) writers: Vec<Writer>,
    /// The number of the next record.
    pub(super) next: u64,
    /// Records below are in the file.
    pub(super) written: u64,
    /// Records below are not needed any more.
    pub(super) freed: u64,
    /// Records below are durable in the file, as far as this log looked.
    pub(super) durable: u64,
    /// The segments that have what is needed, in order; the last is the tail.
    pub(super) parts: VecDeque<Part>,
    /// Where the next group begins in the tail, behind what is sealed.
    pub(super) at: u64,
    /// Whether records may be put into the tail (I6 of the log).
    pub(super) may_have_records: bool,
    pub(super) filling: Option<Group>,
    pub(super) sealed: VecDeque<Group>,
    pub(super) is_writing: bool,
    /// The number of the last change of this log that was written.
    pub(super) change: u64,
    /// The number of the last segment whose header was written.
    pub(super) named: u64,
}

impl Tail {
    /// Of a log with `parts`, to which the segment with `header` is added. Records below `freed`
    /// are not needed.
    pub(super) fn new(parts: Vec<Part>, slot: usize, header: &SegmentHeader, freed: u64) -> Self {
        let next = header.first;
        let mut tail = Self {
            writers: header.writers.clone(),
            next,
            written: next,
            freed,
            durable: header.durable,
            parts: parts.into(),
            at: BLOCK_LEN,
            may_have_records: false,
            filling: None,
            sealed: VecDeque::new(),
            is_writing: false,
            change: 0,
            named: header.number,
        };
        tail.add(slot, header);
        tail
    }

    /// The segment with `header` is the tail now.
    pub(super) fn add(&mut self, slot: usize, header: &SegmentHeader) {
        if let Some(last) = self.parts.back_mut() {
            last.limit = header.first;
        }
        self.parts.push_back(part_of(slot, header));
    }

    /// Where the next group begins in the tail, behind the one that fills.
    pub(super) fn end(&self) -> u64 {
        match &self.filling {
            Some(group) => group.place.at + group.padded_len() as u64,
            None => self.at,
        }
    }

    /// Nothing is added to the group that fills any more.
    pub(super) fn seal(&mut self) {
        self.at = self.end();
        self.sealed.extend(self.filling.take());
    }

    /// Records below are durable in the file.
    pub(super) fn durable_now(&mut self, slots: &Slots) -> u64 {
        if self.change <= slots.durable() {
            self.durable = self.written;
        }
        self.durable
    }

    /// The number of the oldest segment with a record that is needed, if there is one.
    pub(super) fn oldest_needed(&self) -> Option<u64> {
        let after = self.parts.iter().skip(1).map(|part| part.first).chain([self.next]);
        let is_needed = |(_, end): &(&Part, u64)| *end > self.freed;
        self.parts.iter().zip(after).find(is_needed).map(|(part, _)| part.number)
    }

    /// Releases the segments that have nothing that is needed.
    pub(super) fn trim(&mut self, slots: &mut Slots) {
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

fn part_of(slot: usize, header: &SegmentHeader) -> Part {
    let SegmentHeader { number, session, first, .. } = *header;
    Part { slot, number, session, first, limit: u64::MAX }
}

//! What a volume is at a moment: the last state that is in the store, and what was done since.
//!
//! ```text
//! filling ─▶ sealed segments ─▶ extents under way ─▶ state
//!            └── those that are taken ──┘
//! ```
//!
//! Invariants
//! - I1 What is newer hides what is older: the batch that fills, sealed segments from the newest to
//!   the oldest, the map of the state.
//! - I2 A segment is dropped in the same step in which a state with it becomes the state.
//! - I3 A state becomes the state when its extent and all before it are answered.
//! - I4 Records are counted in the order in which they are done. Segments have consecutive ones.

mod cuts;

pub(crate) use cuts::RecentCuts;

use crate::environment::Environment;
use crate::place::BLOCK_BYTES;
use crate::recent::{Batch, Block, Known};
use crate::segment::{Cut, Segment, WEIGHT_MAX};
use crate::stage::Stage;
use crate::state::{Root, State};
use mica_rt::Handle;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Weight of the segments that wait or are under way: then writers wait.
const SEALED_WEIGHT_MAX: usize = 8 * WEIGHT_MAX;
/// Blocks whose buffers a batch keeps in memory, about: those that were overwritten are among them.
const BULK_MAX: usize = 4 * WEIGHT_MAX;
/// Weight of the batch that fills, and a fourth of those that wait, of a volume that is about to be
/// handed over: guests wait for that much when it is.
const LEAVING_WEIGHT_MAX: usize = WEIGHT_MAX / 8;
/// Weight of what waits, from which on extents are made where the volume is tended: less is made
/// before another thread would wake up.
const LONG_WEIGHT_MIN: usize = WEIGHT_MAX / 4;
/// How many these are: snapshots seal small ones, and each is looked through when a block is read.
const SEGMENTS_MAX: usize = 64;
/// Extents under way.
const UNDER_WAY_MAX: usize = 4;

/// See the module. Held under a lock for a few steps in memory.
pub(crate) struct Now {
    /// The last state that is in the store.
    pub(crate) state: State,
    /// Length of the disk in bytes.
    pub(crate) len: u64,
    /// The number that the next record gets.
    pub(crate) records: u64,
    /// Counts the states.
    pub(crate) generation: u64,
    /// Extents that are in the state, of those that this writer put.
    pub(crate) sequence: u32,
    /// Whether a task makes extents.
    pub(crate) is_driven: bool,
    /// The executor that tends the volume, as long as one does.
    pub(crate) tender: Option<Handle>,
    /// Where it is in its life.
    pub(crate) stage: Stage,
    /// Whether somebody waits for the next record.
    pub(crate) is_awaited: bool,
    /// How many groups of snapshots hold the writers.
    pub(crate) holds: usize,
    /// Since when there is something that the store does not have, in nanoseconds since 1970.
    pub(crate) pending_since_ns: Option<u64>,
    /// The snapshots that there were when the volume was opened; their number, if it is known; and
    /// how many were taken since, less those that were dropped.
    pub(crate) snapshots_at_open: Root,
    pub(crate) snapshot_count_at_open: Option<u64>,
    snapshots_since: i64,
    /// What heads say of it.
    pub(crate) heads: HeadsOfNow,
    /// Oldest first.
    sealed: VecDeque<Segment>,
    /// How many of these, from the front, are in extents.
    taken: usize,
    under_way: VecDeque<UnderWay>,
    filling: Batch,
    /// Records below are put without waiting for more.
    wanted: u64,
}

/// What the newest head of a writer has.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct HeadsOfNow {
    /// Extents that are in its state.
    pub(crate) sequence: u32,
    /// Whether snapshots were taken or dropped since, in the state.
    pub(crate) lacks_cuts: bool,
    /// Whether somebody has the turn to put the next one.
    pub(crate) is_under_way: bool,
}

/// An extent that is being put.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    sequence: u32,
    segments: usize,
    state: State,
    is_answered: bool,
}

/// What is done to a volume.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// The block has these bytes.
    Data(u64, Block),
    /// So many blocks from the first on have the bytes of those from this one on, of one buffer:
    /// each is a record of its own.
    Run(u64, Block, u64),
    /// These blocks have nothing.
    Nothing(Range<u64>),
    /// The disk is at least this long.
    Length(u64),
    /// Something is done to its snapshots.
    Cut(Cut),
}

impl Now {
    pub(crate) fn new(state: State) -> Self {
        Self {
            state,
            len: state.len,
            records: state.records,
            generation: 0,
            sequence: 0,
            is_driven: false,
            tender: None,
            stage: Stage::default(),
            is_awaited: false,
            holds: 0,
            pending_since_ns: None,
            snapshots_at_open: state.snapshots,
            snapshot_count_at_open: None,
            snapshots_since: 0,
            heads: HeadsOfNow::default(),
            sealed: VecDeque::new(),
            taken: 0,
            under_way: VecDeque::new(),
            filling: Batch::default(),
            wanted: 0,
        }
    }

    /// What `block` is, unless only the map of the state says it.
    pub(crate) fn recent(&self, block: u64) -> Option<Known> {
        let sealed = || self.sealed.iter().rev().find_map(|segment| segment.batch.get(block));
        self.filling.get(block).or_else(sealed)
    }

    /// Whether of any of `blocks` not only the map of the state says what it is.
    pub(crate) fn has_recent(&self, blocks: &Range<u64>) -> bool {
        let sealed = || self.sealed.iter().any(|segment| segment.batch.touches(blocks));
        self.filling.touches(blocks) || sealed()
    }

    /// What was done to `blocks` since the state, oldest first.
    pub(crate) fn recent_batches(&self, blocks: &Range<u64>) -> Vec<Arc<Batch>> {
        let sealed = self.sealed.iter().map(|segment| Arc::clone(&segment.batch));
        sealed.chain([Arc::new(self.filling.part(blocks))]).collect()
    }

    /// Whether there is room for another change, or for a cut; makes it, if it can.
    pub(crate) fn make_room(&mut self, is_cut: bool, environment: &Environment) -> bool {
        if is_cut {
            return self.has_room_for_segment();
        }
        if !self.is_filled() {
            return true;
        }
        let has_room = self.has_room_for_segment();
        if has_room {
            self.seal(environment);
        }
        has_room
    }

    /// Whether the next change has to wait.
    pub(crate) fn is_full(&self) -> bool {
        self.is_filled() && !self.has_room_for_segment()
    }

    fn batch_weight_max(&self) -> usize {
        if self.stage.is_leaving() { LEAVING_WEIGHT_MAX } else { WEIGHT_MAX }
    }

    /// Whether nothing more is put into the batch that fills.
    fn is_filled(&self) -> bool {
        self.filling.weight() >= self.batch_weight_max() || self.filling.is_bulky(BULK_MAX)
    }

    fn has_room_for_segment(&self) -> bool {
        let weight: usize = self.sealed.iter().map(Segment::weight).sum();
        let most = if self.stage.is_leaving() { 4 * LEAVING_WEIGHT_MAX } else { SEALED_WEIGHT_MAX };
        weight < most && self.sealed.len() < SEGMENTS_MAX
    }

    /// Does `change`, for which there is room.
    pub(crate) fn apply(&mut self, change: Change, environment: &Environment) {
        if self.pending_since_ns.is_none() {
            self.pending_since_ns = Some(environment.now_ns());
        }
        match change {
            Change::Data(block, data) => self.filling.put(block, data),
            Change::Run(first, data, count) => {
                self.filling.put_run(first, data, count);
                // One is counted below.
                self.records += count - 1;
            }
            Change::Nothing(blocks) => self.filling.clear(blocks),
            Change::Length(len) => self.len = self.len.max(len),
            Change::Cut(cut) => return self.cut(cut, environment),
        }
        self.records += 1;
    }

    /// Everything before is in front of `cut`, and everything that comes later behind it.
    fn cut(&mut self, cut: Cut, environment: &Environment) {
        let has_open_end = self.sealed.len() > self.taken
            && self.sealed_records() == self.records
            && self.sealed.back().is_some_and(|last| last.cuts.len() < WEIGHT_MAX / 2);
        if !has_open_end {
            self.seal(environment);
        }
        self.records += 1;
        self.snapshots_since += match cut {
            Cut::Take { .. } => 1,
            Cut::Drop { .. } => -1,
            Cut::Label { .. } | Cut::Rollback { .. } => 0,
        };
        let last = self.sealed.back_mut().expect("was sealed now, or before");
        last.cuts.push(cut);
        last.records = self.records;
    }

    /// Records below are in the state or in sealed segments.
    fn sealed_records(&self) -> u64 {
        self.sealed.back().map_or(self.state.records, |last| last.records)
    }

    /// Records below are in the state or in extents.
    fn taken_records(&self) -> u64 {
        let last = self.taken.checked_sub(1).and_then(|last| self.sealed.get(last));
        last.map_or(self.state.records, |last| last.records)
    }

    fn seal(&mut self, environment: &Environment) {
        self.sealed.push_back(Segment {
            batch: Arc::new(std::mem::take(&mut self.filling)),
            len: self.len,
            records: self.records,
            time_ns: environment.now_ns(),
            cuts: Vec::new(),
        });
    }

    /// The first record that is neither in an extent nor wanted in one; `None` if all are.
    pub(crate) fn waiting(&self) -> Option<u64> {
        let first = self.taken_records().max(self.wanted);
        (first < self.records).then_some(first)
    }

    /// Whether there are changes of snapshots among what waits.
    pub(crate) fn has_waiting_cuts(&self) -> bool {
        let mut waiting = self.sealed.iter().skip(self.taken);
        waiting.any(|segment| segment.records > self.wanted && !segment.cuts.is_empty())
    }

    /// Everything that was done until now is put without waiting for more.
    pub(crate) fn want(&mut self) {
        self.wanted = self.records;
    }

    /// Whether there is an extent to make now.
    pub(crate) fn has_work(&self) -> bool {
        let taken = self.taken_records();
        let mut waiting = self.sealed.iter().skip(self.taken);
        let is_due = self.waiting_weight() >= self.batch_weight_max()
            || self.wanted > taken
            || waiting.any(|segment| segment.batch.is_bulky(BULK_MAX));
        self.under_way.len() < UNDER_WAY_MAX && taken < self.records && is_due
    }

    /// Weight of what is in no extent.
    fn waiting_weight(&self) -> usize {
        let waiting = self.sealed.iter().skip(self.taken);
        waiting.map(Segment::weight).sum::<usize>() + self.filling.weight()
    }

    /// The executor that is to make the extents of what waits, if that is not the one that a
    /// request runs on: there is much of it, and guests need theirs.
    pub(crate) fn other_maker(&self) -> Option<Handle> {
        let is_long = self.waiting_weight() >= LONG_WEIGHT_MIN;
        self.tender.clone().filter(|tender| is_long && !tender.is_current())
    }

    /// The segments of the next extent, which is made from now on; `None` if there is none to make.
    pub(crate) fn take(&mut self, environment: &Environment) -> Option<Vec<Segment>> {
        if !self.has_work() {
            return None;
        }
        if self.sealed_records() < self.records && self.has_room_for_segment() {
            self.seal(environment);
        }
        let mut weight = 0;
        let mut segments = Vec::new();
        for segment in self.sealed.iter().skip(self.taken) {
            weight += segment.weight();
            if !segments.is_empty() && weight > WEIGHT_MAX {
                break;
            }
            segments.push(segment.clone());
        }
        self.taken += segments.len();
        // There is none if the queue is full of what is under way.
        (!segments.is_empty()).then_some(segments)
    }

    /// Bytes of what the store does not have, about.
    pub(crate) fn pending_bytes(&self) -> u64 {
        let sealed: usize = self.sealed.iter().map(Segment::weight).sum();
        ((sealed + self.filling.weight()) * BLOCK_BYTES) as u64
    }

    /// Extents that are being put.
    pub(crate) fn in_flight(&self) -> usize {
        self.under_way.len()
    }

    /// How many snapshots there are, if it is known.
    pub(crate) fn snapshots(&self) -> Option<u64> {
        let at_open = self.snapshot_count_at_open?;
        Some(at_open.saturating_add_signed(self.snapshots_since))
    }

    /// The number of the extent that is made next.
    pub(crate) fn next_sequence(&self) -> u32 {
        self.under_way.back().map_or(self.sequence, |last| last.sequence + 1)
    }

    /// Extent `sequence` has the next `segments` of those that were taken, and is put from now on.
    pub(crate) fn begin(&mut self, sequence: u32, segments: usize, state: State) {
        self.under_way.push_back(UnderWay { sequence, segments, state, is_answered: false });
    }

    /// Extent `sequence` is in the store. Returns whether the state is another one now.
    pub(crate) fn answered(&mut self, sequence: u32) -> bool {
        let extent = self.under_way.iter_mut().find(|extent| extent.sequence == sequence);
        extent.expect("it was under way").is_answered = true;
        let before = self.generation;
        while let Some(extent) = self.under_way.pop_front_if(|extent| extent.is_answered) {
            self.state = extent.state;
            self.sequence += 1;
            self.taken -= extent.segments;
            let stored: Vec<_> = self.sealed.drain(..extent.segments).collect();
            // What comes next was done after that.
            let last_ns = stored.last().map(|last| last.time_ns);
            self.pending_since_ns = last_ns.filter(|_| self.records > extent.state.records);
            self.heads.lacks_cuts |= stored.into_iter().any(|segment| !segment.cuts.is_empty());
            self.generation += 1;
        }
        self.generation != before
    }
}

#[cfg(test)]
mod tests;

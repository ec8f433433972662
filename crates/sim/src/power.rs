//! What survives of a file after a power cut.
//!
//! Readers see a change when its operation completes. Until a sync that was called later, it is
//! **volatile**: a power cut decides about it. A file that is written keeps a [`Journal`]: the
//! bytes that are **durable**, and the volatile changes since, in order of completion.
//!
//! Invariants
//! - I1 The durable bytes with all volatile changes applied are what readers see; unless a sync
//!   failed: then readers see more than will ever be durable, as in a page cache.
//! - I2 A sync makes durable what completed before it was called, and nothing else.
//! - I3 A growth is a change of its own: without it the data beyond the old end is gone; without
//!   the data, the new space is zeros.

use mica_units::SECTOR_BYTES;
use std::collections::BTreeMap;
use std::ops::Range;

/// Size of a sector: the most that a disk writes atomically.
const SECTOR: usize = 512;
const _: () = assert!(SECTOR as u64 == SECTOR_BYTES);

/// What a power cut, or a failed sync, does to the volatile changes of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// All are kept.
    Nothing,
    /// All are lost.
    Everything,
    /// Those up to some point are kept.
    Later,
    /// Those from some point on are kept: the disk reordered them.
    Earlier,
    /// Each is kept or lost as a whole.
    Some,
    /// Each sector of each write is kept or lost.
    Torn,
}

impl Loss {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Nothing, Self::Everything, Self::Later, Self::Earlier, Self::Some, Self::Torn];
}

/// Draws a number below its argument.
pub(crate) type Draw<'a> = &'a mut dyn FnMut(u64) -> u64;

/// What an operation does to a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// Bytes are written.
    Data { at: usize, bytes: Vec<u8> },
    /// A range becomes zeros, up to the end of the file.
    Zeros { at: usize, len: usize },
    /// The file becomes at least this long.
    Grow { len: usize },
    /// The file becomes this long: shorter than it was.
    Shrink { len: usize },
}

impl Change {
    /// The length that a file of `file_len` bytes gets before the change.
    pub(crate) fn growth(&self, file_len: usize) -> Option<Self> {
        let end = match self {
            Self::Data { at, bytes } => at + bytes.len(),
            _ => return None,
        };
        (end > file_len).then_some(Self::Grow { len: end })
    }

    /// Applies the change to `file`.
    pub(crate) fn apply(&self, file: &mut Vec<u8>) {
        match self {
            Self::Data { at, bytes } => {
                let end = at + bytes.len();
                file.resize(file.len().max(end), 0);
                file[*at..end].copy_from_slice(bytes);
            }
            Self::Zeros { at, len } => {
                let end = file.len().min(at + len);
                if *at < end {
                    file[*at..end].fill(0);
                }
            }
            Self::Grow { len } => file.resize(file.len().max(*len), 0),
            Self::Shrink { len } => file.truncate(*len),
        }
    }

    /// What the change does outside of `range`.
    fn outside(self, range: &Range<usize>) -> Vec<Self> {
        let (start, len) = match &self {
            Self::Data { at, bytes } => (*at, bytes.len()),
            Self::Zeros { at, len } => (*at, *len),
            Self::Grow { .. } | Self::Shrink { .. } => return vec![self],
        };
        let end = start + len;
        let parts = [start..end.min(range.start), start.max(range.end)..end];
        let parts = parts.into_iter().filter(|part| part.start < part.end);
        let part_of = |part: Range<usize>| match &self {
            Self::Data { bytes, .. } => {
                let bytes = bytes[part.start - start..part.end - start].to_vec();
                Self::Data { at: part.start, bytes }
            }
            _ => Self::Zeros { at: part.start, len: part.len() },
        };
        parts.map(part_of).collect()
    }

    /// The sectors of a partial write that reach the device: each by the toss of a coin.
    pub(crate) fn torn(&self, draw: Draw<'_>) -> Vec<Self> {
        let Self::Data { at, bytes } = self else { return vec![self.clone()] };
        let mut kept = Vec::new();
        let mut start = 0;
        while start < bytes.len() {
            // Sector boundaries are the file's, wherever the write starts.
            let end = bytes.len().min(start + SECTOR - (at + start) % SECTOR);
            if draw(2) == 0 {
                kept.push(Self::Data { at: at + start, bytes: bytes[start..end].to_vec() });
            }
            start = end;
        }
        kept
    }
}

/// The durable bytes of a file that is written, and what is volatile.
pub(crate) struct Journal {
    durable: Vec<u8>,
    changes: Vec<(u64, Change)>,
    /// Number of the next change to complete.
    next: u64,
    /// Changes whose operations have not completed, by a number of their own.
    in_flight: BTreeMap<u64, Change>,
    started: u64,
}

impl Journal {
    /// A file with only `durable` bytes.
    pub(crate) fn new(durable: Vec<u8>) -> Self {
        let (changes, in_flight) = (Vec::new(), BTreeMap::new());
        Self { durable, changes, next: 0, in_flight, started: 0 }
    }

    /// Records that an operation started which will make `change`; returns its name.
    pub(crate) fn start(&mut self, change: Change) -> u64 {
        self.started += 1;
        self.in_flight.insert(self.started, change);
        self.started
    }

    /// Takes the change of the operation `name`, which completes.
    pub(crate) fn complete(&mut self, name: u64) -> Option<Change> {
        self.in_flight.remove(&name)
    }

    /// Records that `change` was made.
    pub(crate) fn push(&mut self, change: Change) {
        self.changes.push((self.next, change));
        self.next += 1;
    }

    /// What a sync that is called now will make durable.
    pub(crate) fn mark(&self) -> u64 {
        self.next
    }

    /// Makes durable what was volatile at `mark`.
    pub(crate) fn sync(&mut self, mark: u64) {
        let later = self.changes.partition_point(|(number, _)| *number < mark);
        for (_, change) in self.changes.drain(..later) {
            change.apply(&mut self.durable);
        }
    }

    /// Makes durable `bytes`, which were written at `at` before and not changed since, and nothing
    /// else.
    pub(crate) fn sync_written(&mut self, at: usize, bytes: &[u8]) {
        if self.changes.iter().any(|(_, change)| matches!(change, Change::Shrink { .. })) {
            return self.sync(self.next);
        }
        let range = at..at + bytes.len();
        let changes = std::mem::take(&mut self.changes).into_iter();
        self.changes = changes
            .flat_map(|(number, change)| {
                change.outside(&range).into_iter().map(move |part| (number, part))
            })
            .collect();
        Change::Data { at, bytes: bytes.to_vec() }.apply(&mut self.durable);
    }

    /// A sync failed: what was volatile at `mark` is durable or permanently lost, and no later sync
    /// will report it.
    pub(crate) fn fail_sync(&mut self, mark: u64, draw: Draw<'_>) {
        let later = self.changes.partition_point(|(number, _)| *number < mark);
        let decided: Vec<_> = self.changes.drain(..later).map(|(_, change)| change).collect();
        let loss = Loss::ALL[index(draw, Loss::ALL.len())];
        let durable = std::mem::take(&mut self.durable);
        self.durable = survivors(durable, &decided, loss, draw);
    }

    /// The file after a power cut.
    pub(crate) fn cut(mut self, loss: Loss, draw: Draw<'_>) -> Vec<u8> {
        // Writes in flight may be on the disk, too, in any order.
        let mut in_flight: Vec<_> = std::mem::take(&mut self.in_flight).into_values().collect();
        if loss == Loss::Nothing {
            in_flight.retain(|_| draw(2) == 0);
        }
        let mut changes: Vec<_> = self.changes.drain(..).map(|(_, change)| change).collect();
        while !in_flight.is_empty() {
            let change = in_flight.swap_remove(index(draw, in_flight.len()));
            changes.extend(change.growth(0));
            changes.push(change);
        }
        survivors(self.durable, &changes, loss, draw)
    }

    /// The process dies: of its operations in flight on the file, which has `bytes`, each is done,
    /// half done, or not done, in any order. What is volatile stays so.
    pub(crate) fn die(mut self, bytes: &mut Vec<u8>, draw: Draw<'_>) -> Self {
        let mut in_flight: Vec<_> = std::mem::take(&mut self.in_flight).into_values().collect();
        while !in_flight.is_empty() {
            let change = in_flight.swap_remove(index(draw, in_flight.len()));
            let made = match draw(3) {
                0 => Vec::new(),
                1 => change.torn(draw),
                _ => vec![change],
            };
            for change in made {
                for change in change.growth(bytes.len()).into_iter().chain([change]) {
                    change.apply(bytes);
                    self.push(change);
                }
            }
        }
        self
    }

    /// Whether nothing is volatile and nothing is in progress.
    #[cfg(test)]
    pub(crate) fn is_settled(&self) -> bool {
        self.changes.is_empty() && self.in_flight.is_empty()
    }
}

fn index(draw: Draw<'_>, count: usize) -> usize {
    usize::try_from(draw(count as u64)).unwrap_or(0)
}

/// `durable` with those of `changes` that `loss` spares.
fn survivors(durable: Vec<u8>, changes: &[Change], loss: Loss, draw: Draw<'_>) -> Vec<u8> {
    let turn = index(draw, changes.len() + 1);
    // The data may be there without the growth that belonged to it, and a later growth still covers
    // it (I3): so the length follows from the buffer.
    let mut len = durable.len();
    let mut bytes = durable;
    for (number, change) in changes.iter().enumerate() {
        let kept = match loss {
            Loss::Nothing => true,
            Loss::Everything => false,
            Loss::Later => number < turn,
            Loss::Earlier => number >= turn,
            Loss::Some => draw(2) == 0,
            Loss::Torn => matches!(change, Change::Data { .. }) || draw(2) == 0,
        };
        if !kept {
            continue;
        }
        match change {
            Change::Grow { len: grown } => len = len.max(*grown),
            Change::Shrink { len: shrunk } => len = len.min(*shrunk),
            Change::Data { .. } | Change::Zeros { .. } => {}
        }
        if loss == Loss::Torn {
            change.torn(draw).iter().for_each(|part| part.apply(&mut bytes));
        } else {
            change.apply(&mut bytes);
        }
    }
    bytes.resize(len, 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(at: usize, byte: u8, len: usize) -> Change {
        Change::Data { at, bytes: vec![byte; len] }
    }

    /// A file of two sectors of ones; twos over both, threes over the second and a third.
    fn journal() -> Journal {
        let mut journal = Journal::new(vec![1; 1024]);
        for change in [data(0, 2, 1024), Change::Grow { len: 1536 }, data(512, 3, 1024)] {
            journal.push(change);
        }
        journal
    }

    fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
        let world = crate::World::new(seed);
        move |bound| world.random_below(bound)
    }

    /// First bytes of the sectors of a file.
    fn sectors(file: &[u8]) -> Vec<u8> {
        file.chunks(SECTOR)
            .map(|sector| {
                assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is all or nothing");
                sector[0]
            })
            .collect()
    }

    #[test]
    fn sync_makes_durable_what_completed_before_its_call_and_no_more() {
        let mut journal = journal();
        let mark = journal.mark();
        journal.push(data(0, 4, 512));
        journal.sync(mark);
        assert!(!journal.is_settled());
        assert_eq!(sectors(&journal.cut(Loss::Everything, &mut draws(1))), [2, 3, 3]);
    }

    #[test]
    fn sync_of_what_was_written_makes_nothing_else_durable() {
        for seed in 0..200 {
            let mut journal = journal();
            journal.push(Change::Zeros { at: 0, len: 1024 });
            journal.push(data(512, 4, 512));
            journal.sync_written(512, &[4; 512]);
            let loss = Loss::ALL[usize::try_from(seed % 6).unwrap()];
            let file = sectors(&journal.cut(loss, &mut draws(seed)));
            assert_eq!(file[1], 4, "{file:?}");
            assert!(loss != Loss::Everything || file == [1, 4], "{file:?}");
            assert!(loss != Loss::Nothing || file == [0, 4, 3], "{file:?}");
        }
    }

    #[test]
    fn every_combination_of_old_and_new_sectors_and_lengths_comes_up() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..400 {
            let loss = Loss::ALL[usize::try_from(seed % 6).unwrap()];
            seen.insert(sectors(&journal().cut(loss, &mut draws(seed))));
        }
        for expected in [&[1, 1][..], &[2, 3, 3], &[2, 3], &[1, 3, 3], &[2, 2, 0], &[1, 1, 0]] {
            assert!(seen.contains(expected), "{expected:?} of {seen:?}");
        }
        let foreign = seen.iter().flatten().any(|byte| *byte > 3);
        assert!(!foreign && seen.iter().all(|file| file[0] != 0 && file[1] != 0));
    }

    #[test]
    fn failed_sync_decides_for_good() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..100 {
            let mut journal = journal();
            let mark = journal.mark();
            journal.fail_sync(mark, &mut draws(seed));
            journal.sync(journal.mark());
            seen.insert(sectors(&journal.cut(Loss::Everything, &mut draws(seed))));
        }
        assert!(seen.contains(&[1, 1][..]) && seen.contains(&[2, 3, 3][..]), "{seen:?}");
    }

    #[test]
    fn write_in_flight_may_be_on_the_disk_already() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let mut journal = Journal::new(vec![1; 512]);
            journal.start(data(0, 2, 1024));
            seen.insert(sectors(&journal.cut(Loss::Torn, &mut draws(seed))));
        }
        assert_eq!(seen.len(), 6, "{seen:?}");
    }

    #[test]
    fn shrunk_file_has_zeros_where_it_grows_again() {
        let mut file = vec![1; 1024];
        for change in [Change::Shrink { len: 512 }, Change::Grow { len: 1024 }] {
            change.apply(&mut file);
        }
        assert_eq!(sectors(&file), [1, 0]);
    }
}

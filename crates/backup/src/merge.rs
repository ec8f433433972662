//! Makes one step of several that go on from each other: what the last of them makes of what the
//! first goes on from.
//!
//! Invariants
//! - I1 At each byte the last step that has it counts. What none has is as the base has it.
//! - I2 A whole step has no zeros: what they hide is left out with them.
//! - I3 Nothing is written before its sum was compared. What is not cut stays as it is stored.

use crate::folder::Stored;
use crate::format::{Entry, Piece};
use crate::packing::{Packer, Packing};
use crate::verify::DataFile;
use crate::writer::StepWriter;
use mica_block::Result;
use mica_rt::Buf;
use std::io::Write;
use std::ops::Range;

/// Pieces that are kept to be cut again, of 1 MiB each at most.
const CUT_MAX: usize = 64;

/// Writes the parts of the one step that does what those of `line` do, one after the other. `at` is
/// called with how far on the disk that is.
///
/// # Errors
/// `Corrupt` naming the state and the extent that is damaged; what the system reports.
///
/// # Panics
/// If there is no step, or one is gone on from that is not before it.
pub(crate) fn merge_steps<W: Write>(
    line: &[Stored],
    to: &mut StepWriter<W>,
    mut at: impl FnMut(u64),
) -> Result<()> {
    for (below, above) in line.iter().zip(&line[1..]) {
        assert_eq!(above.begin().base.as_ref(), Some(&below.begin().state), "a line");
    }
    let mut steps = line.iter().map(Step::open).collect::<Result<Vec<_>>>()?;
    let packers = [Packing::Plain, Packing::Zstd].map(Packer::new);
    let [plain, zstd] = packers;
    let mut packers = (plain?, zstd?);
    let is_whole = to.begin().base.is_none();
    let mut position = 0;
    while let Some((owner, range)) = next_part(&mut steps, position) {
        position = range.end;
        let step = &mut steps[owner];
        let entry = step.entries[step.next];
        if entry.piece.is_zeros() {
            if !is_whole {
                let (start, len) = (range.start, range.end - range.start);
                to.push(Piece { start, len, stored: 0, sum: 0 }, &[])?;
            }
            continue;
        }
        if range == (entry.start()..entry.piece.end()) {
            let stored = step.data.stored(&entry, step.next as u64)?;
            to.push(entry.piece, &stored)?;
        } else {
            let bytes = step.cut(&range)?;
            let packer = if entry.piece.is_packed() { &mut packers.1 } else { &mut packers.0 };
            let (piece, packed) = packer.pack(range.start, bytes)?;
            to.push(piece, packed.as_deref().unwrap_or(bytes))?;
            forget_some(&mut steps, owner);
        }
        at(position);
    }
    Ok(())
}

/// A step that is read.
struct Step {
    entries: Vec<Entry>,
    /// The first entry that ends behind where the merge is.
    next: usize,
    data: DataFile,
    /// The bytes of an entry of which a part was needed.
    bytes: Option<(usize, Buf)>,
}

impl Step {
    fn open(state: &Stored) -> Result<Self> {
        let entries = state.manifest()?.entries;
        Ok(Self { entries, next: 0, data: DataFile::open(state)?, bytes: None })
    }

    /// The entry that ends behind `at`.
    fn entry_behind(&mut self, at: u64) -> Option<Piece> {
        while self.entries.get(self.next).is_some_and(|entry| entry.piece.end() <= at) {
            self.next += 1;
        }
        self.entries.get(self.next).map(|entry| entry.piece)
    }

    /// The bytes of a part of the next entry.
    fn cut(&mut self, range: &Range<u64>) -> Result<&[u8]> {
        let (number, entry) = (self.next, self.entries[self.next]);
        let kept = self.bytes.take().filter(|(of, _)| *of == number);
        let bytes = match kept {
            Some((_, bytes)) => bytes,
            None => self.data.unpacked(&entry, self.data.stored(&entry, number as u64)?)?,
        };
        let within = |at: u64| usize::try_from(at - entry.start()).expect("a piece");
        let (_, bytes) = self.bytes.insert((number, bytes));
        Ok(&bytes[within(range.start)..within(range.end)])
    }
}

/// The next part from `at` on that some step has: which one, and how far it is what counts.
fn next_part(steps: &mut [Step], at: u64) -> Option<(usize, Range<u64>)> {
    let pieces: Vec<_> = steps.iter_mut().map(|step| step.entry_behind(at)).collect();
    let start = pieces.iter().flatten().map(|piece| piece.start.max(at)).min()?;
    let has = |piece: &Option<Piece>| piece.is_some_and(|piece| piece.start <= start);
    let owner = pieces.iter().rposition(has)?;
    let end = pieces[owner]?.end();
    let newer = pieces[owner + 1..].iter().flatten().map(|piece| piece.start).min();
    Some((owner, start..newer.map_or(end, |newer| newer.min(end))))
}

/// Bounds what is kept to be cut again.
fn forget_some(steps: &mut [Step], owner: usize) {
    if steps.iter().filter(|step| step.bytes.is_some()).count() > CUT_MAX {
        let others = steps.iter_mut().enumerate().filter(|(number, _)| *number != owner);
        others.for_each(|(_, step)| step.bytes = None);
    }
}

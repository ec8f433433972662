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
/// Data files that are open at once: lines have thousands of steps, and processes a limit.
const OPEN_MAX: usize = 16;

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
    let mut steps = Steps::of(line)?;
    let packers = [Packing::Plain, Packing::Zstd].map(Packer::new);
    let [plain, zstd] = packers;
    let mut packers = (plain?, zstd?);
    let is_whole = to.begin().base.is_none();
    let mut position = 0;
    while let Some((owner, range)) = steps.next_part(position) {
        position = range.end;
        let entry = steps.entry(owner);
        if entry.piece.is_zeros() {
            if !is_whole {
                let (start, len) = (range.start, range.end - range.start);
                to.push(Piece { start, len, stored: 0, sum: 0 }, &[])?;
            }
            continue;
        }
        if range == (entry.start()..entry.piece.end()) {
            let stored = steps.stored(owner)?;
            to.push(entry.piece, &stored)?;
        } else {
            let bytes = steps.cut(owner, &range)?;
            let packer = if entry.piece.is_packed() { &mut packers.1 } else { &mut packers.0 };
            let (piece, packed) = packer.pack(range.start, bytes)?;
            to.push(piece, packed.as_deref().unwrap_or(bytes))?;
        }
        at(position);
    }
    Ok(())
}

/// The steps of a line, which are read.
pub(crate) struct Steps(Vec<Step>);

/// A step that is read.
struct Step {
    state: Stored,
    entries: Vec<Entry>,
    /// The first entry that ends behind where the merge is.
    next: usize,
    /// If it is open.
    data: Option<DataFile>,
    /// The bytes of an entry of which a part was needed.
    bytes: Option<(usize, Buf)>,
}

impl Steps {
    /// # Errors
    /// If a manifest cannot be read, or is damaged.
    ///
    /// # Panics
    /// If one goes on from a state that is not before it.
    pub(crate) fn of(line: &[Stored]) -> Result<Self> {
        for (below, above) in line.iter().zip(&line[1..]) {
            assert_eq!(above.begin().base.as_ref(), Some(&below.begin().state), "a line");
        }
        line.iter().map(Step::of).collect::<Result<_>>().map(Self)
    }

    /// The next part from `at` on that some step has: which one, and how far it is what counts.
    pub(crate) fn next_part(&mut self, at: u64) -> Option<(usize, Range<u64>)> {
        let pieces: Vec<_> = self.0.iter_mut().map(|step| step.entry_behind(at)).collect();
        let start = pieces.iter().flatten().map(|piece| piece.start.max(at)).min()?;
        let has = |piece: &Option<Piece>| piece.is_some_and(|piece| piece.start <= start);
        let owner = pieces.iter().rposition(has)?;
        let end = pieces[owner]?.end();
        let newer = pieces[owner + 1..].iter().flatten().map(|piece| piece.start).min();
        Some((owner, start..newer.map_or(end, |newer| newer.min(end))))
    }

    /// The entry of which the last part that was found is.
    pub(crate) fn entry(&self, owner: usize) -> Entry {
        self.0[owner].entries[self.0[owner].next]
    }

    /// What is stored of that entry.
    ///
    /// # Errors
    /// As for reading it.
    fn stored(&mut self, owner: usize) -> Result<Buf> {
        let open = self.0.iter().filter(|step| step.data.is_some()).count();
        if open >= OPEN_MAX && self.0[owner].data.is_none() {
            self.0.iter_mut().for_each(|step| step.data = None);
        }
        let step = &mut self.0[owner];
        let data = match step.data.take() {
            Some(data) => data,
            None => DataFile::open(&step.state)?,
        };
        step.data.insert(data).stored(&step.entries[step.next], step.next as u64)
    }

    /// The bytes of a part of that entry.
    ///
    /// # Errors
    /// As for reading it.
    pub(crate) fn cut(&mut self, owner: usize, range: &Range<u64>) -> Result<&[u8]> {
        let (number, entry) = (self.0[owner].next, self.entry(owner));
        let bytes = match self.0[owner].bytes.take().filter(|(of, _)| *of == number) {
            Some((_, bytes)) => bytes,
            None => {
                self.forget_some();
                let stored = self.stored(owner)?;
                let data = self.0[owner].data.as_ref().expect("it was read");
                data.unpacked(&entry, stored)?
            }
        };
        let within = |at: u64| usize::try_from(at - entry.start()).expect("a piece");
        let (_, bytes) = self.0[owner].bytes.insert((number, bytes));
        Ok(&bytes[within(range.start)..within(range.end)])
    }

    /// Bounds what is kept to be cut again.
    fn forget_some(&mut self) {
        if self.0.iter().filter(|step| step.bytes.is_some()).count() >= CUT_MAX {
            self.0.iter_mut().for_each(|step| step.bytes = None);
        }
    }
}

impl Step {
    fn of(state: &Stored) -> Result<Self> {
        let entries = state.manifest()?.entries;
        Ok(Self { state: state.clone(), entries, next: 0, data: None, bytes: None })
    }

    /// The entry that ends behind `at`.
    fn entry_behind(&mut self, at: u64) -> Option<Piece> {
        while self.entries.get(self.next).is_some_and(|entry| entry.piece.end() <= at) {
            self.next += 1;
        }
        self.entries.get(self.next).map(|entry| entry.piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;
    use crate::folder::tests::back_up;
    use crate::testing::{MemorySource, UNIT};

    /// The story: a line of more steps than a process may have files open could not be merged.
    #[test]
    fn of_a_long_line_only_some_files_are_open_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::make(&dir.path().join("web")).unwrap();
        let mut disk = vec![0; 70 * UNIT];
        for number in 0..70_u8 {
            let before = disk.clone();
            disk[usize::from(number) * UNIT..][..UNIT].fill(number + 1);
            let mut source = match number {
                0 => MemorySource::whole(&disk),
                _ => MemorySource::since(&disk, &before),
            };
            let base = number.checked_sub(1).map(|base| format!("s{base}"));
            let named = format!("s{number}");
            back_up(&folder, (&named, base.as_deref()), &mut source, Packing::Plain).unwrap();
        }
        let mut steps = Steps::of(&folder.line("s69").unwrap()).unwrap();
        let (mut position, mut parts) = (0, 0);
        while let Some((owner, part)) = steps.next_part(position) {
            position = part.end;
            parts += 1;
            assert!(!steps.stored(owner).unwrap().is_empty());
            let open = steps.0.iter().filter(|step| step.data.is_some()).count();
            assert!(open <= OPEN_MAX, "{open} files");
        }
        assert_eq!((parts, position), (70, disk.len() as u64));
    }
}

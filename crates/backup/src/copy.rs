//! Copies a state into a step: what there is, but for zeros.
//!
//! Invariants
//! - I1 What a step says of the disk is what the source reads as. Of a whole step the rest is
//!   zeros, of another what the base has.
//! - I2 Memory is bounded: pieces of a batch, and what the source says of its next part.
//! - I3 Parts are in the order of the disk, so that a step that was cut off goes on where it ends.

use crate::format::{DATA_BYTES_MAX, Piece};
use crate::packing::{Packer, Packing};
use crate::writer::StepWriter;
use mica_block::{LocalFuture, Result, windows};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};
use std::io::Write;

/// Zeros that are found in data are looked for in units of this.
const ZERO_BYTES: u64 = 4096;
/// Fewer zeros between data stay a part of it: a part of their own costs an entry of the manifest,
/// of which there may only be so many.
const GAP_BYTES_MIN: usize = 64 << 10;
/// Pieces that are read together: so many, and so many bytes.
const BATCH_PIECES: usize = 64;
const BATCH_BYTES: u64 = 8 << 20;

/// A part of the disk that is to be copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Where it is; its ends are multiples of a sector.
    pub range: GuestRange,
    /// Whether it is known to read as zeros.
    pub is_zeros: bool,
}

/// A state that is copied.
pub trait Source {
    /// The next parts, behind all that were returned, in order and disjoint; `None` if there are no
    /// more. Of a state that is copied whole all that is not zeros; of another all that may differ
    /// from its base.
    ///
    /// # Errors
    /// Why it is not known.
    fn next(&mut self) -> LocalFuture<'_, Result<Option<Vec<Run>>>>;

    /// The bytes of these parts of the disk.
    ///
    /// # Errors
    /// Why they cannot be read.
    fn read<'a>(&'a mut self, ranges: &'a [GuestRange]) -> LocalFuture<'a, Result<Vec<Buf>>>;
}

/// Copies what `source` has behind what was written already. `at` is called with how far that is,
/// and how many bytes of data that were.
///
/// # Errors
/// What the source or the target report.
pub async fn copy<W: Write>(
    source: &mut dyn Source,
    packing: Packing,
    to: &mut StepWriter<W>,
    at: impl FnMut(u64, u64),
) -> Result<()> {
    let from = GuestOffset::new(to.written.end);
    let is_whole = to.begin().base.is_none();
    let packer = Packer::new(packing)?;
    let mut copy = Copy { to, packer, at, is_whole, batch: Vec::new(), batch_bytes: 0 };
    let mut pending: Option<Run> = None;
    while let Some(runs) = source.next().await? {
        for run in runs {
            let start = run.range.start().max(from);
            let left = GuestRange::between(start, run.range.end());
            let Some(range) = left.filter(|left| !left.is_empty()) else { continue };
            let run = Run { range, ..run };
            match &mut pending {
                Some(last) if last.is_followed_by(&run) => last.extend(&run),
                _ => {
                    if let Some(last) = pending.replace(run) {
                        copy.run(source, last).await?;
                    }
                }
            }
            // Long runs are not gathered any longer than is of use.
            if pending.is_some_and(|run| !run.is_zeros && run.range.len() >= BATCH_BYTES)
                && let Some(run) = pending.take()
            {
                copy.run(source, run).await?;
            }
        }
    }
    if let Some(last) = pending {
        copy.run(source, last).await?;
    }
    copy.flush(source).await
}

impl Run {
    fn is_followed_by(&self, next: &Self) -> bool {
        self.range.end() == next.range.start() && self.is_zeros == next.is_zeros
    }

    fn extend(&mut self, next: &Self) {
        let joined = GuestRange::between(self.range.start(), next.range.end());
        self.range = joined.expect("it follows");
    }
}

/// A copy under way.
struct Copy<'a, W, F> {
    to: &'a mut StepWriter<W>,
    packer: Packer,
    at: F,
    is_whole: bool,
    /// Pieces that are to be read and written.
    batch: Vec<Run>,
    batch_bytes: u64,
}

impl<W: Write, F: FnMut(u64, u64)> Copy<'_, W, F> {
    async fn run(&mut self, source: &mut dyn Source, run: Run) -> Result<()> {
        if run.is_zeros {
            if !self.is_whole {
                self.batch.push(run);
                self.flush_if_full(source).await?;
            }
            return Ok(());
        }
        for range in windows(run.range, DATA_BYTES_MAX) {
            self.batch.push(Run { range, ..run });
            self.batch_bytes += range.len();
            self.flush_if_full(source).await?;
        }
        Ok(())
    }

    async fn flush_if_full(&mut self, source: &mut dyn Source) -> Result<()> {
        if self.batch.len() >= BATCH_PIECES || self.batch_bytes >= BATCH_BYTES {
            self.flush(source).await?;
        }
        Ok(())
    }

    async fn flush(&mut self, source: &mut dyn Source) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let data = batch.iter().filter(|run| !run.is_zeros).map(|run| run.range);
        let ranges: Vec<_> = data.collect();
        let mut read = source.read(&ranges).await?.into_iter();
        for run in batch {
            let (start, len) = (run.range.start().bytes(), run.range.len());
            if run.is_zeros {
                self.zeros(start, len)?;
                (self.at)(start + len, 0);
                continue;
            }
            let bytes = read.next().expect("as many as were asked for");
            assert_eq!(bytes.len() as u64, len, "as long as was asked for");
            let written = self.data(start, &bytes)?;
            (self.at)(start + len, written);
        }
        Ok(())
    }

    fn zeros(&mut self, start: u64, len: u64) -> Result<()> {
        if self.is_whole {
            return Ok(());
        }
        self.to.push(Piece { start, len, stored: 0, sum: 0 }, &[])
    }

    /// Writes what of `bytes` is not zeros. Returns how much that was.
    fn data(&mut self, start: u64, bytes: &[u8]) -> Result<u64> {
        let (mut at, mut written) = (0, 0);
        for Stretch { len, is_zeros } in stretches(start, bytes, self.is_whole) {
            let part = &bytes[at..at + len];
            let part_start = start + at as u64;
            at += len;
            if is_zeros {
                self.zeros(part_start, len as u64)?;
                continue;
            }
            let (piece, packed) = self.packer.pack(part_start, part)?;
            self.to.push(piece, packed.as_deref().unwrap_or(part))?;
            written += len as u64;
        }
        Ok(written)
    }
}

/// Bytes that become one part, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stretch {
    len: usize,
    is_zeros: bool,
}

/// Divides `bytes`, which begin at `start` of the disk, into data and zeros.
fn stretches(start: u64, bytes: &[u8], is_whole: bool) -> Vec<Stretch> {
    let first = usize::try_from(ZERO_BYTES - start % ZERO_BYTES).expect("small");
    let unit = usize::try_from(ZERO_BYTES).expect("small");
    let (head, rest) = bytes.split_at(first.min(bytes.len()));
    let mut found = Vec::new();
    for unit in std::iter::once(head).chain(rest.chunks(unit)) {
        append(&mut found, Stretch { len: unit.len(), is_zeros: is_zero(unit) });
    }
    let last = found.len() - 1;
    let mut stretches = Vec::new();
    for (index, Stretch { len, is_zeros }) in found.into_iter().enumerate() {
        // Those at an edge are no parts of a whole step, nor do they divide one.
        let is_free = last == 0 || is_whole && (index == 0 || index == last);
        let is_zeros = is_zeros && (is_free || len >= GAP_BYTES_MIN);
        append(&mut stretches, Stretch { len, is_zeros });
    }
    stretches
}

fn append(stretches: &mut Vec<Stretch>, next: Stretch) {
    match stretches.last_mut() {
        Some(last) if last.is_zeros == next.is_zeros => last.len += next.len,
        _ => stretches.push(next),
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    // Most data differs from zero early on; the rest is compared with itself shifted by one byte.
    match bytes.split_first() {
        None => true,
        Some((first, rest)) => *first == 0 && bytes[..rest.len()] == *rest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Begin;
    use crate::testing::{MemorySource, block_on};
    use std::cell::Cell;

    fn begin(base: Option<&str>, len: u64) -> Begin {
        let (disk, state) = ("web".to_owned(), "tue".to_owned());
        Begin { disk, state, base: base.map(str::to_owned), len, time_ns: 1 }
    }

    fn data(len: usize) -> Stretch {
        Stretch { len, is_zeros: false }
    }

    fn zeros(len: usize) -> Stretch {
        Stretch { len, is_zeros: true }
    }

    fn bytes_of(stretches: &[Stretch]) -> Vec<u8> {
        let bytes = |it: &Stretch| vec![u8::from(!it.is_zeros); it.len];
        stretches.iter().flat_map(bytes).collect()
    }

    /// Each of them would be a part of its own, and a manifest with as many as a large disk has is
    /// refused.
    #[test]
    fn alternating_blocks_are_one_part() {
        let disk = bytes_of(&[data(4096), zeros(4096)].repeat(256));
        for base in [None, Some("mon")] {
            let mut to = StepWriter::new(Vec::new(), begin(base, disk.len() as u64)).unwrap();
            let mut source = MemorySource::whole(&disk);
            block_on(copy(&mut source, Packing::Plain, &mut to, |_, _| {})).unwrap();
            assert_eq!(to.written.total.parts, 2, "{base:?}, of 1 MiB each");
        }
    }

    #[test]
    fn zeros_are_left_out_where_that_saves_more_than_it_costs() {
        let (long, short) = (zeros(GAP_BYTES_MIN), zeros(GAP_BYTES_MIN - 4096));
        let divided = |given: &[Stretch], is_whole| stretches(0, &bytes_of(given), is_whole);
        for is_whole in [true, false] {
            let parts = [data(4096), long, data(8192)];
            assert_eq!(divided(&parts, is_whole), parts);
            let joined = data(4096 + short.len + 8192);
            assert_eq!(divided(&[data(4096), short, data(8192)], is_whole), [joined]);
            assert_eq!(divided(&[short], is_whole), [short]);
        }
        let edges = [zeros(4096), data(4096), zeros(4096)];
        assert_eq!(divided(&edges, true), edges);
        assert_eq!(divided(&edges, false), [data(3 * 4096)]);
    }

    /// Zeros far from each other, one by one.
    struct Specks<'a> {
        left: u64,
        told: &'a Cell<usize>,
    }

    impl Source for Specks<'_> {
        fn next(&mut self) -> LocalFuture<'_, Result<Option<Vec<Run>>>> {
            let run = self.left.checked_sub(1).map(|left| {
                let start = GuestOffset::new((1000 - self.left) * 8192);
                self.left = left;
                Run { range: GuestRange::new(start, 512).unwrap(), is_zeros: true }
            });
            self.told.set(self.told.get() + usize::from(run.is_some()));
            Box::pin(async move { Ok(run.map(|run| vec![run])) })
        }

        fn read<'a>(&'a mut self, _: &'a [GuestRange]) -> LocalFuture<'a, Result<Vec<Buf>>> {
            Box::pin(async { Ok(Vec::new()) })
        }
    }

    #[test]
    fn zeros_are_not_gathered_without_a_bound() {
        let (told, mut written) = (Cell::new(0), 0);
        let mut to = StepWriter::new(Vec::new(), begin(Some("mon"), 1 << 30)).unwrap();
        let mut source = Specks { left: 1000, told: &told };
        let at = |_, _| {
            assert!(told.get() - written <= BATCH_PIECES + 1, "{written} of {}", told.get());
            written += 1;
        };
        block_on(copy(&mut source, Packing::Plain, &mut to, at)).unwrap();
        assert_eq!((written, to.written.total.parts), (1000, 1000));
    }
}

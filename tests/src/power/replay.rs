//! The disk while its log is replayed: what is durable, and what a power cut may still lose.

use crate::write_log::{Record, Step, WriteLog};
use anyhow::{Context, Result, ensure};
use mica_units::Rng;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The unit of copying, left out if it is all zeros.
const CHUNK: usize = 64 << 10;
const SECTOR: u64 = 512;
/// Where ext4 has its superblock, which has a checksum and no copy that a mount would look for: it
/// needs a device that does not tear these bytes.
const SUPERBLOCK: Range<u64> = 1024..2048;

/// What happens to the writes that no flush has followed yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// All are kept.
    Everything,
    /// None is kept.
    OnlyFlushed,
    /// A random subset.
    Subset,
    /// Those up to a random one, of which only some sectors are kept.
    TornLast,
    /// A random subset, in random order.
    Reordered,
}

/// All of them.
pub const CUTS: [Cut; 5] =
    [Cut::Everything, Cut::OnlyFlushed, Cut::Subset, Cut::TornLast, Cut::Reordered];

/// Where the power is cut, as numbers of preceding records, in their order; and how. Nothing is cut
/// before the log had length `from`.
///
/// # Errors
/// If nothing happened after that.
pub fn places(log: &WriteLog, from: u64, cuts: usize, rng: &mut Rng) -> Result<Vec<(usize, Cut)>> {
    let records = log.records();
    let first =
        records.iter().position(|record| record.end > from).context("nothing is written")?;
    let of_guests = (first..).zip(&records[first..]);
    let flushes: Vec<_> =
        of_guests.filter(|(_, record)| record.step == Step::Flush).map(|(at, _)| at).collect();
    ensure!(!flushes.is_empty(), "nothing is flushed");
    let mut places: Vec<_> = (0..cuts)
        .map(|number| {
            let at = match rng.below(10) {
                // What the flush covers has arrived or not; the flush itself has not ended.
                0..4 => rng.choose(&flushes),
                // It has, and nothing followed it.
                4..5 => rng.choose(&flushes) + 1,
                _ => {
                    let all = (records.len() - first) as u64;
                    first + 1 + usize::try_from(rng.below(all)).unwrap_or(0)
                }
            };
            (at, CUTS[number % CUTS.len()])
        })
        .collect();
    places.sort_by_key(|(at, _)| *at);
    Ok(places)
}

/// A write or a discard that survives a cut, and how many bytes of it.
#[derive(Clone, Copy, Debug)]
pub struct Survivor<'a> {
    record: &'a Record,
    torn_after: Option<u64>,
}

/// The disk at a point of its log.
pub struct Disk<'a> {
    log: &'a WriteLog,
    durable: Vec<u8>,
    /// What followed the last flush, as numbers of records.
    volatile: Vec<usize>,
    /// How many records have been replayed.
    done: usize,
}

impl<'a> Disk<'a> {
    /// The disk that was like this before the log.
    pub fn new(before: Vec<u8>, log: &'a WriteLog) -> Self {
        Self { log, durable: before, volatile: Vec::new(), done: 0 }
    }

    /// Replays records up to number `end`, which must not be in the past.
    ///
    /// # Errors
    /// If one lies beyond the disk.
    pub fn advance(&mut self, end: usize) -> Result<()> {
        while self.done < end {
            if self.log.records()[self.done].step == Step::Flush {
                for number in std::mem::take(&mut self.volatile) {
                    let survivor =
                        Survivor { record: &self.log.records()[number], torn_after: None };
                    let durable = &mut self.durable;
                    survivor.apply(self.log, |offset, bytes| {
                        let from = durable.get_mut(usize::try_from(offset)?..);
                        let here = from.and_then(|from| from.get_mut(..bytes.len()));
                        here.context("a write beyond the disk")?.copy_from_slice(bytes);
                        Ok(())
                    })?;
                }
            } else {
                self.volatile.push(self.done);
            }
            self.done += 1;
        }
        Ok(())
    }

    /// How long the log was at this point.
    pub fn log_len(&self) -> u64 {
        self.done.checked_sub(1).map_or(0, |last| self.log.records()[last].end)
    }

    /// Decides what survives a power cut.
    pub fn cut(&self, cut: Cut, rng: &mut Rng) -> Vec<Survivor<'a>> {
        let of =
            |number: &usize| Survivor { record: &self.log.records()[*number], torn_after: None };
        let mut survivors: Vec<_> = self.volatile.iter().map(of).collect();
        match cut {
            Cut::Everything => {}
            Cut::OnlyFlushed => survivors.clear(),
            Cut::Subset | Cut::Reordered => {
                let percent = rng.choose(&[20, 50, 80]);
                survivors.retain(|_| rng.percent(percent));
                if cut == Cut::Reordered {
                    rng.shuffle(&mut survivors);
                }
            }
            Cut::TornLast => {
                let count = rng.below(survivors.len() as u64 + 1);
                survivors.truncate(usize::try_from(count).unwrap_or(usize::MAX));
                if let Some(last) = survivors.last_mut() {
                    let kept = SECTOR * rng.below(last.len() / SECTOR + 1);
                    last.torn_after = Some(last.whole_superblock(kept));
                }
            }
        }
        survivors
    }

    /// Writes to `file` the disk that a cut leaves.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn lay_down(&self, survivors: &[Survivor<'_>], file: &Path) -> Result<()> {
        let file = File::create(file)?;
        file.set_len(self.durable.len() as u64)?;
        for (number, chunk) in (0..).zip(self.durable.chunks(CHUNK)) {
            if chunk.iter().any(|byte| *byte != 0) {
                file.write_all_at(chunk, number * CHUNK as u64)?;
            }
        }
        for survivor in survivors {
            survivor.apply(self.log, |offset, bytes| Ok(file.write_all_at(bytes, offset)?))?;
        }
        Ok(())
    }
}

impl Survivor<'_> {
    fn len(&self) -> u64 {
        match &self.record.step {
            Step::Write { data, .. } => data.len() as u64,
            Step::Discard { len, .. } => *len,
            Step::Flush => 0,
        }
    }

    /// How many bytes are kept of it if `kept` would tear the superblock: none of that.
    fn whole_superblock(&self, kept: u64) -> u64 {
        let (Step::Write { offset, .. } | Step::Discard { offset, .. }) = self.record.step else {
            return kept;
        };
        if offset + kept > SUPERBLOCK.start && offset + kept < SUPERBLOCK.end {
            SUPERBLOCK.start.saturating_sub(offset)
        } else {
            kept
        }
    }

    /// Passes what it changes to `write`. A discard leaves zeros.
    fn apply(&self, log: &WriteLog, mut write: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let keep = self.torn_after.unwrap_or(u64::MAX).min(self.len());
        match &self.record.step {
            Step::Write { offset, data } => {
                write(*offset, &log.bytes(data)[..usize::try_from(keep)?])
            }
            Step::Discard { offset, .. } => {
                let zeros = vec![0; CHUNK];
                let mut at = 0;
                while at < keep {
                    let len = (keep - at).min(CHUNK as u64);
                    write(offset + at, &zeros[..usize::try_from(len)?])?;
                    at += len;
                }
                Ok(())
            }
            Step::Flush => Ok(()),
        }
    }
}

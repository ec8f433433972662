//! The disk while its log is replayed: what is durable, and what a power cut may still lose.

use anyhow::{Context, Result};
use mica_gen::Rng;
use mica_tests::write_log::{Record, Step, WriteLog};
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
pub(super) enum Cut {
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
pub(super) const CUTS: [Cut; 5] =
    [Cut::Everything, Cut::OnlyFlushed, Cut::Subset, Cut::TornLast, Cut::Reordered];

/// A write or a discard that survives a cut, and how many bytes of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Survivor<'a> {
    record: &'a Record,
    torn_after: Option<u64>,
}

/// The disk at a point of its log.
pub(super) struct Disk<'a> {
    log: &'a WriteLog,
    durable: Vec<u8>,
    /// What followed the last flush, as numbers of records.
    volatile: Vec<usize>,
    /// How many records have been replayed.
    done: usize,
}

impl<'a> Disk<'a> {
    pub(super) fn new(before: Vec<u8>, log: &'a WriteLog) -> Self {
        Self { log, durable: before, volatile: Vec::new(), done: 0 }
    }

    /// Replays records up to number `end`, which must not be in the past.
    pub(super) fn advance(&mut self, end: usize) -> Result<()> {
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
    pub(super) fn log_len(&self) -> u64 {
        self.done.checked_sub(1).map_or(0, |last| self.log.records()[last].end)
    }

    /// Decides what survives a power cut.
    pub(super) fn cut(&self, cut: Cut, rng: &mut Rng) -> Vec<Survivor<'a>> {
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
    pub(super) fn lay_down(&self, survivors: &[Survivor<'_>], file: &Path) -> Result<()> {
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

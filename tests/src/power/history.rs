//! What each sector of the guest's disk has been, and what it may be after a power cut.
//!
//! A write is numbered, and its sectors say which write they come from. The place in the log at
//! which a write was acknowledged as durable decides: a disk that is cut there or later has to hold
//! that write or a later one.

use anyhow::{Result, bail, ensure};
use std::ops::Range;

/// Bytes of a sector.
pub const SECTOR: u64 = 512;

/// What a request does to its sectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// They get its stamp.
    Stamps,
    /// They are zeros.
    Zeros,
    /// They stay as they are, or are zeros.
    MayZero,
}

/// One request, as a sector saw it.
#[derive(Clone, Copy, Debug)]
struct Version {
    number: u64,
    effect: Effect,
    /// The length of the log when it was known to be durable.
    durable_at: Option<u64>,
}

/// All sectors of a disk, each with its versions from old to new.
#[derive(Debug)]
pub struct History {
    sectors: Vec<Vec<Version>>,
    last: u64,
}

/// A sector filled with its number and that of its write.
pub fn stamped(sector: u64, write: u64) -> Vec<u8> {
    let words = [sector.to_le_bytes(), write.to_le_bytes()].concat();
    words.repeat(usize::try_from(SECTOR).expect("small") / words.len())
}

/// What `sectors` hold after `write`.
pub fn stamps(sectors: Range<u64>, write: u64) -> Vec<u8> {
    sectors.flat_map(|sector| stamped(sector, write)).collect()
}

impl History {
    /// A disk of `count` sectors; at first all are zeros, or write 1.
    pub fn new(count: u64, first: Effect) -> Self {
        let first = vec![Version { number: 1, effect: first, durable_at: Some(0) }];
        Self { sectors: vec![first; usize::try_from(count).expect("small")], last: 1 }
    }

    /// Sectors of the disk.
    pub fn count(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// A request for `sectors` is sent; returns its number. No request in flight overlaps it.
    pub fn begin(&mut self, sectors: &Range<u64>, effect: Effect) -> u64 {
        self.last += 1;
        let version = Version { number: self.last, effect, durable_at: None };
        for versions in self.of(sectors) {
            versions.push(version);
        }
        self.last
    }

    /// Request `number` for `sectors` was durable when the log had length `log_len`.
    pub fn settle(&mut self, sectors: &Range<u64>, number: u64, log_len: u64) {
        for versions in self.of(sectors) {
            let mut newest_first = versions.iter_mut().rev();
            if let Some(version) = newest_first.find(|version| version.number == number) {
                version.durable_at.get_or_insert(log_len);
            }
        }
    }

    fn of(&mut self, sectors: &Range<u64>) -> impl Iterator<Item = &mut Vec<Version>> {
        let [start, end] =
            [sectors.start, sectors.end].map(|at| usize::try_from(at).expect("small"));
        self.sectors[start..end].iter_mut()
    }

    /// Compares `disk` with what it may be when the power is cut at `log_len` of the log.
    ///
    /// # Errors
    /// What is wrong with the first sector that is.
    pub fn judge(&self, disk: &[u8], log_len: u64) -> Result<()> {
        let size = usize::try_from(SECTOR)?;
        ensure!(disk.len() == self.sectors.len() * size, "{} bytes", disk.len());
        for ((sector, bytes), versions) in (0..).zip(disk.chunks(size)).zip(&self.sectors) {
            let may = may_be(versions, log_len);
            let (words, _) = bytes.as_chunks::<8>();
            let [says, number] = [0, 1].map(|index| u64::from_le_bytes(words[index]));
            let is_zeros = bytes.iter().all(|byte| *byte == 0);
            let fits = may.iter().any(|version| match version.effect {
                Effect::Stamps => version.number == number && !is_zeros,
                Effect::Zeros | Effect::MayZero => is_zeros,
            });
            if fits && (is_zeros || bytes == stamped(sector, number)) {
                continue;
            }
            if !is_zeros && bytes != stamped(says, number) {
                bail!("sector {sector} holds what nobody wrote, {bytes:02x?}");
            }
            let has = if is_zeros { "zeros".into() } else { format!("write {number} of {says}") };
            bail!("sector {sector} has {has}; at {log_len} it may be {may:?}");
        }
        Ok(())
    }
}

/// What a sector may be: the newest that was durable at `log_len`, and all later ones.
fn may_be(versions: &[Version], log_len: u64) -> &[Version] {
    let is_durable = |version: &Version| version.durable_at.is_some_and(|at| at <= log_len);
    let mut first = versions.iter().rposition(is_durable).unwrap_or(0);
    // What a discard did not remove is still there.
    while first > 0 && versions[first].effect == Effect::MayZero {
        first -= 1;
    }
    &versions[first..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_may_be_what_was_durable_or_newer() {
        let mut history = History::new(2, Effect::Stamps);
        let both = 0..2;
        let write = history.begin(&both, Effect::Stamps);
        let zeros = history.begin(&(1..2), Effect::Zeros);
        history.settle(&both, write, 100);
        let disk = |first: &[u8], second: &[u8]| [first, second].concat();
        let [old, new] = [1, write].map(|number| [0, 1].map(|sector| stamped(sector, number)));
        let empty = [0; 512];
        // Before the write was durable, anything is possible.
        for second in [&old[1][..], &new[1], &empty] {
            history.judge(&disk(&old[0], second), 99).expect("old");
            history.judge(&disk(&new[0], second), 99).expect("new");
        }
        // Then the old content is gone, and neither another sector's content nor a write that was
        // never made may be there.
        history.judge(&disk(&new[0], &empty), 100).expect("new");
        for first in [&old[0][..], &empty, &new[1], &[7; 512], &stamped(0, 99)] {
            history.judge(&disk(first, &empty), 100).expect_err("lost or foreign");
        }
        history.settle(&(1..2), zeros, 200);
        history.judge(&disk(&new[0], &new[1]), 200).expect_err("the zeros are lost");
    }

    #[test]
    fn a_discard_leaves_the_sector_or_zeros() {
        let mut history = History::new(1, Effect::Stamps);
        let one = 0..1;
        let write = history.begin(&one, Effect::Stamps);
        let discard = history.begin(&one, Effect::MayZero);
        history.settle(&one, write, 10);
        history.settle(&one, discard, 20);
        history.judge(&stamped(0, write), 20).expect("left");
        history.judge(&[0; 512], 20).expect("taken");
        history.judge(&stamped(0, 1), 20).expect_err("the old is gone");
    }
}

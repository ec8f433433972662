//! The log that QEMU's `blklogwrites` driver keeps of all that reaches a disk. It has the form of
//! Linux's `dm-log-writes`, so what is read here could come from there as well.
//!
//! All numbers are little-endian, and all that the log holds begins at a sector of its own.
//!
//! ```text
//! sector 0   0 magic "rhswfsj\0"   8 version, 1   16 entries   24 bytes of a sector (u32)
//! entry      0 first sector   8 sectors   16 flags   24 bytes of a mark; zeros to the sector's end
//!            then the sectors' data, unless it is a discard
//! entry      ...
//! ```
//!
//! Flags: 1 all that was written before is flushed first; 2 the entry's data is durable when it is
//! acknowledged (FUA); 4 a discard, without data; 8 a mark, which changes nothing.
//!
//! The super block is written after entries, so its number of entries may be behind: with
//! `log-super-update-interval=1` it is not.

use anyhow::{Context, Result, bail, ensure};
use std::ops::Range;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const SUPER_BYTES: usize = 28;
const ENTRY_BYTES: usize = 32;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// What happened to the disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Bytes were written.
    Write {
        /// Where on the disk.
        offset: u64,
        /// Where the log has them: see [`WriteLog::bytes`].
        data: Range<usize>,
    },
    /// Bytes were given up.
    Discard {
        /// Where on the disk.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// All steps before became durable.
    Flush,
}

/// A step and its place in the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// What happened.
    pub step: Step,
    /// Where its entry ends: the log had this length at least when the step was acknowledged.
    pub end: u64,
}

/// A log that was read.
#[derive(Debug)]
pub struct WriteLog {
    bytes: Vec<u8>,
    records: Vec<Record>,
}

impl WriteLog {
    /// Reads the log that `bytes` are.
    ///
    /// A write with FUA becomes a write and a flush, which is more than it promises.
    ///
    /// # Errors
    /// If they are no log, or an entry lies beyond them.
    pub fn parse(bytes: Vec<u8>) -> Result<Self> {
        let head = bytes.get(..SUPER_BYTES).context("the log is cut in its super block")?;
        let [magic, version, count] = [0, 8, 16].map(|at| word(head, at));
        ensure!(magic == MAGIC && version == VERSION, "no log: {head:02x?}");
        let sector = u64::from(u32::from_le_bytes(*head.last_chunk().context("28 bytes")?));
        ensure!(sector.is_power_of_two() && sector >= 512, "sectors of {sector} bytes");
        let mut records = Vec::new();
        let mut at = sector;
        for number in 0..count {
            let mut entry = || -> Result<u64> {
                let start = usize::try_from(at)?;
                let head = start.checked_add(ENTRY_BYTES).and_then(|end| bytes.get(start..end));
                let head = head.context("it lies beyond the log")?;
                let [offset, len] = [0, 8]
                    .map(|at| word(head, at).checked_mul(sector).context("no disk is that long"));
                let (offset, len) = (offset?, len?);
                let data = at + sector;
                take_entry(&mut records, (offset, len), word(head, 16), (data, bytes.len()))
            };
            at = entry().with_context(|| format!("entry {number} of {count}, at {at}"))?;
        }
        Ok(Self { bytes, records })
    }

    /// What happened, in the order in which it did.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The bytes that a write wrote.
    pub fn bytes(&self, data: &Range<usize>) -> &[u8] {
        &self.bytes[data.clone()]
    }
}

/// Adds the steps of an entry whose data, if it has some, begins at `data` of a log of `log_len`
/// bytes. Returns where the entry ends.
fn take_entry(
    records: &mut Vec<Record>,
    (offset, len): (u64, u64),
    flags: u64,
    (data, log_len): (u64, usize),
) -> Result<u64> {
    if flags & !(FLUSH | FUA | DISCARD | MARK) != 0 {
        bail!("unknown flags {flags:#x}");
    }
    if flags & FLUSH != 0 {
        records.push(Record { step: Step::Flush, end: data });
    }
    if flags & DISCARD != 0 {
        records.push(Record { step: Step::Discard { offset, len }, end: data });
        return Ok(data);
    }
    if flags & MARK != 0 || len == 0 {
        return Ok(data);
    }
    let end = data.checked_add(len).context("no log is that long")?;
    let range = usize::try_from(data)?..usize::try_from(end)?;
    ensure!(range.end <= log_len, "its {len} bytes lie beyond the log");
    records.push(Record { step: Step::Write { offset, data: range }, end });
    if flags & FUA != 0 {
        records.push(Record { step: Step::Flush, end });
    }
    Ok(end)
}

/// The word at `at` of `bytes`, which are long enough.
fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTOR: usize = 512;

    fn padded(words: &[u64]) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(SECTOR, 0);
        bytes
    }

    fn log(count: u64, entries: &[Vec<u8>]) -> Vec<u8> {
        [&[padded(&[MAGIC, VERSION, count, SECTOR as u64])], entries].concat().concat()
    }

    #[test]
    fn steps_come_out_in_order_with_their_places() {
        let entries = [
            padded(&[8, 2, 0]),
            vec![7; 2 * SECTOR],
            padded(&[0, 0, FLUSH]),
            padded(&[16, 100, DISCARD]),
            padded(&[4, 1, FLUSH | FUA]),
            vec![9; SECTOR],
            padded(&[0, 0, MARK, 3]),
        ];
        let log = WriteLog::parse(log(5, &entries)).expect("a log");
        let steps: Vec<_> = log.records().iter().map(|one| (one.step.clone(), one.end)).collect();
        let wanted = [
            (Step::Write { offset: 4096, data: 1024..2048 }, 2048),
            (Step::Flush, 2560),
            (Step::Discard { offset: 8192, len: 51200 }, 3072),
            (Step::Flush, 3584),
            (Step::Write { offset: 2048, data: 3584..4096 }, 4096),
            (Step::Flush, 4096),
        ];
        assert_eq!(steps, wanted);
        assert_eq!(log.bytes(&(1024..2048)), [7; 1024]);
        assert_eq!(log.bytes(&(3584..4096)), [9; 512]);
    }

    #[test]
    fn what_lies_behind_the_last_entry_is_not_read() {
        let entries = [padded(&[0, 0, FLUSH]), padded(&[u64::MAX, u64::MAX, u64::MAX])];
        let log = WriteLog::parse(log(1, &entries)).expect("a log");
        assert_eq!(log.records().len(), 1);
    }

    #[test]
    fn file_that_is_not_a_log_is_refused() {
        let entry = |words: &[u64]| log(1, &[padded(words)]);
        let mut larger_sectors = entry(&[0, 0, FLUSH]);
        larger_sectors[24..28].copy_from_slice(&3000_u32.to_le_bytes());
        let cases = [
            (Vec::new(), "cut"),
            (vec![0; 4096], "no log"),
            (larger_sectors, "sectors of 3000"),
            (log(2, &[padded(&[0, 0, FLUSH])]), "entry 1 of 2"),
            (entry(&[0, 2, 0]), "entry 0 of 1"),
            (entry(&[0, u64::MAX, 0]), "entry 0 of 1"),
            (entry(&[0, 1 << 54, 0]), "entry 0 of 1"),
            (entry(&[0, 0, 16]), "entry 0 of 1"),
        ];
        for (bytes, says) in cases {
            let error = WriteLog::parse(bytes).expect_err(says);
            assert!(error.to_string().contains(says), "{error:#} does not say {says}");
        }
    }
}

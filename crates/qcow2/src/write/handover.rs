//! What acknowledged writes changed in the metadata since the last group, written down where it
//! outlives the process: a server that is killed under a running guest has lost nothing that the
//! guest was told is written, though nothing of it was flushed. [`crate::takeover`] reads it.
//!
//! ```text
//! 0      header: magic | version | name | boot | start | first number | crc
//! 4096   two halves, each: group of records | group | …
//!        number u64 | bytes u32 | crc u32 | records: at u64 | bytes u32 | stage u32 | content
//! ```
//!
//! Groups are read from `start` on until a number or a crc is wrong, and then from the beginning of
//! the other half. Each group of the guest's flushes begins in the other half if nothing there
//! counts any more, so that the log does not grow while it is never empty.
//!
//! A record is a range of the image file as it is to be; groups are applied in their order. What
//! one write changed, with all that it needs, is one group, which is there wholly or not at all.
//! Nothing of this is ever made durable: after a power cut the log is of another boot, and
//! unflushed writes are lost as they may be.
//!
//! The image names the log in its autoclear bits 32 to 63. Whoever else writes the image clears
//! bits that it does not know, and a log that is not named is not believed.
//!
//! Invariants
//! - I1 A change is in the log before it is in the file, and before the write that made it is
//!   acknowledged: to apply the log leads to a state that is not older than the file.
//! - I2 A change leaves the log only when it is durable: with the group that took it.
//! - I3 A log in which something is missing is no log: where it cannot be written it is removed,
//!   and a warning says what that means.
//!
//! What the name does not tell is an older copy of the image that was put back into its file, in
//! the same boot, after the writer was killed: the log would be applied to a state that it does
//! not belong to. Whoever restores an image into its file opens it with `--handover-dir off` first.

use super::pages::Stage;
use crate::index::sidecar::crc32c;
use mica_block::{Error, ErrorKind, Handover, Result};
use mica_units::HostOffset;
use std::sync::Arc;

pub(crate) const MAGIC: [u8; 8] = *b"micalog\x01";
pub(crate) const HEADER_BYTES: usize = 64;
pub(crate) const RECORDS_AT: u64 = 4096;
pub(crate) const GROUP_HEAD_BYTES: usize = 16;
pub(crate) const RECORD_HEAD_BYTES: usize = 16;

/// The header of a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LogHeader {
    pub(crate) name: u32,
    pub(crate) boot: u128,
    /// Where the first group is that counts.
    pub(crate) start: u64,
    /// Its number.
    pub(crate) number: u64,
}

impl LogHeader {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.name.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.boot.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.start.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.number.to_le_bytes());
        let sum = crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The header in `bytes`, if they are one.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let sum = u32::from_le_bytes(*bytes.last_chunk()?);
        if bytes[..8] != MAGIC || sum != crc32c(&bytes[..HEADER_BYTES - 4]) {
            return None;
        }
        let number = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        Some(Self {
            name: u32::from_le_bytes(*bytes[8..].first_chunk()?),
            boot: u128::from_le_bytes(*bytes[16..].first_chunk()?),
            start: number(32)?,
            number: number(40)?,
        })
    }
}

/// Where the other half begins than the one of `at`, of a log with this `capacity`.
pub(crate) fn other_half(at: u64, capacity: u64) -> u64 {
    let middle = capacity / 2;
    if at < middle { middle } else { RECORDS_AT }
}

/// The checksum of a group: of the log's name and its number, too, so that what an earlier group or
/// log left is not taken for a later one.
pub(crate) fn group_sum(name: u32, number: u64, records: &[u8]) -> u32 {
    let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    sum.update(&name.to_le_bytes());
    sum.update(&number.to_le_bytes());
    sum.update(records);
    u32::try_from(sum.finalize()).expect("32 bits")
}

pub(crate) const EARLY: u32 = 0;
const LATE: u32 = 1;

/// A range that changed and is not in the log yet.
#[derive(Clone, Copy)]
struct Touched {
    at: HostOffset,
    len: usize,
    stage: Stage,
}

/// How far the log went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    end: u64,
    number: u64,
}

/// The log of one writer.
pub(crate) struct Log {
    out: Arc<dyn Handover>,
    name: u32,
    /// Where the first group is that counts.
    start: u64,
    /// Where the next group goes, and its number.
    end: u64,
    number: u64,
    touched: Vec<Touched>,
    bytes: Vec<u8>,
}

impl Log {
    /// Begins an empty log, whose name follows from `seed`.
    pub(crate) fn begin(out: Arc<dyn Handover>, seed: u128) -> Result<Self> {
        // Not zero, which is no name.
        let name = crc32c(&seed.to_le_bytes()) | 1;
        let (start, end, number) = (RECORDS_AT, RECORDS_AT, 1);
        let log = Self { out, name, start, end, number, touched: Vec::new(), bytes: Vec::new() };
        // Somebody else's, or one that nobody took over.
        log.out.remove();
        log.write_header(start, number)?;
        Ok(log)
    }

    pub(crate) fn name(&self) -> u32 {
        self.name
    }

    fn write_header(&self, start: u64, number: u64) -> Result<()> {
        let header = LogHeader { name: self.name, boot: self.out.boot(), start, number };
        self.out.write_at(0, &header.encode())
    }

    /// `len` bytes at `at` are being changed.
    pub(crate) fn touch(&mut self, at: HostOffset, len: usize, stage: Stage) {
        // The same counts, or the same entry, again and again.
        if let Some(last) = self.touched.last()
            && (last.at, last.len, last.stage) == (at, len, stage)
        {
            return;
        }
        self.touched.push(Touched { at, len, stage });
    }

    /// Writes down what was touched, as `content` has it.
    ///
    /// # Errors
    /// If it cannot be written: then the log is not to be used any more.
    pub(crate) fn append<'a>(
        &mut self,
        content: impl Fn(HostOffset, usize) -> Option<&'a [u8]>,
    ) -> Result<()> {
        if self.touched.is_empty() {
            return Ok(());
        }
        self.bytes.clear();
        self.bytes.resize(GROUP_HEAD_BYTES, 0);
        for Touched { at, len, stage } in self.touched.drain(..) {
            // What was dropped meanwhile is named by nothing any more.
            let Some(content) = content(at, len) else { continue };
            let stage = if stage == Stage::Early { EARLY } else { LATE };
            self.bytes.extend_from_slice(&at.bytes().to_le_bytes());
            self.bytes.extend_from_slice(&u32::try_from(len).expect("a page").to_le_bytes());
            self.bytes.extend_from_slice(&stage.to_le_bytes());
            self.bytes.extend_from_slice(content);
        }
        // It stays within its half, and short of its end, which is the other one's begin.
        if self.end + self.bytes.len() as u64 >= self.half_end() {
            return Err(Error::new(ErrorKind::NoSpace, "the log is full"));
        }
        let len = u32::try_from(self.bytes.len() - GROUP_HEAD_BYTES).expect("within the log");
        let sum = group_sum(self.name, self.number, &self.bytes[GROUP_HEAD_BYTES..]);
        self.bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        self.bytes[8..12].copy_from_slice(&len.to_le_bytes());
        self.bytes[12..16].copy_from_slice(&sum.to_le_bytes());
        self.out.write_at(self.end, &self.bytes)?;
        self.end += self.bytes.len() as u64;
        self.number += 1;
        Ok(())
    }

    fn half_end(&self) -> u64 {
        let (middle, capacity) = (self.out.capacity() / 2, self.out.capacity());
        if self.end < middle { middle } else { capacity }
    }

    /// Whether it is time to flush, so that it does not become full.
    pub(crate) fn is_long(&self) -> bool {
        self.half_end() - self.end < self.out.capacity() / 4
    }

    /// How far it goes now, for a group that is taken. What comes later goes into the other half,
    /// if that is free.
    pub(crate) fn mark(&mut self) -> Mark {
        let other = other_half(self.end, self.out.capacity());
        let is_free = other_half(self.start, self.out.capacity()) == other;
        if is_free && self.end != other_half(other, self.out.capacity()) {
            self.end = other;
        }
        Mark { end: self.end, number: self.number }
    }

    /// What came before `mark` is durable (I2).
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn forget(&mut self, mark: &Mark) -> Result<()> {
        self.write_header(mark.end, mark.number)?;
        self.start = mark.end;
        Ok(())
    }

    /// Nothing in it counts any more.
    pub(crate) fn remove(&self) {
        self.out.remove();
    }
}

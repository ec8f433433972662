//! What acknowledged writes changed in the metadata since the last group, written down where it
//! outlives the process: a server that is killed under a running guest has lost nothing that the
//! guest was told is written, though nothing of it was flushed. [`crate::takeover`] reads it;
//! [`super::logging`] says when a writer has one.
//!
//! ```text
//! 0      header: magic | salt | name | boot | start | first number | next name | runs | crc
//! 4096   two halves, each: group of records | group | …
//!        number u64 | bytes u32 | crc u32 | records: at u64 | bytes u32 | kind u32 | content
//! ```
//!
//! Groups are read from `start` on until a number or a crc is wrong, and then from the beginning of
//! the other half. Each group of the guest's flushes begins in the other half if nothing there
//! counts any more, so that the log does not grow while it is never empty.
//!
//! A record is a range of the image file as it is to be; groups are applied in their order. What
//! one write changed, with all that it needs, is one group, which is there wholly or not at all.
//! Nothing of this is ever made durable: after a power cut the log is of another boot, and
//! unflushed writes are lost as they may be. Each group says what tells whether the data that it
//! links was lost without one ([`mica_block::Witness`]).
//!
//! The image names the log in its autoclear bits 32 to 63. Whoever else opens the image for writing
//! clears bits that it does not know, and a log that is not named is not believed. Who reopens it
//! for writing may leave them: I5 is for that. With every group that a
//! flush makes durable the name changes, so that it names a state, not only a writer: an older copy
//! that is put back into the file names a log that is no more. The image gets the new name when the
//! group's pages are in the file, and the log goes by both names from before that until the group
//! is durable: a writer may die at any moment between.
//!
//! ```text
//! log: old, new ─▶ pages of the group ─▶ image: new ─▶ all durable ─▶ log: new, without the group
//! ```
//!
//! Invariants
//! - I1 A change is in the log before it is in the file, and before the write that made it is
//!   acknowledged: to apply the log leads to a state that is not older than the file.
//! - I2 A change leaves the log only when it is durable: with the group that took it.
//! - I3 A log in which something is missing is no log: where it cannot be written it is removed,
//!   and a warning says what that means.
//! - I4 The image has a name only while the file has all that the log under this name goes on from.
//! - I5 A page that the log changes has in the file, while this log is named, what it had when it
//!   was changed first, or what a group that was taken made of it, or in some sectors this and in
//!   others that. The log has a sum of each ([`Expected`]) before the page may be written: who
//!   takes over knows by that whether somebody else wrote meanwhile who left the name as it is. A
//!   page that is written through comes into the log as it is then.
//! - I6 What the log calls unused is linked by nothing: neither in the file nor in the log. So what
//!   is linked past the log, by the header, is told before ([`PageState::log_footing`]).
//!
//! What a name does not tell is a copy that was made while the writer ran, since its last flush:
//! put back in place of the image, it gets what the log has of the metadata, which is sound, but
//! where clusters were new after the copy their data is missing.

mod expected;
mod footing;

use super::header::LOG_NAME_SHIFT;
#[cfg(doc)]
use super::pages::PageState;
use super::pages::Stage;
use crate::index::sidecar::crc32c;
pub(crate) use expected::{EXPECTED, Expected, Sums, decode_expected, sums_of};
pub(crate) use footing::{Footing, Run};
use footing::{RUN_BYTES, RUNS_MAX, decode_runs};
use mica_block::{Error, ErrorKind, Handover, Result, Store, Witness};
use mica_units::HostOffset;
use std::sync::Arc;

const MAGIC: [u8; 8] = *b"micalog\x04";
pub(crate) const HEADER_BYTES: usize = RUNS_AT + RUNS_MAX * RUN_BYTES + 8;
pub(crate) const RECORDS_AT: u64 = 4096;
pub(crate) const GROUP_HEAD_BYTES: usize = 16;
pub(crate) const RECORD_HEAD_BYTES: usize = 16;
const RUNS_AT: usize = 56;
const _: () = assert!(HEADER_BYTES as u64 <= RECORDS_AT);

/// Kinds of records: a range that is written with the early pages, or with the late ones.
pub(crate) const EARLY: u32 = 0;
pub(crate) const LATE: u32 = 1;
/// What the groups up to this one go on from: see [`Footing`].
pub(crate) const FOOTING: u32 = 2;
/// What tells whether the data that the groups up to this one link is still there: for the image
/// file, and for the data file if there is one. Content: for each, kind u64, value i128.
pub(crate) const WITNESSES: u32 = 3;
const WITNESS_BYTES: usize = 24;
/// A range that becomes zeros, as [`EARLY`] and [`LATE`]; it has no content: a new table of 2 MiB
/// is one record.
pub(crate) const EARLY_ZEROS: u32 = 4;
pub(crate) const LATE_ZEROS: u32 = 5;
/// Ranges shorter than this have content though it is zeros.
const ZEROS_LEN_MIN: usize = 64;
/// Pages of zeros in a log at most. Who reads it has all that it changes in memory at once.
pub(crate) const ZERO_PAGES_MAX: u64 = 1 << 15;

/// Appends what every record begins with: it is of `len` bytes at `at`.
fn append_head(bytes: &mut Vec<u8>, at: u64, len: usize, kind: u32) {
    let len = u32::try_from(len).expect("a page, or few numbers");
    bytes.extend_from_slice(&at.to_le_bytes());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&kind.to_le_bytes());
}

/// Appends what `stores` tell now as a record.
fn append_witnesses(stores: &[Arc<dyn Store>], bytes: &mut Vec<u8>) {
    append_head(bytes, 0, stores.len() * WITNESS_BYTES, WITNESSES);
    for store in stores {
        let (kind, value) = match store.witness() {
            Witness::None => (0, 0),
            Witness::Life(number) => (1, i128::from(number)),
            Witness::Changed(time_ns) => (2, time_ns),
        };
        bytes.extend_from_slice(&u64::to_le_bytes(kind));
        bytes.extend_from_slice(&value.to_le_bytes());
    }
}

/// What a record of witnesses says; `None` if it is none.
pub(crate) fn decode_witnesses(content: &[u8]) -> Option<Vec<Witness>> {
    let (told, []) = content.as_chunks::<WITNESS_BYTES>() else { return None };
    let decode = |told: &[u8; WITNESS_BYTES]| {
        let value = i128::from_le_bytes(*told[8..].first_chunk()?);
        match u64::from_le_bytes(*told.first_chunk()?) {
            0 => Some(Witness::None),
            1 => u64::try_from(value).ok().map(Witness::Life),
            2 => Some(Witness::Changed(value)),
            _ => None,
        }
    };
    told.iter().map(decode).collect()
}

/// The header of a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LogHeader {
    /// Goes into the checksums of its groups.
    pub(crate) salt: u32,
    /// What the image calls it: one name, or while a group is made durable this or the next one.
    pub(crate) names: [u32; 2],
    pub(crate) boot: u128,
    /// Where the first group is that counts.
    pub(crate) start: u64,
    /// Its number.
    pub(crate) number: u64,
    /// What is unused if there is no group.
    pub(crate) unused: Vec<Run>,
}

impl LogHeader {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.salt.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.names[0].to_le_bytes());
        bytes[16..32].copy_from_slice(&self.boot.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.start.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.number.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.names[1].to_le_bytes());
        let runs = &self.unused[..self.unused.len().min(RUNS_MAX)];
        let count = u32::try_from(runs.len()).expect("few");
        bytes[52..56].copy_from_slice(&count.to_le_bytes());
        for (to, (first, count)) in bytes[RUNS_AT..].chunks_exact_mut(RUN_BYTES).zip(runs) {
            to[..8].copy_from_slice(&first.to_le_bytes());
            to[8..].copy_from_slice(&count.to_le_bytes());
        }
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
        let small = |at: usize| bytes[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let number = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let runs_bytes = usize::try_from(small(52)?).ok()?.checked_mul(RUN_BYTES)?;
        let runs = bytes[RUNS_AT..HEADER_BYTES - 4].get(..runs_bytes)?;
        Some(Self {
            salt: small(8)?,
            names: [small(12)?, small(48)?],
            boot: u128::from_le_bytes(*bytes[16..].first_chunk()?),
            start: number(32)?,
            number: number(40)?,
            unused: decode_runs(runs.as_chunks().0)?,
        })
    }
}

/// Where the other half begins than the one of `at`, of a log with this `capacity`.
pub(crate) fn other_half(at: u64, capacity: u64) -> u64 {
    let middle = capacity / 2;
    if at < middle { middle } else { RECORDS_AT }
}

/// The checksum of a group: of the log's salt and its number, too, so that what an earlier group or
/// log left is not taken for a later one.
pub(crate) fn group_sum(salt: u32, number: u64, records: &[u8]) -> u32 {
    let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    sum.update(&salt.to_le_bytes());
    sum.update(&number.to_le_bytes());
    sum.update(records);
    u32::try_from(sum.finalize()).expect("32 bits")
}

/// The name of a log that is among the autoclear `bits` of an image.
pub(crate) fn names_log(bits: u64) -> Option<u32> {
    u32::try_from(bits >> LOG_NAME_SHIFT).ok().filter(|name| *name != 0)
}

/// The name after `name`. Zero is none.
pub(crate) fn name_after(name: u32) -> u32 {
    name.wrapping_add(1).max(1)
}

/// A range that changed and is not in the log yet.
#[derive(Clone, Copy)]
struct Touched {
    at: HostOffset,
    len: usize,
    stage: Stage,
}

/// How far the log went when a group was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    end: u64,
    number: u64,
    /// What the image calls the log from this group on.
    pub(crate) name: u32,
    /// The log was begun with this group, which is not in it.
    pub(crate) is_first: bool,
}

/// The log of one writer.
pub(crate) struct Log {
    out: Arc<dyn Handover>,
    /// The image file, and the data file if there is one.
    stores: Vec<Arc<dyn Store>>,
    salt: u32,
    name: u32,
    /// The name that the image may have already.
    next: Option<u32>,
    /// Where the first group is that counts, and its number.
    start: u64,
    first: u64,
    /// Where the next group goes, and its number.
    end: u64,
    number: u64,
    touched: Vec<Touched>,
    /// Sums of pages that are not in the log yet.
    expected: Vec<Expected>,
    bytes: Vec<u8>,
    /// Pages of zeros in it: of groups that are being made durable, and later ones.
    zero_pages: [u64; 2],
}

/// Appends the records of ranges to a group: neighbours that become zeros are one.
struct Ranges<'a> {
    bytes: &'a mut Vec<u8>,
    /// Where the record of the last range is, its kind and where the range ends, if it is zeros.
    zeros: Option<(usize, u32, u64)>,
    zero_pages: u64,
}

impl Ranges<'_> {
    fn add(&mut self, at: u64, content: &[u8], stage: Stage) {
        let is_zeros = content.len() >= ZEROS_LEN_MIN && content.iter().all(|byte| *byte == 0);
        let kind = match (stage, is_zeros) {
            (Stage::Early, false) => EARLY,
            (Stage::Late, false) => LATE,
            (Stage::Early, true) => EARLY_ZEROS,
            (Stage::Late, true) => LATE_ZEROS,
        };
        let len = u32::try_from(content.len()).expect("a page");
        let end = at + content.len() as u64;
        self.zero_pages += u64::from(is_zeros);
        if let Some((record, last_kind, last_end)) = &mut self.zeros
            && (*last_kind, *last_end) == (kind, at)
            && let Some(stood) = self.bytes[*record + 8..].first_chunk_mut()
            && let Some(joined) = u32::from_le_bytes(*stood).checked_add(len)
        {
            *stood = joined.to_le_bytes();
            *last_end = end;
            return;
        }
        self.zeros = is_zeros.then_some((self.bytes.len(), kind, end));
        append_head(self.bytes, at, content.len(), kind);
        if !is_zeros {
            self.bytes.extend_from_slice(content);
        }
    }
}

impl Log {
    /// Begins an empty log of this `name`, for an image in these `stores`.
    pub(crate) fn begin(
        out: Arc<dyn Handover>,
        stores: Vec<Arc<dyn Store>>,
        name: u32,
        footing: &Footing,
    ) -> Result<Self> {
        let log = Self {
            out,
            stores,
            salt: name,
            name,
            next: None,
            start: RECORDS_AT,
            first: 1,
            end: RECORDS_AT,
            number: 1,
            touched: Vec::new(),
            expected: Vec::new(),
            bytes: Vec::new(),
            zero_pages: [0; 2],
        };
        // Somebody else's, or one that nobody took over.
        log.out.remove();
        match log.write_header(footing) {
            Ok(()) => Ok(log),
            Err(error) => {
                log.remove();
                Err(error)
            }
        }
    }

    /// The name that it was given last.
    pub(crate) fn name(&self) -> u32 {
        self.next.unwrap_or(self.name)
    }

    fn write_header(&self, footing: &Footing) -> Result<()> {
        let header = LogHeader {
            salt: self.salt,
            names: [self.name, self.next.unwrap_or(self.name)],
            boot: self.out.boot(),
            start: self.start,
            number: self.first,
            unused: footing.unused.clone(),
        };
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

    /// The file may have the page at `at` as it is in `page` (I5).
    pub(crate) fn expect(&mut self, at: u64, page: &[u8]) {
        Expected::push(&mut self.expected, at, page);
    }

    /// Whether something was touched that is not written down.
    pub(crate) fn is_behind(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Writes down what was touched, as `content` has it, and the footing.
    ///
    /// # Errors
    /// If it cannot be written: then the log is not to be used any more.
    pub(crate) fn append<'a>(
        &mut self,
        content: impl Fn(HostOffset, usize) -> Option<&'a [u8]>,
        footing: &Footing,
    ) -> Result<()> {
        self.bytes.clear();
        self.bytes.resize(GROUP_HEAD_BYTES, 0);
        let mut ranges = Ranges { bytes: &mut self.bytes, zeros: None, zero_pages: 0 };
        for Touched { at, len, stage } in self.touched.drain(..) {
            // What was dropped meanwhile is named by nothing any more.
            let Some(content) = content(at, len) else { continue };
            ranges.add(at.bytes(), content, stage);
        }
        self.zero_pages[1] += ranges.zero_pages;
        for expected in self.expected.drain(..) {
            expected.append_to(&mut self.bytes);
        }
        footing.append_to(&mut self.bytes);
        // What the group links was written before.
        append_witnesses(&self.stores, &mut self.bytes);
        // It stays within its half, and short of its end, which is the other one's begin.
        let is_full = self.end + self.bytes.len() as u64 >= self.half_end();
        if is_full || self.zero_pages.iter().sum::<u64>() > ZERO_PAGES_MAX {
            return Err(Error::new(ErrorKind::NoSpace, "the log is full"));
        }
        let len = u32::try_from(self.bytes.len() - GROUP_HEAD_BYTES).expect("within the log");
        let sum = group_sum(self.salt, self.number, &self.bytes[GROUP_HEAD_BYTES..]);
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
        let is_short_of_room = self.half_end() - self.end < self.out.capacity() / 4;
        is_short_of_room || self.zero_pages[1] > ZERO_PAGES_MAX / 4
    }

    /// How far it goes now, for a group that is taken, and the name that the image gets with that.
    /// What comes later goes into the other half, if that is free.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn mark(&mut self, footing: &Footing) -> Result<Mark> {
        let other = other_half(self.end, self.out.capacity());
        let is_free = other_half(self.start, self.out.capacity()) == other;
        if is_free && self.end != other_half(other, self.out.capacity()) {
            self.end = other;
        }
        let [before, later] = self.zero_pages;
        self.zero_pages = [before + later, 0];
        // A name that was not used yet, because a group before found no space, will do.
        if self.next.is_none() {
            self.next = Some(name_after(self.name));
            self.write_header(footing)?;
        }
        Ok(Mark { end: self.end, number: self.number, name: self.name(), is_first: false })
    }

    /// The mark of a log that begins with a group.
    pub(crate) fn first_mark(&self) -> Mark {
        Mark { end: self.end, number: self.number, name: self.name, is_first: true }
    }

    /// Whether there is nothing in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.number == self.first
    }

    /// What came before `mark` is durable (I2), and the image has the name of `mark`.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn forget(&mut self, mark: &Mark, footing: &Footing) -> Result<()> {
        (self.name, self.next) = (mark.name, None);
        (self.start, self.first) = (mark.end, mark.number);
        self.zero_pages[0] = 0;
        self.write_header(footing)
    }

    /// Nothing in it counts any more.
    pub(crate) fn remove(&self) {
        self.out.remove();
    }
}

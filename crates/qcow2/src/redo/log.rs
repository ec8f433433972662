//! The log of one writer: what it appends, when, and when it forgets.

use super::Stage;
use super::baseline::LogBaseline;
use super::changed::Changed;
use super::expected::{Expected, sums_of};
use super::format::{
    EARLY, EARLY_ZEROS, GROUP_HEAD_BYTES, GroupHead, LATE, LATE_ZEROS, LogHeader, RECORDS_AT,
    ZERO_PAGES_MAX, ZEROS_LEN_MIN, append_head, append_witnesses, name_after, other_half, time_of,
    witnesses_of,
};
use mica_block::{Error, ErrorKind, RedoMemory, RedoOrigin, Result, Store, Witness};
use mica_units::HostOffset;
use std::sync::Arc;

/// Sixteenths of the memory of a log that it takes compacted at most: it is long at four, and so
/// has room before it is long again.
const COMPACTED_SIXTEENTHS_MAX: u64 = 3;
/// Bytes that are left for the requests under way once no others are let in.
const ROOM_MIN: u64 = 1 << 18;

/// A range that changed and is not in the log yet.
#[derive(Clone, Copy)]
struct Touched {
    at: HostOffset,
    len: usize,
    stage: Stage,
}

/// The extent of the log when a group was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    end: u64,
    number: u64,
    /// The image's name for the log from this group on.
    pub(crate) name: u32,
    /// The log began with this group, which is not in it.
    pub(crate) is_first: bool,
}

/// The log of one writer.
pub(crate) struct Log {
    out: Arc<dyn RedoMemory>,
    /// The image file, and the data file if there is one.
    stores: Vec<Arc<dyn Store>>,
    /// Of its memory.
    origin: RedoOrigin,
    salt: u32,
    /// How many times its header was written.
    sequence: u64,
    name: u32,
    /// The name that the image may already have.
    next: Option<u32>,
    /// Where the first group that counts is, and its number.
    start: u64,
    first: u64,
    /// Where the next group goes, and its number.
    end: u64,
    number: u64,
    touched: Vec<Touched>,
    /// What changed since the last mark.
    changed: Changed,
    /// Whether it has changes that it may not have had when the image got its name: a copy that was
    /// made before them has that name, too.
    has_news: bool,
    /// Whether there is a mark whose group is not durable.
    is_marked: bool,
    /// Whether a page is being written outside of a group: the file has either of its contents.
    is_page_written: bool,
    /// Sums of pages that are not in the log yet.
    expected: Vec<Expected>,
    bytes: Vec<u8>,
    /// Its contents from groups that are being made durable, and from later ones.
    held: [Held; 2],
    /// What the log has recorded since the last mark: it is repeated only if it changed.
    recorded: Option<(LogBaseline, Vec<Witness>)>,
}

/// The contents of a part of a log.
#[derive(Clone, Copy, Default)]
struct Held {
    zero_pages: u64,
    /// Whether it changes anything.
    has_changes: bool,
}

/// Appends the records of ranges to a group: neighbours that become zeros share one.
struct Ranges<'a> {
    bytes: &'a mut Vec<u8>,
    /// The place of the last range's record, its kind and the end of the range, if it is zeros.
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
    /// Begins an empty log of this `name`, for an image in these `stores` with pages of
    /// `page_bytes`.
    pub(crate) fn begin(
        out: Arc<dyn RedoMemory>,
        stores: Vec<Arc<dyn Store>>,
        name: u32,
        page_bytes: u64,
    ) -> Result<Self> {
        // What another writer left there, or nobody replayed, goes.
        let origin = out.renew()?;
        let mut log = Self {
            out,
            stores,
            origin,
            salt: name,
            sequence: 0,
            name,
            next: None,
            start: RECORDS_AT,
            first: 1,
            end: RECORDS_AT,
            number: 1,
            touched: Vec::new(),
            changed: Changed::new(page_bytes),
            has_news: false,
            is_marked: false,
            is_page_written: false,
            expected: Vec::new(),
            bytes: Vec::new(),
            held: [Held::default(); 2],
            recorded: None,
        };
        match log.write_header() {
            Ok(()) => Ok(log),
            Err(error) => {
                log.remove();
                Err(error)
            }
        }
    }

    /// The name that it got last.
    pub(crate) fn name(&self) -> u32 {
        self.next.unwrap_or(self.name)
    }

    fn write_header(&mut self) -> Result<()> {
        self.sequence += 1;
        let header = LogHeader {
            salt: self.salt,
            names: [self.name, self.next.unwrap_or(self.name)],
            origin: self.origin,
            start: self.start,
            number: self.first,
            sequence: self.sequence,
            time_ns: time_of(self.out.now_ns()),
            next: self.number,
            replay_began: false,
        };
        header.write(&*self.out)
    }

    /// `len` bytes at `at` are being changed.
    pub(crate) fn touch(&mut self, at: HostOffset, len: usize, stage: Stage) {
        // The same counts, or the same entry, are often touched repeatedly.
        if let Some(last) = self.touched.last()
            && (last.at, last.len, last.stage) == (at, len, stage)
        {
            return;
        }
        self.touched.push(Touched { at, len, stage });
        self.changed.touch(at, stage);
    }

    /// The file may hold the page at `at` as it is in `page` (W5).
    pub(crate) fn expect(&mut self, at: u64, page: &[u8]) {
        let sums = sums_of(page);
        Expected::push(&mut self.expected, at, page.len() as u64, sums);
        self.changed.expect(at, sums);
    }

    /// A page is about to be written outside of a group, as it was last expected.
    pub(crate) fn begin_page_write(&mut self) {
        self.is_page_written = true;
    }

    /// Notes that the page is in the file. Without this a group has to write it before the log can
    /// be compacted.
    pub(crate) fn end_page_write(&mut self) {
        self.is_page_written = false;
    }

    /// Whether something was touched that is not recorded yet.
    pub(crate) fn is_behind(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Records what was touched, as in `content`, and what of `baseline` the log does not have yet.
    ///
    /// # Errors
    /// If it cannot be written: then the log must not be used any more.
    pub(crate) fn append<'a>(
        &mut self,
        content: impl Fn(HostOffset, usize) -> Option<&'a [u8]>,
        baseline: &LogBaseline,
    ) -> Result<()> {
        self.bytes.clear();
        self.bytes.resize(GROUP_HEAD_BYTES, 0);
        let mut ranges = Ranges { bytes: &mut self.bytes, zeros: None, zero_pages: 0 };
        for Touched { at, len, stage } in self.touched.drain(..) {
            // What was dropped in the meantime is no longer named by anything.
            let Some(content) = content(at, len) else { continue };
            ranges.add(at.bytes(), content, stage);
        }
        self.held[1].zero_pages += ranges.zero_pages;
        self.held[1].has_changes |= self.bytes.len() > GROUP_HEAD_BYTES;
        self.has_news |= self.bytes.len() > GROUP_HEAD_BYTES;
        for expected in self.expected.drain(..) {
            expected.append_to(&mut self.bytes);
        }
        self.append_changed(baseline);
        if self.bytes.len() == GROUP_HEAD_BYTES {
            return Ok(());
        }
        // It stays within its half, before the start of the other one.
        let is_full = self.end + self.bytes.len() as u64 >= self.half_end();
        if is_full || self.zero_pages() > ZERO_PAGES_MAX {
            return Err(Error::new(ErrorKind::NoSpace, "the log is full"));
        }
        self.write_group(self.end)
    }

    /// Writes the group that is in `bytes` at `at`, from where the log goes on.
    fn write_group(&mut self, at: u64) -> Result<()> {
        let (head, records) = self.bytes.split_at_mut(GROUP_HEAD_BYTES);
        let time_ns = time_of(self.out.now_ns());
        let group = GroupHead::of(self.salt, self.number, time_ns, records);
        head.copy_from_slice(&group.encode());
        self.out.write_at(at, &self.bytes)?;
        self.end = at + self.bytes.len() as u64;
        self.number += 1;
        Ok(())
    }

    /// Writes what it has since the last mark into the free half, as the pages are now in
    /// `content`. Returns whether that left room: not if it is much, or if the half is not free.
    ///
    /// # Errors
    /// As [`Self::append`], if the header cannot be written.
    pub(crate) fn compact<'a>(
        &mut self,
        content: impl Fn(HostOffset, usize) -> Option<&'a [u8]>,
        baseline: &LogBaseline,
    ) -> Result<bool> {
        assert!(!self.is_behind(), "what was touched is recorded");
        let capacity = self.out.capacity();
        let free = other_half(self.end, capacity);
        let len_max = capacity / 16 * COMPACTED_SIXTEENTHS_MAX;
        let is_settled = !self.is_marked && !self.is_page_written;
        let is_free = other_half(self.start, capacity) == free;
        if !is_settled || !is_free || self.changed.bytes() > len_max {
            return Ok(false);
        }
        self.bytes.clear();
        self.bytes.resize(GROUP_HEAD_BYTES, 0);
        let mut ranges = Ranges { bytes: &mut self.bytes, zeros: None, zero_pages: 0 };
        for (at, stage) in self.changed.stages() {
            // What was dropped in the meantime is no longer named by anything; what is not in
            // memory any more is in the file as it was recorded.
            if let Some(content) = content(HostOffset::new(at), self.changed.page_len()) {
                ranges.add(at, content, stage);
            }
        }
        let zero_pages = ranges.zero_pages;
        let has_changes = self.bytes.len() > GROUP_HEAD_BYTES;
        for expected in self.changed.expected() {
            expected.append_to(&mut self.bytes);
        }
        // What counts begins with this group, so it has all of the baseline.
        self.recorded = None;
        self.append_changed(baseline);
        if self.bytes.len() as u64 > len_max {
            self.recorded = None;
            return Ok(false);
        }
        let first = self.number;
        if let Err(error) = self.write_group(free) {
            // What it has stays as it is: nothing of it was touched.
            tracing::debug!(?error, "a log is not compacted");
            self.recorded = None;
            return Ok(false);
        }
        (self.start, self.first) = (free, first);
        self.held[1] = Held { zero_pages, has_changes };
        self.expected.clear();
        self.write_header()?;
        Ok(true)
    }

    /// Appends what is new in `baseline` and in the witnesses of the stores.
    fn append_changed(&mut self, baseline: &LogBaseline) {
        // The data that the group links was written earlier.
        let witnesses = witnesses_of(&self.stores);
        let last = self.recorded.as_ref();
        if last.is_none_or(|(last, _)| last.header != baseline.header) {
            baseline.header.append_to(&mut self.bytes);
        }
        if last.is_none_or(|(last, _)| last.space != baseline.space) {
            baseline.space.append_to(&mut self.bytes);
        }
        if last.is_none_or(|(_, last)| *last != witnesses) {
            append_witnesses(&witnesses, &mut self.bytes);
        }
        match &mut self.recorded {
            Some((last, last_witnesses)) => {
                last.header = baseline.header;
                last.space.clone_from(&baseline.space);
                *last_witnesses = witnesses;
            }
            none => *none = Some((baseline.clone(), witnesses)),
        }
    }

    fn zero_pages(&self) -> u64 {
        self.held.iter().map(|held| held.zero_pages).sum()
    }

    fn half_end(&self) -> u64 {
        let (middle, capacity) = (self.out.capacity() / 2, self.out.capacity());
        if self.end < middle { middle } else { capacity }
    }

    /// Whether it is time to flush, before it becomes full.
    pub(crate) fn is_long(&self) -> bool {
        let is_short_of_room = self.room() < self.out.capacity() / 4;
        is_short_of_room || self.held[1].zero_pages > ZERO_PAGES_MAX / 4
    }

    /// Whether it is long, and will be full soon. What is short needs all the room that is left for
    /// the requests under way.
    pub(crate) fn is_nearly_full(&self) -> bool {
        let (long, room) = (self.out.capacity() / 4, self.out.capacity() / 8);
        let is_short_of_room = self.room() < room.max(long.min(ROOM_MIN));
        is_short_of_room || self.held[1].zero_pages > ZERO_PAGES_MAX / 2
    }

    /// Bytes that still fit into its half.
    fn room(&self) -> u64 {
        self.half_end() - self.end
    }

    /// Its present extent, for a group that is taken, and the name that the image gets with that.
    /// Later groups go into the other half, if that is free.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn mark(&mut self) -> Result<Mark> {
        let other = other_half(self.end, self.out.capacity());
        let is_free = other_half(self.start, self.out.capacity()) == other;
        if is_free && self.end != other_half(other, self.out.capacity()) {
            self.end = other;
        }
        let [before, later] = self.held;
        let both = Held {
            zero_pages: before.zero_pages + later.zero_pages,
            has_changes: before.has_changes || later.has_changes,
        };
        self.held = [both, Held::default()];
        self.changed.clear();
        (self.is_marked, self.is_page_written) = (true, false);
        // The older half is forgotten with the group.
        self.recorded = None;
        self.take_name()?;
        Ok(Mark { end: self.end, number: self.number, name: self.name(), is_first: false })
    }

    /// Answers to one more name, which is for the image.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn take_name(&mut self) -> Result<()> {
        // A name that went unused, because an earlier group found no space, will do; but the image
        // may have it already.
        self.has_news = self.next.is_some();
        if self.next.is_none() {
            self.next = Some(name_after(self.name));
            self.write_header()?;
        }
        Ok(())
    }

    /// The image has the name that [`Self::take_name`] gave: the log answers to no other.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn drop_old_name(&mut self) -> Result<()> {
        self.name = self.name();
        self.next = None;
        self.write_header()
    }

    /// Whether it has changes since the image got its name.
    pub(crate) fn has_news(&self) -> bool {
        self.has_news
    }

    /// The image did not get the last name.
    pub(crate) fn keep_old_name(&mut self) {
        self.has_news = true;
    }

    /// The mark of a log that begins with a group.
    pub(crate) fn first_mark(&mut self) -> Mark {
        self.is_marked = true;
        Mark { end: self.end, number: self.number, name: self.name, is_first: true }
    }

    /// Whether it could be compacted without the page at `at`, which is dirty.
    pub(crate) fn misses(&self, at: u64) -> bool {
        !self.is_marked && !self.changed.has(at)
    }

    /// Whether it changes nothing.
    pub(crate) fn is_empty(&self) -> bool {
        !self.held.iter().any(|held| held.has_changes)
    }

    /// Everything before `mark` is durable (W2), and the image has the name of `mark`.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub(crate) fn forget(&mut self, mark: &Mark) -> Result<()> {
        (self.name, self.next) = (mark.name, None);
        (self.start, self.first) = (mark.end, mark.number);
        self.held[0] = Held::default();
        self.is_marked = false;
        self.write_header()
    }

    /// Nothing in it counts any more.
    pub(crate) fn remove(&self) {
        self.out.remove();
    }
}

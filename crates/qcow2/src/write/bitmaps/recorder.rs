//! What the dirty bitmaps of an image record while it is written, in memory; and for which regions
//! of the disk the image's file already says that all of it may be dirty.

use super::bits::{Bits, PAGE_BITS, PAGE_BYTES};
use mica_qcow2_format::BitmapTableEntry;
use mica_units::{GuestRange, HostOffset};
use parking_lot::{Mutex, MutexGuard};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The least size of a region, as a power of two.
pub(super) const REGION_BITS_MIN: u32 = 24;
/// A disk has about so many regions, as a power of two, unless they would be too small.
const REGIONS_BITS: u32 = 12;
/// Regions that there may be: a disk that grows has more of them.
const REGIONS_MAX: u64 = 1 << 16;
/// Regions ahead of a sequential writer that are covered with the one that it writes.
const AHEAD_MAX: u64 = 8;

/// Where the bits of a bitmap are in the file.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) at: HostOffset,
    pub(super) entries: Vec<BitmapTableEntry>,
}

/// A bitmap that is kept true.
pub(super) struct Recorded {
    pub(super) name: String,
    /// Its index in the directory.
    pub(super) index: usize,
    pub(super) granularity_bits: u8,
    /// Whether it records what is written; if not, only what is merged into it.
    pub(super) is_enabled: bool,
    pub(super) bits: Bits,
    pub(super) table: Mutex<Table>,
}

/// The bitmaps of an image that are kept true.
pub(crate) struct Recorder {
    pub(super) all: Vec<Recorded>,
    region_bits: u32,
    /// A bit for each region that is covered.
    covered: Box<[AtomicU64]>,
    /// Bytes of the disk that the file's bitmaps are of.
    len: AtomicU64,
}

impl Recorded {
    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// How many entries its table has.
    pub(super) fn table_len(&self) -> u64 {
        self.table().entries.len() as u64
    }

    /// What its table says of cluster `number` of it; `None` beyond the table.
    pub(super) fn entry(&self, number: u64) -> Option<BitmapTableEntry> {
        self.table().entries.get(usize::try_from(number).ok()?).copied()
    }

    /// Sets the bits of what lies in `range`, of a disk of `len` bytes.
    #[inline]
    pub(super) fn set(&self, range: Range<u64>, len: u64) {
        let end = range.end.min(len);
        if range.start < end {
            let bit = |at: u64| at >> self.granularity_bits;
            self.bits.set(bit(range.start), bit(end - 1));
        }
    }

    /// The pages with the bits of `range`.
    pub(super) fn pages_of(&self, range: Range<u64>) -> Range<u64> {
        let page = |at: u64| (at >> self.granularity_bits) / PAGE_BITS;
        if range.is_empty() { 0..0 } else { page(range.start)..page(range.end - 1) + 1 }
    }
}

/// A page of a bitmap, to be filled.
pub(super) struct PageBits<'a> {
    pub(super) number: u64,
    pub(super) bytes: &'a mut [u8],
}

impl Recorder {
    /// Records changes of a disk of `len` bytes.
    pub(super) fn new(all: Vec<Recorded>, len: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        Self {
            all,
            region_bits: bits.saturating_sub(REGIONS_BITS).max(REGION_BITS_MIN),
            covered: (0..REGIONS_MAX / 64).map(|_| AtomicU64::new(0)).collect(),
            len: AtomicU64::new(len),
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Records that `len` bytes at `at` are about to change, if the file knows that they may (B1);
    /// false if it does not.
    #[inline]
    pub(crate) fn note(&self, at: u64, len: u64) -> bool {
        let range = at..at.saturating_add(len);
        let is_covered = self.covers(&range);
        if is_covered {
            self.set(range);
        }
        is_covered
    }

    /// Records that `range` changes.
    #[inline]
    pub(super) fn set(&self, range: Range<u64>) {
        let len = self.len();
        self.all
            .iter()
            .filter(|bitmap| bitmap.is_enabled)
            .for_each(|bitmap| bitmap.set(range.clone(), len));
    }

    #[inline]
    fn covers(&self, range: &Range<u64>) -> bool {
        let mut regions = self.regions_of(range);
        regions.all(|region| self.is_covered(region))
    }

    #[inline]
    fn is_covered(&self, region: u64) -> bool {
        let word = self.word_of(region);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (region % 64) & 1 == 1)
    }

    #[inline]
    fn word_of(&self, region: u64) -> Option<&AtomicU64> {
        self.covered.get(usize::try_from(region / 64).ok()?)
    }

    #[inline]
    fn regions_of(&self, range: &Range<u64>) -> Range<u64> {
        match range.is_empty() {
            true => 0..0,
            false => range.start >> self.region_bits..((range.end - 1) >> self.region_bits) + 1,
        }
    }

    /// Bytes of the disk that there can be regions for.
    pub(super) fn len_max(&self) -> u64 {
        REGIONS_MAX << self.region_bits
    }

    /// The regions that are to be covered before `range` changes: from the first that is not to the
    /// last, and some more for who writes on in sequence. Empty if there are none.
    pub(super) fn uncovered(&self, range: GuestRange) -> Range<u64> {
        let end = range.end().bytes().min(self.len());
        let regions = self.regions_of(&(range.start().bytes().min(end)..end));
        let open = |region: &u64| !self.is_covered(*region);
        let Some(first) = regions.clone().find(open) else { return 0..0 };
        let last = regions.rev().find(open).unwrap_or(first);
        let before = (0..first).rev().take_while(|region| self.is_covered(*region));
        let ahead = before.take(usize::try_from(AHEAD_MAX).unwrap_or(0)).count() as u64;
        let regions_end = self.regions_of(&(0..self.len())).end;
        first..(last + 1 + ahead).min(regions_end)
    }

    /// From now on the file says that all of these regions may be dirty.
    pub(super) fn cover(&self, regions: Range<u64>) {
        for region in regions {
            if let Some(word) = self.word_of(region) {
                word.fetch_or(1 << (region % 64), Ordering::Release);
            }
        }
    }

    /// The disk is `len` bytes long. The region in which it ended is to be covered again.
    pub(super) fn set_len(&self, len: u64) {
        let old = self.len.swap(len, Ordering::AcqRel);
        let region = old >> self.region_bits;
        if let Some(word) = self.word_of(region) {
            word.fetch_and(!(1 << (region % 64)), Ordering::AcqRel);
        }
    }

    /// The bytes of the disk that `regions` have.
    pub(super) fn bytes_of(&self, regions: &Range<u64>) -> Range<u64> {
        let len = self.len();
        (regions.start << self.region_bits).min(len)..(regions.end << self.region_bits).min(len)
    }

    /// Runs of regions that are covered.
    pub(super) fn covered_runs(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        let end = self.regions_of(&(0..self.len())).end;
        for region in (0..end).filter(|region| self.is_covered(*region)) {
            match runs.last_mut() {
                Some(run) if run.end == region => run.end += 1,
                _ => runs.push(region..region + 1),
            }
        }
        runs
    }

    /// Puts into `page` that page of `bitmap` as the file is to have it while the image is
    /// written: what is recorded, and all of the regions that are covered, or are to be: `more`.
    pub(super) fn put_covered(&self, bitmap: &Recorded, page: PageBits<'_>, more: &Range<u64>) {
        let PageBits { number, bytes } = page;
        bitmap.bits.put_page(number, bytes);
        let bit = |at: u64| at >> bitmap.granularity_bits;
        let (first, end) = (number * PAGE_BITS, (number + 1) * PAGE_BITS);
        let covers =
            (first << bitmap.granularity_bits)..(end << bitmap.granularity_bits).min(self.len());
        for region in self.regions_of(&covers) {
            if !more.contains(&region) && !self.is_covered(region) {
                continue;
            }
            let range = self.bytes_of(&(region..region + 1));
            let range = range.start.max(covers.start)..range.end.min(covers.end);
            if !range.is_empty() {
                set_bytes(bytes, bit(range.start) - first, bit(range.end - 1) - first);
            }
        }
        self.cut(bitmap, PageBits { number, bytes });
    }

    /// As [`Self::put_covered`] as it is in the file of an image that is closed.
    pub(super) fn put_exact(&self, bitmap: &Recorded, page: PageBits<'_>) {
        bitmap.bits.put_page(page.number, page.bytes);
        self.cut(bitmap, page);
    }

    /// Clears what is behind the end of the disk: QEMU expects nothing there.
    fn cut(&self, bitmap: &Recorded, page: PageBits<'_>) {
        let PageBits { number, bytes } = page;
        let count = self.len().div_ceil(1 << bitmap.granularity_bits);
        let kept = count.saturating_sub(number * PAGE_BITS).min(PAGE_BITS);
        let at = usize::try_from(kept / 8).unwrap_or(PAGE_BYTES);
        let Some((byte, after)) = bytes.get_mut(at..).and_then(<[u8]>::split_first_mut) else {
            return;
        };
        *byte &= (1_u8 << (kept % 8)) - 1;
        after.fill(0);
    }

    /// What is dirty in the bitmap called `name` of `range`: lengths in bytes, from its start, at
    /// most `runs_max`. And whether it is enabled.
    pub(crate) fn runs(
        &self,
        name: &str,
        range: GuestRange,
        runs_max: usize,
    ) -> Option<(Vec<(u64, bool)>, bool)> {
        let bitmap = self.all.iter().find(|bitmap| bitmap.name == name)?;
        let (mut at, end) = (range.start().bytes(), range.end().bytes());
        let mut runs = Vec::new();
        while at < end && runs.len() < runs_max {
            let bit = |at: u64| at >> bitmap.granularity_bits;
            let (len, is_dirty) = bitmap.bits.run(bit(at), bit(end - 1) + 1);
            let stop = ((bit(at) + len) << bitmap.granularity_bits).min(end);
            runs.push((stop - at, is_dirty));
            at = stop;
        }
        Some((runs, bitmap.is_enabled))
    }
}

/// Sets the bits from `first` to `last`.
fn set_bytes(bytes: &mut [u8], first: u64, last: u64) {
    let at = |bit: u64| usize::try_from(bit / 8).expect("within a page");
    for (index, byte) in bytes.iter_mut().enumerate().take(at(last) + 1).skip(at(first)) {
        let low = if index == at(first) { u8::MAX << (first % 8) } else { u8::MAX };
        let high = if index == at(last) { u8::MAX >> (7 - last % 8) } else { u8::MAX };
        *byte |= low & high;
    }
}

#[cfg(test)]
mod tests {
    use super::super::bits::Room;
    use super::*;
    use mica_units::{GuestOffset, next_random};
    use std::sync::Arc;

    const MIB: u64 = 1 << 20;

    fn recorder(len: u64, granularity_bits: u8) -> Recorder {
        let bitmap = Recorded {
            name: "b".to_owned(),
            index: 0,
            granularity_bits,
            is_enabled: true,
            bits: Bits::new(Room::new(Arc::default())),
            table: Mutex::new(Table { at: HostOffset::ZERO, entries: Vec::new() }),
        };
        Recorder::new(vec![bitmap], len)
    }

    fn range(start: u64, end: u64) -> GuestRange {
        GuestRange::between(GuestOffset::new(start), GuestOffset::new(end)).expect("a range")
    }

    /// The bits of all pages as `put` makes them.
    fn bits_by(recorder: &Recorder, put: impl Fn(u64, &mut [u8])) -> Vec<bool> {
        let mut all = Vec::new();
        for number in recorder.all[0].pages_of(0..recorder.len()) {
            let mut page = [0; PAGE_BYTES];
            put(number, &mut page);
            all.extend((0..8 * PAGE_BYTES).map(|bit| page[bit / 8] >> (bit % 8) & 1 == 1));
        }
        all
    }

    fn at(value: u64) -> usize {
        usize::try_from(value).expect("small")
    }

    #[test]
    fn file_has_all_of_covered_regions_and_exactly_what_was_noted_afterwards() {
        for seed in 0..30 {
            let mut state = seed;
            let mut below = |end: u64| next_random(&mut state) % end;
            let len = 40 * MIB + below(80 * MIB) / 512 * 512;
            let granularity_bits = [12, 16, 20, 26][at(below(4))];
            let recorder = recorder(len, granularity_bits);
            let count = at(recorder.all[0].pages_of(0..len).end * PAGE_BITS);
            let (mut noted, mut covered) = (vec![false; count], vec![false; count]);
            let granules = |start: u64, end: u64| {
                let end = end.min(len).max(start + 1);
                at(start >> granularity_bits)..at((end - 1) >> granularity_bits) + 1
            };
            for _ in 0..12 {
                let start = below(len / 512) * 512;
                let end = (start + 512 * (1 + below(64))).min(len);
                let regions = recorder.uncovered(range(start, end));
                assert_eq!(recorder.note(start, end - start), regions.is_empty());
                if !regions.is_empty() {
                    let of_them = recorder.bytes_of(&regions);
                    covered[granules(of_them.start, of_them.end)].fill(true);
                    recorder.cover(regions);
                    assert!(recorder.note(start, end - start));
                }
                noted[granules(start, end)].fill(true);
            }
            let exact = bits_by(&recorder, |number, bytes| {
                recorder.put_exact(&recorder.all[0], PageBits { number, bytes });
            });
            assert!(exact == noted, "seed {seed}");
            let file = bits_by(&recorder, |number, bytes| {
                recorder.put_covered(&recorder.all[0], PageBits { number, bytes }, &(0..0));
            });
            let either: Vec<_> =
                noted.iter().zip(&covered).map(|(one, two)| *one || *two).collect();
            assert!(file == either, "seed {seed}");
        }
    }

    #[test]
    fn who_writes_in_sequence_has_regions_ahead_covered() {
        let recorder = recorder(1 << 30, 16);
        let mut syncs = 0;
        for at in (0..1 << 30).step_by(1 << 20) {
            let regions = recorder.uncovered(range(at, at + MIB));
            if !regions.is_empty() {
                syncs += 1;
                recorder.cover(regions);
            }
        }
        // Of 64 regions.
        assert_eq!(syncs, 10);
        assert_eq!(recorder.covered_runs(), vec![0..64]);
        assert_eq!(recorder.uncovered(range(0, 1 << 30)), 0..0);
        // The region where a disk ended is to be covered again, and what it gains.
        recorder.set_len((1 << 30) + 24 * MIB);
        assert!(!recorder.note(1 << 30, 512));
        assert_eq!(recorder.uncovered(range(1 << 30, (1 << 30) + 24 * MIB)), 64..66);
    }
}

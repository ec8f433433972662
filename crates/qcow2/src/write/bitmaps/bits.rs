//! The bits of a dirty bitmap in memory: pages as large as a sector, which are there where
//! something is dirty.
//!
//! Bits are only ever set, by any thread and without a lock. A page for which there is no room is
//! dirty as a whole, and so are all pages that are found together if there is none for the list of
//! them: the bitmap says too much, and never too little.

use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{BITMAP_BYTES_MAX, BitmapTableEntry};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Bytes of a page: a device writes them as a whole.
pub(super) const PAGE_BYTES: usize = 512;
/// Bits of a page.
pub(super) const PAGE_BITS: u64 = 8 * PAGE_BYTES as u64;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
/// Pages that are found together.
const SHELF_PAGES: u64 = 1024;
/// Shelves of the longest bitmap that an image can have.
const SHELVES: u64 = BITMAP_BYTES_MAX / (SHELF_PAGES * PAGE_BYTES as u64);

/// Bytes that the bitmaps of all chains that share a cache may take in memory.
pub(super) const ROOM_BYTES: u64 = 64 << 20;

type Words = [AtomicU64; PAGE_WORDS];
/// What a shelf takes.
const SHELF_BYTES: u64 = SHELF_PAGES * size_of::<OnceLock<Page>>() as u64;

/// Pages, or what stands for them where there is no room for so many: all of them are dirty.
enum Shelf {
    Some(Box<[OnceLock<Page>]>),
    All,
}

enum Page {
    Some(Box<Words>),
    All,
}

/// Each page of a shelf that stands for all of them.
static DIRTY: Page = Page::All;

/// Which parts of a disk are dirty.
pub(super) struct Bits {
    shelves: Box<[OnceLock<Shelf>]>,
    room: Room,
}

/// How much memory bitmaps take.
pub(super) struct Room {
    /// By all bitmaps that share it.
    used: Arc<AtomicU64>,
    own: AtomicU64,
    is_short: AtomicBool,
}

impl Room {
    pub(super) fn new(used: Arc<AtomicU64>) -> Self {
        Self { used, own: AtomicU64::new(0), is_short: AtomicBool::new(false) }
    }

    /// For what is dirty as a whole if there is none.
    fn take(&self, bytes: u64) -> bool {
        let is_there = self.take_if_there(bytes);
        if !is_there && !self.is_short.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "dirty bitmaps take more than {} MiB of memory: from now on parts of them are \
                 dirty as a whole",
                ROOM_BYTES >> 20
            );
        }
        is_there
    }

    fn take_if_there(&self, bytes: u64) -> bool {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let is_there = before + bytes <= ROOM_BYTES;
        match is_there {
            true => self.own.fetch_add(bytes, Ordering::Relaxed),
            false => self.used.fetch_sub(bytes, Ordering::Relaxed),
        };
        is_there
    }

    /// For a table of `entries`, without which there is no bitmap.
    ///
    /// # Errors
    /// `Limit` if there is none.
    pub(super) fn take_table(&self, entries: u64) -> Result<()> {
        match self.take_if_there(entries * size_of::<BitmapTableEntry>() as u64) {
            true => Ok(()),
            false => {
                let context =
                    format!("dirty bitmaps take more than {} MiB of memory", ROOM_BYTES >> 20);
                Err(Error::new(ErrorKind::Limit, context))
            }
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.used.fetch_sub(self.own.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Bits {
    pub(super) fn new(room: Room) -> Self {
        Self { shelves: (0..SHELVES).map(|_| OnceLock::new()).collect(), room }
    }

    /// How much memory it may take.
    pub(super) fn room(&self) -> &Room {
        &self.room
    }

    /// Sets the bits from `first` to `last`.
    #[inline]
    pub(super) fn set(&self, first: u64, last: u64) {
        for number in first / PAGE_BITS..=last / PAGE_BITS {
            let start = number * PAGE_BITS;
            let from = first.max(start) - start;
            let to = last.min(start + PAGE_BITS - 1) - start;
            if let Some(Page::Some(words)) = self.page_to_set(number, to - from + 1 == PAGE_BITS) {
                set_words(words, from, to);
            }
        }
    }

    /// The page `number`, which is made if it is not there, and is about to be dirty.
    fn page_to_set(&self, number: u64, is_whole: bool) -> Option<&Page> {
        let (shelf, within) = (number / SHELF_PAGES, number % SHELF_PAGES);
        // A bitmap cannot be longer.
        let shelf = self.shelves.get(usize::try_from(shelf).ok()?)?;
        let Shelf::Some(pages) = shelf.get_or_init(|| self.new_shelf()) else {
            return Some(&DIRTY);
        };
        let page = pages.get(usize::try_from(within).ok()?)?;
        Some(page.get_or_init(|| match is_whole {
            true => Page::All,
            false => self.new_page(),
        }))
    }

    fn new_shelf(&self) -> Shelf {
        match self.room.take(SHELF_BYTES) {
            true => Shelf::Some((0..SHELF_PAGES).map(|_| OnceLock::new()).collect()),
            false => Shelf::All,
        }
    }

    fn new_page(&self) -> Page {
        match self.room.take(PAGE_BYTES as u64) {
            true => Page::Some(Box::new([const { AtomicU64::new(0) }; PAGE_WORDS])),
            false => Page::All,
        }
    }

    fn page(&self, number: u64) -> Option<&Page> {
        let (shelf, within) = (number / SHELF_PAGES, number % SHELF_PAGES);
        match self.shelves.get(usize::try_from(shelf).ok()?)?.get()? {
            Shelf::Some(pages) => pages.get(usize::try_from(within).ok()?)?.get(),
            Shelf::All => Some(&DIRTY),
        }
    }

    /// Sets what is set in `bytes`, which are those of page `number` in the image's order.
    pub(super) fn add_page(&self, number: u64, bytes: &[u8]) {
        if bytes.iter().all(|byte| *byte == 0) {
            return;
        }
        let is_whole = bytes.len() == PAGE_BYTES && bytes.iter().all(|byte| *byte == u8::MAX);
        let Some(Page::Some(words)) = self.page_to_set(number, is_whole) else { return };
        for (word, bytes) in words.iter().zip(bytes.as_chunks().0) {
            word.fetch_or(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
    }

    /// Sets in `bytes`, which are those of page `number` in the image's order, what is set here.
    pub(super) fn put_page(&self, number: u64, bytes: &mut [u8]) {
        match self.page(number) {
            None => {}
            Some(Page::All) => bytes.fill(u8::MAX),
            Some(Page::Some(words)) => {
                for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words.iter()) {
                    let word = word.load(Ordering::Relaxed) | u64::from_le_bytes(*to);
                    *to = word.to_le_bytes();
                }
            }
        }
    }

    /// How many bits from `first` on, at most up to before `end`, are like it, and how it is.
    pub(super) fn run(&self, first: u64, end: u64) -> (u64, bool) {
        let mut at = first;
        let mut is_set = None;
        while at < end {
            let page_end = (at / PAGE_BITS + 1) * PAGE_BITS;
            let (len, now) = match self.page(at / PAGE_BITS) {
                None => (page_end - at, false),
                Some(Page::All) => (page_end - at, true),
                Some(Page::Some(words)) => run_in(words, at % PAGE_BITS),
            };
            if *is_set.get_or_insert(now) != now {
                break;
            }
            at += len;
        }
        (at.min(end) - first, is_set.unwrap_or(false))
    }
}

#[inline]
fn set_words(words: &Words, from: u64, to: u64) {
    let (first, last) = (word_of(from), word_of(to));
    for (index, word) in words.iter().enumerate().take(last + 1).skip(first) {
        let low = if index == first { u64::MAX << (from % 64) } else { u64::MAX };
        let high = if index == last { u64::MAX >> (63 - to % 64) } else { u64::MAX };
        let mask = low & high;
        // Mostly it is dirty already, and then the line stays shared between processors.
        if word.load(Ordering::Relaxed) & mask != mask {
            word.fetch_or(mask, Ordering::Relaxed);
        }
    }
}

/// How many bits from bit `at` of a page on are like it, within its word, and how it is.
fn run_in(words: &Words, at: u64) -> (u64, bool) {
    let word = words[word_of(at)].load(Ordering::Relaxed) >> (at % 64);
    let is_set = word & 1 == 1;
    let alike = if is_set { word.trailing_ones() } else { word.trailing_zeros() };
    (u64::from(alike).min(64 - at % 64), is_set)
}

fn word_of(bit: u64) -> usize {
    usize::try_from(bit / 64).expect("within a page")
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::next_random;

    fn bits() -> Bits {
        Bits::new(Room::new(Arc::default()))
    }

    #[test]
    fn bits_are_what_a_plain_list_of_them_is() {
        const COUNT: u64 = 5 * PAGE_BITS;
        for seed in 0..20 {
            let mut state = seed;
            let mut below = |end: u64| next_random(&mut state) % end;
            let (bits, mut model) = (bits(), vec![false; usize::try_from(COUNT).unwrap()]);
            for _ in 0..40 {
                let first = below(COUNT);
                let len_max = [1, 70, 2 * PAGE_BITS][usize::try_from(below(3)).unwrap()];
                let last = (first + below(len_max)).min(COUNT - 1);
                bits.set(first, last);
                (first..=last).for_each(|bit| model[usize::try_from(bit).unwrap()] = true);
            }
            let mut seen = Vec::new();
            let mut at = 0;
            while at < COUNT {
                let (len, is_set) = bits.run(at, COUNT);
                assert!(len > 0);
                seen.extend((0..len).map(|_| is_set));
                at += len;
            }
            assert_eq!(seen, model, "seed {seed}");
            let again = Bits::new(Room::new(Arc::default()));
            for number in 0..COUNT / PAGE_BITS {
                let mut page = [0; PAGE_BYTES];
                bits.put_page(number, &mut page);
                let first = usize::try_from(number * PAGE_BITS).unwrap();
                let of_page = model[first..][..8 * PAGE_BYTES].iter().enumerate();
                for (bit, expected) in of_page {
                    assert_eq!(page[bit / 8] >> (bit % 8) & 1 == 1, *expected, "seed {seed}");
                }
                again.add_page(number, &page);
                let mut copy = [0; PAGE_BYTES];
                again.put_page(number, &mut copy);
                assert_eq!(copy, page);
            }
        }
    }

    #[test]
    fn page_without_room_is_dirty_as_a_whole_and_what_ends_makes_room() {
        let used = Arc::new(AtomicU64::new(ROOM_BYTES - SHELF_BYTES - PAGE_BYTES as u64));
        let bits = Bits::new(Room::new(Arc::clone(&used)));
        bits.set(7, 7);
        bits.set(PAGE_BITS + 7, PAGE_BITS + 7);
        assert_eq!(bits.run(0, PAGE_BITS), (7, false));
        assert_eq!(bits.run(PAGE_BITS, 3 * PAGE_BITS), (PAGE_BITS, true));
        // Nor is there room to find other pages.
        let next = SHELF_PAGES * PAGE_BITS;
        bits.set(next + 7, next + 7);
        assert_eq!(bits.run(next, 3 * next), (next, true));
        let mut page = [0; PAGE_BYTES];
        bits.put_page(SHELF_PAGES + 9, &mut page);
        assert_eq!(page, [u8::MAX; PAGE_BYTES]);
        drop(bits);
        assert_eq!(
            used.load(Ordering::Relaxed),
            ROOM_BYTES - SHELF_BYTES - PAGE_BYTES as u64,
            "what ends makes room"
        );
    }
}

//! Which parts of the disk the guest has changed since somebody last looked.
//!
//! Invariants
//! - I1 A change is noted after it has entered the gate and before it is carried out. Whoever takes
//!   the notes, and then waits for all changes that are under way, sees what those did; what begins
//!   later is noted again.

use arc_swap::ArcSwapOption;
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a part, as a power of two.
const PART_BITS: u32 = 18;

/// The notes, while somebody wants them.
#[derive(Default)]
pub(in crate::chain) struct Touches {
    /// Asked by every change.
    are_wanted: AtomicBool,
    notes: ArcSwapOption<Notes>,
}

/// A bit for each part of the disk.
pub(super) struct Notes {
    words: Box<[AtomicU64]>,
}

/// Changes are noted until this is dropped.
pub(super) struct Wanted<'a> {
    touches: &'a Touches,
    pub(super) notes: Arc<Notes>,
}

impl Touches {
    /// Notes a change of `len` bytes at `at`, if somebody wants to know.
    #[inline]
    pub(in crate::chain) fn note(&self, at: GuestOffset, len: u64) {
        if self.are_wanted.load(Ordering::Relaxed) {
            self.note_now(at, len);
        }
    }

    #[cold]
    fn note_now(&self, at: GuestOffset, len: u64) {
        if let Some(notes) = &*self.notes.load() {
            notes.mark(at.bytes(), at.bytes().saturating_add(len));
        }
    }

    /// Whether changes are noted.
    pub(in crate::chain) fn are_wanted(&self) -> bool {
        self.are_wanted.load(Ordering::Relaxed)
    }

    /// From now on changes of a disk of `len` bytes are noted. The caller holds the gate, so that
    /// every later change knows.
    pub(super) fn want(&self, len: u64) -> Wanted<'_> {
        let words = (len >> PART_BITS) / 64 + 1;
        let notes = Arc::new(Notes { words: (0..words).map(|_| AtomicU64::new(0)).collect() });
        self.notes.store(Some(Arc::clone(&notes)));
        self.are_wanted.store(true, Ordering::SeqCst);
        Wanted { touches: self, notes }
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.touches.are_wanted.store(false, Ordering::SeqCst);
        self.touches.notes.store(None);
    }
}

impl Notes {
    fn mark(&self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        for part in start >> PART_BITS..=(end - 1) >> PART_BITS {
            let word = usize::try_from(part / 64).ok().and_then(|index| self.words.get(index));
            // A change beyond the end fails.
            let Some(word) = word else { return };
            word.fetch_or(1 << (part % 64), Ordering::SeqCst);
        }
    }

    /// The parts that were changed, up to `end` bytes, which are not noted any more; neighbours are
    /// joined.
    pub(super) fn take(&self, end: u64) -> Vec<GuestRange> {
        let mut ranges: Vec<GuestRange> = Vec::new();
        for (index, word) in (0_u64..).zip(&self.words) {
            let mut bits = match word.load(Ordering::SeqCst) {
                0 => continue,
                _ => word.swap(0, Ordering::SeqCst),
            };
            while bits != 0 {
                let part = index * 64 + u64::from(bits.trailing_zeros());
                bits &= bits - 1;
                let (start, stop) = (part << PART_BITS, ((part + 1) << PART_BITS).min(end));
                let (start, stop) = (GuestOffset::new(start), GuestOffset::new(stop));
                match ranges.last_mut() {
                    Some(last) if last.end() == start => {
                        *last = GuestRange::between(last.start(), stop).expect("it goes on");
                    }
                    _ => ranges.extend(GuestRange::between(start, stop)),
                }
            }
        }
        ranges.retain(|range| !range.is_empty());
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(start), len).expect("a range")
    }

    #[test]
    fn changes_are_noted_in_parts_only_while_somebody_wants_them() {
        const PART: u64 = 1 << PART_BITS;
        let touches = Touches::default();
        touches.note(GuestOffset::new(0), 512);
        let end = 200 * PART + 512;
        let wanted = touches.want(end);
        assert_eq!(wanted.notes.take(end), []);
        touches.note(GuestOffset::new(PART - 512), 1024);
        touches.note(GuestOffset::new(63 * PART), 2 * PART);
        touches.note(GuestOffset::new(200 * PART), 512);
        touches.note(GuestOffset::new(1 << 50), 512);
        touches.note(GuestOffset::new(5 * PART), 0);
        let taken = wanted.notes.take(end);
        let expected = [range(0, 2 * PART), range(63 * PART, 2 * PART), range(200 * PART, 512)];
        assert_eq!(taken, expected);
        assert_eq!(wanted.notes.take(end), []);
        drop(wanted);
        assert!(!touches.are_wanted());
        touches.note(GuestOffset::new(0), 512);
    }
}

//! What was written and is in no extent yet, by guest block.
//!
//! Invariants
//! - I1 Pieces do not overlap: for every block the last that was done to it counts.
//! - I2 A range without data is one piece, however long it is.
//! - I3 Blocks that were written together share a buffer, which stays as long as one of them. So
//!   what a batch keeps in memory is bounded by what was ever put into it ([`Batch::is_bulky`]).

use crate::place::BLOCK_BYTES;
use mica_rt::Buf;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The bytes of a block: a part of the buffer that it was written with.
#[derive(Clone)]
pub(crate) struct Block {
    of: Arc<Buf>,
    at: usize,
}

impl Block {
    /// A block of its own.
    pub(crate) fn new(bytes: &[u8; BLOCK_BYTES]) -> Self {
        Self { of: Arc::new(Buf::from_slice(bytes)), at: 0 }
    }

    /// The blocks of `buf` from `at` on. Nobody changes them: `buf` is not foreign.
    pub(crate) fn all_of(buf: Buf, at: usize) -> impl Iterator<Item = Self> {
        debug_assert!(!buf.is_foreign(), "its other owner may change it");
        let (count, of) = (buf.len().saturating_sub(at) / BLOCK_BYTES, Arc::new(buf));
        (0..count).map(move |index| Self { of: Arc::clone(&of), at: at + index * BLOCK_BYTES })
    }

    fn has_others(&self) -> bool {
        self.of.len() >= 2 * BLOCK_BYTES
    }
}

impl Deref for Block {
    type Target = [u8; BLOCK_BYTES];

    fn deref(&self) -> &Self::Target {
        self.of[self.at..].first_chunk().expect("a block is within its buffer")
    }
}

impl PartialEq for Block {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Block {}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a block of {:02x?}…", &self[..8])
    }
}

/// What a block is, as far as a batch knows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    /// It has these bytes.
    Data(Block),
    /// It has none: it reads as zeros.
    Nothing,
}

/// A run of blocks that are alike.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Piece {
    Data(Block),
    /// This many blocks.
    Nothing(u64),
}

impl Piece {
    fn count(&self) -> u64 {
        match self {
            Self::Data(_) => 1,
            Self::Nothing(count) => *count,
        }
    }
}

/// Changes that become durable together, or not at all.
#[derive(Clone, Default, Debug)]
pub(crate) struct Batch {
    pieces: BTreeMap<u64, Piece>,
    data: usize,
    /// Blocks that were put and share a buffer with others, whether they are still there or not.
    shared: usize,
}

impl Batch {
    /// Blocks with data.
    pub(crate) fn data_blocks(&self) -> usize {
        self.data
    }

    /// Blocks with data, and ranges without: as `WEIGHT_MAX` counts them.
    pub(crate) fn weight(&self) -> usize {
        self.pieces.len()
    }

    /// Whether it may keep far more in memory than it has (I3): `limit` blocks or more.
    pub(crate) fn is_bulky(&self, limit: usize) -> bool {
        self.shared >= limit
    }

    /// What `block` is; `None` if nothing was done to it.
    pub(crate) fn get(&self, block: u64) -> Option<Known> {
        let (start, piece) = self.pieces.range(..=block).next_back()?;
        match piece {
            Piece::Data(data) if *start == block => Some(Known::Data(data.clone())),
            Piece::Nothing(count) if block - start < *count => Some(Known::Nothing),
            _ => None,
        }
    }

    /// Whether anything was done to one of `blocks`.
    pub(crate) fn touches(&self, blocks: &Range<u64>) -> bool {
        let last = self.pieces.range(..blocks.end).next_back();
        last.is_some_and(|(start, piece)| start + piece.count() > blocks.start)
    }

    /// `block` has these bytes now.
    pub(crate) fn put(&mut self, block: u64, data: Block) {
        self.cut(block..block + 1);
        self.shared += usize::from(data.has_others());
        self.pieces.insert(block, Piece::Data(data));
        self.data += 1;
    }

    /// `blocks` have nothing now.
    pub(crate) fn clear(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        self.cut(blocks.clone());
        let (mut start, mut end) = (blocks.start, blocks.end);
        // With what is beside it, it stays one piece.
        if let Some((before, Piece::Nothing(count))) = self.pieces.range(..start).next_back()
            && before + count == start
        {
            start = *before;
        }
        if let Some(Piece::Nothing(count)) = self.pieces.get(&end) {
            let count = *count;
            self.pieces.remove(&end);
            end += count;
        }
        self.pieces.insert(start, Piece::Nothing(end - start));
    }

    /// Forgets what is known of `blocks`.
    fn cut(&mut self, blocks: Range<u64>) {
        if let Some((&start, &Piece::Nothing(count))) =
            self.pieces.range(..blocks.start).next_back()
        {
            let end = start + count;
            if end > blocks.start {
                self.pieces.insert(start, Piece::Nothing(blocks.start - start));
            }
            if end > blocks.end {
                self.pieces.insert(blocks.end, Piece::Nothing(end - blocks.end));
            }
        }
        while let Some((&start, piece)) = self.pieces.range(blocks.clone()).next() {
            let end = start + piece.count();
            match self.pieces.remove(&start) {
                Some(Piece::Data(_)) => self.data -= 1,
                Some(Piece::Nothing(_)) if end > blocks.end => {
                    self.pieces.insert(blocks.end, Piece::Nothing(end - blocks.end));
                }
                _ => {}
            }
        }
    }

    /// What was done to `blocks`.
    pub(crate) fn part(&self, blocks: &Range<u64>) -> Self {
        let mut part = Self::default();
        part.add_part(self, blocks);
        part
    }

    /// Adds what `newer` did to `blocks`.
    pub(crate) fn add_part(&mut self, newer: &Self, blocks: &Range<u64>) {
        let first = newer.pieces.range(..blocks.start).next_back();
        for (&start, piece) in first.into_iter().chain(newer.pieces.range(blocks.clone())) {
            self.add(start, piece, blocks);
        }
    }

    fn add(&mut self, start: u64, piece: &Piece, blocks: &Range<u64>) {
        let part = start.max(blocks.start)..(start + piece.count()).min(blocks.end);
        match piece {
            _ if part.is_empty() => {}
            Piece::Data(data) => self.put(start, data.clone()),
            Piece::Nothing(_) => self.clear(part),
        }
    }

    /// Everything in it, by block: the first, how many, and their bytes if it is one with data.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, u64, Option<&Block>)> {
        self.pieces.iter().map(|(start, piece)| match piece {
            Piece::Data(data) => (*start, 1, Some(data)),
            Piece::Nothing(count) => (*start, *count, None),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::Rng;

    fn block(number: u64) -> Block {
        let mut bytes = [0; BLOCK_BYTES];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        Block::new(&bytes)
    }

    #[test]
    fn trim_of_a_whole_disk_is_one_piece_whatever_was_there() {
        let mut batch = Batch::default();
        for number in 0..1000 {
            batch.put(number * 7, block(number));
            batch.clear(number * 11..number * 11 + 3);
        }
        batch.clear(0..1 << 36);
        assert_eq!(
            batch.pieces().map(|(start, count, _)| (start, count)).collect::<Vec<_>>(),
            [(0, 1 << 36)]
        );
        assert_eq!(batch.data_blocks(), 0);
    }

    /// The story: a guest that wrote many blocks at once, and most of them again and again.
    #[test]
    fn batch_says_when_it_may_keep_far_more_than_it_has() {
        let mut batch = Batch::default();
        for _ in 0..3 {
            for (number, data) in (0..).zip(Block::all_of(Buf::zeroed(8 * BLOCK_BYTES), 0)) {
                batch.put(number, data);
            }
            batch.put(9, block(1));
        }
        assert_eq!((batch.weight(), batch.data_blocks()), (9, 9));
        assert!(batch.is_bulky(24) && !batch.is_bulky(25));
    }

    /// Against a map of single blocks.
    #[test]
    fn batch_knows_of_each_block_the_last_that_was_done() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let (mut batch, mut model) = (Batch::default(), BTreeMap::new());
            for step in 0..60 {
                let start = rng.below(40);
                if rng.percent(50) {
                    batch.put(start, block(step));
                    model.insert(start, Known::Data(block(step)));
                } else {
                    let blocks = start..start + rng.below(20);
                    batch.clear(blocks.clone());
                    model.extend(blocks.map(|block| (block, Known::Nothing)));
                }
                for block in 0..70 {
                    assert_eq!(batch.get(block), model.get(&block).cloned(), "seed {seed}");
                }
                for start in 0..70 {
                    let blocks = start..start + 1 + start % 5;
                    let touches = model.range(blocks.clone()).next().is_some();
                    assert_eq!(batch.touches(&blocks), touches, "seed {seed}: {blocks:?}");
                }
                let data = model.values().filter(|known| **known != Known::Nothing).count();
                assert_eq!(batch.data_blocks(), data);
                let mut end = 0;
                for (start, count, data) in batch.pieces() {
                    assert!(start >= end && count > 0, "seed {seed}: pieces overlap");
                    assert!(data.is_none() || count == 1);
                    end = start + count;
                }
            }
        }
    }
}

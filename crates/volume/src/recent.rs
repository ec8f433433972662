//! What was written and is in no extent yet, by guest block.
//!
//! Invariants
//! - I1 Pieces do not overlap: for every block the last that was done to it counts.
//! - I2 A range without data is one piece, however long it is; and so are blocks of one buffer that
//!   follow each other in it and on the disk.
//! - I3 Blocks that were written together share a buffer, which stays as long as one of them. So
//!   what a batch keeps in memory is bounded by what was ever put into it ([`Batch::is_bulky`]).

use crate::place::BLOCK_BYTES;
use mica_map::crc32c;
use mica_rt::{Buf, Part};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of a block: a part of the buffer that it was written with.
#[derive(Clone)]
pub(crate) struct Block {
    of: Arc<Written>,
    at: usize,
}

/// What was written at once.
struct Written {
    bytes: Arc<Buf>,
    /// The sum of each block, once somebody asked: above, whether it is known.
    sums: Box<[AtomicU64]>,
}

/// Bytes of the shortest buffer that is worth writing without copying it.
const LONG_BYTES: usize = 64 << 10;
const IS_KNOWN: u64 = 1 << 32;

impl Block {
    /// A block of its own.
    pub(crate) fn new(bytes: &[u8; BLOCK_BYTES]) -> Self {
        Self { of: Written::of(Buf::from_slice(bytes)), at: 0 }
    }

    /// The blocks of `buf` from `at` on. Nobody changes them: `buf` is not foreign.
    pub(crate) fn all_of(buf: Buf, at: usize) -> impl Iterator<Item = Self> {
        debug_assert!(!buf.is_foreign(), "its other owner may change it");
        let (count, of) = (buf.len().saturating_sub(at) / BLOCK_BYTES, Written::of(buf));
        (0..count).map(move |index| Self { of: Arc::clone(&of), at: at + index * BLOCK_BYTES })
    }

    /// The block that is so many behind it in its buffer.
    pub(crate) fn nth(&self, count: u64) -> Self {
        let count = usize::try_from(count).expect("within a buffer");
        Self { of: Arc::clone(&self.of), at: self.at + count * BLOCK_BYTES }
    }

    /// Whether it is the same part of the same buffer.
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.of, &other.of) && self.at == other.at
    }

    fn has_others(&self) -> bool {
        self.of.bytes.len() >= 2 * BLOCK_BYTES
    }

    /// Whether it was written with many others: then it is not copied more often than necessary.
    pub(crate) fn is_of_many(&self) -> bool {
        self.of.bytes.len() >= LONG_BYTES
    }

    /// Its bytes, to be written with others.
    pub(crate) fn part(&self) -> Part {
        Part::new(Arc::clone(&self.of.bytes), self.at..self.at + BLOCK_BYTES)
    }

    /// The CRC-32C of its bytes, which are summed up once.
    pub(crate) fn sum(&self) -> u32 {
        let known = &self.of.sums[self.at / BLOCK_BYTES];
        let value = known.load(Ordering::Relaxed);
        if value & IS_KNOWN != 0 {
            return u32::try_from(value & !IS_KNOWN).expect("a 32-bit sum");
        }
        let sum = crc32c(&self[..]);
        known.store(IS_KNOWN | u64::from(sum), Ordering::Relaxed);
        sum
    }
}

impl Written {
    fn of(bytes: Buf) -> Arc<Self> {
        let sums = (0..bytes.len() / BLOCK_BYTES).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { bytes: Arc::new(bytes), sums })
    }
}

impl Deref for Block {
    type Target = [u8; BLOCK_BYTES];

    fn deref(&self) -> &Self::Target {
        self.of.bytes[self.at..].first_chunk().expect("a block is within its buffer")
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
    /// This many blocks of one buffer; the first.
    Data(Block, u64),
    /// This many blocks.
    Nothing(u64),
}

impl Piece {
    fn count(&self) -> u64 {
        match self {
            Self::Data(_, count) | Self::Nothing(count) => *count,
        }
    }

    /// Its blocks `range`.
    fn part(&self, range: Range<u64>) -> Self {
        let count = range.end - range.start;
        match self {
            Self::Data(first, _) => Self::Data(first.nth(range.start), count),
            Self::Nothing(_) => Self::Nothing(count),
        }
    }

    /// Whether `next` goes on where it ends, in the same buffer.
    fn is_followed_by(&self, next: &Self) -> bool {
        match (self, next) {
            (Self::Data(first, count), Self::Data(next, _)) => first.nth(*count).is_same(next),
            _ => false,
        }
    }
}

/// Changes that become durable together, or not at all.
#[derive(Clone, Default, Debug)]
pub(crate) struct Batch {
    pieces: BTreeMap<u64, Piece>,
    /// Blocks with data, and pieces without.
    data: u64,
    cleared: usize,
    /// Blocks that were put and share a buffer with others, whether they are still there or not.
    shared: usize,
}

impl Batch {
    /// Blocks with data.
    pub(crate) fn data_blocks(&self) -> usize {
        usize::try_from(self.data).expect("all of them are in memory")
    }

    /// Blocks with data, and ranges without: as `WEIGHT_MAX` counts them.
    pub(crate) fn weight(&self) -> usize {
        self.data_blocks() + self.cleared
    }

    /// Whether it may keep far more in memory than it has (I3): `limit` blocks or more.
    pub(crate) fn is_bulky(&self, limit: usize) -> bool {
        self.shared >= limit
    }

    /// What `block` is; `None` if nothing was done to it.
    pub(crate) fn get(&self, block: u64) -> Option<Known> {
        let (start, piece) = self.pieces.range(..=block).next_back()?;
        let index = block - start;
        (index < piece.count()).then(|| match piece {
            Piece::Data(first, _) => Known::Data(first.nth(index)),
            Piece::Nothing(_) => Known::Nothing,
        })
    }

    /// Whether anything was done to one of `blocks`.
    pub(crate) fn touches(&self, blocks: &Range<u64>) -> bool {
        let last = self.pieces.range(..blocks.end).next_back();
        last.is_some_and(|(start, piece)| start + piece.count() > blocks.start)
    }

    /// `block` has these bytes now.
    pub(crate) fn put(&mut self, block: u64, data: Block) {
        self.put_run(block, data, 1);
    }

    /// `count` blocks from `first` on have the bytes of those from `data` on, of one buffer.
    pub(crate) fn put_run(&mut self, first: u64, data: Block, count: u64) {
        self.cut(first..first + count);
        if data.has_others() {
            self.shared = self.shared.saturating_add(usize::try_from(count).unwrap_or(usize::MAX));
        }
        let piece = Piece::Data(data, count);
        match self.pieces.range_mut(..first).next_back() {
            Some((start, before))
                if start + before.count() == first && before.is_followed_by(&piece) =>
            {
                let Piece::Data(_, longer) = before else { unreachable!("data follow data") };
                *longer += count;
                self.data += count;
            }
            _ => self.insert(first, piece),
        }
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
            self.remove(start);
        }
        if let Some(Piece::Nothing(count)) = self.pieces.get(&end) {
            let count = *count;
            self.remove(end);
            end += count;
        }
        self.insert(start, Piece::Nothing(end - start));
    }

    /// Forgets what is known of `blocks`.
    fn cut(&mut self, blocks: Range<u64>) {
        let before = self.pieces.range(..blocks.start).next_back();
        let before = before.filter(|(start, piece)| *start + piece.count() > blocks.start);
        let mut next = before.map(|(start, _)| *start).or_else(|| self.first_in(&blocks));
        while let Some(start) = next {
            let piece = self.remove(start);
            let end = start + piece.count();
            if start < blocks.start {
                self.insert(start, piece.part(0..blocks.start - start));
            }
            if end > blocks.end {
                self.insert(blocks.end, piece.part(blocks.end - start..end - start));
            }
            next = self.first_in(&blocks);
        }
    }

    /// Where the first piece begins that begins in `blocks`.
    fn first_in(&self, blocks: &Range<u64>) -> Option<u64> {
        self.pieces.range(blocks.clone()).next().map(|(start, _)| *start)
    }

    /// Adds a piece, where there is none.
    fn insert(&mut self, start: u64, piece: Piece) {
        match &piece {
            Piece::Data(_, count) => self.data += count,
            Piece::Nothing(_) => self.cleared += 1,
        }
        self.pieces.insert(start, piece);
    }

    /// Takes the piece that begins at `start` away.
    fn remove(&mut self, start: u64) -> Piece {
        let piece = self.pieces.remove(&start).expect("it was found");
        match &piece {
            Piece::Data(_, count) => self.data -= count,
            Piece::Nothing(_) => self.cleared -= 1,
        }
        piece
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
            Piece::Data(first, _) => {
                self.put_run(part.start, first.nth(part.start - start), part.end - part.start);
            }
            Piece::Nothing(_) => self.clear(part),
        }
    }

    /// Everything in it, by block: the first, how many, and the bytes if it is one with data.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, u64, Option<Block>)> {
        self.pieces.iter().flat_map(|(start, piece)| {
            let (first, blocks, cleared) = match piece {
                Piece::Data(first, count) => (Some(first), 0..*count, None),
                Piece::Nothing(count) => (None, 0..0, Some((*start, *count, None))),
            };
            let one = move |index| (start + index, 1, first.map(|first| first.nth(index)));
            blocks.map(one).chain(cleared)
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
                if rng.percent(40) {
                    batch.put(start, block(step));
                    model.insert(start, Known::Data(block(step)));
                } else if rng.percent(50) {
                    // Some at a time, as of a long write.
                    let (mut at, count) = (start, 1 + rng.below(20));
                    let blocks = (0..count).map(|index| block(step << 8 | index));
                    let bytes = blocks.flat_map(|block| block.to_vec()).collect::<Vec<_>>();
                    let mut data = Block::all_of(Buf::from_slice(&bytes), 0).collect::<Vec<_>>();
                    model.extend((start..).zip(data.iter().cloned().map(Known::Data)));
                    while !data.is_empty() {
                        let count =
                            data.len().min(1 + usize::try_from(rng.below(8)).expect("small"));
                        batch.put_run(at, data[0].clone(), count as u64);
                        (at, data) = (at + count as u64, data.split_off(count));
                    }
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
                assert_eq!(batch.weight(), batch.pieces().count(), "seed {seed}");
                let part = batch.part(&(start..start + 9));
                for block in 0..70 {
                    let known = model.get(&block).filter(|_| (start..start + 9).contains(&block));
                    assert_eq!(part.get(block), known.cloned(), "seed {seed}");
                }
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

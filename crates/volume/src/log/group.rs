//! Records that are written together, in one buffer.

use super::format::{BLOCK, GROUP_BYTES_MAX, GROUP_HEAD_BYTES, GroupHead, SegmentHeader};
use super::record::{RECORD_BYTES_MAX, Record, encrypt_blocks};
use crate::crypt::LogCipher;
use crate::format::Id;
use crate::place::BLOCK_BYTES;
use crate::recent::Block;
use mica_map::{RunningSum, Shift};
use mica_rt::{Buf, Part, Parts};
use std::sync::Arc;

/// A group that fills, or waits to be written.
pub(super) struct Group {
    /// All of it but the blocks that stay where they are.
    buf: Buf,
    /// Where its head is in the buffer: behind the header of the segment, if it begins one.
    head_at: usize,
    /// Bytes of the buffer in use.
    end: usize,
    /// The blocks that stay where they are, and behind which bytes of the buffer each comes.
    blocks: Vec<(usize, Block)>,
    count: u32,
    /// Most bytes of the group.
    len_max: usize,
    pub(super) place: Place,
    /// The number of its first record.
    pub(super) first: u64,
}

/// The bytes of a group, to be written.
pub(super) enum Bytes {
    Whole(Buf),
    Parts(Parts),
}

/// What the blocks of a group do to its sum.
static OVER_BLOCK: Shift = Shift::over(BLOCK_BYTES);

/// Where a group goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) slot: usize,
    /// The number of the segment.
    pub(super) segment: u64,
    /// The offset in the segment.
    pub(super) at: u64,
}

impl Group {
    /// A group at `place` of a segment with `room` bytes from there on. It is preceded by `header`
    /// if it begins the segment. `buf` is as long as a group may become.
    pub(super) fn new(
        buf: Buf,
        place: Place,
        room: u64,
        header: Option<&SegmentHeader>,
        first: u64,
    ) -> Self {
        let len_max = usize::try_from(room).unwrap_or(usize::MAX).min(buf.len());
        let (head_at, end, blocks, count) = (0, 0, Vec::new(), 0);
        let mut group = Self { buf, head_at, end, blocks, count, len_max, place, first };
        if let Some(header) = header {
            group.buf.put(0, &header.encode());
            group.head_at = BLOCK;
        }
        group.end = group.head_at + GROUP_HEAD_BYTES;
        group
    }

    /// A buffer for a group.
    pub(super) fn buffer() -> Buf {
        Buf::new(GROUP_BYTES_MAX)
    }

    /// Bytes of it so far.
    fn len(&self) -> usize {
        self.end + self.blocks.len() * BLOCK_BYTES
    }

    /// Whether `len` more bytes fit.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.len() + len <= self.len_max
    }

    /// # Panics
    /// If it does not fit.
    pub(super) fn push(&mut self, record: &Record<'_>) {
        let len = record.encoded_len();
        assert!(self.has_room(len), "the group is full");
        record.encode(&mut self.buf.own_bytes()[self.end..self.end + len]);
        self.end += len;
        self.count += 1;
    }

    /// As [`Self::push`], of a block that stays where it is. Not for a log with a cipher.
    ///
    /// # Panics
    /// If it does not fit.
    pub(super) fn push_block(&mut self, number: u64, block: &Block) {
        assert!(self.has_room(RECORD_BYTES_MAX), "the group is full");
        let head = Record::Data { block: number, bytes: block }.head();
        self.buf.put(self.end, &head);
        self.end += head.len();
        self.blocks.push((self.end, block.clone()));
        self.count += 1;
    }

    /// Whether the group begins its segment.
    pub(super) fn begins_segment(&self) -> bool {
        self.head_at > 0
    }

    /// The number after its last record.
    pub(super) fn next(&self) -> u64 {
        self.first + u64::from(self.count)
    }

    /// Bytes that it takes in the file.
    pub(super) fn padded_len(&self) -> usize {
        match self.count {
            0 => self.head_at,
            _ => self.len().next_multiple_of(BLOCK),
        }
    }

    /// What is to be written at its place: a multiple of blocks, which say that records below
    /// `durable` are. The blocks in it are encrypted if there is a cipher.
    ///
    /// # Panics
    /// If there is one, and blocks that stay where they are.
    pub(super) fn finish(
        mut self,
        (device, session): (&Id, &Id),
        durable: u64,
        cipher: Option<&LogCipher>,
    ) -> Bytes {
        let padding = self.padded_len() - self.len().min(self.padded_len());
        if self.count == 0 {
            self.end = self.head_at;
        } else {
            if let Some(cipher) = cipher {
                self.encrypt(cipher);
            }
            let records_at = self.head_at + GROUP_HEAD_BYTES;
            let head = GroupHead {
                len: self.len() - records_at,
                count: self.count,
                segment: self.place.segment,
                first: self.first,
                durable: Some(durable),
            };
            let head = head.encode(device, session, |sum| self.add_records(sum));
            self.buf.put(self.head_at, &head);
        }
        // What was in the buffer is nobody's business.
        self.buf.fill_part(self.end..self.end + padding, 0);
        self.buf.truncate(self.end + padding);
        if self.blocks.is_empty() {
            return Bytes::Whole(self.buf);
        }
        let (buf, mut parts, mut at) = (Arc::new(self.buf), Parts::default(), 0);
        for (end, block) in &self.blocks {
            parts.push(Part::new(Arc::clone(&buf), at..*end));
            parts.push(block.part());
            at = *end;
        }
        let end = buf.len();
        parts.push(Part::new(buf, at..end));
        Bytes::Parts(parts)
    }

    fn encrypt(&mut self, cipher: &LogCipher) {
        assert!(self.blocks.is_empty(), "what is to be encrypted is copied");
        let (segment, records_at) = (self.place.segment, self.head_at + GROUP_HEAD_BYTES);
        let records = &mut self.buf.own_bytes()[records_at..self.end];
        encrypt_blocks(records, self.first, |number, block| {
            cipher.encrypt(segment, number, block);
        });
    }

    fn add_records(&self, sum: &mut RunningSum) {
        let mut at = self.head_at + GROUP_HEAD_BYTES;
        for (end, block) in &self.blocks {
            sum.add(&self.buf[at..*end]);
            sum.add_summed(block.sum(), &OVER_BLOCK);
            at = *end;
        }
        sum.add(&self.buf[at..self.end]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::format::{BLOCK_LEN, Kind};
    use crate::place::Writer;
    use mica_units::Rng;

    fn header() -> SegmentHeader {
        SegmentHeader {
            kind: Kind::Records,
            device: [1; 16],
            session: [2; 16],
            store: [3; 16],
            volume: [4; 16],
            number: 5,
            root: 5,
            oldest: 5,
            first: 7,
            freed: 7,
            durable: 7,
            writers: vec![Writer::FIRST],
        }
    }

    fn group(begins: bool) -> Group {
        let place = Place { slot: 0, segment: 5, at: 0 };
        let header = begins.then(header);
        Group::new(Group::buffer(), place, 64 * BLOCK_LEN, header.as_ref(), 7)
    }

    fn bytes_of(group: Group) -> Vec<u8> {
        match group.finish((&[1; 16], &[2; 16]), 7, None) {
            Bytes::Whole(buf) => buf.to_vec(),
            Bytes::Parts(parts) => parts.to_buf(0..parts.len()).to_vec(),
        }
    }

    #[test]
    fn group_is_the_same_whether_its_blocks_are_copied_or_not() {
        for seed in 0..100 {
            let mut rng = Rng::new(seed);
            let bytes =
                (0..9 * BLOCK_BYTES).map(|_| rng.below(256).to_le_bytes()[0]).collect::<Vec<_>>();
            let blocks = Block::all_of(Buf::from_slice(&bytes), 0).collect::<Vec<_>>();
            let begins = rng.percent(50);
            let (mut copied, mut left) = (group(begins), group(begins));
            for _ in 0..rng.below(40) {
                let number = rng.below(1000);
                let block = &blocks[usize::try_from(rng.below(9)).expect("small")];
                let record = match rng.percent(30) {
                    true => Record::Nothing { first: number, count: 1 + rng.below(9) },
                    false => Record::Data { block: number, bytes: block },
                };
                copied.push(&record);
                match record {
                    Record::Data { .. } if rng.percent(70) => left.push_block(number, block),
                    record => left.push(&record),
                }
                assert_eq!(copied.padded_len(), left.padded_len(), "seed {seed}");
                assert_eq!(copied.next(), left.next(), "seed {seed}");
            }
            let most = usize::try_from(rng.below(70 * BLOCK_LEN)).expect("small");
            assert_eq!(copied.has_room(most), left.has_room(most), "seed {seed}");
            assert_eq!(bytes_of(copied), bytes_of(left), "seed {seed}");
        }
    }
}

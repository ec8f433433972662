//! What the blocks of an extent become in it: as they are, encrypted, or in frames.
//!
//! ```text
//! segments ─▶ runs of blocks beside each other ─▶ a frame each, if that saves an eighth
//!                                              └▶ or the blocks     ─▶ encrypted ─▶ places
//! ```
//!
//! Invariants
//! - I1 All blocks that are not in frames come first, so that they are where they would be in an
//!   extent without frames.
//! - I2 Spots are in the order of the blocks in their segments.

use crate::crypt::Cipher;
use crate::format::extent::HEADER_BYTES;
use crate::frames::{self, FrameMaker};
use crate::place::{BLOCK_BYTES, ExtentId, FRAME_BLOCKS_MAX, FramePart, Place};
use crate::properties::{Access, Compression};
use crate::recent::Block;
use crate::segment::Segment;
use mica_block::{Error, Result};
use mica_map::crc32c;
use mica_rt::{Buf, Pace};
use std::collections::VecDeque;
use std::ops::Range;

/// Makes what a volume stores of blocks.
pub(crate) struct Packer {
    maker: Option<FrameMaker>,
    access: Access,
}

/// The blocks of an extent as they are stored.
pub(crate) struct Packed {
    /// All of them: from the header on.
    pub(crate) area: Buf,
    /// How many are as they are, or encrypted.
    pub(crate) blocks: usize,
    /// Bytes of the frames, which follow.
    pub(crate) frames_len: usize,
    /// Where each block is.
    pub(crate) spots: VecDeque<Spot>,
}

/// Where a block is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    pub(crate) place: Place,
    /// If a frame begins with it: how many blocks that has, and how many bytes.
    pub(crate) frame: Option<(u64, u64)>,
}

/// Blocks beside each other.
struct Run {
    blocks: Vec<Block>,
    frame: Option<Vec<u8>>,
}

impl Packer {
    /// `None` if blocks are stored as they are.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn new(compression: Compression, access: Access) -> Result<Option<Self>> {
        let maker = match (compression, &access) {
            (Compression::None, Access::Plain) => return Ok(None),
            (Compression::None, _) => None,
            (Compression::Zstd, _) => {
                let maker = FrameMaker::new();
                Some(maker.map_err(|error| Error::from_io("zstd", error))?)
            }
        };
        Ok(Some(Self { maker, access }))
    }

    /// Packs the blocks of `segments` into extent `id`.
    ///
    /// # Errors
    /// `Denied` if there are any, and the key is not there.
    pub(crate) async fn pack(
        &mut self,
        id: ExtentId,
        segments: &[Segment],
        pace: &mut Pace,
    ) -> Result<Packed> {
        let mut runs: Vec<Run> = segments.iter().flat_map(runs_of).collect();
        if !runs.is_empty() {
            self.access.check()?;
        }
        for run in &mut runs {
            if let Some(maker) = &mut self.maker {
                run.frame = maker.make(&run.blocks);
            }
            // Many times what other steps take.
            pace.steps(2 * run.blocks.len() as u64).await;
        }
        let plain = runs.iter().filter(|run| run.frame.is_none());
        let blocks = plain.map(|run| run.blocks.len()).sum();
        let frames_len = runs.iter().flat_map(|run| &run.frame).map(Vec::len).sum();
        let area = Buf::new(blocks * BLOCK_BYTES + frames_len);
        let packed = Packed { area, blocks, frames_len, spots: VecDeque::new() };
        let mut layout = Layout { id, packed, plain_at: 0, frame_at: blocks * BLOCK_BYTES };
        for run in runs {
            pace.steps(run.blocks.len() as u64).await;
            match run.frame {
                Some(frame) => layout.put_frame(&frame, run.blocks.len(), self.access.cipher()),
                None => run.blocks.iter().for_each(|block| {
                    layout.put_block(block, self.access.cipher());
                }),
            }
        }
        Ok(layout.packed)
    }
}

/// The blocks of a segment: those of one frame together.
fn runs_of(segment: &Segment) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut next = None;
    for (number, _, data) in segment.batch.pieces() {
        let Some(block) = data else { continue };
        match runs.last_mut() {
            // What is written over later is written as a whole then, more often than not.
            Some(run)
                if next == Some(number) && !number.is_multiple_of(FRAME_BLOCKS_MAX as u64) =>
            {
                run.blocks.push(block);
            }
            _ => runs.push(Run { blocks: vec![block], frame: None }),
        }
        next = Some(number + 1);
    }
    runs
}

/// Blocks and frames on their way to their places.
struct Layout {
    id: ExtentId,
    packed: Packed,
    plain_at: usize,
    frame_at: usize,
}

impl Layout {
    fn put_block(&mut self, block: &Block, cipher: Option<&Cipher>) {
        let range = take(&mut self.plain_at, BLOCK_BYTES);
        let bytes = &mut self.packed.area.own_bytes()[range.clone()];
        bytes.copy_from_slice(&block[..]);
        let place = |sum| Place::new(self.id, HEADER_BYTES + range.start, sum);
        if let Some(cipher) = cipher {
            cipher.encrypt(place(0), bytes);
        }
        let place = place(crc32c(bytes));
        self.packed.spots.push_back(Spot { place, frame: None });
    }

    fn put_frame(&mut self, frame: &[u8], blocks: usize, cipher: Option<&Cipher>) {
        let range = take(&mut self.frame_at, frame.len());
        let bytes = &mut self.packed.area.own_bytes()[range.clone()];
        bytes.copy_from_slice(frame);
        let offset = (HEADER_BYTES + range.start) as u64;
        let class = FramePart::class_of(frame.len()).expect("a frame of this length");
        let place = |index, sum| Place::in_frame(self.id, FramePart { offset, class, index }, sum);
        if let Some(cipher) = cipher {
            frames::encrypt(bytes, place(0, 0), cipher);
        }
        let sum = crc32c(bytes);
        let whole = (blocks as u64, frame.len() as u64);
        let spot = |index| Spot { place: place(index, sum), frame: (index == 0).then_some(whole) };
        self.packed.spots.extend((0..blocks).map(spot));
    }
}

/// The next `len` bytes.
fn take(at: &mut usize, len: usize) -> Range<usize> {
    let start = *at;
    *at += len;
    start..*at
}

//! Frames: runs of blocks that are compressed together.
//!
//! docs/formats/extent.md specifies their bytes.
//!
//! Invariants
//! - I1 A frame takes at most 7/8 of what its blocks take; what does not fit is stored as it is.
//! - I2 Nothing of a frame is believed before its sum was compared, and it is given no more memory
//!   than its blocks take, whatever it says.
//! - I3 What is compressed is encrypted afterwards; the sum is that of what is stored.

use crate::crypt::Cipher;
use crate::place::{BLOCK_BYTES, FRAME_BLOCKS_MAX, FRAME_LENS, FRAME_UNIT_BYTES, FramePart, Place};
use crate::recent::Block;
use crate::tree::damaged;
use mica_block::Result;
use mica_map::crc32c;
use std::cell::RefCell;
use std::io;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};
use zstd::bulk::{Compressor, Decompressor};

/// Bytes of a frame before what is compressed.
pub(crate) const FRAME_HEADER_BYTES: usize = size_of::<RawFrame>();
/// Most bytes of what is compressed of one.
const FRAME_LEN_MAX: usize = FRAME_LENS[FRAME_LENS.len() - 1] - FRAME_HEADER_BYTES;
/// What the header says of zstd.
const ZSTD: u8 = 1;
/// It keeps up with a device.
const LEVEL: i32 = 1;
/// Bytes that are looked at to find out whether there is anything to save.
const SAMPLE_BYTES: usize = 4096;

// What is encrypted of a frame is whole units of the cipher.
const _: () = assert!(
    FRAME_HEADER_BYTES.is_multiple_of(mica_crypt::UNIT_BYTES)
        && FRAME_UNIT_BYTES.is_multiple_of(mica_crypt::UNIT_BYTES)
        && FRAME_LENS[5] == FRAME_BLOCKS_MAX * BLOCK_BYTES / 8 * 7
);

/// The header of a frame, which is never encrypted.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawFrame {
    /// Bytes of what is compressed, which follows.
    pub(crate) len: U32,
    pub(crate) blocks: u8,
    pub(crate) codec: u8,
    pub(crate) reserved: [u8; 10],
}

/// Makes frames.
pub(crate) struct FrameMaker {
    zstd: Compressor<'static>,
    plain: Vec<u8>,
    frame: Vec<u8>,
}

impl FrameMaker {
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn new() -> io::Result<Self> {
        let zstd = Compressor::new(LEVEL)?;
        Ok(Self { zstd, plain: Vec::new(), frame: Vec::new() })
    }

    /// A frame of `blocks`, not encrypted yet; `None` if it saves too little (I1).
    ///
    /// # Panics
    /// If there are none, or too many.
    pub(crate) fn make(&mut self, blocks: &[Block]) -> Option<Vec<u8>> {
        assert!((1..=FRAME_BLOCKS_MAX).contains(&blocks.len()), "blocks for one frame");
        if looks_random(blocks) {
            return None;
        }
        self.plain.clear();
        blocks.iter().for_each(|block| self.plain.extend_from_slice(&block[..]));
        let most = self.plain.len() / 8 * 7;
        self.frame.resize(most, 0);
        let room = &mut self.frame[FRAME_HEADER_BYTES..most];
        // It fails if it does not fit.
        let len = self.zstd.compress_to_buffer(&self.plain, room).ok()?;
        let header = RawFrame {
            len: u32::try_from(len).ok()?.into(),
            blocks: u8::try_from(blocks.len()).ok()?,
            codec: ZSTD,
            reserved: [0; 10],
        };
        let mut frame = Vec::with_capacity(stored_len(len));
        frame.extend_from_slice(header.as_bytes());
        frame.extend_from_slice(&self.frame[FRAME_HEADER_BYTES..][..len]);
        frame.resize(stored_len(len), 0);
        Some(frame)
    }
}

/// Bytes that a frame takes in an extent which has so many compressed ones.
fn stored_len(len: usize) -> usize {
    (FRAME_HEADER_BYTES + len).next_multiple_of(FRAME_UNIT_BYTES)
}

/// Whether the values of bytes are so evenly spread that no code of them saves an eighth: as what
/// is encrypted, or compressed already. What is spread like that, but repeats itself, is missed.
fn looks_random(blocks: &[Block]) -> bool {
    let mut counts = [0_u32; 256];
    let part = SAMPLE_BYTES / blocks.len();
    for (index, block) in blocks.iter().enumerate() {
        // From another part of each block, so that what they begin with does not count too much.
        let from = index * part % (BLOCK_BYTES - part + 1);
        block[from..from + part].iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    }
    let count = u64::try_from(part * blocks.len()).expect("small");
    let squares: u64 = counts.iter().map(|count| u64::from(*count) * u64::from(*count)).sum();
    // Of random bytes it is count + count² / 256. With 1.5 times that, each byte still carries more
    // than 7.4 bits.
    squares * 512 < 3 * (count * 256 + count * count)
}

/// The frame at `at` that `bytes` begin with, which has the right sum, and its header.
///
/// # Errors
/// `Corrupt` if there is another one, or none.
fn checked(bytes: &[u8], at: Place) -> Result<(usize, RawFrame)> {
    let wrong = |why: &str| damaged(at, "a frame", &why);
    let (raw, _) = RawFrame::read_from_prefix(bytes).map_err(|_| wrong("it is truncated"))?;
    let len = usize::try_from(raw.len.get()).unwrap_or(usize::MAX);
    let stored = Some(len).filter(|len| *len <= FRAME_LEN_MAX).map(stored_len);
    let frame = stored.and_then(|stored| bytes.get(..stored));
    let Some(frame) = frame.filter(|frame| crc32c(frame) == at.sum()) else {
        return Err(wrong("its checksum does not match"));
    };
    let blocks = usize::from(raw.blocks);
    let is_sound = (1..=FRAME_BLOCKS_MAX).contains(&blocks)
        && raw.codec == ZSTD
        && raw.reserved == [0; 10]
        && frame.len() <= blocks * BLOCK_BYTES / 8 * 7;
    if !is_sound {
        return Err(wrong("it contradicts itself"));
    }
    let is_named = at.frame().is_some_and(|part| {
        FramePart::class_of(frame.len()) == Some(part.class) && part.index < blocks
    });
    match is_named {
        true => Ok((frame.len(), raw)),
        false => Err(wrong("it is not the one that is named")),
    }
}

/// That the frame at `at`, which `bytes` begin with, is the one that was written there; returns how
/// many blocks it has. Needs no key.
///
/// # Errors
/// `Corrupt` if it is not.
pub(crate) fn check(bytes: &[u8], at: Place) -> Result<usize> {
    checked(bytes, at).map(|(_, raw)| raw.blocks.into())
}

/// The frame at `offset` of an extent that `bytes` begin with, with its sum and how many blocks it
/// has; `None` if none begins there.
pub(crate) fn found(bytes: &[u8], offset: u64) -> Option<(FramePart, u32, u64)> {
    let (raw, _) = RawFrame::read_from_prefix(bytes).ok()?;
    let len = usize::try_from(raw.len.get()).ok().filter(|len| *len <= FRAME_LEN_MAX)?;
    let frame = bytes.get(..stored_len(len))?;
    let class = FramePart::class_of(frame.len())?;
    Some((FramePart { offset, class, index: 0 }, crc32c(frame), raw.blocks.into()))
}

/// The blocks of the frame at `at`, which `bytes` begin with.
///
/// # Errors
/// As [`check`].
pub(crate) fn open(bytes: &mut [u8], at: Place, cipher: Option<&Cipher>) -> Result<Vec<u8>> {
    let (stored, raw) = checked(bytes, at)?;
    let content = &mut bytes[FRAME_HEADER_BYTES..stored];
    if let Some(cipher) = cipher {
        cipher.decrypt(at, content);
    }
    let len = usize::try_from(raw.len.get()).expect("it was compared");
    let mut blocks = vec![0; usize::from(raw.blocks) * BLOCK_BYTES];
    let unpacked = decompress(&content[..len], &mut blocks);
    match unpacked {
        Ok(len) if len == blocks.len() => Ok(blocks),
        Ok(_) => Err(damaged(at, "a frame", &"it has fewer blocks than it says")),
        Err(error) => Err(damaged(at, "a frame", &error)),
    }
}

fn decompress(content: &[u8], blocks: &mut [u8]) -> io::Result<usize> {
    thread_local! {
        static ZSTD: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
    }
    ZSTD.with_borrow_mut(|zstd| {
        let zstd = match zstd {
            Some(zstd) => zstd,
            None => zstd.insert(Decompressor::new()?),
        };
        zstd.decompress_to_buffer(content, blocks)
    })
}

/// Encrypts the frame in `bytes`, which is put at `at`.
pub(crate) fn encrypt(bytes: &mut [u8], at: Place, cipher: &Cipher) {
    cipher.encrypt(at, &mut bytes[FRAME_HEADER_BYTES..]);
}

#[cfg(test)]
mod tests;

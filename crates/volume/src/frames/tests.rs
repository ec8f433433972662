use super::*;
use crate::crypt::VolumeKey;
use crate::place::{ExtentId, Writer};
use mica_block::ErrorKind;
use mica_units::Rng;
use proptest::prelude::*;

const OFFSET: u64 = 4096;

fn extent() -> ExtentId {
    ExtentId { writer: Writer::FIRST, sequence: 0 }
}

fn cipher(byte: u8) -> Cipher {
    let key = VolumeKey::of_file("key", &[byte; 32]).expect("a key");
    key.new_secret(|| [byte; 16]).0
}

/// Where `frame` is, with its block `index`.
fn place_of(frame: &[u8], index: usize) -> Place {
    let class = FramePart::class_of(frame.len()).expect("a frame");
    Place::in_frame(extent(), FramePart { offset: OFFSET, class, index }, crc32c(frame))
}

/// Blocks of which about `percent` of the bytes are random.
fn blocks(rng: &mut Rng, count: usize, percent: u64) -> Vec<Block> {
    let byte = |rng: &mut Rng| u8::try_from(rng.below(256)).expect("a byte");
    let filler = byte(rng);
    let mut block = || {
        let bytes = (0..BLOCK_BYTES).map(|_| if rng.percent(percent) { byte(rng) } else { filler });
        Block::new(bytes.collect::<Vec<_>>().first_chunk().expect("a block"))
    };
    (0..count).map(|_| block()).collect()
}

fn make(blocks: &[Block]) -> Option<Vec<u8>> {
    FrameMaker::new().expect("zstd").make(blocks)
}

#[test]
fn frame_has_its_blocks_again_and_saves_an_eighth() {
    let (mut rng, secret) = (Rng::new(1), cipher(1));
    let mut made = 0;
    for round in 0..60_u64 {
        let count = usize::try_from(1 + rng.below(16)).expect("small");
        let blocks = blocks(&mut rng, count, round);
        let Some(frame) = make(&blocks) else { continue };
        made += 1;
        assert!(frame.len() * 8 <= count * BLOCK_BYTES * 7, "{} of {count}", frame.len());
        assert!(frame.len().is_multiple_of(FRAME_UNIT_BYTES));
        let whole: Vec<u8> = blocks.iter().flat_map(|block| block.iter().copied()).collect();
        let at = place_of(&frame, count - 1);
        assert_eq!(check(&frame, at).expect("sound"), count);
        assert_eq!(open(&mut frame.clone(), at, None).expect("sound"), whole);
        let mut stored = frame.clone();
        encrypt(&mut stored, at, &secret);
        assert_ne!(stored, frame);
        // What follows in the extent is read with it.
        let at = place_of(&stored, 0);
        stored.extend([9; 5000]);
        assert_eq!(check(&stored, at).expect("sound"), count);
        assert!(open(&mut stored.clone(), at, Some(&cipher(2))).is_err(), "another secret");
        assert_eq!(open(&mut stored, at, Some(&secret)).expect("sound"), whole);
    }
    assert!(made > 40, "{made}");
}

#[test]
fn what_is_random_already_is_not_compressed() {
    let mut rng = Rng::new(1);
    for count in [1, 3, 16] {
        let random = blocks(&mut rng, count, 100);
        assert!(looks_random(&random));
        assert!(make(&random).is_none());
        // Half of it is zeros, in blocks of their own or not.
        let mut half = random.clone();
        half.iter_mut().step_by(2).for_each(|block| *block = Block::new(&[0; BLOCK_BYTES]));
        assert!(make(&half).is_some());
        let bytes = |block: &Block| {
            let mut bytes = **block;
            bytes[..BLOCK_BYTES / 2].fill(0);
            Block::new(&bytes)
        };
        assert!(make(&random.iter().map(bytes).collect::<Vec<_>>()).is_some());
    }
}

/// The story: a store that is not ours has a small frame which says that it is a gigabyte.
#[test]
fn frame_that_would_become_more_than_it_says_is_corrupt() {
    let bomb = zstd::bulk::compress(&vec![0; 1 << 30], 1).expect("small");
    let bomb = &bomb[..bomb.len().min(FRAME_LEN_MAX)];
    let small = zstd::bulk::compress(&[0; 3 * BLOCK_BYTES], 1).expect("small");
    for (content, blocks, wanted) in [
        (bomb, 16, "frame"),
        (&small, 2, "frame"),
        (&small, 4, "fewer blocks"),
        (&small, 0, "contradicts"),
        (&small, 17, "contradicts"),
        (&[0; 40], 1, "frame"),
    ] {
        let len = u32::try_from(content.len()).expect("small").into();
        let header = RawFrame { len, blocks, codec: ZSTD, reserved: [0; 10] };
        let mut frame = [header.as_bytes(), content].concat();
        frame.resize(stored_len(content.len()), 0);
        let refused = open(&mut frame.clone(), place_of(&frame, 0), None).expect_err("not one");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        assert!(refused.to_string().contains(wanted), "{refused}");
    }
}

#[test]
fn place_that_names_a_frame_wrongly_is_corrupt_and_named() {
    let frame = make(&blocks(&mut Rng::new(1), 3, 5)).expect("small");
    let right = FramePart { offset: OFFSET, ..place_of(&frame, 0).frame().expect("one") };
    assert!(check(&frame, place_of(&frame, 2)).is_ok());
    for wrong in [
        FramePart { index: 3, ..right },
        FramePart { index: 15, ..right },
        FramePart { class: right.class + 1, ..right },
    ] {
        let refused = check(&frame, Place::in_frame(extent(), wrong, crc32c(&frame)));
        let refused = refused.expect_err("not that one");
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        let what = refused.to_string();
        assert!(what.contains(extent().name().as_str()) && what.contains("4096"), "{what}");
    }
    for bit in 0..frame.len() * 8 {
        let mut bad = frame.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(check(&bad, place_of(&frame, 0)).is_err(), "bit {bit}");
    }
}

proptest! {
    /// Whatever a store has, with a sum that matches: there is an answer, and it is as long as it
    /// says.
    #[test]
    fn hostile_frames_are_blocks_or_corrupt(
        len in 0_u32..60_000,
        count in 0_u8..20,
        codec in 0_u8..3,
        seed: u64,
        index in 0_usize..16,
        is_real: bool,
    ) {
        let mut rng = Rng::new(seed);
        let mut content: Vec<u8> = if is_real {
            let plain = vec![7; usize::try_from(rng.below(80_000)).expect("small")];
            zstd::bulk::compress(&plain, 1).expect("small")
        } else {
            (0..2000).map(|_| u8::try_from(rng.below(256)).expect("a byte")).collect()
        };
        for _ in 0..rng.below(3) {
            let at = usize::try_from(rng.below(content.len() as u64)).expect("small");
            content[at] ^= 1 << rng.below(8);
        }
        let len = if is_real { u32::try_from(content.len()).expect("small") } else { len };
        let header = RawFrame { len: len.into(), blocks: count, codec, reserved: [0; 10] };
        let mut bytes = [header.as_bytes(), &content].concat();
        let stored = stored_len(usize::try_from(len).expect("small"));
        bytes.resize(stored.max(FRAME_UNIT_BYTES), 0);
        let Some(class) = FramePart::class_of(stored) else { return Ok(()) };
        let sum = crc32c(&bytes[..stored]);
        let part = FramePart { offset: OFFSET, class, index };
        let place = Place::in_frame(extent(), part, sum);
        match open(&mut bytes, place, None) {
            Ok(blocks) => prop_assert_eq!(blocks.len(), usize::from(count) * BLOCK_BYTES),
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    }
}

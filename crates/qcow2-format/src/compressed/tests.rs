use super::*;
use flate2::{Compress, FlushCompress};
use std::io::Write;

const CLUSTER_BYTES: usize = 65536;

fn cluster() -> Vec<u8> {
    let mut state = 7_u32;
    let mut bytes = Vec::with_capacity(CLUSTER_BYTES);
    while bytes.len() < CLUSTER_BYTES {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let [byte, ..] = state.to_be_bytes();
        bytes.extend_from_slice(&[byte, byte, 0, byte & 3]);
    }
    bytes
}

fn deflate(data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(2 * data.len() + 64);
    let mut stream = Compress::new(flate2::Compression::default(), false);
    stream.compress_vec(data, &mut out, FlushCompress::Finish).expect("compresses");
    out
}

fn zstd(data: &[u8]) -> Vec<u8> {
    zstd::encode_all(data, 3).expect("compresses")
}

fn read(kind: Compression, input: &[u8]) -> Result<Vec<u8>> {
    let mut output = vec![0xee; CLUSTER_BYTES];
    decompress(kind, input, &mut output)?;
    Ok(output)
}

#[test]
fn cluster_decompresses_even_with_bytes_after_it() {
    for (kind, data) in
        [(Compression::Deflate, deflate(&cluster())), (Compression::Zstd, zstd(&cluster()))]
    {
        assert_eq!(read(kind, &data).expect("valid"), cluster());
        let followed = [&data[..], &[0xff; 300]].concat();
        assert_eq!(read(kind, &followed).expect("valid"), cluster());
        let zeros = [&data[..], &[0; 300]].concat();
        assert_eq!(read(kind, &zeros).expect("valid"), cluster());
    }
}

#[test]
fn data_too_short_for_a_cluster_is_corrupt() {
    let half = &cluster()[..CLUSTER_BYTES / 2];
    for (kind, data) in [(Compression::Deflate, deflate(half)), (Compression::Zstd, zstd(half))] {
        assert_eq!(read(kind, &data).expect_err("short").kind(), ErrorKind::Corrupt);
        assert_eq!(read(kind, &[]).expect_err("empty").kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn data_too_long_for_a_cluster_is_read_as_qemu_reads_it() {
    let double = [cluster(), cluster()].concat();
    assert_eq!(read(Compression::Deflate, &deflate(&double)).expect("cut"), cluster());
    assert!(read(Compression::Zstd, &zstd(&double)).is_err());
}

#[test]
fn several_zstd_frames_make_one_cluster() {
    let whole = cluster();
    let (first, second) = whole.split_at(1000);
    let frames = [zstd(first), zstd(&[]), zstd(second)].concat();
    assert_eq!(read(Compression::Zstd, &frames).expect("valid"), cluster());
    assert!(read(Compression::Zstd, &frames[..frames.len() - 5]).is_err());
}

#[test]
fn skippable_and_empty_zstd_frames_end() {
    let skippable = [0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0];
    assert!(read(Compression::Zstd, &skippable.repeat(100)).is_err());
    assert!(read(Compression::Zstd, &zstd(&[]).repeat(100)).is_err());
}

#[test]
fn every_damaged_byte_and_every_cut_is_survived() {
    for (kind, data) in
        [(Compression::Deflate, deflate(&cluster())), (Compression::Zstd, zstd(&cluster()))]
    {
        for at in (0..data.len()).step_by(97) {
            let mut damaged = data.clone();
            damaged[at] ^= 0x55;
            let _ = read(kind, &damaged);
            assert!(read(kind, &data[..at]).is_err());
        }
        assert_eq!(read(kind, &data).expect("still works"), cluster());
    }
}

#[test]
fn zstd_frame_that_asks_for_a_huge_window_costs_nothing() {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("encoder");
    encoder.window_log(27).expect("known");
    encoder.include_contentsize(false).expect("known");
    encoder.write_all(&cluster()).expect("memory");
    let data = encoder.finish().expect("memory");
    assert_eq!(read(Compression::Zstd, &data).expect("valid"), cluster());
}

#[test]
fn distances_beyond_qemus_window_are_read_as_zlib_reads_them() {
    let far: Vec<u8> = cluster().chunks(20_000).next().expect("some").repeat(4);
    let far = &far[..CLUSTER_BYTES];
    assert_eq!(read(Compression::Deflate, &deflate(far)).expect("valid"), far);
}

//! Compressed clusters that inflate wrongly, too far, or not at all.

use super::harm::Victim;
use mica_tests::judge;

/// Number of the compressed cluster: 4 MiB in clusters of 64 KiB.
const CLUSTER: u64 = 64;
const COMPRESSED: u64 = 1 << 62;

/// An image whose compressed cluster holds `data` instead.
fn with(options: &str, data: &[u8]) -> Option<Victim> {
    let victim = Victim::new(options)?;
    let end = std::fs::metadata(victim.path()).expect("there").len().next_multiple_of(1 << 16);
    victim.set_len(end + data.len().next_multiple_of(512) as u64);
    victim.patch(end, data);
    let sectors = (data.len() as u64).div_ceil(512).max(1) - 1;
    let entry = COMPRESSED | sectors << (62 - 8) | end;
    victim.patch(victim.l2() + CLUSTER * 8, entry.to_be_bytes());
    Some(victim)
}

#[test]
fn garbage_fails_alone() {
    for options in ["compression_type=zlib", "compression_type=zstd"] {
        for data in [&[0xff; 700][..], &[0; 700], &[0x55; 512], b"\x03\x00"] {
            let Some(victim) = with(options, data) else { return };
            println!("{options} {:02x?}", &data[..2]);
            assert_eq!(victim.served(), [CLUSTER]);
        }
    }
}

#[test]
fn data_that_inflates_beyond_its_cluster_stops_there() {
    // Deflate: one byte, then copies of 258 bytes at distance one, forever: 1,000 times its
    // length. The bits of a fixed block: literal 'A', then length 258 (code 285), distance 1 (code
    // 0).
    let mut bits = vec![true, true, false];
    let push = |bits: &mut Vec<bool>, code: u32, width: u32| {
        bits.extend((0..width).rev().map(|bit| code >> bit & 1 == 1));
    };
    push(&mut bits, 0x30 + u32::from(b'A'), 8);
    for _ in 0..4000 {
        push(&mut bits, 0b1100_0101, 8);
        push(&mut bits, 0, 5);
    }
    let mut bomb: Vec<u8> = bits
        .chunks(8)
        .map(|byte| (0..).zip(byte).fold(0, |sum, (bit, set)| sum | u8::from(*set) << bit))
        .collect();
    bomb.truncate(8000);
    let Some(victim) = with("compression_type=zlib", &bomb) else { return };
    // QEMU takes the first cluster's worth of it.
    victim.served_whole();
}

#[test]
fn data_that_ends_before_its_cluster_fails_alone() {
    // A stored block of 16 bytes, final: a cluster of 16 bytes.
    let mut short = vec![1, 16, 0, 0xef, 0xff];
    short.extend([0x41; 16]);
    let Some(victim) = with("compression_type=zlib", &short) else { return };
    assert_eq!(victim.served(), [CLUSTER]);
}

#[test]
fn an_entry_far_beyond_the_file_fails_alone() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let entry = COMPRESSED | ((1_u64 << 54) - 1) | 0xff << 54;
    victim.patch(victim.l2() + CLUSTER * 8, entry.to_be_bytes());
    assert_eq!(victim.served(), [CLUSTER]);
}

#[test]
fn compressed_data_at_the_files_ragged_end_reads_as_in_qemu() {
    let Some(victim) = Victim::new("cluster_size=64k") else { return };
    let convert = ["convert", "-c", "-O", "qcow2", "disk.qcow2", "packed.qcow2"];
    mica_tests::qemu::img(victim.dir(), convert).ok();
    let path = victim.dir().join("packed.qcow2");
    let file = std::fs::File::options().write(true).open(&path).expect("there");
    // QEMU writes compressed data to whole sectors; the tail after the data may be missing.
    let len = file.metadata().expect("there").len();
    file.set_len(len.div_ceil(512) * 512 - 200).expect("cut");
    let flat = ["convert", "-O", "raw", "packed.qcow2", "flat.raw"];
    if mica_tests::qemu::img(victim.dir(), flat).code() == Some(0) {
        judge::same_as_raw(victim.dir(), "packed.qcow2", "flat.raw", &[]);
    }
}

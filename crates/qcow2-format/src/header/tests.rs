use super::frame::MAGIC;
use super::*;
use crate::FeatureKind;
use proptest::prelude::*;

const FILE_LEN: u64 = 1 << 20;

fn header() -> Header {
    let l2 = L2Format {
        cluster_bits: ClusterBits::new(16).expect("valid"),
        version: Version::V3,
        extended: false,
        data_file: false,
    };
    Header {
        size: 1 << 30,
        l1_entries: 2,
        l1_offset: HostOffset::new(0x30000),
        refcount_table_offset: HostOffset::new(0x10000),
        refcount_table_clusters: 1,
        ..Header::new(l2, Compression::Deflate)
    }
}

/// A header with every optional part present.
fn full() -> Header {
    Header {
        incompatible: Incompatible {
            external_data_file: true,
            compression: true,
            extended_l2: true,
            dirty: true,
            corrupt: true,
        },
        compatible: Compatible { lazy_refcounts: true, unknown: 1 << 33 },
        autoclear: Autoclear { bitmaps_consistent: true, raw_external: true, unknown: 1 << 40 },
        compression: Compression::Zstd,
        l1_entries: 4,
        refcount_width: RefcountWidth::from_order(6).expect("valid"),
        backing: Some(BackingName { name: "base.qcow2".into(), format: Some("qcow2".to_owned()) }),
        data_file_name: Some("disk.raw".into()),
        bitmaps: Some(BitmapsExtension {
            count: 1,
            directory_bytes: 32,
            directory_offset: HostOffset::new(0x80000),
        }),
        unknown_extensions: vec![
            Extension { magic: 0x5351_4d55, data: vec![1, 2, 3] },
            Extension { magic: 0x5351_4d55, data: vec![] },
        ],
        unknown_tail: vec![7; 8],
        ..header()
    }
}

fn cluster(header: &Header) -> Vec<u8> {
    let mut bytes = header.encode().expect("fits");
    bytes.resize(65536, 0);
    bytes
}

fn decode(bytes: &[u8]) -> Result<Header> {
    Header::decode(bytes, FILE_LEN)
}

/// The outcome when the 32 bits at `at` of a good header are `value`.
fn with_u32(at: usize, value: u32) -> Result<Header> {
    let mut bytes = cluster(&header());
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    decode(&bytes)
}

/// The outcome when the 64 bits at `at` of a good header are `value`.
fn with_u64(at: usize, value: u64) -> Result<Header> {
    let mut bytes = cluster(&header());
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    decode(&bytes)
}

fn kind(outcome: Result<Header>) -> ErrorKind {
    outcome.expect_err("refused").kind()
}

#[test]
fn header_round_trips() {
    for header in [header(), full()] {
        assert_eq!(decode(&cluster(&header)).expect("valid"), header);
    }
}

#[test]
fn version_2_round_trips_with_its_extensions() {
    let header = Header {
        version: Version::V2,
        feature_names: Vec::new(),
        backing: Some(BackingName { name: "base".into(), format: Some("raw".to_owned()) }),
        unknown_extensions: vec![Extension { magic: 9, data: vec![1; 9] }],
        ..header()
    };
    assert_eq!(decode(&cluster(&header)).expect("valid"), header);
}

#[test]
fn version_2_cannot_carry_what_version_3_has() {
    let header = Header { version: Version::V2, ..full() };
    assert_eq!(header.encode().expect_err("refused").kind(), ErrorKind::Invalid);
}

#[test]
fn first_kilobytes_are_enough_for_an_ordinary_header() {
    let bytes = cluster(&full());
    let needed = Header::bytes_needed(&bytes[..HEADER_READ_BYTES]).expect("valid");
    assert!(needed <= HEADER_READ_BYTES);
    let decoded = decode(&bytes[..needed]).expect("valid");
    assert_eq!(decoded, full());
    let error = decode(&bytes[..needed - 1]).expect_err("cut");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn extensions_beyond_the_first_read_are_asked_for() {
    let big = Extension { magic: 9, data: vec![1; 3 * HEADER_READ_BYTES] };
    let header = Header { unknown_extensions: vec![big], ..header() };
    let bytes = cluster(&header);
    let needed = Header::bytes_needed(&bytes[..HEADER_READ_BYTES]).expect("valid");
    assert_eq!(decode(&bytes[..needed]).expect("valid"), header);
}

#[test]
fn file_that_ends_within_the_first_cluster_reads_as_zeros_there() {
    let bytes = header().encode().expect("fits");
    let decoded = Header::decode(&bytes, bytes.len() as u64).expect("valid");
    assert_eq!(decoded, header());
    assert_eq!(kind(Header::decode(&[], 0)), ErrorKind::Corrupt);
}

#[test]
fn feature_names_are_omitted_if_the_cluster_is_small() {
    let small = Header {
        cluster_bits: ClusterBits::new(9).expect("valid"),
        size: 0,
        backing: Some(BackingName { name: "base".into(), format: Some("raw".to_owned()) }),
        ..header()
    };
    let bytes = small.encode().expect("fits");
    assert!(bytes.len() <= 512);
    let decoded = Header::decode(&bytes, bytes.len() as u64).expect("valid");
    assert_eq!(decoded, Header { feature_names: Vec::new(), ..small });
}

#[test]
fn header_too_long_for_its_cluster_is_not_encoded() {
    let big = Extension { magic: 9, data: vec![1; 65536] };
    let header = Header { unknown_extensions: vec![big], ..header() };
    assert_eq!(header.encode().expect_err("refused").kind(), ErrorKind::Limit);
}

#[test]
fn dirty_and_corrupt_images_can_be_read() {
    assert!(with_u64(72, 1).expect("readable").incompatible.dirty);
    assert!(with_u64(72, 2).expect("readable").incompatible.corrupt);
}

#[test]
fn other_formats_and_versions_are_refused_by_name() {
    assert_eq!(kind(with_u32(0, 0x5146_4900)), ErrorKind::Corrupt);
    for version in [0, 1, 4, u32::MAX] {
        let error = with_u32(4, version).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(&version.to_string()));
    }
}

#[test]
fn cluster_sizes_beyond_qemus_are_refused() {
    for bits in [0, 8, 22, 32, 64, u32::MAX] {
        assert_eq!(kind(with_u32(20, bits)), ErrorKind::Corrupt);
    }
}

#[test]
fn cve_2014_0143_huge_l1_table_is_refused_before_anything_is_allocated() {
    for entries in [4 * 1024 * 1024 + 1, u32::MAX] {
        let error = with_u32(36, entries).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("too large"));
    }
    assert!(with_u32(36, 4 * 1024 * 1024).is_ok());
}

#[test]
fn cve_2014_0144_snapshot_table_header_length_and_extension_length_are_bounded() {
    assert_eq!(kind(with_u32(60, SNAPSHOT_COUNT_MAX + 1)), ErrorKind::Corrupt);
    assert!(with_u32(60, SNAPSHOT_COUNT_MAX).is_ok());
    for offset in [1, 0xffff, i64::MAX as u64 + 1, u64::MAX - 0xffff] {
        assert_eq!(kind(with_u64(64, offset)), ErrorKind::Corrupt);
    }
    for len in [0, 72, 103, 65537, u32::MAX] {
        assert_eq!(kind(with_u32(100, len)), ErrorKind::Corrupt);
    }
    let mut bytes = cluster(&header());
    for len in [65536 - 120 + 1, i32::MAX as u32, u32::MAX - 7, u32::MAX] {
        bytes[112..116].copy_from_slice(&0xe279_2aca_u32.to_be_bytes());
        bytes[116..120].copy_from_slice(&len.to_be_bytes());
        assert_eq!(kind(decode(&bytes)), ErrorKind::Corrupt);
    }
}

#[test]
fn cve_2014_0222_disk_larger_than_its_l1_table_is_refused() {
    let error = with_u64(24, (1 << 30) + 1).expect_err("refused");
    assert!(error.to_string().contains("L1 table is too small"));
    for size in [u64::MAX, 1 << 63, i64::MAX as u64, 1 << 62] {
        assert_eq!(kind(with_u64(24, size)), ErrorKind::Corrupt);
    }
    assert_eq!(with_u64(24, 1 << 30).expect("fits").size, 1 << 30);
}

#[test]
fn refcount_table_beyond_its_limits_is_refused() {
    for clusters in [0, 129, u32::MAX] {
        assert_eq!(kind(with_u32(56, clusters)), ErrorKind::Corrupt);
    }
    assert!(with_u32(56, 128).is_ok());
    for offset in [1, 0x1_0001, u64::MAX, i64::MAX as u64 - 0xffff + 0x10000] {
        assert_eq!(kind(with_u64(48, offset)), ErrorKind::Corrupt);
    }
    for order in [7, u32::MAX] {
        assert_eq!(kind(with_u32(96, order)), ErrorKind::Corrupt);
    }
}

#[test]
fn check_accepts_headers_that_serving_refuses() {
    let mut bytes = cluster(&header());
    bytes[56..60].fill(0);
    bytes[60..64].copy_from_slice(&u32::MAX.to_be_bytes());
    bytes[35] = 1;
    assert!(Header::decode(&bytes, FILE_LEN).is_err());
    assert!(Header::decode_for_check(&bytes, FILE_LEN).is_ok());
}

#[test]
fn l1_table_beyond_its_limits_is_refused() {
    for offset in [1, 0x3_0200, u64::MAX, 1 << 63] {
        assert_eq!(kind(with_u64(40, offset)), ErrorKind::Corrupt);
    }
    // Beyond the end of the file QEMU reads zeros.
    assert!(with_u64(40, 1 << 40).is_ok());
}

#[test]
fn encryption_is_decoded_if_it_is_known_and_whole() {
    for method in [3, u32::MAX] {
        assert_eq!(kind(with_u32(32, method)), ErrorKind::Unsupported);
    }
    assert_eq!(with_u32(32, 1).expect("known").encryption, Encryption::Aes);
    let error = with_u32(32, 2).expect_err("refused");
    assert!(error.to_string().contains("does not say where its LUKS header is"));
    let mut header = with_u32(32, 1).expect("known");
    for (at, len, is_right) in [(1, 0x20_0000, true), (2, 5 << 20, false), (1 << 47, 1, false)] {
        let at = HostOffset::new(at << header.cluster_bits.bits());
        header.encryption = Encryption::Luks { header: Some((at, len)) };
        let decoded = Header::decode(&header.encode().expect("it fits"), FILE_LEN);
        match is_right {
            true => assert_eq!(decoded.expect("known").encryption, header.encryption),
            false => assert_eq!(kind(decoded), ErrorKind::Corrupt),
        }
    }
}

#[test]
fn unknown_incompatible_features_are_refused_with_their_names() {
    let mut names = FeatureName::known();
    names.push(FeatureName { kind: FeatureKind::Compatible, bit: 20, name: "other".to_owned() });
    names.push(FeatureName { kind: FeatureKind::Incompatible, bit: 20, name: "sheets".to_owned() });
    let mut bytes = cluster(&Header { feature_names: names, ..header() });
    bytes[72..80].copy_from_slice(&(1_u64 << 20 | 1 << 63).to_be_bytes());
    let error = decode(&bytes).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.contains("\"sheets\" (bit 20), bit 63"), "{text}");
}

#[test]
fn compression_type_and_its_feature_bit_must_agree() {
    let mut bytes = cluster(&header());
    bytes[104] = 1;
    assert_eq!(kind(decode(&bytes)), ErrorKind::Corrupt);
    bytes[79] = 8;
    assert_eq!(decode(&bytes).expect("agree").compression, Compression::Zstd);
    bytes[104] = 0;
    assert_eq!(kind(decode(&bytes)), ErrorKind::Corrupt);
    bytes[104] = 2;
    assert_eq!(kind(decode(&bytes)), ErrorKind::Unsupported);
}

#[test]
fn short_header_of_version_3_has_no_compression_type() {
    let mut bytes = cluster(&Header { feature_names: Vec::new(), ..header() });
    bytes[100..104].copy_from_slice(&104_u32.to_be_bytes());
    bytes[104..112].fill(0);
    assert_eq!(decode(&bytes).expect("valid").compression, Compression::Deflate);
}

#[test]
fn extended_l2_entries_need_large_clusters() {
    let mut bytes = cluster(&header());
    bytes[79] = 16;
    bytes[39] = 4;
    assert!(decode(&bytes).expect("valid").incompatible.extended_l2);
    bytes[23] = 13;
    bytes[36..40].copy_from_slice(&65536_u32.to_be_bytes());
    let error = decode(&bytes).expect_err("refused");
    assert!(error.to_string().contains("16384"), "{error}");
}

#[test]
fn raw_data_file_without_a_data_file_is_corrupt() {
    assert_eq!(kind(with_u64(88, 2)), ErrorKind::Corrupt);
}

#[test]
fn backing_name_outside_the_first_cluster_is_refused() {
    for (at, len) in
        [(65537, 0), (65536, 1), (65535, 2), (60000, 1024), (200, u32::MAX), (u64::MAX, 5)]
    {
        let mut bytes = cluster(&header());
        bytes[8..16].copy_from_slice(&at.to_be_bytes());
        bytes[16..20].copy_from_slice(&len.to_be_bytes());
        assert_eq!(kind(decode(&bytes)), ErrorKind::Corrupt, "{at} {len}");
    }
}

#[test]
fn backing_name_ends_at_the_first_nul() {
    let name = BackingName { name: "base\0/etc/shadow".into(), format: None };
    let decoded = decode(&cluster(&Header { backing: Some(name), ..header() })).expect("valid");
    assert_eq!(decoded.backing.map(|backing| backing.name), Some("base".into()));
}

#[test]
fn backing_format_with_a_long_name_is_refused() {
    let backing = |format: &str| {
        let backing = BackingName { name: "base".into(), format: Some(format.to_owned()) };
        decode(&cluster(&Header { backing: Some(backing), ..header() }))
    };
    assert!(backing("fifteen-letters").is_ok());
    assert_eq!(kind(backing("sixteen--letters")), ErrorKind::Corrupt);
}

#[test]
fn bitmaps_that_another_program_made_stale_are_not_decoded() {
    let mut bytes = cluster(&full());
    bytes[95] &= !1;
    let decoded = decode(&bytes).expect("valid");
    assert!(decoded.stale_bitmaps);
    assert_eq!(decoded.bitmaps, None);
}

#[test]
fn hostile_bitmaps_extension_is_refused() {
    let good = full().bitmaps.expect("there");
    let offset = HostOffset::new(0x80001);
    for bad in [
        BitmapsExtension { count: 0, ..good },
        BitmapsExtension { count: 65536, ..good },
        BitmapsExtension { directory_offset: offset, ..good },
        BitmapsExtension { directory_bytes: u64::MAX, ..good },
    ] {
        let header = Header { bitmaps: Some(bad), ..full() };
        assert_eq!(kind(decode(&cluster(&header))), ErrorKind::Corrupt, "{bad:?}");
    }
}

#[test]
fn disk_is_whole_sectors() {
    assert_eq!(with_u64(24, 1000).expect("valid").disk_bytes(), 512);
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), at in 0_u32..22) {
        let mut bytes = bytes;
        let _ = Header::decode(&bytes, bytes.len() as u64);
        // The same after a start that passes the first checks.
        let start = [&MAGIC.to_be_bytes()[..], &3_u32.to_be_bytes()].concat();
        for (to, from) in bytes.iter_mut().zip(start) {
            *to = from;
        }
        if let Some(bits) = bytes.get_mut(20..24) {
            bits.copy_from_slice(&at.to_be_bytes());
        }
        let _ = Header::decode_for_check(&bytes, bytes.len() as u64);
    }

    #[test]
    fn changed_bytes_decode_or_are_refused(at in 0_usize..600, value in any::<u8>()) {
        let mut bytes = cluster(&full());
        bytes[at] = value;
        if let Ok(header) = decode(&bytes)
            && let Ok(again) = header.encode()
        {
            let decoded = Header::decode(&again, again.len() as u64).expect("our own");
            // A length that is not a multiple of eight is rounded up, as extensions are aligned.
            let mut unknown_tail = header.unknown_tail.clone();
            unknown_tail.resize(unknown_tail.len().next_multiple_of(8), 0);
            prop_assert_eq!(decoded, Header { stale_bitmaps: false, unknown_tail, ..header });
        }
    }
}

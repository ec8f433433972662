use super::*;

const CLUSTER: HostOffset = HostOffset::new(0x50000);

fn format() -> L2Format {
    L2Format {
        cluster_bits: ClusterBits::new(16).expect("valid"),
        version: Version::V3,
        extended: false,
        data_file: false,
    }
}

fn extended() -> L2Format {
    L2Format { extended: true, ..format() }
}

fn raw(entry: u64) -> RawL2Entry {
    RawL2Entry { entry, bitmap: 0 }
}

fn read(entry: u64) -> Option<L2Entry> {
    format().interpret(raw(entry)).ok()
}

fn read_extended(entry: u64, allocated: u32, zero: u32) -> Option<L2Entry> {
    let bitmap = u64::from(zero) << 32 | u64::from(allocated);
    extended().interpret(RawL2Entry { entry, bitmap }).ok()
}

#[test]
fn standard_entries_are_read_as_qemu_reads_them() {
    assert_eq!(read(0), Some(L2Entry::Unallocated));
    assert_eq!(read(1), Some(L2Entry::Zero));
    assert_eq!(read(COPIED | 0x50000), Some(L2Entry::Data(CLUSTER)));
    assert_eq!(read(0x50000), Some(L2Entry::Data(CLUSTER)));
    assert_eq!(read(COPIED | 0x50001), Some(L2Entry::ZeroAllocated(CLUSTER)));
}

#[test]
fn reserved_bits_are_ignored_on_read() {
    assert_eq!(read(0xbf00_0000_0005_01fe), Some(L2Entry::Data(CLUSTER)));
    assert_eq!(read(0x3f00_0000_0000_01fe), Some(L2Entry::Unallocated));
    assert_eq!(read(0x3f00_0000_0000_01ff), Some(L2Entry::Zero));
    assert!(raw(0x3f00_0000_0000_01fe).has_reserved_bits());
    assert!(!raw(COPIED | COMPRESSED | ZERO | OFFSET_MASK).has_reserved_bits());
}

#[test]
fn offset_0_with_copied_is_unallocated_without_a_data_file() {
    assert_eq!(read(COPIED), Some(L2Entry::Unallocated));
}

#[test]
fn offset_0_with_copied_is_data_in_a_data_file() {
    let format = L2Format { data_file: true, ..format() };
    let entry = |entry| format.interpret(raw(entry)).ok();
    assert_eq!(entry(COPIED), Some(L2Entry::Data(HostOffset::ZERO)));
    assert_eq!(entry(0), Some(L2Entry::Unallocated));
    assert_eq!(entry(COPIED | ZERO), Some(L2Entry::Zero));
}

#[test]
fn offset_in_a_data_file_must_be_the_disk_offset() {
    let format = L2Format { data_file: true, ..format() };
    assert!(format.interpret_at(raw(COPIED | 0x50000), GuestOffset::new(0x50000)).is_ok());
    assert!(format.interpret_at(raw(COPIED | 0x50000), GuestOffset::new(0x60000)).is_err());
    assert!(format.interpret_at(raw(COPIED), GuestOffset::new(0x60000)).is_err());
    assert!(format.interpret(raw(COMPRESSED | 0x50000)).is_err());
}

#[test]
fn unaligned_clusters_are_corrupt() {
    for entry in [0x200, COPIED | 0x50200, 0x8000, 0x50201] {
        let error = format().interpret(raw(entry)).expect_err("refused");
        assert_eq!(error.kind(), mica_block::ErrorKind::Corrupt);
    }
}

#[test]
fn zero_flag_in_version_2_is_corrupt() {
    let format = L2Format { version: Version::V2, ..format() };
    assert!(format.interpret(raw(1)).is_err());
    assert!(format.interpret(raw(0x50001)).is_err());
    assert!(format.interpret(raw(COMPRESSED | 0x50001)).is_ok());
}

#[test]
fn compressed_entries_give_offset_and_maximum_length() {
    // The entries that qemu-img writes for two clusters, each filled with one value.
    let first = CompressedCluster { host: CLUSTER, len_max: 512 };
    let second = CompressedCluster { host: HostOffset::new(0x5004f), len_max: 512 - 0x4f };
    assert_eq!(read(0x4000_0000_0005_0000), Some(L2Entry::Compressed(first)));
    assert_eq!(read(0x4000_0000_0005_004f), Some(L2Entry::Compressed(second)));
    let third = CompressedCluster { host: HostOffset::new(0x50001), len_max: 3 * 512 - 1 };
    assert_eq!(read(COMPRESSED | 2 << 54 | 0x50001), Some(L2Entry::Compressed(third)));
}

#[test]
fn compressed_bit_comes_before_all_others() {
    let entry = extended().interpret(RawL2Entry { entry: COMPRESSED | 1, bitmap: u64::MAX });
    assert!(matches!(entry, Ok(L2Entry::Compressed(_))));
}

#[test]
fn compressed_entries_round_trip() {
    for bits in ClusterBits::MIN..=ClusterBits::MAX {
        let cluster_bits = ClusterBits::new(bits).expect("valid");
        let format = L2Format { cluster_bits, ..format() };
        for host in [0x1000_u64, 0x1_0001, CompressedCluster::host_max(cluster_bits).bytes()] {
            for len in [1_u64, 511, 512, cluster_bits.bytes() - 1] {
                let compressed = CompressedCluster { host: HostOffset::new(host), len_max: len };
                let encoded = format.encode(L2Entry::Compressed(compressed), true);
                assert!(!encoded.copied());
                let Ok(L2Entry::Compressed(back)) = format.interpret(encoded) else {
                    panic!("compressed")
                };
                assert_eq!(back.host, compressed.host);
                assert!(back.len_max >= len && back.len_max < len + 512);
            }
        }
    }
}

#[test]
fn extended_entries_are_read_as_qemu_reads_them() {
    let all = u32::MAX;
    assert_eq!(read_extended(0, 0, 0), Some(L2Entry::Unallocated));
    assert_eq!(read_extended(0, 0, all), Some(L2Entry::Zero));
    assert_eq!(read_extended(0x50000, 0, all), Some(L2Entry::ZeroAllocated(CLUSTER)));
    assert_eq!(read_extended(0x50000, all, 0), Some(L2Entry::Data(CLUSTER)));
    // Bit 0 means nothing here, and QEMU does not look at it.
    assert_eq!(read_extended(0x50001, all, 0), Some(L2Entry::Data(CLUSTER)));
    let mixed = L2Entry::Subclusters { host: Some(CLUSTER), allocated: 1, zero: 2 };
    assert_eq!(read_extended(0x50000, 1, 2), Some(mixed));
    let none = L2Entry::Subclusters { host: Some(CLUSTER), allocated: 0, zero: 0 };
    assert_eq!(read_extended(0x50000, 0, 0), Some(none));
    let zero = L2Entry::Subclusters { host: None, allocated: 0, zero: 4 };
    assert_eq!(read_extended(0, 0, 4), Some(zero));
}

#[test]
fn contradictory_subclusters_are_corrupt() {
    assert_eq!(read_extended(0x50000, 1, 1), None);
    assert_eq!(read_extended(0, 1, 0), None);
    assert_eq!(read_extended(COPIED, 1, 0), None);
    assert_eq!(read_extended(0x50200, 1, 0), None);
}

#[test]
fn entries_round_trip() {
    let plain = [
        L2Entry::Unallocated,
        L2Entry::Zero,
        L2Entry::ZeroAllocated(CLUSTER),
        L2Entry::Data(CLUSTER),
    ];
    let mixed = L2Entry::Subclusters { host: Some(CLUSTER), allocated: 5, zero: 2 };
    for format in [format(), extended()] {
        for entry in plain {
            let encoded = format.encode(entry, true);
            assert_eq!(format.interpret(encoded).expect("valid"), entry);
            assert_eq!(encoded.copied(), entry.host().is_some());
        }
    }
    assert_eq!(extended().interpret(extended().encode(mixed, false)).expect("valid"), mixed);
}

#[test]
fn entries_are_at_their_index_in_a_table() {
    for format in [format(), extended()] {
        let mut table = vec![0; 4 * format.entry_bytes()];
        let entry = format.encode(L2Entry::Data(CLUSTER), true);
        format.put_raw(&mut table, 2, entry);
        format.put_raw(&mut table, 4, entry);
        assert_eq!(format.raw(&table, 2), Some(entry));
        assert_eq!(format.raw(&table, 1), Some(RawL2Entry::default()));
        assert_eq!(format.raw(&table, 4), None);
        assert_eq!(format.raw(&table, usize::MAX), None);
        assert!(format.decode(&table[..format.entry_bytes() - 1]).is_err());
    }
}

#[test]
fn geometry_follows_the_entry_size() {
    assert_eq!((format().entries(), format().table_bits()), (8192, 29));
    assert_eq!((extended().entries(), extended().table_bits()), (4096, 28));
    assert_eq!((format().subcluster_bits(), extended().subcluster_bits()), (16, 11));
    let guest = GuestOffset::new((1 << 29) + (3 << 16) + 5);
    assert_eq!((format().l1_index(guest), format().l2_index(guest)), (1, 3));
    let cluster = format().cluster_bits.guest_cluster(guest);
    assert_eq!((format().table_of(cluster), format().index_of(cluster)), (1, 3));
    assert_eq!(format().first_of_table(1).saturating_add(3), cluster);
    assert_eq!(format().table_start(1), GuestOffset::new(1 << 29));
    assert_eq!((format().table_bytes(), extended().subcluster_bytes()), (1 << 29, 1 << 11));
}

#[test]
fn hostile_l1_entry_is_corrupt_or_unallocated() {
    let bits = format().cluster_bits;
    // Offset 0 with COPIED stops QEMU 7.2 and 10.0 with an assertion on the next write.
    assert_eq!(L1Entry(COPIED).decode(bits).expect("none"), None);
    assert!(L1Entry(0x200).decode(bits).is_err());
    let reserved = L1Entry(0x7f00_0000_0005_01ff);
    assert_eq!(reserved.decode(bits).expect("some"), Some(CLUSTER));
    assert!(reserved.has_reserved_bits());
    assert_eq!(L1Entry::encode(CLUSTER, true), L1Entry(COPIED | 0x50000));
    assert!(L1Entry::encode(CLUSTER, true).copied());
}

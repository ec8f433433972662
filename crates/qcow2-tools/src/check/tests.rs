//! The images here are built by hand, byte for byte, so that what QEMU says of them is known:
//! clusters of 64 KiB; header, refcount table, refcount block, L1, L2, then data from cluster 5 on.

use super::*;
use futures_util::FutureExt;
use mica_qcow2_format::bits::COPIED;
use mica_qcow2_format::{
    BitmapEntry, BitmapsExtension, Compression, L1Entry, L2Entry, L2Format, RefcountTableEntry,
    RefcountWidth, Version,
};
use mica_store::MemoryStore;
use mica_units::{ClusterBits, HostCluster};

const CLUSTER: usize = 65536;

struct Image {
    header: Header,
    bytes: Vec<u8>,
}

impl Image {
    /// Two clusters of data at guest clusters 0 and 1; nothing is wrong.
    fn new() -> Self {
        let at = |cluster: u64| HostOffset::new(cluster * CLUSTER as u64);
        let l2 = L2Format {
            cluster_bits: ClusterBits::new(16).expect("valid"),
            version: Version::V3,
            extended: false,
            data_file: false,
        };
        let header = Header {
            size: 64 << 20,
            l1_entries: 1,
            l1_offset: at(3),
            refcount_table_offset: at(1),
            refcount_table_clusters: 1,
            feature_names: Vec::new(),
            ..Header::new(l2, Compression::Deflate)
        };
        let mut image = Self { header, bytes: vec![0; 7 * CLUSTER] };
        image.put(CLUSTER, RefcountTableEntry::encode(at(2)).0);
        for cluster in 0..7 {
            image.set_refcount(cluster, 1);
        }
        image.put(3 * CLUSTER, L1Entry::encode(at(4), true).0);
        image.set_l2(0, COPIED | (5 * CLUSTER) as u64);
        image.set_l2(1, COPIED | (6 * CLUSTER) as u64);
        image
    }

    fn put(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    fn set_l2(&mut self, index: usize, entry: u64) {
        self.put(4 * CLUSTER + 8 * index, entry);
    }

    fn set_refcount(&mut self, cluster: usize, refcount: u64) {
        let block = &mut self.bytes[2 * CLUSTER..3 * CLUSTER];
        self.header.refcount_width.set(block, cluster, refcount).expect("fits");
    }

    fn check(&self) -> (Result<CheckReport>, Vec<String>) {
        let mut lines = Vec::new();
        let mut observer = |finding: Finding| lines.push(finding.to_string());
        let store = Arc::new(MemoryStore::new("bytes", self.bytes.clone()));
        let report = check(store, &self.header, &mut observer).now_or_never();
        let report = report.expect("the store is always ready");
        (report, lines)
    }

    fn report(&self) -> (CheckReport, Vec<String>) {
        let (report, lines) = self.check();
        (report.expect("judged"), lines)
    }
}

#[test]
fn image_without_faults_is_clean() {
    let (report, lines) = Image::new().report();
    let expected = CheckReport {
        image_end_offset: 7 * CLUSTER as u64,
        total_clusters: 1024,
        allocated_clusters: 2,
        ..CheckReport::default()
    };
    assert_eq!(report, expected);
    assert_eq!(report.verdict(), Verdict::Clean);
    assert!(lines.is_empty());
}

#[test]
fn cluster_that_nobody_mentions_is_a_leak() {
    let mut image = Image::new();
    image.set_l2(0, 0);
    let (report, lines) = image.report();
    assert_eq!((report.leaks, report.verdict().exit_status()), (1, 3));
    assert_eq!(lines, ["Leaked cluster 5 refcount=1 reference=0"]);
}

#[test]
fn cluster_in_use_without_a_refcount_is_a_corruption() {
    let mut image = Image::new();
    image.set_refcount(5, 0);
    let (report, lines) = image.report();
    assert_eq!((report.corruptions, report.verdict().exit_status()), (2, 2));
    assert_eq!(
        lines,
        [
            "ERROR OFLAG_COPIED data cluster: l2_entry=8000000000050000 refcount=0",
            "ERROR cluster 5 refcount=0 reference=1",
        ]
    );
}

#[test]
fn cluster_with_two_owners_is_a_corruption_and_the_other_a_leak() {
    let mut image = Image::new();
    image.set_l2(0, COPIED | (6 * CLUSTER) as u64);
    let (report, lines) = image.report();
    assert_eq!((report.corruptions, report.leaks), (1, 1));
    assert!(lines.contains(&"ERROR cluster 6 refcount=1 reference=2".to_owned()));
}

#[test]
fn copied_flag_that_is_missing_is_a_corruption() {
    let mut image = Image::new();
    image.set_l2(0, (5 * CLUSTER) as u64);
    image.put(3 * CLUSTER, (4 * CLUSTER) as u64);
    let (report, lines) = image.report();
    assert_eq!(report.corruptions, 2);
    let expected = "ERROR OFLAG_COPIED L2 cluster: l1_index=0 l1_entry=40000 refcount=1";
    assert_eq!(lines[0], expected);
}

#[test]
fn reserved_bits_are_corruptions() {
    let mut image = Image::new();
    image.set_l2(0, COPIED | (5 * CLUSTER) as u64 | 2);
    image.put(3 * CLUSTER, COPIED | (4 * CLUSTER) as u64 | 1);
    let (report, lines) = image.report();
    assert_eq!(report.corruptions, 2);
    assert_eq!(lines[0], "ERROR found L1 entry with reserved bits set: 8000000000040001");
    assert_eq!(lines[1], "ERROR found l2 entry with reserved bits set: 8000000000050002");
}

#[test]
fn mention_beyond_the_end_of_the_file_is_reported_and_not_kept() {
    let mut image = Image::new();
    image.set_l2(2, COPIED | 0x00ff_ffff_ffff_0000);
    let (report, _) = image.report();
    // One for the place, one for the flag: nothing counts a cluster there.
    assert_eq!(report.corruptions, 2);
}

#[test]
fn compressed_clusters_share_the_cluster_that_they_stand_in() {
    let mut image = Image::new();
    let format = image.header.l2_format();
    for (index, host) in [(0, 0x50000_u64), (1, 0x50300)] {
        let cluster = CompressedAt { host, len: 700 };
        let raw = format.encode(cluster.entry(), false);
        image.set_l2(index, raw.entry);
    }
    image.set_refcount(5, 2);
    image.set_refcount(6, 0);
    let (report, lines) = image.report();
    assert_eq!(lines, Vec::<String>::new());
    assert_eq!((report.compressed_clusters, report.fragmented_clusters), (2, 2));
    assert_eq!(report.image_end_offset, 6 * CLUSTER as u64);
}

struct CompressedAt {
    host: u64,
    len: u64,
}

impl CompressedAt {
    fn entry(&self) -> L2Entry {
        L2Entry::Compressed(mica_qcow2_format::CompressedCluster {
            host: HostOffset::new(self.host),
            len_max: self.len,
        })
    }
}

#[test]
fn refcount_block_off_its_cluster_leaves_its_clusters_unjudged() {
    let mut image = Image::new();
    image.put(CLUSTER, 0x7fff_fe00);
    let (report, lines) = image.report();
    assert_eq!(report.verdict().exit_status(), 1);
    assert_eq!(report.check_errors, 7);
    assert!(lines[0].contains("refcount block 0 is not cluster aligned"));
}

#[test]
fn l1_entry_at_offset_0_reads_the_header_as_a_table_as_qemu_does() {
    let mut image = Image::new();
    image.bytes[..CLUSTER].fill(0);
    let header = image.header.encode().expect("fits");
    image.bytes[..header.len()].copy_from_slice(&header);
    image.put(3 * CLUSTER, COPIED);
    let (report, _) = image.report();
    assert_eq!(report.verdict(), Verdict::Corrupt);
}

#[test]
fn more_references_than_a_refcount_can_hold_are_corruptions() {
    let mut image = Image::new();
    image.header.refcount_width = RefcountWidth::from_order(0).expect("valid");
    image.bytes[2 * CLUSTER..3 * CLUSTER].fill(0);
    for cluster in 0..6 {
        image.set_refcount(cluster, 1);
    }
    image.set_l2(1, COPIED | (5 * CLUSTER) as u64);
    let (report, lines) = image.report();
    assert_eq!(report.corruptions, 1);
    assert_eq!(lines, ["ERROR: overflow cluster offset=0x50000"]);
}

/// A snapshot whose L1 table has `entries` at cluster 8.
fn snapshot(entries: u32) -> SnapshotEntry {
    SnapshotEntry {
        id: "1".to_owned(),
        name: "one".to_owned(),
        l1_offset: HostOffset::new(8 * CLUSTER as u64),
        l1_entries: entries,
        date_seconds: 0,
        date_nanoseconds: 0,
        vm_clock_nanoseconds: 0,
        vm_state_bytes: 0,
        disk_bytes: Some(64 << 20),
        icount: None,
        extra_bytes: 16,
        unknown_extra: Vec::new(),
    }
}

#[test]
fn tables_that_overlap_again_and_again_end_the_check() {
    let mut image = Image::new();
    let mut table = Vec::new();
    // The largest has all of cluster 8.
    for entries in 8192 - 100..8192 {
        snapshot(entries).encode(&mut table);
    }
    image.bytes.extend_from_slice(&table);
    image.bytes.resize(9 * CLUSTER, 0);
    image.header.snapshots_offset = HostOffset::new(7 * CLUSTER as u64);
    for (snapshots, ends) in [(9, false), (16, false), (18, true), (100, true)] {
        image.header.snapshot_count = snapshots;
        let (report, lines) = image.check();
        assert_eq!(report.is_err(), ends, "{snapshots}: {report:?}");
        assert_eq!(lines.is_empty(), ends, "{snapshots}: {lines:?}");
    }
}

#[test]
fn l2_tables_between_clusters_end_the_check_if_they_are_very_many() {
    let mut image = Image::new();
    let (l1, tables) = (image.bytes.len(), image.bytes.len() + 4 * CLUSTER);
    let most = usize::try_from(UNALIGNED_BYTES_MIN).expect("64 bits") / CLUSTER;
    // Of zeros, each at another place.
    image.bytes.resize(tables + 160 * CLUSTER, 0);
    let between = (0..).filter(|sector| sector % (CLUSTER / 512) != 0);
    for (index, sector) in between.take(most + 1).enumerate() {
        image.put(l1 + 8 * index, (tables + 512 * sector) as u64);
    }
    image.header.l1_offset = HostOffset::new(l1 as u64);
    for (count, ends) in [(most, false), (most + 1, true)] {
        image.header.l1_entries = u32::try_from(count).expect("few");
        assert_eq!(image.check().0.is_err(), ends, "{count}");
    }
}

#[test]
fn table_that_many_bitmaps_share_is_read_once_and_counts_for_each() {
    const BITMAPS: u32 = 1000;
    let mut image = Image::new();
    let at = |cluster: u64| HostOffset::new(cluster * CLUSTER as u64);
    let mut directory = Vec::new();
    for number in 0..BITMAPS {
        let bitmap = BitmapEntry {
            name: format!("b{number}"),
            table_offset: at(8),
            table_entries: 1,
            granularity_bits: 16,
            in_use: false,
            auto: false,
        };
        bitmap.encode(&mut directory);
    }
    let directory_bytes = directory.len() as u64;
    image.header.bitmaps =
        Some(BitmapsExtension { count: BITMAPS, directory_offset: at(7), directory_bytes });
    image.bytes.extend_from_slice(&directory);
    image.bytes.resize(10 * CLUSTER, 0);
    image.put(8 * CLUSTER, 9 * CLUSTER as u64);
    for (cluster, refcount) in [(7, 1), (8, u64::from(BITMAPS)), (9, u64::from(BITMAPS))] {
        image.set_refcount(cluster, refcount);
    }
    let store = Arc::new(MemoryStore::new("bytes", image.bytes.clone()));
    let counted = count(store, &image.header, Task::Keep, &mut |_| {}).now_or_never();
    let counted = counted.expect("ready").expect("judged");
    assert_eq!(counted.report.verdict(), Verdict::Clean);
    let places = |cluster| counted.kept.places.covering(HostCluster::new(cluster));
    assert_eq!([8, 9].map(places), [1, 1]);
}

#[test]
fn table_that_many_snapshots_share_counts_for_each_but_is_reported_once() {
    let mut image = Image::new();
    let mut table = Vec::new();
    for _ in 0..3 {
        snapshot(1).encode(&mut table);
    }
    image.bytes.extend_from_slice(&table);
    image.bytes.resize(9 * CLUSTER, 0);
    image.put(8 * CLUSTER, (4 * CLUSTER) as u64);
    image.put(3 * CLUSTER, (4 * CLUSTER) as u64);
    image.header.snapshot_count = 3;
    image.header.snapshots_offset = HostOffset::new(7 * CLUSTER as u64);
    image.set_l2(0, (5 * CLUSTER) as u64);
    image.set_l2(1, (6 * CLUSTER) as u64 | 4);
    for (cluster, refcount) in [(4, 4), (5, 4), (6, 4), (7, 1), (8, 3)] {
        image.set_refcount(cluster, refcount);
    }
    let (report, lines) = image.report();
    assert_eq!(lines, ["ERROR found l2 entry with reserved bits set: 60004"]);
    assert_eq!((report.corruptions, report.leaks, report.allocated_clusters), (4, 0, 2));
}

#[test]
fn snapshot_table_at_an_impossible_place_ends_the_check() {
    let mut image = Image::new();
    image.header.snapshot_count = 1;
    image.header.snapshots_offset = HostOffset::new(1);
    assert!(image.check().0.is_err());
    image.header.snapshot_count = u32::MAX;
    image.header.snapshots_offset = HostOffset::ZERO;
    assert!(image.check().0.is_err());
}

#[test]
fn empty_snapshots_beyond_the_end_cost_nothing() {
    let mut image = Image::new();
    image.header.snapshot_count = 65536;
    image.header.snapshots_offset = HostOffset::new(1 << 40);
    let (report, lines) = image.report();
    assert_eq!(lines.len(), 65537, "each is incomplete, and the table is beyond the end");
    assert_eq!(report.verdict(), Verdict::Corrupt);
}

#[test]
fn progress_ends_with_all_that_is_known() {
    struct Watch(Progress);
    impl Observer for Watch {
        fn finding(&mut self, _finding: Finding) {}
        fn progress(&mut self, progress: Progress) {
            assert!(progress.done >= self.0.done && progress.done <= progress.total);
            self.0 = progress;
        }
    }
    let image = Image::new();
    let mut watch = Watch(Progress::default());
    let store = Arc::new(MemoryStore::new("bytes", image.bytes.clone()));
    assert!(check(store, &image.header, &mut watch).now_or_never().is_some());
    assert!(watch.0.done > 0);
    assert_eq!(watch.0.done, watch.0.total);
}

#[test]
fn every_changed_entry_is_survived() {
    let good = Image::new();
    for table in 1..5 {
        for bit in 0..64 {
            for value in [1_u64 << bit, u64::MAX << bit, COPIED | (1 << bit)] {
                let mut image = Image { header: good.header.clone(), bytes: good.bytes.clone() };
                image.put(table * CLUSTER, value);
                let _ = image.check();
            }
        }
    }
}

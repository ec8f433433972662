//! The images here are built by hand in every geometry: header, refcount table, refcount blocks,
//! L1, a snapshot's L1, the table of snapshots, an L2 table, data. Then they are harmed, repaired,
//! and cut off from power at each write of the repair.

mod image;
pub(crate) mod power;
pub(crate) mod store;

use super::*;
use crate::check::Verdict;
use futures_util::FutureExt;
use image::{Image, Shape, guest};
use mica_qcow2_format::RawL2Entry;
use mica_qcow2_format::bits::COPIED;
use power::Random;
use std::future::Future;
use store::{Logged, index};

fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("the store is always ready")
}

fn header_of(bytes: &[u8]) -> Header {
    Header::decode_for_check(bytes, bytes.len() as u64).expect("a header")
}

/// Repairs a copy of `bytes`; returns the store and what the repair says.
fn repaired(bytes: &[u8], mode: RepairMode) -> (Arc<Logged>, Result<Repair>) {
    let store = Logged::new(bytes);
    let header = header_of(bytes);
    let repair = now(repair(store.clone(), &header, mode, &mut |_: Finding| {}));
    (store, repair)
}

fn judged(bytes: &[u8]) -> (CheckReport, Vec<String>) {
    let mut lines = Vec::new();
    let mut observer = |finding: Finding| lines.push(finding.to_string());
    let report = now(check(Logged::new(bytes), &header_of(bytes), &mut observer));
    (report.expect("judged"), lines)
}

/// All widths and the ends of cluster sizes.
fn shapes() -> Vec<Shape> {
    let mut shapes = Vec::new();
    for refcount_order in 0..=6 {
        shapes.push(Shape { cluster_bits: 9, refcount_order, extended: false, data: 60 });
        shapes.push(Shape { cluster_bits: 12, refcount_order, extended: false, data: 20 });
        shapes.push(Shape { cluster_bits: 14, refcount_order, extended: true, data: 20 });
    }
    shapes.push(Shape { cluster_bits: 21, refcount_order: 4, extended: false, data: 2 });
    shapes
}

/// What is done to an image, by its name.
type Harm = (&'static str, fn(&mut Image));

/// What `-r all` repairs wholly, and what the guest reads stays.
const HARMS: &[Harm] = &[
    ("nothing", |_| {}),
    ("a leak", |image| {
        image.set_l2(1, RawL2Entry::default());
    }),
    ("no refcount of a cluster in use", |image| image.set_refcount(image.data_at, 0)),
    ("no refcounts at all", |image| {
        for cluster in 0..image.data_at + image.data {
            image.set_refcount(cluster, 0);
        }
    }),
    ("all refcounts 1, as if there were no snapshot", |image| {
        for cluster in 0..image.data_at + image.data {
            image.set_refcount(cluster, 1);
        }
    }),
    ("flags turned", |image| {
        for number in 0..image.data {
            let raw = image.l2(number);
            image.set_l2(number, RawL2Entry { entry: raw.entry ^ COPIED, ..raw });
        }
        let at = image.cluster_at(image.l1_at);
        let entry = u64::from_be_bytes(image.bytes[index(at)..][..8].try_into().expect("8"));
        image.put(at, entry ^ COPIED);
    }),
    ("no refcount table", |image| {
        image.header.refcount_table_clusters = 0;
        image.store_header();
    }),
    ("no refcount block", |image| image.put(image.cluster_at(1), 0)),
    ("a refcount block off its cluster", |image| {
        image.put(image.cluster_at(1), image.cluster_at(image.blocks_at) + 0x200);
    }),
    ("a refcount block with reserved bits", |image| {
        image.put(image.cluster_at(1), image.cluster_at(image.blocks_at) + 1);
    }),
    ("a refcount block far outside", |image| image.put(image.cluster_at(1), 1 << 50)),
    ("a refcount block on the guest's data", |image| {
        image.put(image.cluster_at(1), image.cluster_at(image.data_at + 1));
    }),
    ("a refcount block on the L2 table", |image| {
        image.put(image.cluster_at(1), image.cluster_at(image.l2_at));
    }),
    ("a refcount block on the header's neighbour, itself the table", |image| {
        image.put(image.cluster_at(1), image.cluster_at(1));
    }),
    ("a refcount table on the L1 table", |image| {
        image.header.refcount_table_offset = image.header.l1_offset;
        image.store_header();
    }),
    ("a lost tail", |image| {
        let len = image.cluster_at(image.data_at + 1);
        image.bytes.truncate(index(len));
    }),
    ("a lost tail, the refcounts with it", |image| {
        for cluster in image.data_at..image.data_at + image.data {
            image.set_refcount(cluster, 0);
        }
        image.bytes.truncate(index(image.cluster_at(image.data_at + 1) - 100));
    }),
    ("a lost tail and no refcount table", |image| {
        image.header.refcount_table_clusters = 0;
        image.header.incompatible.dirty = true;
        image.store_header();
        image.bytes.truncate(index(image.cluster_at(image.data_at)));
    }),
    ("a snapshot of version 2", |image| {
        if image.header.snapshot_count > 0 {
            let at = index(image.cluster_at(image.l1_at + 2));
            // The entry ends with its names, after 16 bytes of extra data.
            image.bytes.copy_within(at + 56..at + 60, at + 40);
            image.bytes[at + 36..at + 40].fill(0);
            image.bytes[at + 44..at + 60].fill(0);
        }
    }),
    ("marked dirty and corrupt", |image| {
        image.header.incompatible.dirty = true;
        image.header.incompatible.corrupt = true;
        image.header.autoclear.unknown = 1 << 40;
        image.store_header();
    }),
];

fn harmed(shape: Shape, harm: fn(&mut Image)) -> Image {
    let mut image = Image::new(shape);
    assert_eq!(judged(&image.bytes).1, Vec::<String>::new(), "{shape:?}");
    harm(&mut image);
    image
}

#[track_caller]
fn assert_repaired(bytes: &[u8], read_before: &[Option<Vec<u8>>], what: &str) {
    let (report, lines) = judged(bytes);
    assert_eq!(report.verdict(), Verdict::Clean, "{what}: {lines:?}");
    let header = header_of(bytes);
    assert!(!header.incompatible.dirty && !header.incompatible.corrupt, "{what}");
    assert!(guest(bytes) == read_before, "{what}: the guest reads something else");
}

#[test]
fn all_that_can_be_repaired_is_and_the_guest_reads_the_same() {
    for shape in shapes() {
        for (what, harm) in HARMS {
            let image = harmed(shape, *harm);
            let what = format!("{what}, {shape:?}");
            let before = guest(&image.bytes);
            let (store, repair) = repaired(&image.bytes, RepairMode::All);
            let repair = repair.unwrap_or_else(|error| panic!("{what}: {error:?}"));
            assert_eq!(repair.after.verdict(), Verdict::Clean, "{what}: {repair:?}");
            assert_repaired(&store.content(), &before, &what);
            let was_wrong = repair.before.verdict() != Verdict::Clean;
            assert_eq!(repair.repaired != Repaired::default(), was_wrong, "{what}: {repair:?}");
            let (again, _) = repaired(&store.content(), RepairMode::All);
            assert_eq!(again.events().len(), 0, "{what}: a clean image is written");
        }
    }
}

const PLAIN: Shape = Shape { cluster_bits: 12, refcount_order: 4, extended: false, data: 20 };

#[test]
fn leaks_are_repaired_alone() {
    let image = harmed(PLAIN, |image| {
        image.set_refcount(image.data_at, 7);
        image.set_refcount(image.data_at + 1, 1);
    });
    let (store, repair) = repaired(&image.bytes, RepairMode::Leaks);
    let repair = repair.expect("repaired");
    assert_eq!(repair.repaired, Repaired { leaks: 1, corruptions: 0 });
    assert_eq!((repair.after.leaks, repair.after.verdict()), (0, Verdict::Corrupt));
    assert!(guest(&store.content()) == guest(&image.bytes));
}

#[test]
fn leak_of_a_second_user_brings_the_flag_back() {
    let shape = Shape { refcount_order: 0, ..PLAIN };
    let mut image = Image::new(Shape { refcount_order: 1, ..shape });
    // The snapshot is forgotten: all refcounts are one too high, and no flag is set.
    image.header.snapshot_count = 0;
    image.store_header();
    let (store, repair) = repaired(&image.bytes, RepairMode::Leaks);
    let repair = repair.expect("repaired");
    assert_eq!(repair.repaired.leaks, 20 + 1 + 2);
    assert_eq!(repair.repaired.corruptions, 20 + 1, "the flags");
    assert_eq!(repair.after.verdict(), Verdict::Clean);
    assert!(guest(&store.content()) == guest(&image.bytes));
}

#[test]
fn leaks_of_broken_refcounts_are_not_repaired() {
    let image = harmed(PLAIN, |image| image.set_refcount(image.data_at, 0));
    let (store, repair) = repaired(&image.bytes, RepairMode::Leaks);
    assert_eq!(repair.expect_err("as in QEMU").kind(), ErrorKind::Corrupt);
    assert_eq!(store.events().len(), 0, "nothing is written");
}

#[test]
fn refcount_of_one_bit_cannot_say_two() {
    let image = harmed(Shape { refcount_order: 0, ..PLAIN }, |image| {
        image.set_l2(1, image.l2(0));
    });
    let before = guest(&image.bytes);
    let (store, repair) = repaired(&image.bytes, RepairMode::All);
    let repair = repair.expect("what can be is repaired");
    assert_eq!((repair.after.corruptions, repair.after.leaks), (1, 0));
    assert!(guest(&store.content()) == before);
    let header = header_of(&image.bytes);
    let dirty = now(repair_dirty(Logged::new(&image.bytes), &header));
    assert_eq!(dirty.expect_err("a write would hurt").kind(), ErrorKind::Corrupt);
}

#[test]
fn two_users_of_one_cluster_lose_the_right_to_write_in_place() {
    let image = harmed(PLAIN, |image| {
        image.header.snapshot_count = 0;
        image.store_header();
        image.set_l2(1, image.l2(0));
    });
    let (store, repair) = repaired(&image.bytes, RepairMode::All);
    assert_eq!(repair.expect("repaired").after.verdict(), Verdict::Clean);
    let image = Image { bytes: store.content(), ..image };
    assert_eq!(
        [image.l2(0), image.l2(1), image.l2(2)].map(RawL2Entry::copied),
        [false, false, true]
    );
}

#[test]
fn table_that_is_the_header_is_not_written() {
    let image = harmed(PLAIN, |image| {
        image.header.incompatible.dirty = true;
        image.store_header();
        image.put(image.cluster_at(image.l1_at), COPIED);
    });
    let (store, repair) = repaired(&image.bytes, RepairMode::All);
    assert_eq!(repair.expect("as far as it goes").after.verdict(), Verdict::Corrupt);
    let header = header_of(&store.content());
    assert!(header.incompatible.dirty, "it is not clean");
    assert_eq!(
        Header { refcount_table_offset: image.header.refcount_table_offset, ..header },
        image.header
    );
}

#[test]
fn entry_far_beyond_the_file_stays_and_the_file_does_not_grow() {
    let image = harmed(PLAIN, |image| {
        image.set_l2(3, RawL2Entry { entry: COPIED | 1 << 50, bitmap: 0 });
        image.header.refcount_table_clusters = 0;
        image.store_header();
    });
    let (store, repair) = repaired(&image.bytes, RepairMode::All);
    let repair = repair.expect("the rest is repaired");
    assert_eq!((repair.after.corruptions, repair.after.leaks), (2, 0), "of snapshot and disk");
    assert!(store.content().len() <= image.bytes.len() + 8 * 4096);
}

#[test]
fn lost_tail_is_not_taken_for_new_refcounts() {
    let image = harmed(PLAIN, |image| {
        image.header.incompatible.dirty = true;
        image.header.compatible.lazy_refcounts = true;
        image.store_header();
        image.put(image.cluster_at(1), 0);
        image.bytes.truncate(index(image.cluster_at(image.data_at + 3)));
    });
    let before = guest(&image.bytes);
    let store = Logged::new(&image.bytes);
    let header = now(repair_dirty(store.clone(), &header_of(&image.bytes))).expect("repaired");
    assert!(!header.incompatible.dirty);
    assert_eq!(header, header_of(&store.content()));
    assert!(header.refcount_table_offset.bytes() >= image.cluster_at(image.data_at + image.data));
    assert_repaired(&store.content(), &before, "a lost tail");
}

#[test]
fn corrupt_image_is_not_opened_as_a_dirty_one() {
    let image = harmed(PLAIN, |image| {
        image.header.incompatible.corrupt = true;
        image.store_header();
    });
    let store = Logged::new(&image.bytes);
    assert!(now(repair_dirty(store.clone(), &image.header)).is_err());
    assert_eq!(store.events().len(), 0);
}

#[test]
fn preallocated_cluster_off_its_place_becomes_zeros() {
    let image = harmed(PLAIN, |image| {
        image.set_l2(2, RawL2Entry { entry: image.cluster_at(image.data_at + 2) + 513, bitmap: 0 });
    });
    let (store, repair) = repaired(&image.bytes, RepairMode::All);
    let repair = repair.expect("repaired");
    assert_eq!(repair.after.verdict(), Verdict::Clean);
    let mended = Image { bytes: store.content(), ..image.clone() };
    assert_eq!(mended.l2(2).entry, 1);
    let unaligned_data = harmed(PLAIN, |image| {
        let entry = image.cluster_at(image.data_at + 2) + 512;
        image.set_l2(2, RawL2Entry { entry, bitmap: 0 });
    });
    let (store, repair) = repaired(&unaligned_data.bytes, RepairMode::All);
    assert_eq!(repair.expect("the rest is repaired").after.verdict(), Verdict::Corrupt);
    let kept = Image { bytes: store.content(), ..unaligned_data.clone() };
    assert_eq!(kept.l2(2).offset(), unaligned_data.l2(2).offset(), "data is not thrown away");
}

#[test]
fn any_changed_word_is_survived_and_a_second_repair_changes_nothing() {
    let good = Image::new(Shape { cluster_bits: 9, refcount_order: 4, extended: false, data: 30 });
    let mut random = Random(0xbad);
    let parts = [1, good.blocks_at, good.l1_at, good.l1_at + 1, good.l2_at];
    for round in 0..600 {
        let mut image = good.clone();
        for _ in 0..=round % 3 {
            let part = parts[index(random.next() % parts.len() as u64)];
            let at = image.cluster_at(part) + 8 * (random.next() % 34);
            let clusters = image.data_at + image.data + 4;
            let value = match random.next() % 3 {
                0 => random.next(),
                1 => image.cluster_at(random.next() % clusters) | (random.next() & COPIED),
                _ => 1 << (random.next() % 64),
            };
            image.put(at, value);
        }
        let (store, first) = repaired(&image.bytes, RepairMode::All);
        let Ok(first) = first else { continue };
        assert!(first.after.corruptions <= first.before.corruptions, "{first:?}");
        assert_eq!(first.after.leaks, 0, "round {round}: {first:?}");
        let (again, second) = repaired(&store.content(), RepairMode::All);
        assert_eq!(second.expect("again").after, first.after, "round {round}");
        assert!(again.content() == store.content(), "round {round}: not settled");
    }
}

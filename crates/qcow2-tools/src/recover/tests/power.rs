//! Power cuts at each write of a repair.

use super::image::{Shape, guest};
use super::store::{Event, index, play};
use super::{HARMS, assert_repaired, harmed, header_of, repaired, shapes};
use crate::recover::RepairMode;
use mica_qcow2_format::RefcountTableEntry;
use mica_units::HostOffset;

/// Deterministic numbers for what a power cut keeps.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// States that a disk may be in when power is cut after `events[..end]`: what was synced is there,
/// of the rest all, nothing, or any sectors.
pub(crate) fn states(
    start: &[u8],
    events: &[Event],
    end: usize,
    random: &mut Random,
) -> Vec<Vec<u8>> {
    let synced = events[..end].iter().rposition(|event| matches!(event, Event::Sync)).unwrap_or(0);
    let mut durable = start.to_vec();
    events[..synced].iter().for_each(|event| play(&mut durable, event));
    let mut all = durable.clone();
    events[synced..end].iter().for_each(|event| play(&mut all, event));
    let mut torn = durable.clone();
    for event in &events[synced..end] {
        match event {
            Event::Write(at, bytes) => {
                for (number, sector) in bytes.chunks(512).enumerate() {
                    if random.next().is_multiple_of(2) {
                        play(&mut torn, &Event::Write(at + number * 512, sector.to_vec()));
                    }
                }
            }
            other if random.next().is_multiple_of(2) => play(&mut torn, other),
            _ => {}
        }
    }
    let mut states = vec![durable, all, torn];
    states.dedup();
    states
}

/// The refcount of the cluster at `at`.
fn refcount_in(bytes: &[u8], at: HostOffset) -> u64 {
    let header = header_of(bytes);
    let (bits, width) = (header.cluster_bits, header.refcount_width);
    let cluster = bits.host_cluster(at);
    let table = &bytes[index(header.refcount_table_offset.bytes())..];
    let entry = table.as_chunks().0[index(width.block_of(bits, cluster))];
    let block = RefcountTableEntry(u64::from_be_bytes(entry)).offset();
    if block == HostOffset::ZERO {
        return 0;
    }
    let block = &bytes[index(block.bytes())..][..index(bits.bytes())];
    width.get(block, index(width.index_of(bits, cluster))).expect("in the block")
}

/// The header named a new table of snapshots before its clusters had refcounts: whoever opened the
/// image after a power cut took them for free ones.
#[test]
fn power_cut_leaves_no_table_of_snapshots_without_refcount_unless_the_image_is_dirty() {
    let mut random = Random(0x7ab1e);
    let (_, harm) = HARMS.iter().find(|(what, _)| *what == "a snapshot of version 2").expect("one");
    let mut named = 0;
    for shape in shapes().into_iter().filter(|shape| shape.refcount_order > 0) {
        let image = harmed(shape, *harm);
        let (store, _) = repaired(&image.bytes, RepairMode::All);
        let events = store.events();
        for end in 0..=events.len() {
            for state in states(&image.bytes, &events, end, &mut random) {
                let header = header_of(&state);
                let is_counted = refcount_in(&state, header.snapshots_offset) > 0;
                let what = format!("{shape:?}, cut after {end} of {}", events.len());
                assert!(is_counted || header.incompatible.dirty, "{what}");
                named += u64::from(header.snapshots_offset != image.header.snapshots_offset);
            }
        }
        assert!(!header_of(&store.content()).incompatible.dirty, "{shape:?}");
    }
    assert!(named > 0, "the table is a new one");
}

#[test]
fn power_cut_at_each_write_leaves_an_image_that_can_be_repaired_again() {
    let mut random = Random(0x5eed);
    let mut cuts = 0;
    // With the smallest clusters the most is written.
    let small = |shape: &Shape| shape.cluster_bits == 9 || shape.refcount_order == 4;
    for shape in shapes().into_iter().filter(small).filter(|shape| shape.cluster_bits <= 14) {
        for (what, harm) in HARMS {
            let image = harmed(shape, *harm);
            let before = guest(&image.bytes);
            let (store, _) = repaired(&image.bytes, RepairMode::All);
            let events = store.events();
            for end in 0..=events.len() {
                for state in states(&image.bytes, &events, end, &mut random) {
                    let what = format!("{what}, {shape:?}, cut after {end} of {}", events.len());
                    assert!(guest(&state) == before, "{what}: the guest reads something else");
                    let (again, repair) = repaired(&state, RepairMode::All);
                    repair.unwrap_or_else(|error| panic!("{what}: {error:?}"));
                    assert_repaired(&again.content(), &before, &what);
                    cuts += 1;
                }
            }
        }
    }
    assert!(cuts > 1000, "only {cuts} cuts");
}

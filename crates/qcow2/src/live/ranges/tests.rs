use super::*;
use std::collections::{BTreeMap as Map, BTreeSet as Set};

const BITS: u32 = 16;

fn ranges(file_clusters: u64) -> MetadataRanges {
    let ranges = MetadataRanges::new(ClusterBits::new(BITS).expect("64 KiB"));
    ranges.set_file_end(HostCluster::new(file_clusters));
    ranges.add(HostOffset::ZERO, 1 << BITS, "the header");
    ranges
}

fn at(cluster: u64) -> HostOffset {
    HostOffset::new(cluster << BITS)
}

fn gather(ranges: &MetadataRanges, clusters: impl Iterator<Item = u64>) {
    let mut gathered = ranges.gather(TableKind::L2);
    clusters.for_each(|cluster| gathered.push(at(cluster)));
    gathered.finish();
}

/// Entries of the largest L1 table that is opened: 32 MiB.
const ENTRIES: u64 = 4 << 20;
const TABLE_BYTES: usize = 32 << 20;

#[test]
fn largest_table_whose_entries_lie_side_by_side_is_held_in_a_few_runs() {
    let ranges = ranges(2 * ENTRIES);
    gather(&ranges, 1..ENTRIES);
    assert!(ranges.held_bytes() < 4096, "{}", ranges.held_bytes());
    assert!(ranges.check(at(ENTRIES - 1), 1).is_err());
    assert!(ranges.check(at(ENTRIES), 1).is_ok());
}

#[test]
fn largest_table_that_names_what_is_beyond_its_file_holds_nothing_and_none_is_written() {
    let ranges = ranges(16);
    gather(&ranges, (0..ENTRIES).map(|index| 16 + index * 977));
    assert!(ranges.held_bytes() < 4096, "{}", ranges.held_bytes());
    assert!(ranges.check_table(at(16 + 977)).is_err());
    // What is made there later is a table like others.
    ranges.add_table(at(16 + 977), TableKind::L2);
    assert!(ranges.check_table(at(16 + 977)).is_ok());
}

#[test]
fn largest_table_that_names_one_table_all_over_holds_one_run_and_it_is_contested() {
    let ranges = ranges(16);
    gather(&ranges, (0..ENTRIES).map(|_| 5));
    assert!(ranges.held_bytes() < 4096, "{}", ranges.held_bytes());
    assert!(ranges.check_table(at(5)).is_err());
}

#[test]
fn largest_table_that_is_strewn_over_a_sparse_file_holds_no_more_than_itself() {
    let ranges = ranges(u64::MAX >> BITS);
    // An odd factor visits all clusters of a power of two, in no order.
    let strewn = (0..ENTRIES).map(|index| 2 + 2 * (index.wrapping_mul(0x9e37_79b1) % (1 << 26)));
    let in_order: u64 = strewn.clone().take(1000).filter(|cluster| *cluster == 2).count() as u64;
    assert_eq!(in_order, 1);
    gather(&ranges, strewn.clone());
    let held = ranges.held_bytes();
    assert!(held <= TABLE_BYTES + TABLE_BYTES / 16, "{held}");
    for cluster in strewn.step_by(4099) {
        assert!(ranges.check(at(cluster), 1).is_err() && ranges.check_table(at(cluster)).is_ok());
        assert!(ranges.check(at(cluster + 1), 1 << BITS).is_ok());
    }
}

#[test]
fn table_over_other_metadata_is_contested_and_the_data_check_names_what_is_there() {
    let ranges = ranges(64);
    ranges.add(at(4), 3 << BITS, "the L1 table");
    gather(&ranges, [5, 9].into_iter());
    let mut blocks = ranges.gather(TableKind::RefcountBlock);
    blocks.push(at(9));
    blocks.push(at(11));
    blocks.finish();
    for cluster in [5, 9] {
        assert!(ranges.check_table(at(cluster)).is_err(), "{cluster}");
    }
    assert!(ranges.check_table(at(11)).is_ok());
    for (cluster, name) in [(0, "the header"), (5, "the L1"), (9, "an L2"), (11, "a refcount")] {
        let error = ranges.check(at(cluster), 1).expect_err("metadata").to_string();
        assert!(error.contains(name), "{error}");
    }
    // The area is as long as it was said to be, and goes away whole.
    ranges.remove(at(4));
    assert!(ranges.check(at(4), 3 << BITS).is_ok());
}

/// The obvious way: each cluster by itself.
#[derive(Default)]
struct Model {
    areas: Map<u64, u64>,
    tables: Set<u64>,
    contested: Set<u64>,
}

impl Model {
    fn is_metadata(&self, cluster: u64) -> bool {
        self.tables.contains(&cluster)
            || self.areas.iter().any(|(start, end)| (*start..*end).contains(&cluster))
    }

    fn add_table(&mut self, cluster: u64) {
        if self.is_metadata(cluster) {
            self.contested.insert(cluster);
        } else {
            self.tables.insert(cluster);
        }
    }
}

fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

#[test]
fn ranges_say_what_a_set_of_clusters_says() {
    const FILE: u64 = 9_000;
    const SPACE: u64 = 10_000;
    for seed in 0..12_u64 {
        let mut random = seed;
        let ranges = ranges(FILE);
        let mut model = Model::default();
        model.areas.insert(0, 1);
        for step in 0..400 {
            let cluster = next(&mut random) % SPACE;
            match next(&mut random) % 8 {
                0 => {
                    let mut gathered = ranges.gather(TableKind::L2);
                    for _ in 0..next(&mut random) % 600 {
                        // Often neighbours, so that there are runs to be cut.
                        let first = next(&mut random) % SPACE;
                        for cluster in first..first + next(&mut random) % 9 {
                            gathered.push(at(cluster));
                            if cluster < FILE {
                                model.add_table(cluster);
                            }
                        }
                    }
                    gathered.finish();
                }
                1 => {
                    let end = cluster + 1 + next(&mut random) % 20;
                    ranges.add(at(cluster), (end - cluster) << BITS, "an area");
                    if (cluster..end).any(|cluster| model.is_metadata(cluster)) {
                        model.contested.insert(cluster);
                    } else {
                        model.areas.insert(cluster, end);
                    }
                }
                2..5 => {
                    ranges.add_table(at(cluster), TableKind::RefcountBlock);
                    model.add_table(cluster);
                }
                _ => {
                    ranges.remove(at(cluster));
                    if model.areas.remove(&cluster).is_none() {
                        model.tables.remove(&cluster);
                    }
                }
            }
            for cluster in (step % 50..SPACE + 30).step_by(50) {
                let said = ranges.check(at(cluster), 1 << BITS).is_err();
                assert_eq!(said, model.is_metadata(cluster), "seed {seed} step {step} {cluster}");
                let is_beyond = cluster >= FILE
                    && !model.tables.contains(&cluster)
                    && !model.areas.contains_key(&cluster);
                let refused = is_beyond || model.contested.contains(&cluster);
                let said = ranges.check_table(at(cluster)).is_err();
                assert_eq!(said, refused, "seed {seed} step {step} {cluster}");
            }
        }
    }
}

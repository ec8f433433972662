use super::*;
use crate::testing::from_seeds;
use mica_units::Rng;
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

/// The obvious way: each byte of an area, and each cluster of a table, by itself.
#[derive(Default)]
struct Model {
    /// The bytes of headers and of tables of tables, by their starts.
    areas: Map<u64, u64>,
    tables: Map<u64, TableKind>,
    contested: Set<u64>,
}

impl Model {
    fn has_area(&self, start: u64, end: u64) -> bool {
        self.areas.iter().any(|(first, last)| *first < end && start < *last)
    }

    fn has_table(&self, bits: ClusterBits, start: u64, end: u64) -> bool {
        let (first, end) =
            (bits.host_cluster(HostOffset::new(start)).number(), bits.clusters_for(end));
        (first..end).any(|cluster| self.tables.contains_key(&cluster))
    }

    fn is_metadata(&self, bits: ClusterBits, start: u64, end: u64) -> bool {
        self.has_area(start, end) || self.has_table(bits, start, end)
    }

    fn add_table(&mut self, bits: ClusterBits, cluster: u64, kind: TableKind) {
        let start = cluster << bits.bits();
        if self.is_metadata(bits, start, start + bits.bytes()) {
            self.contested.insert(cluster);
        } else {
            self.tables.insert(cluster, kind);
        }
    }
}

/// Clusters of the file, and of the numbers that are used.
const FILE: u64 = 9_000;
const SPACE: u64 = 10_000;

struct Run {
    rng: Rng,
    bits: ClusterBits,
    ranges: MetadataRanges,
    model: Model,
}

impl Run {
    fn place(&self, cluster: u64) -> HostOffset {
        HostOffset::new(cluster << self.bits.bits())
    }

    fn kind(&mut self) -> TableKind {
        self.rng.choose(&[TableKind::L2, TableKind::RefcountBlock])
    }

    fn gather(&mut self) {
        let kind = self.kind();
        let mut gathered = self.ranges.gather(kind);
        for _ in 0..self.rng.below(600) {
            // Often neighbours, so that there are runs to be cut.
            let first = self.rng.below(SPACE);
            for cluster in first..first + self.rng.below(9) {
                gathered.push(HostOffset::new(cluster << self.bits.bits()));
                if cluster < FILE {
                    self.model.add_table(self.bits, cluster, kind);
                }
            }
        }
        gathered.finish();
    }

    /// An area of whole clusters, or of a part of some.
    fn add_area(&mut self) {
        let within = self.rng.choose(&[0, 8, self.bits.bytes() / 2]);
        let cluster = self.rng.below(SPACE);
        let start = self.place(cluster).bytes() + within;
        let len = self.rng.choose(&[0, 1, self.bits.bytes(), 7 * self.bits.bytes() + 8]);
        self.ranges.add(HostOffset::new(start), len, "an area");
        if len == 0 {
            return;
        }
        if self.model.is_metadata(self.bits, start, start + len) {
            self.model.contested.insert(self.bits.host_cluster(HostOffset::new(start)).number());
        } else {
            self.model.areas.insert(start, start + len);
        }
    }

    /// A table, or an area that begins at a cluster, goes.
    fn remove(&mut self) {
        let start = match self.rng.percent(30) {
            true => self.model.areas.keys().nth(1).copied(),
            false => None,
        };
        let cluster = self.rng.below(SPACE);
        let at = start.map_or(self.place(cluster), HostOffset::new);
        self.ranges.remove(at);
        if self.model.areas.remove(&at.bytes()).is_none() {
            self.model.tables.remove(&self.bits.host_cluster(at).number());
        }
    }

    fn check_table(&self, cluster: u64) {
        let at = self.place(cluster);
        let is_beyond = cluster >= FILE
            && !self.model.tables.contains_key(&cluster)
            && !self.model.areas.contains_key(&at.bytes());
        let is_refused = is_beyond || self.model.contested.contains(&cluster);
        assert_eq!(self.ranges.check_table(at).is_err(), is_refused, "the table at {at}");
    }

    /// Data may be where no metadata is; else the message names what is there.
    fn check_data(&self, start: u64, len: u64) {
        let end = start + len;
        let checked = self.ranges.check(HostOffset::new(start), len);
        let Err(error) = checked else {
            assert!(!self.model.is_metadata(self.bits, start, end), "{start:#x} to {end:#x}");
            return;
        };
        let error = error.to_string();
        assert!(self.model.is_metadata(self.bits, start, end), "{start:#x} to {end:#x}: {error}");
        let clusters =
            self.bits.host_cluster(HostOffset::new(start)).number()..self.bits.clusters_for(end);
        let has = |kind| clusters.clone().any(|it| self.model.tables.get(&it) == Some(&kind));
        let is_there = error.contains("overwrite an area") && self.model.has_area(start, end)
            || error.contains("overwrite the header") && self.model.has_area(start, end)
            || error.contains("overwrite an L2") && has(TableKind::L2)
            || error.contains("overwrite a refcount") && has(TableKind::RefcountBlock);
        assert!(is_there, "{start:#x} to {end:#x}: {error}");
    }

    fn step(&mut self) {
        match self.rng.below(16) {
            0 => self.gather(),
            1..3 => self.add_area(),
            3..8 => {
                let (cluster, kind) = (self.rng.below(SPACE), self.kind());
                self.ranges.add_table(self.place(cluster), kind);
                self.model.add_table(self.bits, cluster, kind);
            }
            _ => self.remove(),
        }
    }

    fn check(&mut self) {
        let state = self.ranges.read();
        state.tables.verify();
        state.contested.verify();
        drop(state);
        for _ in 0..100 {
            let cluster = self.rng.below(SPACE + 30);
            self.check_table(cluster);
            let within = self.rng.below(self.bits.bytes());
            let len = 1 + self.rng.below(3 * self.bits.bytes());
            self.check_data(self.place(cluster).bytes() + within, len);
        }
    }
}

#[test]
fn ranges_say_what_a_set_of_clusters_says() {
    from_seeds(4, |seed| {
        let rng = Rng::new(seed);
        let model = Model { areas: Map::from([(0, 1 << BITS)]), ..Model::default() };
        let bits = ClusterBits::new(BITS).expect("64 KiB");
        let mut run = Run { rng, bits, ranges: ranges(FILE), model };
        for _ in 0..400 {
            run.step();
            run.check();
        }
        (0..SPACE).for_each(|cluster| run.check_table(cluster));
        (0..SPACE).for_each(|cluster| run.check_data(run.place(cluster).bytes(), 1 << BITS));
    });
}

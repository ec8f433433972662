//! The results as a page.

use crate::page::{Found, Rows, Table};

/// What is said of boots.
const BOOTS: &[(&str, &str, usize)] = &[
    ("serves after ms", "first_serves_ms", 0),
    ("boot s", "first_boot_s", 1),
    ("reads per s", "first_reads_per_s", 0),
    ("MiB/s", "first_mib_s", 1),
    ("p99 ms", "first_p99_ms", 0),
    ("the next: serves after ms", "next_serves_ms", 0),
    ("boot s", "next_boot_s", 1),
    ("reads per s", "next_reads_per_s", 0),
    ("MiB/s", "next_mib_s", 1),
    ("p99 ms", "next_p99_ms", 0),
];

/// The page.
pub(super) fn page(found: &Found<'_>) -> String {
    let verified = "What was written was read back, in part. All disks are filled before they are \
                    read, over one connection of NBD unless there are 16 writers.";
    let rows = |part: &str| {
        let part = part.to_owned();
        vec![Rows { name: String::new(), in_words: part.clone(), part, layers: 1 }]
    };
    let table = |page: &mut String, title, part: &str, columns| {
        Table { title, first: "", columns }.put(page, found.samples, &rows(part));
    };
    found.page("Volumes beside other disks", verified, |page| {
        let columns = &[
            ("writes MiB/s", "seq_write_mib_s", 0),
            ("CPU µs/MiB", "seq_write_cpu_us", 0),
            ("reads MiB/s", "seq_read_mib_s", 0),
            ("CPU µs/MiB", "seq_read_cpu_us", 0),
            ("occupied MiB at the end", "occupied_mib", 0),
            ("peak RSS MiB", "rss_peak_mib", 0),
        ];
        table(page, "Sequential, 1 MiB, 4 in flight", "loads", columns);
        let columns = &[
            ("1 in flight: per s", "rand_read_1_per_s", 0),
            ("p99 µs", "rand_read_1_p99_us", 0),
            ("CPU µs", "rand_read_1_cpu_us", 1),
            ("16 in flight: per s", "rand_read_16_per_s", 0),
            ("p99 µs", "rand_read_16_p99_us", 0),
            ("CPU µs", "rand_read_16_cpu_us", 1),
        ];
        table(page, "Random 4 KiB reads, cached", "loads", columns);
        let columns = &[
            ("fsync each, 1 writer: per s", "fsync_1_per_s", 0),
            ("fsync p99 µs", "fsync_1_flush_p99_us", 0),
            ("CPU µs", "fsync_1_cpu_us", 1),
            ("16 writers: per s", "fsync_16_per_s", 0),
            ("fsync p99 µs", "fsync_16_flush_p99_us", 0),
            ("CPU µs", "fsync_16_cpu_us", 1),
            ("no fsync, 16 in flight: per s", "rand_write_16_per_s", 0),
            ("p99 µs", "rand_write_16_p99_us", 0),
            ("CPU µs", "rand_write_16_cpu_us", 1),
        ];
        table(page, "Random 4 KiB writes over the filled disk", "loads", columns);
        let columns = &[
            ("per s", "snapshot_per_s", 0),
            ("p50 µs", "snapshot_p50_us", 0),
            ("p90 µs", "snapshot_p90_us", 0),
            ("p99 µs", "snapshot_p99_us", 0),
            ("max µs", "snapshot_max_us", 0),
            ("writes/s without", "writes_without_per_s", 0),
            ("with", "writes_with_per_s", 0),
            ("slower %", "writes_slower_percent", 1),
        ];
        table(page, "100 snapshots a second of a volume that is written", "snapshots", columns);
        let columns = &[
            ("per s", "clone_per_s", 0),
            ("p50 µs", "clone_p50_us", 0),
            ("p99 µs", "clone_p99_us", 0),
        ];
        table(page, "Clones, a process each", "clones", columns);
        let title = "Boots of clones, 30 ms from their store: the first, and the next";
        table(page, title, "cold", BOOTS);
        let columns = &[
            ("MiB of the store per s", "collect_mib_s", 0),
            ("guest's reads, p99 µs: idle", "collect_read_p99_idle_us", 0),
            ("meanwhile", "collect_read_p99_us", 0),
            ("ratio", "collect_read_p99_ratio", 2),
            ("occupied / live", "collect_space_ratio", 2),
        ];
        table(page, "Collection by a process beside a guest that reads", "collection", columns);
    })
}

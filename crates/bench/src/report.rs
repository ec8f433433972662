//! The results as a page.

use super::page::{Column, Found, by_layers};

/// Columns of the table of warm runs.
const WARM: &[Column] = &[
    ("open ms", "open_ms", 1),
    ("random 4 KiB, depth 1: reads/s", "random_1_per_s", 0),
    ("p50 µs", "random_1_p50_us", 0),
    ("p99 µs", "random_1_p99_us", 0),
    ("depth 32: reads/s", "random_32_per_s", 0),
    ("p50 µs", "random_32_p50_us", 0),
    ("p99 µs", "random_32_p99_us", 0),
    ("CPU µs/read", "random_32_cpu_us", 1),
    ("sequential MiB/s", "sequential_mib_s", 0),
    ("block status p50 µs", "lookup_p50_us", 1),
    ("memory open MiB", "rss_open_mib", 1),
    ("memory peak MiB", "rss_peak_mib", 1),
    ("map hits", "map_hits", 0),
    ("misses", "map_misses", 0),
    ("walks", "map_walks", 0),
    ("look-ups/request", "lookups_per_request", 2),
];
const COLD: &[Column] = &[
    ("open ms", "cold_open_ms", 1),
    ("random 4 KiB, depth 1: reads/s", "cold_random_1_per_s", 0),
    ("p50 µs", "cold_random_1_p50_us", 0),
    ("p99 µs", "cold_random_1_p99_us", 0),
    ("sequential MiB/s", "cold_sequential_mib_s", 0),
];
const FIRST: &[Column] = &[
    ("open ms", "open_ms", 1),
    ("random 4 KiB, depth 32, at once: reads/s", "at_once_32_per_s", 0),
    ("first pass over the disk: MiB/s", "first_pass_mib_s", 0),
    ("then random 4 KiB, depth 32: reads/s", "random_32_per_s", 0),
    ("walks", "map_walks", 0),
    ("layers walked", "map_layers_walked", 0),
];
const RANDOM: &[Column] = &[
    ("random 4 KiB, depth 32: reads/s", "random_32_per_s", 0),
    ("p50 µs", "random_32_p50_us", 0),
    ("p99 µs", "random_32_p99_us", 0),
    ("CPU µs/read", "random_32_cpu_us", 1),
    ("memory peak MiB", "rss_peak_mib", 1),
];
const INDEX: &[Column] = &[
    ("build s", "build_s", 2),
    ("bytes on disk", "index_bytes", 0),
    ("a copy of all L2 tables in each layer, bytes", "copied_tables_bytes", 0),
];

/// The page.
pub(super) fn page(found: &Found<'_>) -> String {
    let samples = found.samples;
    found.page("Reading chains: mica beside its peers", "Every answer was verified.", |page| {
        by_layers(page, samples, "warm", "Warm", WARM);
        by_layers(
            page,
            samples,
            "cold",
            "Cold: page cache dropped before each, index present",
            COLD,
        );
        by_layers(page, samples, "first", "Chains that mica has never seen", FIRST);
        by_layers(page, samples, "handles", "Under a limit of 256 open files", RANDOM);
        for (budget, part) in super::parts::budgets_measured() {
            let title = format!("{budget} MiB for the map of the whole chain");
            by_layers(page, samples, &part, &title, RANDOM);
        }
        by_layers(page, samples, "null", "Nothing behind the protocol", RANDOM);
        by_layers(page, samples, "raw", "A raw file past the page cache", RANDOM);
        by_layers(page, samples, "index", "The index on disk", INDEX);
        by_layers(page, samples, "index-50g", "The index on disk, 50 GiB", INDEX);
    })
}

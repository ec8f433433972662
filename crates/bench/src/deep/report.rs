//! The results as a page.

use crate::page::{Column, Found, by_layers};

const OPEN: &[Column] =
    &[("start to first 4 KiB, ms", "open_ms", 1), ("memory peak MiB", "rss_peak_mib", 1)];
const WARM: &[Column] = &[
    ("depth 1: reads/s", "random_1_per_s", 0),
    ("p50 µs", "random_1_p50_us", 0),
    ("p99 µs", "random_1_p99_us", 0),
    ("CPU µs/read", "random_1_cpu_us", 2),
    ("depth 32: reads/s", "random_32_per_s", 0),
    ("p50 µs", "random_32_p50_us", 0),
    ("p99 µs", "random_32_p99_us", 0),
    ("CPU µs/read", "random_32_cpu_us", 2),
    ("load's CPU µs", "random_32_load_cpu_us", 2),
];
const COLD: &[Column] = &[
    ("sequential MiB/s", "cold_sequential_mib_s", 0),
    ("CPU s/GiB", "cold_sequential_cpu_s_per_gib", 2),
];
const VERBS: &[Column] = &[
    ("gen s", "gen_s", 2),
    ("index build s", "index_build_s", 2),
    ("index status s", "index_status_s", 2),
    ("info --backing-chain s", "info_s", 2),
    ("map s", "map_s", 2),
    ("check (one image) s", "check_s", 3),
];

/// The page.
pub(super) fn page(found: &Found<'_>) -> String {
    let samples = found.samples;
    let verified = "Every read was verified, and what each verb printed. No peers: mica beside \
                    itself at one layer. The row \"pread\" is the system alone, one read after the \
                    other of the same places in the same files: what it takes longer with many \
                    files, no server can save.";
    found.page("Very long chains", verified, |page| {
        by_layers(page, samples, "open", "Opening an indexed chain, page cache warm", OPEN);
        by_layers(page, samples, "warm", "Random 4 KiB reads, everything cached", WARM);
        by_layers(page, samples, "cold", "Sequential reads, page cache dropped", COLD);
        by_layers(page, samples, "verbs", "Verbs", VERBS);
    })
}

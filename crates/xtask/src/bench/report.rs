//! The results as a page.

use super::goal::Goal;
use super::page::{self, line};
use super::plots::Plot;
use super::samples::Samples;

/// Columns of the table of warm runs: what, figure, digits after the point.
const WARM: &[(&str, &str, usize)] = &[
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
const COLD: &[(&str, &str, usize)] = &[
    ("open ms", "cold_open_ms", 1),
    ("random 4 KiB, depth 1: reads/s", "cold_random_1_per_s", 0),
    ("p50 µs", "cold_random_1_p50_us", 0),
    ("p99 µs", "cold_random_1_p99_us", 0),
    ("sequential MiB/s", "cold_sequential_mib_s", 0),
];
const FIRST: &[(&str, &str, usize)] = &[
    ("open ms", "open_ms", 1),
    ("random 4 KiB, depth 32, at once: reads/s", "at_once_32_per_s", 0),
    ("first pass over the disk: MiB/s", "first_pass_mib_s", 0),
    ("then random 4 KiB, depth 32: reads/s", "random_32_per_s", 0),
    ("walks", "map_walks", 0),
    ("layers walked", "map_layers_walked", 0),
];
const RANDOM: &[(&str, &str, usize)] = &[
    ("random 4 KiB, depth 32: reads/s", "random_32_per_s", 0),
    ("p50 µs", "random_32_p50_us", 0),
    ("p99 µs", "random_32_p99_us", 0),
    ("CPU µs/read", "random_32_cpu_us", 1),
    ("memory peak MiB", "rss_peak_mib", 1),
];
const INDEX: &[(&str, &str, usize)] = &[
    ("build s", "build_s", 2),
    ("bytes on disk", "index_bytes", 0),
    ("a copy of all L2 tables in each layer, bytes", "copied_tables_bytes", 0),
];

/// The page.
pub(super) fn page(
    machine: &[(String, String)],
    quick: bool,
    samples: &Samples,
    goals: &[Goal],
    plots: &[Plot],
) -> String {
    let title = "Reading chains: mica beside its peers";
    let mut page = page::head(title, quick, "Every answer was verified.", machine, samples);
    page::goals(&mut page, goals);
    table(&mut page, samples, "warm", "Warm", WARM);
    table(&mut page, samples, "cold", "Cold: page cache dropped before each, index present", COLD);
    table(&mut page, samples, "first", "Chains that mica has never seen", FIRST);
    table(&mut page, samples, "handles", "Under a limit of 256 open files", RANDOM);
    for (budget, part) in super::parts::budgets_measured() {
        let title = format!("{budget} MiB for the map of the whole chain");
        table(&mut page, samples, &part, &title, RANDOM);
    }
    table(&mut page, samples, "null", "Nothing behind the protocol", RANDOM);
    table(&mut page, samples, "raw", "A raw file past the page cache", RANDOM);
    table(&mut page, samples, "index", "The index on disk", INDEX);
    table(&mut page, samples, "index-50g", "The index on disk, 50 GiB", INDEX);
    page::plots(&mut page, plots);
    page
}

fn table(
    page: &mut String,
    samples: &Samples,
    part: &str,
    title: &str,
    columns: &[(&str, &str, usize)],
) {
    let layers = samples.layers(part);
    if layers.is_empty() {
        return;
    }
    line(page, &format!("\n## {title}\n"));
    let heads: Vec<_> = columns.iter().map(|(what, ..)| *what).collect();
    line(page, &format!("| layers | server | runs | {} |", heads.join(" | ")));
    line(page, &format!("|{}", "---|".repeat(columns.len() + 3)));
    for layers in layers {
        for server in samples.servers(part) {
            let runs = samples.of(part, &server, layers).count();
            if runs == 0 {
                continue;
            }
            let cells: Vec<_> = columns
                .iter()
                .map(|(_, metric, after_point)| {
                    let value = samples.median(part, &server, layers, metric);
                    value.map_or("-".to_owned(), |value| format!("{value:.after_point$}"))
                })
                .collect();
            line(page, &format!("| {layers} | {server} | {runs} | {} |", cells.join(" | ")));
        }
    }
    let errors = samples.layers(part).into_iter().flat_map(|layers| {
        let said = |server: String| {
            let errors = samples.errors(part, &server, layers);
            let first = errors.first().cloned();
            first.map(|first| format!("{server}, {layers} layers, {} runs: {first}", errors.len()))
        };
        samples.servers(part).into_iter().filter_map(said).collect::<Vec<_>>()
    });
    for error in errors {
        line(page, &format!("\n**Failed:** {error}"));
    }
}

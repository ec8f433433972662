//! The results as a page.

use super::{ALLOCATING, ALLOCATING_SUBCLUSTERS, READS, RESTART, REWRITES};
use crate::bench::page::{Column, Found, Rows, Table};
use crate::bench::samples::Samples;

const SPEEDS: &[Column] = &[
    ("1 queue, depth 1: per s", "q1_d1_per_s", 0),
    ("p50 µs", "q1_d1_p50_us", 1),
    ("p99 µs", "q1_d1_p99_us", 1),
    ("CPU µs", "q1_d1_cpu_us", 2),
    ("depth 32: per s", "q1_d32_per_s", 0),
    ("p50 µs", "q1_d32_p50_us", 1),
    ("p99 µs", "q1_d32_p99_us", 1),
    ("CPU µs", "q1_d32_cpu_us", 2),
    ("load's CPU µs", "q1_d32_load_cpu_us", 2),
    ("4 queues, depth 1: per s", "q4_d1_per_s", 0),
    ("CPU µs", "q4_d1_cpu_us", 2),
    ("depth 32: per s", "q4_d32_per_s", 0),
    ("p99 µs", "q4_d32_p99_us", 1),
    ("CPU µs", "q4_d32_cpu_us", 2),
    ("load's CPU µs", "q4_d32_load_cpu_us", 2),
    ("open ms", "open_ms", 1),
];
const RESTARTS: &[Column] = &[
    ("kills", "kills", 0),
    ("server away, longest ms", "longest_absence_ms", 1),
    ("longest stall ms", "longest_stall_ms", 1),
    ("writes", "writes", 0),
    ("failed", "failed", 0),
    ("lost", "lost", 0),
];

/// The page.
pub(super) fn page(found: &Found<'_>) -> String {
    let samples = found.samples;
    let verified = "Every read was verified, and every write read back. Depth is that of each \
                    queue; one thread drives all queues, and its processor time is told beside the \
                    server's.";
    found.page("Serving machines: mica beside its peers", verified, |page| {
        table(page, samples, READS, "Random 4 KiB reads, vhost-user-blk without a guest", SPEEDS);
        let title = "Random 4 KiB writes to clusters that the active layer has";
        table(page, samples, REWRITES, title, SPEEDS);
        let title = "Random 4 KiB writes to a fresh layer on top, 64 KiB clusters";
        table(page, samples, ALLOCATING, title, SPEEDS);
        let title = "The same, subclusters of 4 KiB (extended_l2)";
        table(page, samples, ALLOCATING_SUBCLUSTERS, title, SPEEDS);
        let title = "Killed and restarted under random writes, indexed";
        table(page, samples, RESTART, title, RESTARTS);
    })
}

fn table(page: &mut String, samples: &Samples, part: &str, title: &str, columns: &[Column]) {
    let rows = samples.layers(part).into_iter().map(|layers| Rows {
        name: layers.to_string(),
        in_words: format!("{layers} layers"),
        part: part.to_owned(),
        layers,
    });
    Table { title, first: "layers", columns }.put(page, samples, &rows.collect::<Vec<_>>());
}

#[cfg(test)]
mod tests {
    use super::SPEEDS;
    use crate::bench::guest::device::{SHAPES, shape_name};

    #[test]
    fn every_shape_has_its_columns() {
        for shape in SHAPES {
            let speed = format!("{}_per_s", shape_name(shape));
            assert!(SPEEDS.iter().any(|(_, metric, _)| *metric == speed), "{speed}");
        }
    }
}

//! The results as a page.

use super::{
    ALLOCATING, ALLOCATING_SUBCLUSTERS, BOOT, DATABASE_PART, RANDOM, READS, RESTART, REWRITES,
};
use crate::page::{Column, Found, by_layers, line};
use crate::samples::Samples;

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
    ("of its slowest queue", "q4_d32_slowest_queue_p99_us", 1),
    ("CPU µs", "q4_d32_cpu_us", 2),
    ("load's CPU µs", "q4_d32_load_cpu_us", 2),
    ("open ms", "open_ms", 1),
];
const LONG_SPEEDS: &[Column] = &[
    ("1 queue, depth 8: per s", "64k_q1_d8_per_s", 0),
    ("p99 µs", "64k_q1_d8_p99_us", 1),
    ("CPU µs", "64k_q1_d8_cpu_us", 2),
    ("load's CPU µs", "64k_q1_d8_load_cpu_us", 2),
    ("4 queues, depth 8: per s", "64k_q4_d8_per_s", 0),
    ("p99 µs", "64k_q4_d8_p99_us", 1),
    ("of its slowest queue", "64k_q4_d8_slowest_queue_p99_us", 1),
    ("CPU µs", "64k_q4_d8_cpu_us", 2),
    ("load's CPU µs", "64k_q4_d8_load_cpu_us", 2),
];
const RESTARTS: &[Column] = &[
    ("kills", "kills", 0),
    ("server away, longest ms", "longest_absence_ms", 1),
    ("longest stall ms", "longest_stall_ms", 1),
    ("writes", "writes", 0),
    ("failed", "failed", 0),
    ("lost", "lost", 0),
];

const BOOTS: &[Column] = &[
    ("to the login prompt s", "login_s", 2),
    ("of it from the disk s", "from_disk_s", 2),
    ("requests for reads", "disk_reads", 0),
    ("mean µs of one in the machine", "read_mean_us", 0),
    ("server's CPU µs/request", "server_cpu_us", 1),
];
const RANDOMS: &[Column] = &[
    ("depth 1: reads/s", "random_1_per_s", 0),
    ("depth 32: reads/s", "random_32_per_s", 0),
    ("server's CPU µs/request", "server_cpu_us", 1),
];
const DATABASES: &[Column] = &[
    ("keys/s", "reads_per_s", 0),
    ("requests for reads", "disk_reads", 0),
    ("mean µs of one in the machine", "read_mean_us", 0),
    ("server's CPU µs/request", "server_cpu_us", 1),
];

/// The page.
pub(super) fn page(found: &Found<'_>) -> String {
    let samples = found.samples;
    let verified = "Every read was verified, and every write read back. Depth is that of each \
                    queue; one thread drives all queues, and its processor time is shown beside the \
                    server's. A server that leaves a queue waiting completes few of its requests, \
                    which the p99 of all does not show: so that of the slowest queue stands beside \
                    it.";
    found.page("Serving machines: mica beside its peers", verified, |page| {
        by_layers(
            page,
            samples,
            READS,
            "Random 4 KiB reads, vhost-user-blk without a guest",
            SPEEDS,
        );
        let title = "Random 64 KiB reads, of each of which the first 4 KiB were verified";
        by_layers(page, samples, READS, title, LONG_SPEEDS);
        let title = "Random 4 KiB writes to clusters that the active layer has";
        by_layers(page, samples, REWRITES, title, SPEEDS);
        let title = "Random 4 KiB writes to a fresh layer on top, 64 KiB clusters";
        by_layers(page, samples, ALLOCATING, title, SPEEDS);
        let title = "The same, subclusters of 4 KiB (extended_l2)";
        by_layers(page, samples, ALLOCATING_SUBCLUSTERS, title, SPEEDS);
        let title = "Killed and restarted under random writes, indexed";
        by_layers(page, samples, RESTART, title, RESTARTS);
        machines(page, samples);
    })
}

/// What was measured in machines.
fn machines(page: &mut String, samples: &Samples) {
    if samples.layers(BOOT).is_empty() && samples.layers(RANDOM).is_empty() {
        return;
    }
    let how = match mica_tests::machine::accelerator() {
        "kvm" => "Machines ran under KVM.",
        _ => {
            "Machines ran under TCG, which emulates their processors: what they do takes many \
             times as long as on a real one, and hides how much the disks differ. The server's \
             processor time is real."
        }
    };
    line(page, &format!("\n## In machines\n\n{how}"));
    by_layers(page, samples, BOOT, "Boot from the disk (as sQemu figure 17)", BOOTS);
    by_layers(page, samples, RANDOM, "fio in the machine, random 4 KiB reads", RANDOMS);
    let title = "RocksDB, read-only, uniform keys (YCSB-C, as sQemu figure 18)";
    by_layers(page, samples, DATABASE_PART, title, DATABASES);
}

#[cfg(test)]
mod tests {
    use super::SPEEDS;
    use crate::guest::device::{SHAPES, shape_name};
    use crate::load::vhost::BLOCK_BYTES;

    #[test]
    fn every_shape_has_its_columns() {
        for shape in SHAPES {
            let speed = format!("{}_per_s", shape_name(shape, BLOCK_BYTES));
            assert!(SPEEDS.iter().any(|(_, metric, _)| *metric == speed), "{speed}");
        }
    }
}

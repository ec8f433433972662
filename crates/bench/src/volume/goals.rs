//! The goals for volumes.

use super::disks::Disk;
use crate::goal::{Bound, Goal};
use crate::samples::Samples;

/// Judges all goals.
pub(super) fn judge(samples: &Samples) -> Vec<Goal> {
    let median =
        |part: &str, disk: Disk, metric: &str| samples.median(part, disk.name(), 1, metric);
    let by = |one: Disk, other: Disk, metric: &str| {
        Some(median("loads", one, metric)? / median("loads", other, metric)?)
    };
    let of_raw = |metric: &str| by(Disk::VolumeLog, Disk::Raw, metric);
    let at_least = Bound::AtLeast;
    let at_most = Bound::AtMost;
    let percent = median("snapshots", Disk::VolumeLog, "writes_slower_percent");
    let snapshot_ms = |metric: &str| Some(median("snapshots", Disk::VolumeLog, metric)? / 1000.0);
    let mut goals = vec![
        Goal::new("sequential writes / raw file", at_least(0.95), "", of_raw("seq_write_mib_s")),
        Goal::new("sequential reads / raw file", at_least(0.95), "", of_raw("seq_read_mib_s")),
        Goal::new("random 4 KiB reads / raw file", at_least(0.9), "", of_raw("rand_read_16_per_s")),
        Goal::new(
            "random 4 KiB writes with fsync, 1 writer / raw file",
            at_least(1.0),
            "",
            of_raw("fsync_1_per_s"),
        ),
        Goal::new(
            "random 4 KiB writes with fsync, 16 writers / raw file",
            at_least(1.0),
            "",
            of_raw("fsync_16_per_s"),
        ),
        Goal::new(
            "on RADOS with a log, random 4 KiB writes with fsync, 1 writer / RBD",
            at_least(5.0),
            "",
            by(Disk::RadosLog, Disk::Rbd, "fsync_1_per_s"),
        ),
        Goal::new(
            "on RADOS, durable in the pool, 16 writers with fsync / RBD",
            at_least(1.5),
            "",
            by(Disk::RadosStore, Disk::Rbd, "fsync_16_per_s"),
        ),
        Goal::new("snapshot, p90", at_most(1.0), " ms", snapshot_ms("snapshot_p90_us")),
        Goal::new("snapshot, p99", at_most(5.0), " ms", snapshot_ms("snapshot_p99_us")),
        Goal::new("writes beside 100 snapshots a second: slower by", at_most(4.0), " %", percent),
        Goal::new(
            "clone, p50, with the start of the program",
            at_most(5.0),
            " ms",
            median("clones", Disk::VolumeLog, "clone_p50_us").map(|time| time / 1000.0),
        ),
    ];
    goals.extend(judge_collection(samples));
    goals
}

/// Judges those of collection.
fn judge_collection(samples: &Samples) -> [Goal; 3] {
    let (at_least, at_most) = (Bound::AtLeast, Bound::AtMost);
    let collection = |metric: &str| samples.median("collection", Disk::VolumeLog.name(), 1, metric);
    [
        Goal::new(
            "collection of a store, with the start of the program",
            at_least(954.0),
            " MiB/s",
            collection("collect_mib_s"),
        ),
        Goal::new(
            "reads of a guest during collection, p99 / idle",
            at_most(1.5),
            "",
            collection("collect_read_p99_ratio"),
        ),
        Goal::new("space / live bytes", at_most(1.25), "", collection("collect_space_ratio")),
    ]
}

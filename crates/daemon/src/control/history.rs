//! An hour of figures, so that a page that was just opened shows what happened before.
//!
//! The control thread samples every disk each [`PERIOD`]. A process keeps its totals for each
//! period, a disk its own for each [`DISK_PERIODS`] of them. The next server begins without.
//!
//! Invariants
//! - I1 Memory is bounded: 11.5 KiB for the process, 3.4 KiB for a disk, for [`DISKS_MAX`] disks at
//!   most. A disk that was at rest for an hour has no points.
//! - I2 Only the control thread waits for it.

use crate::own_process::ProcessFigures;
use crate::stats::Totals;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Time between two samples.
pub(super) const PERIOD: Duration = Duration::from_secs(10);
/// Samples that are one point of a disk.
const DISK_PERIODS: u32 = 3;
/// Points of the process, and of a disk: an hour.
const PROCESS_POINTS: usize = 360;
const DISK_POINTS: usize = 120;
/// Disks that have a history, in the order in which they were added: 14 MiB.
const DISKS_MAX: usize = 4096;

/// The history of a process and its disks.
#[derive(Default)]
pub(super) struct History {
    points: VecDeque<ProcessPoint>,
    disks: BTreeMap<String, DiskHistory>,
    /// Uptime at the last sample, and at the last point of the disks.
    sampled: Duration,
    disks_sampled: Duration,
    /// Samples since that point.
    samples: u32,
    cpu_seconds: f64,
}

/// Rates of all disks together, and what the process used.
#[derive(Clone, Copy)]
struct ProcessPoint {
    rates: [f32; 4],
    errors: f32,
    processors: f32,
    resident_bytes: f32,
    descriptors: f32,
}

#[derive(Default)]
struct DiskHistory {
    /// At the last sample.
    before: Totals,
    /// Since the last point.
    pending: Totals,
    /// Empty if it was at rest all the time.
    points: VecDeque<DiskPoint>,
}

#[derive(Clone, Copy, PartialEq, Default)]
struct DiskPoint {
    rates: [f32; 4],
    /// Mean times of reads and writes, in microseconds.
    means: [f32; 2],
    errors: u32,
}

impl History {
    /// Adds what `disks` have counted so far, at this uptime.
    pub(super) fn sample<'a>(
        &mut self,
        uptime: Duration,
        process: &ProcessFigures,
        disks: impl Iterator<Item = (&'a str, Totals)>,
    ) {
        let mut all = Totals::default();
        let mut left = std::mem::take(&mut self.disks);
        for (name, now) in disks.take(DISKS_MAX) {
            let (name, mut disk) = left
                .remove_entry(name)
                .unwrap_or_else(|| (name.to_owned(), DiskHistory::default()));
            let more = now.since(&disk.before);
            all = all.plus(&more);
            disk.pending = disk.pending.plus(&more);
            disk.before = now;
            self.disks.insert(name, disk);
        }
        self.samples += 1;
        if self.samples >= DISK_PERIODS {
            let passed = uptime.saturating_sub(self.disks_sampled);
            self.disks.values_mut().for_each(|disk| disk.end_period(passed));
            (self.samples, self.disks_sampled) = (0, uptime);
        }
        let passed = uptime.saturating_sub(self.sampled);
        let cpu_seconds = (process.cpu_seconds - self.cpu_seconds).max(0.0);
        (self.sampled, self.cpu_seconds) = (uptime, process.cpu_seconds);
        let point = ProcessPoint {
            rates: rates(&all, passed),
            errors: float(all.errors),
            processors: single(cpu_seconds / seconds(passed)),
            resident_bytes: float(process.resident_bytes),
            descriptors: float(process.open_descriptors),
        };
        push(&mut self.points, point, PROCESS_POINTS);
    }

    /// Errors of the disk `name` in the last hour, if it has counted `now` since its start.
    pub(super) fn errors_lately(&self, name: &str, now: &Totals) -> u64 {
        let Some(disk) = self.disks.get(name) else { return now.errors };
        let kept: u64 = disk.points.iter().map(|point| u64::from(point.errors)).sum();
        kept + disk.pending.errors + now.since(&disk.before).errors
    }

    /// The points of the process, the newest last.
    pub(super) fn of_process(&self) -> Value {
        let points = self.points.iter().map(|point| {
            let ProcessPoint { rates: [r, w, rb, wb], errors, processors, .. } = *point;
            json!([r, w, rb, wb, errors, processors, point.resident_bytes, point.descriptors])
        });
        let columns = ["errors", "processors", "resident_bytes", "open_descriptors"];
        json!({
            "period_seconds": PERIOD.as_secs(),
            "points_max": PROCESS_POINTS,
            "columns": RATES.into_iter().chain(columns).collect::<Vec<_>>(),
            "points": points.collect::<Vec<_>>(),
        })
    }

    /// The points of a disk, the newest last; none if it was at rest.
    pub(super) fn of_disk(&self, name: &str) -> Value {
        let points = self.disks.get(name).into_iter().flat_map(|disk| &disk.points);
        let points = points.map(|point| {
            let DiskPoint { rates: [r, w, rb, wb], means: [read, write], errors } = *point;
            json!([r, w, rb, wb, read, write, errors])
        });
        let columns = ["read_mean_us", "write_mean_us", "errors"];
        json!({
            "period_seconds": PERIOD.as_secs() * u64::from(DISK_PERIODS),
            "points_max": DISK_POINTS,
            "columns": RATES.into_iter().chain(columns).collect::<Vec<_>>(),
            "points": points.collect::<Vec<_>>(),
        })
    }
}

/// What comes first in each point, per second.
const RATES: [&str; 4] = ["reads", "writes", "read_bytes", "written_bytes"];

impl DiskHistory {
    fn end_period(&mut self, passed: Duration) {
        let sum = std::mem::take(&mut self.pending);
        let mean = |ns: u64, count: u64| float(ns / 1000) / float(count.max(1));
        let point = DiskPoint {
            rates: rates(&sum, passed),
            means: [mean(sum.read_ns, sum.reads), mean(sum.write_ns, sum.writes)],
            errors: u32::try_from(sum.errors).unwrap_or(u32::MAX),
        };
        let nothing = DiskPoint::default();
        if point == nothing && self.points.iter().all(|point| *point == nothing) {
            self.points = VecDeque::new();
            return;
        }
        push(&mut self.points, point, DISK_POINTS);
    }
}

fn push<T>(points: &mut VecDeque<T>, point: T, points_max: usize) {
    if points.capacity() < points_max {
        points.reserve_exact(points_max - points.len());
    }
    if points.len() >= points_max {
        points.pop_front();
    }
    points.push_back(point);
}

fn rates(sum: &Totals, passed: Duration) -> [f32; 4] {
    let seconds = single(seconds(passed));
    [sum.reads, sum.writes, sum.read_bytes, sum.written_bytes].map(|count| float(count) / seconds)
}

fn seconds(passed: Duration) -> f64 {
    passed.as_secs_f64().max(0.001)
}

#[expect(clippy::cast_precision_loss, reason = "it is drawn")]
fn float(count: u64) -> f32 {
    count as f32
}

#[expect(clippy::cast_possible_truncation, reason = "it is drawn")]
fn single(value: f64) -> f32 {
    value as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(reads: u64, errors: u64) -> Totals {
        Totals {
            reads,
            read_bytes: reads * 4096,
            read_ns: reads * 5000,
            errors,
            ..Totals::default()
        }
    }

    /// Samples as many periods as there are `totals` of the disk "a"; "b" is at rest.
    fn sampled(totals: impl IntoIterator<Item = Totals>) -> History {
        let mut history = History::default();
        for (index, totals) in (1_u32..).zip(totals) {
            let cpu_seconds = f64::from(index) * 5.0;
            let process = ProcessFigures { cpu_seconds, ..ProcessFigures::default() };
            let disks = [("a", totals), ("b", Totals::default())];
            history.sample(PERIOD * index, &process, disks.into_iter());
        }
        history
    }

    #[test]
    fn points_are_rates_of_their_period() {
        let history = sampled([reads(10, 0), reads(30, 0), reads(60, 2), reads(1060, 3)]);
        let process = history.of_process();
        assert_eq!(process["columns"][0], "reads");
        let rates: Vec<_> =
            (0..4_usize).map(|at| process["points"][at][0].as_f64().unwrap()).collect();
        assert_eq!(rates, [1.0, 2.0, 3.0, 100.0]);
        assert_eq!(process["points"][1][5], 0.5, "half a processor");
        let disk = history.of_disk("a");
        assert_eq!(disk["points"].as_array().unwrap().len(), 1, "three samples are a point");
        assert_eq!(disk["points"][0], json!([2.0, 0.0, 8192.0, 0.0, 5.0, 0.0, 2]));
        assert_eq!(history.errors_lately("a", &reads(1060, 7)), 7, "those since the point, too");
        assert_eq!(history.errors_lately("new", &reads(5, 1)), 1);
    }

    #[test]
    fn disk_that_was_opened_again_counts_from_zero() {
        let history = sampled([reads(90, 0), reads(90, 0), reads(30, 0)]);
        assert_eq!(history.of_disk("a")["points"][0][0], 4.0);
    }

    #[test]
    fn memory_is_bounded_and_disks_at_rest_have_no_points() {
        let history = sampled((1..=2000).map(|count| reads(count, 1)));
        assert_eq!(history.points.len(), PROCESS_POINTS);
        let (busy, resting) = (&history.disks["a"], &history.disks["b"]);
        assert_eq!((busy.points.len(), resting.points.capacity()), (DISK_POINTS, 0));
        assert!(busy.points.capacity() * size_of::<DiskPoint>() <= 3500);
        assert!(size_of::<DiskHistory>() < 256);
        assert!(history.points.capacity() * size_of::<ProcessPoint>() <= 12 << 10);

        // An hour later nothing is left of what it did.
        let at_rest = std::iter::repeat_n(reads(90, 1), 3 * DISK_POINTS + 6);
        let history = sampled([reads(90, 1)].into_iter().chain(at_rest));
        assert_eq!(history.disks["a"].points.capacity(), 0);
        assert_eq!(history.errors_lately("a", &reads(90, 1)), 0);
    }

    #[test]
    fn disks_that_are_gone_and_those_beyond_the_limit_have_none() {
        let mut history = sampled([reads(1, 0)]);
        let names: Vec<_> = (0..DISKS_MAX + 10).map(|index| format!("disk-{index}")).collect();
        let disks = names.iter().map(|name| (&**name, reads(1, 1)));
        history.sample(PERIOD * 2, &ProcessFigures::default(), disks);
        assert_eq!(history.disks.len(), DISKS_MAX);
        assert!(!history.disks.contains_key("a"));
        assert!(history.of_disk("a")["points"].as_array().unwrap().is_empty());
    }
}

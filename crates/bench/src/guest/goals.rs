//! The goals for serving machines, each judged by what was measured.

use super::device::{SHAPES, shape_name};
use super::{ALLOCATING, ALLOCATING_SUBCLUSTERS, BOOT, READS, RESTART, REWRITES};
use crate::goal::{Bound, CPU_MAX, Goal, P99_MAX, RATE_MIN};
use crate::load::vhost::BLOCK_BYTES;
use crate::peers::{MICA, QEMU_STORAGE_DAEMON};
use crate::samples::Samples;

/// Judges all goals.
pub(super) fn judge(samples: &Samples) -> Vec<Goal> {
    let mut judge = Judge { samples, goals: Vec::new() };
    judge.cells();
    judge.one_layer();
    judge.queues();
    judge.many_layers();
    judge.boot();
    judge.restart();
    judge.goals
}

struct Judge<'a> {
    samples: &'a Samples,
    goals: Vec<Goal>,
}

impl Judge<'_> {
    fn goal(&mut self, what: &str, bound: Bound, unit: &str, measured: Option<f64>) {
        self.goals.push(Goal::new(what, bound, unit, measured));
    }

    fn mica(&self, part: &str, layers: u32, metric: &str) -> Option<f64> {
        self.samples.median(part, MICA, layers, metric)
    }

    fn qemu(&self, part: &str, layers: u32, metric: &str) -> Option<f64> {
        self.samples.median(part, QEMU_STORAGE_DAEMON, layers, metric)
    }

    /// Every load, shape and number of layers, beside qemu-storage-daemon.
    fn cells(&mut self) {
        for (words, part) in [
            ("reads", READS),
            ("writes in place", REWRITES),
            ("writes to new clusters", ALLOCATING),
            ("writes to new subclusters", ALLOCATING_SUBCLUSTERS),
        ] {
            for (figure, bound, metric) in [
                ("rate", Bound::AtLeast(RATE_MIN), "per_s"),
                ("CPU", Bound::AtMost(CPU_MAX), "cpu_us"),
                ("p99 of the slowest queue", Bound::AtMost(P99_MAX), "slowest_queue_p99_us"),
            ] {
                let what = format!("random 4 KiB {words}: {figure} / qemu-storage-daemon's");
                let worst = Goal::worst(&what, bound, self.beside_qemu(part, metric));
                self.goals.extend(worst);
            }
        }
    }

    /// Mica's figure by the peer's in each cell of a load.
    fn beside_qemu(&self, part: &str, metric: &str) -> impl Iterator<Item = (String, f64)> {
        let layers = self.samples.layers(part).into_iter();
        let cells = layers.flat_map(|layers| SHAPES.map(|shape| (layers, shape)));
        cells.filter_map(move |(layers, shape)| {
            let metric = format!("{}_{metric}", shape_name(shape, BLOCK_BYTES));
            let ratio = self.mica(part, layers, &metric)? / self.qemu(part, layers, &metric)?;
            let (queues, depth) = shape;
            Some((format!("{queues} queues, depth {depth}, {layers} layers"), ratio))
        })
    }

    fn one_layer(&mut self) {
        let metric = "q1_d32_cpu_us";
        let read = self.mica(READS, 1, metric);
        self.goal("one layer, CPU time of a read", Bound::AtMost(3.0), " µs", read);
    }

    fn queues(&mut self) {
        for (name, one, four) in
            [("4 KiB", "q1_d32", "q4_d32"), ("64 KiB", "64k_q1_d8", "64k_q4_d8")]
        {
            let of = |metric: String| self.mica(READS, 1, &metric);
            let gain = || Some(of(format!("{four}_per_s"))? / of(format!("{one}_per_s"))?);
            // The machine's processors are busy with both sides of a request, and at most one of
            // them with the load generator's: that bounds what the server can gain.
            let most = || {
                let server = of(format!("{one}_cpu_us"))?;
                let load = of(format!("{one}_load_cpu_us"))?;
                let processors =
                    u32::try_from(std::thread::available_parallelism().ok()?.get()).ok()?;
                let rate = (f64::from(processors) / (server + load)).min(1.0 / load);
                Some(rate * server.max(load))
            };
            let (gain, most) = (gain(), most());
            let allowed =
                most.map_or(String::new(), |most| format!(" (machine and load allow {most:.2})"));
            let what = format!("4 queues / 1 queue, random {name} reads/s{allowed}");
            self.goal(&what, Bound::AtLeast(1.6), "", gain);
        }
    }

    fn many_layers(&mut self) {
        let metric = "q1_d32_per_s";
        let gain = || Some(self.mica(READS, 500, metric)? / self.qemu(READS, 500, metric)?);
        let gain = gain();
        let what = "500 layers, random 4 KiB reads/s at depth 32 / qemu-storage-daemon";
        self.goal(what, Bound::AtLeast(1000.0), "", gain);
    }

    fn boot(&mut self) {
        let of = |layers| self.mica(BOOT, layers, "login_s");
        let longer = || Some(of(1000)? / of(1)?);
        let longer = longer();
        self.goal("boot at 1000 layers / at 1 layer", Bound::AtMost(1.1), "", longer);
        // The kernel and the initramfs do not come from the disk: without them its share is
        // clearer.
        let of = |layers| self.mica(BOOT, layers, "from_disk_s");
        let longer = || Some(of(1000)? / of(1)?);
        let longer = longer();
        let what = "the same, only from the disk's mount to the login prompt";
        self.goal(what, Bound::AtMost(1.1), "", longer);
    }

    fn restart(&mut self) {
        let stall = self.mica(RESTART, 1000, "longest_stall_ms");
        let what = "killed and restarted under load at 1000 indexed layers: longest stall";
        self.goal(what, Bound::AtMost(150.0), " ms", stall);
        // Not the median: even once is too often.
        let worst = |metric: &str| {
            let runs = self.samples.of(RESTART, MICA, 1000);
            runs.filter_map(|run| run.metrics.get(metric).copied()).reduce(f64::max)
        };
        let (failed, lost) = (worst("failed"), worst("lost"));
        self.goal("the same: failed requests", Bound::AtMost(0.0), "", failed);
        self.goal("the same: runs that lost writes", Bound::AtMost(0.0), "", lost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::Sample;

    #[test]
    fn each_cell_beside_the_peer_counts() {
        let mut samples = Samples::default();
        for (server, layers, rate) in [
            (MICA, 1, 9.0),
            (QEMU_STORAGE_DAEMON, 1, 3.0),
            (MICA, 50, 6.0),
            (QEMU_STORAGE_DAEMON, 50, 8.0),
        ] {
            let mut sample = Sample::new(ALLOCATING, server, layers, 0);
            sample.put("q4_d1_per_s", rate);
            samples.add(sample);
        }
        let goals = judge(&samples);
        let rates: Vec<_> = goals.iter().filter(|goal| goal.what.contains(": rate")).collect();
        let [rate] = rates[..] else { panic!("{} goals", rates.len()) };
        assert!(rate.what.ends_with("worst: 4 queues, depth 1, 50 layers"), "{}", rate.what);
        assert_eq!((rate.measured, rate.reached), (Some(0.75), Some(false)));
    }
}

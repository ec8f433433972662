//! The goals for serving machines, each judged by what was measured.

use super::{BOOT, READS, RESTART, REWRITES};
use crate::goal::{Bound, Goal};
use crate::peers::{MICA, QEMU_STORAGE_DAEMON};
use crate::samples::Samples;

/// Judges all goals.
pub(super) fn judge(samples: &Samples) -> Vec<Goal> {
    let mut judge = Judge { samples, goals: Vec::new() };
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

    fn one_layer(&mut self) {
        let metric = "q1_d32_cpu_us";
        for (what, part) in [("reads", READS), ("writes", REWRITES)] {
            let per_second = || Some(self.qemu(part, 1, metric)? / self.mica(part, 1, metric)?);
            let per_second = per_second();
            let what =
                format!("one layer, random 4 KiB {what} per CPU second / qemu-storage-daemon");
            self.goal(&what, Bound::AtLeast(1.5), "", per_second);
        }
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
        self.goal(what, Bound::AtLeast(40.0), "", gain);
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
        self.goal(what, Bound::AtMost(300.0), " ms", stall);
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

//! The goals for reading chains, each judged by what was measured.

use super::goal::{Bound, Goal};
use super::peers::MICA;
use super::samples::Samples;

/// The peers that a figure is compared with: the better of them counts.
const QEMU: &[&str] = &["qemu-nbd", "qemu-storage-daemon"];

/// Judges all goals.
pub(super) fn judge(samples: &Samples) -> Vec<Goal> {
    let mut judge = Judge { samples, goals: Vec::new() };
    judge.depth();
    judge.one_layer();
    judge.many_layers();
    judge.memory();
    judge.opening();
    judge.index();
    judge.goals
}

struct Judge<'a> {
    samples: &'a Samples,
    goals: Vec<Goal>,
}

impl Judge<'_> {
    fn mica(&self, part: &str, layers: u32, metric: &str) -> Option<f64> {
        self.samples.median(part, MICA, layers, metric)
    }

    /// The best of QEMU's figures.
    fn qemu(&self, layers: u32, metric: &str, better: fn(f64, f64) -> f64) -> Option<f64> {
        let of = |server: &&str| self.samples.median("warm", server, layers, metric);
        QEMU.iter().filter_map(of).reduce(better)
    }

    fn goal(&mut self, what: &str, bound: Bound, unit: &str, measured: Option<f64>) {
        self.goals.push(Goal::new(what, bound, unit, measured));
    }

    /// The worst of mica's figures over all depths, as a share of its own at one layer.
    fn worst_share(&self, part: &str, metric: &str) -> Option<f64> {
        let one = self.mica(part, 1, metric)?;
        let layers = self.samples.layers(part).into_iter().filter(|layers| *layers > 1);
        layers
            .filter_map(|layers| self.mica(part, layers, metric))
            .map(|rate| rate / one)
            .reduce(f64::min)
    }

    fn depth(&mut self) {
        for (what, metric) in [
            ("random 4 KiB, depth 1: worst of all lengths / one layer", "random_1_per_s"),
            ("random 4 KiB, depth 32: worst of all lengths / one layer", "random_32_per_s"),
            ("sequential: worst of all lengths / one layer", "sequential_mib_s"),
        ] {
            self.goal(what, Bound::AtLeast(0.9), "", self.worst_share("warm", metric));
        }
        for (what, metric) in [
            ("cold random 4 KiB: worst of all lengths / one layer", "cold_random_1_per_s"),
            ("cold sequential: worst of all lengths / one layer", "cold_sequential_mib_s"),
        ] {
            self.goal(what, Bound::AtLeast(0.75), "", self.worst_share("cold", metric));
        }
    }

    fn ratio(&self, layers: u32, metric: &str, better: fn(f64, f64) -> f64) -> Option<f64> {
        Some(self.mica("warm", layers, metric)? / self.qemu(layers, metric, better)?)
    }

    fn one_layer(&mut self) {
        let random = self.ratio(1, "random_32_per_s", f64::max);
        self.goal("one layer, random 4 KiB at depth 32 / QEMU", Bound::AtLeast(3.0), "", random);
        let processor = self.ratio(1, "random_32_cpu_us", f64::min);
        self.goal("one layer, processor time per read / QEMU", Bound::AtMost(0.3), "", processor);
        let sequential = self.ratio(1, "sequential_mib_s", f64::max);
        self.goal("one layer, sequential / QEMU", Bound::AtLeast(2.0), "", sequential);
        let raw = self.share("raw", "fio on the file");
        self.goal("raw file by NBD / fio on the file", Bound::AtLeast(0.85), "", raw);
        let null = self.share("null", "nbdkit");
        self.goal("null disk / nbdkit's null", Bound::AtLeast(2.0), "", null);
    }

    fn share(&self, part: &str, server: &str) -> Option<f64> {
        let metric = "random_32_per_s";
        Some(self.mica(part, 1, metric)? / self.samples.median(part, server, 1, metric)?)
    }

    fn many_layers(&mut self) {
        for layers in [500, 1000] {
            let measured = self.ratio(layers, "random_32_per_s", f64::max);
            let what = format!("{layers} layers, random 4 KiB at depth 32 / QEMU");
            self.goal(&what, Bound::AtLeast(1000.0), "", measured);
            let dead = QEMU
                .iter()
                .filter(|server| !self.samples.errors("warm", server, layers).is_empty());
            let dead: Vec<_> = dead.copied().collect();
            if let Some(goal) = self.goals.last_mut().filter(|goal| goal.measured.is_none())
                && !dead.is_empty()
            {
                goal.note = Some(format!("{} failed, see below", dead.join(" and ")));
            }
        }
    }

    fn memory(&mut self) {
        let metric = "rss_peak_mib";
        let at_1000 = self.mica("warm", 1000, metric);
        self.goal("peak memory at 1000 layers", Bound::AtMost(16.0), " MiB", at_1000);
        let longest = self.samples.layers("warm").last().copied().filter(|layers| *layers > 1);
        let per_layer = longest.and_then(|layers| {
            let more = self.mica("warm", layers, metric)? - self.mica("warm", 1, metric)?;
            Some(more * 1024.0 / f64::from(layers - 1))
        });
        self.goal("memory per further layer", Bound::AtMost(2.0), " KiB", per_layer);
        let full = self.samples.layers("budget-33554432").first().copied();
        let half = full.and_then(|layers| {
            let metric = "random_32_per_s";
            let small = self.mica("budget-1048576", layers, metric)?;
            Some(small / self.mica("budget-33554432", layers, metric)?)
        });
        self.goal("speed with 1 MiB for the index / with enough", Bound::AtLeast(0.5), "", half);
        let over = self.samples.layers("warm").into_iter().filter_map(|layers| {
            let held = self.mica("warm", layers, "map_cached_bytes")?;
            Some(held / self.mica("warm", layers, "map_budget_bytes")?)
        });
        let over = over.reduce(f64::max);
        self.goal("bytes of the map's cache / its budget", Bound::AtMost(1.0), "", over);
    }

    fn opening(&mut self) {
        let indexed = self.mica("warm", 1000, "open_ms");
        self.goal("1000 indexed layers: open", Bound::AtMost(50.0), " ms", indexed);
        let first = self.mica("first", 1000, "open_ms");
        self.goal("1000 layers never indexed: open", Bound::AtMost(50.0), " ms", first);
        let metric = "random_32_per_s";
        let after = || Some(self.mica("first", 1000, metric)? / self.mica("first", 1, metric)?);
        let after = after();
        let what = "1000 layers never indexed, after one pass / one layer";
        self.goal(what, Bound::AtLeast(0.9), "", after);
        let longest = self.samples.layers("handles").last().copied();
        let limited = longest.and_then(|layers| self.mica("handles", layers, metric));
        let limited = limited.map(|rate| if rate > 0.0 { 1.0 } else { 0.0 });
        self.goal("works under 256 open files (1: yes)", Bound::AtLeast(1.0), "", limited);
    }

    fn index(&mut self) {
        let share = |part: &str| {
            let bytes = self.mica(part, 1000, "index_bytes")?;
            Some(100.0 * bytes / self.mica(part, 1000, "copied_tables_bytes")?)
        };
        let (here, large) = (share("index"), share("index-50g"));
        let what = "index of 1000 layers / a copy of all L2 tables in each";
        self.goal(what, Bound::AtMost(2.0), " %", here);
        let what = "the same for a disk of 50 GiB";
        self.goal(what, Bound::AtMost(2.0), " %", large);
    }
}

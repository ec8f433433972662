//! The goals for chains of any length.

use super::verbs::VERBS;
use crate::goal::{Bound, Goal};
use crate::peers::MICA;
use crate::samples::Samples;

/// Rate of warm reads, at least, by that of one layer.
const WARM_MIN: f64 = 0.9;
/// Rate of cold sequential reads, at least, by that of one layer.
const COLD_MIN: f64 = 0.75;
/// The length that others are compared with, to judge whether a verb is linear.
const LINEAR_FROM: u32 = 1000;
/// A verb's time for a layer, at most, by that at [`LINEAR_FROM`].
const LINEAR_MAX: f64 = 1.5;

/// Judges all goals.
pub(super) fn judge(samples: &Samples) -> Vec<Goal> {
    let mut goals = Vec::new();
    let opened = |layers, metric| samples.median("open", MICA, layers, metric);
    for (layers, most) in [(1000, 50.0), (10_000, 300.0)] {
        let what = format!("{layers} indexed layers: start to first 4 KiB");
        goals.push(Goal::new(&what, Bound::AtMost(most), " ms", opened(layers, "open_ms")));
    }
    let memory = opened(10_000, "rss_peak_mib");
    goals.push(Goal::new("10000 layers: peak memory", Bound::AtMost(64.0), " MiB", memory));
    for (depth, metric) in [(1, "random_1_per_s"), (32, "random_32_per_s")] {
        for layers in [1000, 10_000] {
            let what = format!("{layers} layers / one, random 4 KiB, depth {depth}, cached");
            let share = samples.paired("warm", MICA, (layers, 1), metric);
            goals.push(Goal::new(&what, Bound::AtLeast(WARM_MIN), "", share));
        }
    }
    let cold = |layers| samples.median("cold", MICA, layers, "cold_sequential_mib_s");
    let share = cold(1000).zip(cold(1)).map(|(many, one)| many / one);
    let what = "1000 layers / one, sequential, not cached";
    goals.push(Goal::new(what, Bound::AtLeast(COLD_MIN), "", share));
    goals.extend(VERBS.iter().map(|(verb, figure)| linear(samples, verb, figure)));
    goals
}

/// Whether a verb takes no longer for each layer of the longest chain than for each of a thousand.
fn linear(samples: &Samples, verb: &str, figure: &str) -> Goal {
    let longest = samples.layers("verbs").last().copied().filter(|layers| *layers > LINEAR_FROM);
    let each =
        |layers: u32| Some(samples.median("verbs", MICA, layers, figure)? / f64::from(layers));
    let growth = || Some(each(longest?)? / each(LINEAR_FROM)?);
    let what = format!("{verb}: time for a layer, longest chain / {LINEAR_FROM} layers");
    Goal::new(&what, Bound::AtMost(LINEAR_MAX), "", growth())
}

#[cfg(test)]
mod tests {
    use super::linear;
    use crate::samples::{Sample, Samples};

    #[test]
    fn verb_is_judged_by_its_time_for_a_layer_of_the_longest_chain() {
        let mut samples = Samples::default();
        for (layers, seconds) in [(1000, 0.5), (5000, 9.0), (10_000, 6.0)] {
            let mut sample = Sample::new("verbs", "mica", layers, 0);
            sample.put("gen_s", seconds);
            samples.add(sample);
        }
        let goal = linear(&samples, "gen", "gen_s");
        assert_eq!((goal.measured, goal.reached), (Some(1.2), Some(true)));
    }
}

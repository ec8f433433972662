//! The goals for merges.

use super::{COMMIT, STREAM};
use crate::goal::{Bound, Goal};
use crate::peers::MICA;
use crate::samples::Samples;

/// Judges all goals.
pub(super) fn judge(samples: &Samples) -> Vec<Goal> {
    let mut goals = Vec::new();
    for part in [STREAM, COMMIT] {
        let layers = samples.layers(part).last().copied().unwrap_or(0);
        for (what, metric, most, unit) in [
            ("reads' p99 during the merge / before it", "p99_ratio", 1.5, ""),
            ("the slowest read during the merge", "max_ms", 20.0, " ms"),
            ("time / qemu-img convert's", "took_ratio", 1.5, ""),
            ("time under writes / without a guest", "loaded_ratio", 2.0, ""),
        ] {
            let measured = samples.median(part, MICA, layers, metric);
            let what = format!("{part}, {layers} layers: {what}");
            goals.push(Goal::new(&what, Bound::AtMost(most), unit, measured));
        }
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::Sample;

    #[test]
    fn goals_are_those_of_mica_alone() {
        let mut samples = Samples::default();
        for (server, ratio) in [(MICA, 1.2), ("another", 9.0)] {
            let mut sample = Sample::new(COMMIT, server, 30, 0);
            sample.put("p99_ratio", ratio);
            samples.add(sample);
        }
        let goals = judge(&samples);
        let judged = goals.iter().find(|goal| goal.what.starts_with("commit, 30 layers: reads'"));
        assert_eq!(judged.expect("a goal").measured, Some(1.2));
        assert_eq!(judged.expect("a goal").reached, Some(true));
        assert_eq!(goals.iter().filter(|goal| goal.measured.is_some()).count(), 1);
    }
}

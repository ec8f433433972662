//! The goals for snapshots.

use super::{BY_LAYERS, BY_SIZE, SYNCS};
use crate::goal::{Bound, Goal};
use crate::peers::{MICA, QEMU_STORAGE_DAEMON};
use crate::samples::Samples;

/// A snapshot's time at any depth and size, at most, by that at one layer and the smallest size.
const GROWTH_MAX: f64 = 1.2;

/// Judges all goals.
pub(super) fn judge(samples: &Samples) -> Vec<Goal> {
    let caller = |server: &str| samples.median(BY_LAYERS, server, 1, "caller_ms");
    let beside = caller(MICA).zip(caller(QEMU_STORAGE_DAEMON)).map(|(ours, theirs)| ours / theirs);
    let mut goals = vec![
        Goal::new(
            "1 layer: the guest's slowest write during a snapshot, median",
            Bound::AtMost(1.0),
            " ms",
            samples.median(BY_LAYERS, MICA, 1, "pause_ms"),
        ),
        Goal::new("1 layer: caller, mica / QEMU", Bound::AtMost(1.0), "", beside),
        Goal::new(
            "space of a snapshot",
            Bound::AtMost(256.0),
            " KiB",
            samples.median(BY_LAYERS, MICA, 1, "space_kib"),
        ),
        Goal::new(
            "syncs of a snapshot after a write",
            Bound::AtMost(3.0),
            "",
            samples.median(SYNCS, MICA, 1, "syncs"),
        ),
    ];
    for (part, what) in [(BY_LAYERS, "layers"), (BY_SIZE, "GiB")] {
        let all = samples.layers(part);
        let growth = all
            .first()
            .zip(all.last())
            .and_then(|(least, most)| samples.paired(part, MICA, (*most, *least), "caller_ms"));
        let what = format!("caller, most {what} / fewest");
        goals.push(Goal::new(&what, Bound::AtMost(GROWTH_MAX), "", growth));
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::Sample;

    #[test]
    fn goals_compare_with_the_peer_and_the_smallest() {
        let mut samples = Samples::default();
        for (server, layers, ms) in
            [(MICA, 1, 2.0), (MICA, 1000, 2.2), (QEMU_STORAGE_DAEMON, 1, 4.0)]
        {
            let mut sample = Sample::new(BY_LAYERS, server, layers, 0);
            sample.put("caller_ms", ms);
            samples.add(sample);
        }
        let goals = judge(&samples);
        let measured = |what: &str| {
            let goal = goals.iter().find(|goal| goal.what.contains(what)).expect("a goal");
            goal.measured.map(|value| (value * 100.0).round() / 100.0)
        };
        assert_eq!(measured("mica / QEMU"), Some(0.5));
        assert_eq!(measured("layers / fewest"), Some(1.1));
        assert_eq!(measured("GiB / fewest"), None);
    }
}

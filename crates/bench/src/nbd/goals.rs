//! The goals for NBD: one for each figure and group of cells, held by the worst cell.

use super::cells::{Beside, Cell, Group};
use crate::goal::{Bound, CPU_MAX, Goal, P99_MAX, RATE_MIN};
use crate::peers::MICA;
use crate::samples::Samples;

/// Mica's rate with an fsync each by that of the peer's raw file, at least.
pub(super) const RAW_MIN: f64 = 1.0;
/// Raw files past the page cache, by fio.
const FIO_MIN: f64 = 0.85;

/// Whether a group belongs to a goal.
type IsIn = fn(Group) -> bool;
/// What a goal is about.
type Figure = fn(&Beside) -> Option<f64>;

/// Judges all goals.
pub(super) fn judge(cells: &[Cell], samples: &Samples) -> Vec<Goal> {
    let mut goals = Vec::new();
    let groups: [(&str, IsIn); 3] = [
        ("chains", |group| matches!(group, Group::Chain(_))),
        ("an fsync each", |group| group == Group::Synced),
        ("16 in flight, no fsync", |group| group == Group::Unsynced),
    ];
    for (words, is_in) in groups {
        let cells = cells.iter().filter(|cell| is_in(cell.group));
        let rows: Vec<_> = cells
            .flat_map(|cell| cell.beside(samples).into_iter().map(move |one| (cell, one)))
            .collect();
        let figures: [(&str, Bound, Figure); 4] = [
            ("rate / peer", Bound::AtLeast(RATE_MIN), |one| Some(one.rate.ratio())),
            ("CPU / peer", Bound::AtMost(CPU_MAX), |one| Some(one.cpu.ratio())),
            ("p99 / peer", Bound::AtMost(P99_MAX), |one| Some(one.p99.ratio())),
            ("rate / qemu-nbd with a raw file", Bound::AtLeast(RAW_MIN), |one| one.raw),
        ];
        for (figure, bound, value) in figures {
            goals.extend(worst(&format!("{words}: {figure}"), bound, &rows, value));
        }
    }
    let rate = |server: &str| samples.median("raw", server, 1, "random_32_per_s");
    if let (Some(mica), Some(fio)) = (rate(MICA), rate("fio on the file")) {
        let what = "raw file past the page cache / fio on the file";
        goals.push(Goal::new(what, Bound::AtLeast(FIO_MIN), "", Some(mica / fio)));
    }
    goals
}

/// A goal for all of `rows`, named after the worst of them.
fn worst(what: &str, bound: Bound, rows: &[(&Cell, Beside)], value: Figure) -> Option<Goal> {
    let cells = rows.iter().filter_map(|(cell, beside)| {
        let Cell { name, layers, .. } = cell;
        let name = format!("{name}, {layers} layers, beside {}", beside.peer);
        Some((name, value(beside)?))
    });
    Goal::worst(what, bound, cells)
}

//! The results as a page: in each table a row for each cell and peer.

use super::cells::{Beside, Cell, ChainLoad, Group};
use super::goals::RAW_MIN;
use crate::goal::{CPU_MAX, P99_MAX, RATE_MIN};
use crate::page::{Column, Found, by_layers, line};
use crate::samples::Samples;

const RAW: &[Column] = &[
    ("random 4 KiB, depth 32: reads/s", "random_32_per_s", 0),
    ("p50 µs", "random_32_p50_us", 0),
    ("p99 µs", "random_32_p99_us", 0),
    ("CPU µs/read", "random_32_cpu_us", 1),
    ("load's CPU µs", "random_32_load_cpu_us", 1),
];

/// The page.
pub(super) fn page(found: &Found<'_>, cells: &[Cell]) -> String {
    let verified = "Every read was verified, and writes were read back. Depth is that of each \
                    connection. Each figure is mica's, then the peer's.";
    found.page("NBD: mica beside its peers", verified, |page| {
        for load in ChainLoad::ALL {
            table(page, found.samples, cells, Group::Chain(load), load.words());
        }
        let title = "Writers that wait for an fsync after each write";
        table(page, found.samples, cells, Group::Synced, title);
        let title = "16 writes in flight, without an fsync";
        table(page, found.samples, cells, Group::Unsynced, title);
        let title = "A raw file past the page cache";
        by_layers(page, found.samples, "raw", title, RAW);
    })
}

fn table(page: &mut String, samples: &Samples, cells: &[Cell], group: Group, title: &str) {
    let cells: Vec<_> = cells.iter().filter(|cell| cell.group == group).collect();
    if cells.is_empty() {
        return;
    }
    line(page, &format!("\n## {title}\n"));
    let raw = if group == Group::Synced { " by its raw |" } else { "" };
    line(
        page,
        &format!(
            "| load | layers | peer | per s | ratio |{raw} CPU µs | ratio | p50 µs | p99 µs | ratio | lost |"
        ),
    );
    line(page, &format!("|{}", "---|".repeat(11 + usize::from(group == Group::Synced))));
    for cell in cells {
        for beside in cell.beside(samples) {
            line(page, &row(cell, &beside));
        }
    }
}

fn row(cell: &Cell, beside: &Beside) -> String {
    let Cell { name, layers, group, .. } = cell;
    let Beside { peer, rate, cpu, p50, p99, raw } = beside;
    let raw = match (group, raw) {
        (Group::Synced, Some(raw)) => format!(" {raw:.2} |"),
        (Group::Synced, None) => " - |".to_owned(),
        _ => String::new(),
    };
    format!(
        "| {name} | {layers} | {peer} | {:.0} / {:.0} | {:.2} |{raw} {:.1} / {:.1} | {:.2} | \
         {:.0} / {:.0} | {:.0} / {:.0} | {:.2} | {} |",
        rate.mica,
        rate.peer,
        rate.ratio(),
        cpu.mica,
        cpu.peer,
        cpu.ratio(),
        p50.mica,
        p50.peer,
        p99.mica,
        p99.peer,
        p99.ratio(),
        lost(beside).join(", ")
    )
}

/// What is not reached.
fn lost(beside: &Beside) -> Vec<&'static str> {
    let lost = [
        ("rate", beside.rate.ratio() < RATE_MIN),
        ("raw", beside.raw.is_some_and(|raw| raw < RAW_MIN)),
        ("CPU", beside.cpu.ratio() > CPU_MAX),
        ("p99", beside.p99.ratio() > P99_MAX),
    ];
    lost.into_iter().filter(|(_, is_lost)| *is_lost).map(|(what, _)| what).collect()
}

//! The figures 3, 4, 9, 11, 12 and 13 of the paper on the transactional hypervisor, with today's
//! programs: its baseline is QEMU, and mica takes the place of its own hypervisor.

use super::images::Kind;
use super::loads::{Case, Mode};
use super::{KIB_4, KIB_64, MIB, counted_part, part, sizes};
use crate::charts::{Bars, Chart, Group, Line, Scale};
use crate::load::ratio;
use crate::peers::{MICA, QEMU_NBD};
use crate::plots::{Plot, Plots};
use crate::samples::Samples;
use anyhow::Result;
use std::path::Path;

const FORMATS: &[Kind] = &[Kind::Raw, Kind::Empty, Kind::Overlay, Kind::Subclusters];
const PREALLOCATIONS: &[Kind] = &[Kind::Raw, Kind::Empty, Kind::Metadata, Kind::Falloc, Kind::Full];
const SERVERS: [&str; 2] = [MICA, QEMU_NBD];

/// Bars of writes per second: file, title, load, images.
const SPEEDS: &[(&str, &str, Case, &[Kind])] = &[
    (
        "formats",
        "Sequential 4 KiB writes, no fsync (as figures 3a and 9a)",
        Case::sequential(KIB_4, Mode::Never),
        FORMATS,
    ),
    (
        "formats-fsync",
        "Sequential 4 KiB writes, fsync every 256 (as figures 3b and 9b)",
        Case::sequential(KIB_4, Mode::Sometimes),
        FORMATS,
    ),
    (
        "formats-fsync-each",
        "Random 4 KiB writes, fsync after each",
        Case::random(KIB_4, Mode::Each),
        FORMATS,
    ),
    (
        "preallocation-sequential",
        "Sequential 4 KiB writes by preallocation (as figure 13, sequential)",
        Case::sequential(KIB_4, Mode::Never),
        PREALLOCATIONS,
    ),
    (
        "preallocation-random",
        "Random 4 KiB writes by preallocation (as figure 13, random)",
        Case::random(KIB_4, Mode::Never),
        PREALLOCATIONS,
    ),
];

/// Draws what there are figures for.
pub(super) fn write(samples: &Samples, out: &Path, name: &str) -> Result<Vec<Plot>> {
    let mut plots = Plots::new(out, name);
    for &(what, title, case, kinds) in SPEEDS {
        let groups = kinds.iter().map(|&kind| Group {
            name: kind.name().to_owned(),
            values: values(samples, kind, case, |run| run("writes_per_s")),
        });
        plots.put(what, title, bars(title, "writes/s", groups.collect()))?;
    }
    let title = "Time to write a GiB sequentially, no fsync (as figure 4)";
    plots.put("time", title, bars(title, "s", times(samples)))?;
    let relative = [
        (
            "sizes",
            "Writes/s of mica / of QEMU, fsync every 256 (as figure 11)",
            speed_by_size(samples),
        ),
        (
            "syncs",
            "Syncs of mica / of QEMU, fsync every 256 (as figure 12)",
            syncs_by_size(samples),
        ),
    ];
    for (what, title, points) in relative {
        let lines = vec![Line { name: "mica / qemu-nbd, empty".to_owned(), points }];
        let chart =
            Chart { title, x: ("KiB of a write", Scale::Log), y: ("ratio", Scale::Linear), lines };
        plots.put(what, title, chart.draw())?;
    }
    Ok(plots.written())
}

fn bars(title: &str, unit: &str, groups: Vec<Group>) -> Result<Option<String>> {
    Bars { title, unit, series: SERVERS.map(str::to_owned).to_vec(), groups }.draw()
}

/// The value that `figure` computes from each server's medians.
fn values(
    samples: &Samples,
    kind: Kind,
    case: Case,
    figure: impl Fn(&dyn Fn(&str) -> Option<f64>) -> Option<f64>,
) -> Vec<Option<f64>> {
    let part = part(kind, case);
    let of = |server| figure(&|metric| samples.median(&part, server, kind.layers(), metric));
    SERVERS.into_iter().map(of).collect()
}

fn times(samples: &Samples) -> Vec<Group> {
    let sizes = [(KIB_4, "4 KiB"), (KIB_64, "64 KiB"), (MIB, "1 MiB")];
    let group = |kind: Kind, (bytes, size): (u32, &str)| Group {
        name: format!("{} {size}", if kind == Kind::Subclusters { "ext_l2" } else { kind.name() }),
        values: values(samples, kind, Case::sequential(bytes, Mode::Never), |run| {
            run("mib_s").map(|speed| 1024.0 / speed)
        }),
    };
    FORMATS.iter().flat_map(|kind| sizes.map(|size| group(*kind, size))).collect()
}

fn speed_by_size(samples: &Samples) -> Vec<[f64; 2]> {
    let speed = |server, case| {
        samples.median(&part(Kind::Empty, case), server, Kind::Empty.layers(), "writes_per_s")
    };
    by_size(|case| Some(speed(MICA, case)? / speed(QEMU_NBD, case)?))
}

fn syncs_by_size(samples: &Samples) -> Vec<[f64; 2]> {
    let syncs = |server, case| {
        samples.median(&counted_part(Kind::Empty, case), server, Kind::Empty.layers(), "syncs")
    };
    by_size(|case| Some(syncs(MICA, case)? / syncs(QEMU_NBD, case)?))
}

fn by_size(figure: impl Fn(Case) -> Option<f64>) -> Vec<[f64; 2]> {
    let point = |case: Case| Some([ratio(u64::from(case.bytes), 1024), figure(case)?]);
    sizes().into_iter().filter_map(point).collect()
}

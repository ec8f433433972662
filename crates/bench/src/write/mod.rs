//! `cargo xtask bench write`: what is written to which images by which server, and where the
//! figures go.

mod count;
mod goals;
pub(crate) mod images;
pub(crate) mod loads;
pub(crate) mod measure;
mod plots;
mod report;

use super::machine::Machine;
use super::page::Found;
use super::peers::{Peer, all_installed};
use super::samples::Samples;
use super::turns::each_once;
use crate::extent::{Extent, Usual};
use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use images::{Images, Kind};
use loads::{Case, Mode};
use measure::{Bounds, Context};
use mica_tests::shell;
use mica_tests::tools;
use serde_json::json;

pub(crate) const KIB_4: u32 = 4 << 10;
pub(crate) const KIB_64: u32 = 64 << 10;
const MIB: u32 = 1 << 20;
/// Maximum number of writes of a load in a smoke run.
const QUICK_WRITES_MAX: usize = 4096;

/// What is usual here.
const REPEATS: Usual<u32> = Usual::new(5, 1);
const SECONDS: Usual<f64> = Usual::new(1.0, 0.7);
const GIB: Usual<u64> = Usual::new(2, 1);

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// What to measure.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Of these, only those with this in their name, such as "overlay/random-4k".
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,
    #[command(flatten)]
    extent: Extent,
}

/// What is written, and to which image.
pub(crate) type Run = (Kind, Case);

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Raw, empty and overlaid images under all loads.
    Formats,
    /// What QEMU's modes of preallocation gain.
    Preallocation,
    /// Sequential writes of 4 KiB to 1 MiB.
    Sizes,
    /// Writers that wait for an fsync each: 16, and one alone.
    Writers,
    /// System calls and bytes, by strace.
    Counts,
}

impl Part {
    /// What it measures: each of the kinds under each of the loads.
    fn runs(self) -> Vec<Run> {
        let modes = [Mode::Never, Mode::Sometimes, Mode::Each];
        let (kinds, cases) = match self {
            Self::Formats => {
                let small =
                    modes.map(|mode| [Case::random(KIB_4, mode), Case::sequential(KIB_4, mode)]);
                let large =
                    modes.map(|mode| [Case::random(KIB_64, mode), Case::sequential(KIB_64, mode)]);
                let mut cases = [small.concat(), large.concat()].concat();
                cases.push(Case::sequential(MIB, Mode::Never));
                cases.push(Case::sequential(MIB, Mode::Each));
                (vec![Kind::Raw, Kind::Empty, Kind::Overlay, Kind::Subclusters], cases)
            }
            Self::Preallocation => (
                vec![Kind::Metadata, Kind::Falloc, Kind::Full],
                vec![
                    Case::random(KIB_4, Mode::Never),
                    Case::random(KIB_4, Mode::Each),
                    Case::sequential(KIB_4, Mode::Never),
                    Case::sequential(KIB_64, Mode::Never),
                    Case::sequential(KIB_64, Mode::Sometimes),
                ],
            ),
            Self::Sizes => (vec![Kind::Empty], sizes().to_vec()),
            Self::Writers => (
                vec![Kind::Raw, Kind::Empty, Kind::Falloc, Kind::Overlay, Kind::Subclusters],
                vec![Case::random(KIB_4, Mode::Writers), Case::random(KIB_4, Mode::Alone)],
            ),
            Self::Counts => return counted(),
        };
        cases.iter().flat_map(|case| kinds.iter().map(|kind| (*kind, *case))).collect()
    }
}

/// Sequential writes with an fsync after every 256, by size.
fn sizes() -> [Case; 5] {
    [KIB_4, 16 << 10, KIB_64, 256 << 10, MIB].map(|bytes| Case::sequential(bytes, Mode::Sometimes))
}

/// What is counted by strace.
fn counted() -> Vec<Run> {
    let cases = [
        Case::random(KIB_4, Mode::Alone),
        Case::random(KIB_4, Mode::Each),
        Case::sequential(KIB_4, Mode::Each),
        Case::sequential(KIB_64, Mode::Each),
        Case::random(KIB_4, Mode::Sometimes),
    ];
    let kinds = [Kind::Empty, Kind::Overlay, Kind::Subclusters];
    let mut runs: Vec<_> =
        cases.into_iter().flat_map(|case| kinds.map(|kind| (kind, case))).collect();
    runs.extend(sizes().map(|case| (Kind::Empty, case)));
    runs.push((Kind::Overlay, Case::random(KIB_64, Mode::Sometimes)));
    for bytes in [KIB_4, KIB_64] {
        runs.push((Kind::LargeClusters, Case::random(bytes, Mode::Sometimes)));
    }
    runs
}

/// The name of the part of the samples that holds `case` on `kind`.
pub(crate) fn part(kind: Kind, case: Case) -> String {
    format!("{}/{}", kind.name(), case.name())
}

/// The same for what strace counted.
fn counted_part(kind: Kind, case: Case) -> String {
    format!("counts/{}", part(kind, case))
}

/// Measures and writes it all.
pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(all_installed(&[tools::QEMU_NBD, tools::QEMU_IMG]), "QEMU makes and checks the images");
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let work = options.extent.folders.work()?;
    let disk_bytes = options.extent.gib(GIB) << 30;
    let context = Context {
        images: Images::new(work.path(), disk_bytes)?,
        disk_bytes,
        bounds: Bounds {
            limit: options.extent.time(SECONDS),
            writes_max: if options.extent.quick { QUICK_WRITES_MAX } else { usize::MAX },
        },
    };
    let mut samples = Samples::default();
    in_turns(options, &context, &mut samples);
    if options.parts.contains(&Part::Counts) && all_installed(&[tools::STRACE]) {
        counts(options, &context, &mut samples);
    }
    write(options, &context, &samples)
}

/// All runs against the clock, each by mica and its peer in turns, all of them once before any is
/// repeated: a machine whose speed drifts slows every kind alike.
fn in_turns(options: &Options, context: &Context<'_>, samples: &mut Samples) {
    let peers = [Peer::mica(&[]).writable(), Peer::qemu_nbd(&[]).writable()];
    let parts = options.parts.iter().filter(|part| **part != Part::Counts);
    // Parts share runs; no run is repeated.
    let mut runs: Vec<Run> = Vec::new();
    for run in parts.flat_map(|part| part.runs()) {
        if !runs.contains(&run) && part(run.0, run.1).contains(&options.only) {
            runs.push(run);
        }
    }
    for repeat in 0..options.extent.repeats(REPEATS) {
        for &(kind, case) in &runs {
            let name = part(kind, case);
            each_once(&name, &peers, kind.layers(), repeat, samples, |peer, sample| {
                measure::run(context, peer, (kind, case), sample)
            });
        }
    }
}

/// Counts are the same each time, or nearly: one run of each suffices.
fn counts(options: &Options, context: &Context<'_>, samples: &mut Samples) {
    let mica = Peer::mica(&["--aio", "threads"]).writable();
    let peers = [mica, Peer::qemu_nbd(&["--aio=threads"]).writable()];
    for (kind, case) in Part::Counts.runs() {
        let name = counted_part(kind, case);
        if !name.contains(&options.only) {
            continue;
        }
        each_once(&name, &peers, kind.layers(), 0, samples, |peer, sample| {
            count::run(context, peer, (kind, case), sample)
        });
    }
}

fn write(options: &Options, context: &Context<'_>, samples: &Samples) -> Result<()> {
    let mut machine = Machine::query()?;
    let overlays_by = context.images.overlays_by.to_owned();
    machine.facts.push(("overlays with subclusters made by".to_owned(), overlays_by));
    let name = format!("{}-write", machine.date);
    let goals = goals::judge(samples);
    let plots = plots::write(samples, &options.extent.folders.out()?, &name)?;
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "disk_gib": options.extent.gib(GIB),
        "quick": options.extent.quick,
        "seconds": options.extent.time(SECONDS).as_secs_f64(),
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.extent.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &plots });
    options.extent.folders.put(&name, &document, &page)
}

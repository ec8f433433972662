//! `cargo xtask bench deep`: whether anything depends on the number of layers, up to ten thousand.
//! Without peers: mica beside itself at one layer, and beside the system alone on the same places.

mod goals;
mod open;
mod report;
mod system;
mod verbs;
mod warm;

use super::chains::{self, Chain};
use super::machine::Machine;
use super::measure::{self, Cold};
use super::page::Found;
use super::parts::drop_caches;
use super::peers::{MICA, Peer};
use super::samples::{Sample, Samples};
use super::turns::{in_order, note};
use crate::extent::{Extent, Usual};
use anyhow::Result;
use clap::{Args, ValueEnum};
use mica_gen::ChainSpec;
use mica_tests::shell;
use serde_json::json;
use std::time::Duration;

/// Numbers of layers of each part.
const OPENED: &[u32] = &[1, 100, 1000, 10_000];
const READ_WARM: &[u32] = &[1, 1000, 10_000];
const READ_COLD: &[u32] = &[1, 1000];
const HANDLED: &[u32] = &[1000, 2500, 5000, 10_000];

/// What is usual here.
const REPEATS: Usual<u32> = Usual::new(7, 2);
const SECONDS: Usual<f64> = Usual::new(0.5, 0.2);
const GIB: Usual<u64> = Usual::new(4, 1);

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// The longest chains [default: 10000; quick: 1000].
    #[arg(long)]
    layers_max: Option<u32>,
    /// Short loads of each run of warm reads, lengths taking turns [default: 6; quick: 2].
    #[arg(long)]
    rounds: Option<u32>,
    /// Seconds of each cold sequential load, at most [default: 3; quick: 1].
    #[arg(long)]
    sequential_seconds: Option<f64>,
    /// What to measure.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    #[command(flatten)]
    extent: Extent,
}

impl Options {
    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(self.extent.pick(Usual::new(6, 2))).max(1)
    }

    fn sequential_seconds(&self) -> Duration {
        Duration::from_secs_f64(
            self.sequential_seconds.unwrap_or(self.extent.pick(Usual::new(3.0, 1.0))),
        )
    }

    /// Those of `lengths` that are wanted; none if the part is not.
    fn of_part(&self, part: Part, lengths: &[u32]) -> Vec<u32> {
        let most = self.layers_max.unwrap_or(self.extent.pick(Usual::new(10_000, 1000)));
        let wanted = self.parts.contains(&part);
        lengths.iter().copied().filter(|layers| wanted && *layers <= most).collect()
    }
}

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// From the start of the process to the first 4 KiB, and memory.
    Open,
    /// Random reads, everything cached.
    Warm,
    /// Sequential reads with the page cache dropped (root only).
    Cold,
    /// What the verbs take that go through all layers.
    Verbs,
}

/// Measures and writes it all.
pub(crate) fn run(options: &Options) -> Result<()> {
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let work = options.extent.folders.work()?;
    let context = chains::Context {
        work: work.path(),
        random: options.extent.time(SECONDS),
        sequential: options.sequential_seconds(),
        spec: ChainSpec {
            disk_bytes: options.extent.gib(GIB) << 30,
            fill: 0.3,
            ..ChainSpec::new(work.path())
        },
    };
    let mut samples = Samples::default();
    // First, before files are removed from the file system: it takes longer to make others then.
    let handled = options.of_part(Part::Verbs, HANDLED);
    verbs::measure(&context, &handled, options.extent.repeats(REPEATS).min(3), &mut samples);
    on_chains(options, &context, &mut samples)?;
    write(options, &samples)
}

/// What is read from chains, which are all made first and then measured in turns: a machine whose
/// speed drifts slows every length alike.
fn on_chains(
    options: &Options,
    context: &chains::Context<'_>,
    samples: &mut Samples,
) -> Result<()> {
    let opened = options.of_part(Part::Open, OPENED);
    let warm = options.of_part(Part::Warm, READ_WARM);
    let cold = options.of_part(Part::Cold, READ_COLD);
    let mut lengths = [&opened[..], &warm, &cold].concat();
    lengths.sort_unstable();
    lengths.dedup();
    let mut chains = Vec::new();
    for layers in lengths {
        println!("\n== {layers} layers");
        let chain = Chain::make(context, ChainSpec { layers, ..context.spec.clone() })?;
        chain.index("build")?;
        chain.read_all()?;
        chains.push(chain);
    }
    let of = |lengths: &[u32]| {
        chains.iter().filter(|chain| lengths.contains(&chain.layers)).collect::<Vec<_>>()
    };
    if !opened.is_empty() {
        println!("\n== open");
        each_in_turns(
            "open",
            &of(&opened),
            options.extent.repeats(REPEATS),
            samples,
            open::measure,
        );
    }
    if !warm.is_empty() {
        println!("\n== warm");
        warm::measure(options, &of(&warm), samples)?;
    }
    if !cold.is_empty() {
        println!("\n== cold");
        match drop_caches() {
            Ok(()) => sequential(options, context, &of(&cold), samples),
            Err(error) => println!("cold: not measured: {error}"),
        }
    }
    Ok(())
}

fn sequential(
    options: &Options,
    context: &chains::Context<'_>,
    chains: &[&Chain],
    samples: &mut Samples,
) {
    each_in_turns("cold", chains, options.extent.repeats(REPEATS), samples, |chain, sample| {
        drop_caches()?;
        measure::cold(&Peer::mica(&[]), chain.subject(context), Cold::Sequential, sample)
    });
}

/// Measures mica on each of `chains` once, then again the other way round.
fn each_in_turns(
    part: &str,
    chains: &[&Chain],
    repeats: u32,
    samples: &mut Samples,
    measure: impl Fn(&Chain, &mut Sample) -> Result<()>,
) {
    for repeat in 0..repeats {
        for chain in in_order(chains, repeat) {
            let mut sample = Sample::new(part, MICA, chain.layers, repeat);
            note(&mut sample, |sample| measure(chain, sample));
            samples.push(sample);
        }
    }
}

fn write(options: &Options, samples: &Samples) -> Result<()> {
    let machine = Machine::query()?;
    let name = format!("{}-deep", machine.date);
    let goals = goals::judge(samples);
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "disk_bytes": options.extent.gib(GIB) << 30,
        "quick": options.extent.quick,
        "seconds": options.extent.time(SECONDS).as_secs_f64(),
        "sequential_seconds": options.sequential_seconds().as_secs_f64(),
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.extent.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &[] });
    options.extent.folders.put(&name, &document, &page)
}

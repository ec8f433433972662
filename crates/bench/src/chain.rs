//! `cargo xtask bench chain`: the order in which everything is measured, and where it goes.

use super::folders::Folders;
use super::machine::Machine;
use super::page::Found;
use super::parts::{self, Context, Part};
use super::samples::Samples;
use super::{goals, plots, report};
use anyhow::Result;
use clap::{Args, ValueEnum};
use mica_gen::ChainSpec;
use mica_tests::shell;
use serde_json::json;
use std::time::Duration;

/// Number of layers from which runs are slow.
const SLOW_LAYERS: u32 = 300;

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// Numbers of layers [default: 1,10,50,100,300,500,1000; quick: 1,10,100,500].
    #[arg(long, value_delimiter = ',')]
    layers: Vec<u32>,
    /// Runs of each server, of which the median counts [default: 5; quick: 3].
    #[arg(long)]
    repeats: Option<u32>,
    /// Runs of each server on 300 layers and more.
    #[arg(long, default_value_t = 3)]
    slow_repeats: u32,
    /// Seconds of each random load [default: 3; quick: 1].
    #[arg(long)]
    seconds: Option<f64>,
    /// Seconds of each sequential load, at most [default: 8; quick: 3].
    #[arg(long)]
    sequential_seconds: Option<f64>,
    /// GiB of the disk.
    #[arg(long, default_value_t = 8)]
    gib: u64,
    /// Part of the disk that some layer owns.
    #[arg(long, default_value_t = 0.3)]
    fill: f64,
    /// What to measure.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Few layers, few runs, short loads: a smoke run, not a result.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    folders: Folders,
}

impl Options {
    /// One value for a result, another for a smoke run.
    fn full_or_quick<T>(&self, result: T, look: T) -> T {
        if self.quick { look } else { result }
    }

    fn layers(&self) -> Vec<u32> {
        match &self.layers[..] {
            [] => self.full_or_quick(vec![1, 10, 50, 100, 300, 500, 1000], vec![1, 10, 100, 500]),
            layers => layers.to_vec(),
        }
    }

    fn repeats(&self) -> u32 {
        self.repeats.unwrap_or(self.full_or_quick(5, 3)).max(1)
    }

    fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(self.full_or_quick(3.0, 1.0))
    }

    fn sequential_seconds(&self) -> f64 {
        self.sequential_seconds.unwrap_or(self.full_or_quick(8.0, 3.0))
    }
}

/// Measures everything and writes the results.
pub(crate) fn run(options: &Options) -> Result<()> {
    let layers = options.layers();
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let work = options.folders.work()?;
    let context = Context {
        work: work.path(),
        random: Duration::from_secs_f64(options.seconds()),
        sequential: Duration::from_secs_f64(options.sequential_seconds()),
        spec: ChainSpec {
            disk_bytes: options.gib << 30,
            fill: options.fill,
            ..ChainSpec::new(work.path())
        },
    };
    let mut samples = Samples::default();
    let wanted = |part: Part| options.parts.contains(&part);
    let repeats = |layers: u32| match layers >= SLOW_LAYERS {
        true => options.slow_repeats,
        false => options.repeats(),
    };
    parts::of_chains(&context, &layers, repeats, wanted, &mut samples)?;
    if wanted(Part::Ceiling) {
        parts::ceiling(&context, options.repeats(), &mut samples)?;
    }
    if wanted(Part::IndexSize) {
        parts::index_size(&context, &layers, &mut samples)?;
    }
    write(options, &samples)
}

fn write(options: &Options, samples: &Samples) -> Result<()> {
    let machine = Machine::query()?;
    let name = format!("{}-chain", machine.date);
    let goals = goals::judge(samples);
    let plots = plots::write(samples, &options.folders.out()?, &name)?;
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "disk_gib": options.gib,
        "fill": options.fill,
        "quick": options.quick,
        "random_seconds": options.seconds(),
        "sequential_seconds": options.sequential_seconds(),
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &plots });
    options.folders.put(&name, &document, &page)
}

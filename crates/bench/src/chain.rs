//! `cargo xtask bench chain`: the order in which everything is measured, and where it goes.

use super::chains::Context;
use super::machine::Machine;
use super::page::Found;
use super::parts::{self, Part};
use super::samples::Samples;
use super::{goals, plots, report};
use crate::extent::{Extent, Usual};
use anyhow::Result;
use clap::{Args, ValueEnum};
use mica_gen::ChainSpec;
use mica_tests::shell;
use serde_json::json;
use std::time::Duration;

/// Number of layers from which runs are slow.
const SLOW_LAYERS: u32 = 300;

/// What is usual here.
const REPEATS: Usual<u32> = Usual::new(5, 3);
const SECONDS: Usual<f64> = Usual::new(3.0, 1.0);
const GIB: Usual<u64> = Usual::new(8, 8);

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// Numbers of layers [default: 1,10,50,100,300,500,1000; quick: 1,10,100,500].
    #[arg(long, value_delimiter = ',')]
    layers: Vec<u32>,
    /// Runs of each server on 300 layers and more.
    #[arg(long, default_value_t = 3)]
    slow_repeats: u32,
    /// Seconds of each sequential load, at most [default: 8; quick: 3].
    #[arg(long)]
    sequential_seconds: Option<f64>,
    /// Part of the disk that some layer owns.
    #[arg(long, default_value_t = 0.3)]
    fill: f64,
    /// What to measure.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    #[command(flatten)]
    extent: Extent,
}

impl Options {
    fn layers(&self) -> Vec<u32> {
        match &self.layers[..] {
            [] => self
                .extent
                .pick(Usual::new(vec![1, 10, 50, 100, 300, 500, 1000], vec![1, 10, 100, 500])),
            layers => layers.to_vec(),
        }
    }

    fn sequential_seconds(&self) -> f64 {
        self.sequential_seconds.unwrap_or(self.extent.pick(Usual::new(8.0, 3.0)))
    }
}

/// Measures everything and writes the results.
pub(crate) fn run(options: &Options) -> Result<()> {
    let layers = options.layers();
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let work = options.extent.folders.work()?;
    let context = Context {
        work: work.path(),
        random: options.extent.time(SECONDS),
        sequential: Duration::from_secs_f64(options.sequential_seconds()),
        spec: ChainSpec {
            disk_bytes: options.extent.gib(GIB) << 30,
            fill: options.fill,
            ..ChainSpec::new(work.path())
        },
    };
    let mut samples = Samples::default();
    let wanted = |part: Part| options.parts.contains(&part);
    let repeats = |layers: u32| match layers >= SLOW_LAYERS {
        true => options.slow_repeats,
        false => options.extent.repeats(REPEATS),
    };
    parts::of_chains(&context, &layers, repeats, wanted, &mut samples)?;
    if wanted(Part::Ceiling) {
        parts::ceiling(&context, options.extent.repeats(REPEATS), &mut samples)?;
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
    let plots = plots::write(samples, &options.extent.folders.out()?, &name)?;
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "disk_gib": options.extent.gib(GIB),
        "fill": options.fill,
        "quick": options.extent.quick,
        "random_seconds": options.extent.time(SECONDS).as_secs_f64(),
        "sequential_seconds": options.sequential_seconds(),
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.extent.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &plots });
    options.extent.folders.put(&name, &document, &page)
}

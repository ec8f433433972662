//! `cargo xtask bench nbd`: NBD in every cell of what is asked, over how many connections, with how
//! many requests in flight on each; and writers that wait for an fsync after each write.

mod cells;
mod goals;
mod load;
mod report;

use super::chains::{self, Chain};
use super::machine::Machine;
use super::page::Found;
use super::parts;
use super::peers::{Peer, all_installed};
use super::samples::{Sample, Samples};
use super::turns::{each_once, in_order};
use super::write::images::Images;
use super::write::measure::{self, Bounds};
use super::write::part;
use crate::extent::{Extent, Usual};
use anyhow::{Result, ensure};
use cells::ChainLoad;
use clap::{Args, ValueEnum};
use mica_gen::ChainSpec;
use mica_tests::{shell, tools};
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// What is usual here.
const REPEATS: Usual<u32> = Usual::new(5, 1);
const SECONDS: Usual<f64> = Usual::new(1.0, 0.3);
const GIB: Usual<u64> = Usual::new(4, 1);

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// Numbers of layers.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 50])]
    layers: Vec<u32>,
    /// What to measure.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Beside which servers, if they are installed.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Beside::value_variants().to_vec())]
    beside: Vec<Beside>,
    /// Of writers with an fsync each, only those with this in their name, such as
    /// "overlay/random-4k".
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,
    #[command(flatten)]
    extent: Extent,
}

impl Options {
    fn peers(&self) -> Vec<Peer> {
        let peers = self.beside.iter().map(|beside| match beside {
            Beside::QemuNbd => (tools::QEMU_NBD, Peer::qemu_nbd(&[])),
            Beside::QemuStorageDaemon => {
                (tools::QEMU_STORAGE_DAEMON, Peer::qemu_storage_daemon(&[]))
            }
        });
        let peers = peers.filter(|(tool, _)| all_installed(&[*tool])).map(|(_, peer)| peer);
        [Peer::mica(&[])].into_iter().chain(peers).collect()
    }
}

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Random reads of chains, cached.
    Reads,
    /// Random writes to chains: to clusters that the active layer has, and to new ones.
    Writes,
    /// Writers that wait for an fsync after each write: 16, and one alone; and the same writes
    /// without.
    Fsync,
    /// A raw file past the page cache, beside fio on the file.
    Raw,
}

/// A server that is measured beside mica.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Beside {
    QemuNbd,
    QemuStorageDaemon,
}

/// What the loads on chains share.
struct Context<'a> {
    /// How chains are made.
    parts: chains::Context<'a>,
    /// How long a load lasts.
    limit: Duration,
}

/// Measures and writes it all.
pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(all_installed(&[tools::QEMU_NBD, tools::QEMU_IMG]), "QEMU makes and checks the images");
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let work = options.extent.folders.work()?;
    let limit = options.extent.time(SECONDS);
    let context = Context {
        parts: chains::Context {
            work: work.path(),
            random: limit,
            sequential: limit,
            spec: ChainSpec {
                disk_bytes: options.extent.gib(GIB) << 30,
                fill: 0.3,
                ..ChainSpec::new(work.path())
            },
        },
        limit,
    };
    let mut samples = Samples::default();
    on_chains(options, &context, &mut samples)?;
    if options.parts.contains(&Part::Fsync) {
        synced(options, work.path(), &mut samples)?;
    }
    if options.parts.contains(&Part::Raw) {
        println!("\n== raw");
        parts::raw(&context.parts, options.extent.repeats(REPEATS), &mut samples)?;
    }
    write(options, &samples)
}

/// The loads on chains, which are made first and then measured in turns: a machine whose speed
/// drifts slows every length alike.
fn on_chains(options: &Options, context: &Context<'_>, samples: &mut Samples) -> Result<()> {
    let wanted: Vec<_> =
        ChainLoad::ALL.into_iter().filter(|load| options.parts.contains(&load.part())).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let mut chains = Vec::new();
    for &layers in &options.layers {
        let chain =
            Chain::make(&context.parts, ChainSpec { layers, ..context.parts.spec.clone() })?;
        chain.index("build")?;
        chains.push(chain);
    }
    for load in wanted {
        println!("\n== {}", load.name());
        let peers: Vec<_> = match load.part() {
            Part::Reads => options.peers(),
            _ => options.peers().into_iter().map(Peer::writable).collect(),
        };
        let measure = |peer: &Peer, chain: &Chain, sample: &mut Sample| match load {
            ChainLoad::Reads => load::reads(context, peer, chain, sample),
            ChainLoad::Rewrites => load::rewrites(context, peer, chain, sample),
            ChainLoad::Allocating(format) => {
                load::allocating(context, peer, chain, format.options(), sample)
            }
        };
        for repeat in 0..options.extent.repeats(REPEATS) {
            for chain in in_order(&chains, repeat) {
                each_once(load.name(), &peers, chain.layers, repeat, samples, |peer, sample| {
                    measure(peer, chain, sample)
                });
            }
        }
    }
    Ok(())
}

/// Writers on raw and qcow2 files, as `bench write` measures them.
fn synced(options: &Options, work: &Path, samples: &mut Samples) -> Result<()> {
    println!("\n== writers");
    let disk_bytes = options.extent.gib(GIB) << 30;
    let context = measure::Context {
        images: Images::new(work, disk_bytes)?,
        disk_bytes,
        bounds: Bounds { limit: options.extent.time(SECONDS), writes_max: usize::MAX },
    };
    let peers: Vec<_> = options.peers().into_iter().map(Peer::writable).collect();
    for repeat in 0..options.extent.repeats(REPEATS) {
        for (kind, case) in cells::writers() {
            let name = part(kind, case);
            if name.contains(&options.only) {
                each_once(&name, &peers, kind.layers(), repeat, samples, |peer, sample| {
                    measure::run(&context, peer, (kind, case), sample)
                });
            }
        }
    }
    Ok(())
}

fn write(options: &Options, samples: &Samples) -> Result<()> {
    let machine = Machine::query()?;
    let name = format!("{}-nbd", machine.date);
    let cells = cells::of(samples);
    let goals = goals::judge(&cells, samples);
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
    let found = Found { machine, quick, samples, goals: &goals, plots: &[] };
    options.extent.folders.put(&name, &document, &report::page(&found, &cells))
}

//! `cargo xtask bench guest`: the disk as a machine uses it, by the load generator and in guests.

mod device;
mod goals;
mod machines;
mod plots;
mod report;
mod restart;
mod rootfs;

use super::chains::{self, Chain};
use super::machine::Machine;
use super::page::Found;
use super::peers::{Peer, all_installed};
use super::samples::Samples;
use super::turns::{each_once, in_order};
use crate::extent::{Extent, Usual};
use anyhow::Result;
use clap::{Args, ValueEnum};
use machines::Task;
use mica_gen::ChainSpec;
use mica_tests::shell;
use mica_tests::{machine, tools};
use rootfs::RootDisk;
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

/// Queues that servers offer.
const QUEUES: u16 = 4;

/// Names of the parts of the samples.
const READS: &str = "reads";
const REWRITES: &str = "rewrites";
const ALLOCATING: &str = "allocating";
const ALLOCATING_SUBCLUSTERS: &str = "allocating-extended_l2";
const RESTART: &str = "restart";
const BOOT: &str = "boot";
const RANDOM: &str = "guest-random";
const DATABASE_PART: &str = "database";
/// Numbers of layers at which the paper runs its database.
const DATABASE_LAYERS: &[u32] = &[50, 500];

/// What is usual here.
const REPEATS: Usual<u32> = Usual::new(5, 1);
const SECONDS: Usual<f64> = Usual::new(1.0, 0.3);
/// For writes to fresh layers, each of which is full after 0.2 to 6 s.
const FRESH_SECONDS: Usual<f64> = Usual::new(4.0, 0.3);
const GIB: Usual<u64> = Usual::new(8, 1);

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// Numbers of layers [default: 1,50,500,1000; quick: 1,50].
    #[arg(long, value_delimiter = ',')]
    layers: Vec<u32>,
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
            [] => self.extent.pick(Usual::new(vec![1, 50, 500, 1000], vec![1, 50])),
            layers => layers.to_vec(),
        }
    }
}

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Random reads by the load generator.
    Reads,
    /// Random writes by the load generator, to clusters that the active layer has and to new ones.
    Writes,
    /// mica killed and restarted under load.
    Restart,
    /// A machine boots from a disk of many layers.
    Boot,
    /// Random reads in a machine.
    Random,
    /// RocksDB in a machine, at 50 and 500 layers.
    Database,
}

/// What all parts share.
struct Context<'a> {
    /// How chains are made.
    parts: chains::Context<'a>,
    /// How long a load lasts.
    limit: Duration,
    /// How long one that fills fresh layers lasts.
    fresh: Duration,
    /// Whether it is only a smoke run.
    quick: bool,
}

impl Context<'_> {
    /// Where `peer` serves over vhost-user.
    fn socket(&self, peer: &Peer) -> PathBuf {
        self.parts.work.join(format!("vhost-{}", peer.name))
    }

    /// `peer` as a vhost-user-blk server.
    fn over_vhost_user(&self, peer: Peer) -> Peer {
        let socket = self.socket(&peer);
        peer.over_vhost_user(socket, QUEUES)
    }

    /// Whether machines do `task` at this length.
    fn is_wanted(&self, task: Task, layers: u32) -> bool {
        match task {
            Task::Boot => true,
            Task::Random => layers > 1 || !self.quick,
            Task::Database => DATABASE_LAYERS.contains(&layers),
        }
    }

    /// mica, and the peer that serves vhost-user-blk if it is installed.
    fn peers(&self) -> Vec<Peer> {
        let mut peers = vec![self.over_vhost_user(Peer::mica(&[]))];
        if all_installed(&[tools::QEMU_STORAGE_DAEMON, tools::QEMU_IMG]) {
            peers.push(self.over_vhost_user(Peer::qemu_storage_daemon(&[])));
        }
        peers
    }
}

/// Measures and writes it all.
pub(crate) fn run(options: &Options) -> Result<()> {
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
                fill: options.fill,
                ..ChainSpec::new(work.path())
            },
        },
        limit,
        fresh: options.extent.time(FRESH_SECONDS),
        quick: options.extent.quick,
    };
    let mut samples = Samples::default();
    without_a_guest(options, &context, &mut samples)?;
    in_guests(options, &context, &mut samples)?;
    write(options, &samples)
}

/// What the load generator measures. Chains are made first, and then measured in turns: a machine
/// whose speed drifts slows every length alike.
fn without_a_guest(options: &Options, context: &Context<'_>, samples: &mut Samples) -> Result<()> {
    let wanted = |part: Part| options.parts.contains(&part);
    if ![Part::Reads, Part::Writes, Part::Restart].into_iter().any(wanted) {
        return Ok(());
    }
    let mut chains = Vec::new();
    for layers in options.layers() {
        println!("\n== {layers} layers");
        let spec = ChainSpec { layers, ..context.parts.spec.clone() };
        let chain = Chain::make(&context.parts, spec)?;
        chain.index("build")?;
        chains.push(chain);
    }
    let peers = context.peers();
    if wanted(Part::Reads) {
        println!("\n== reads");
        in_turns(READS, options, &peers, &chains, samples, |peer, chain, sample| {
            device::reads(context, peer, chain, sample)
        });
    }
    // From here on the chains are written, and no longer hold what they were generated with.
    let peers: Vec<_> = peers.into_iter().map(Peer::writable).collect();
    if wanted(Part::Writes) {
        println!("\n== writes");
        in_turns(REWRITES, options, &peers, &chains, samples, |peer, chain, sample| {
            device::rewrites(context, peer, chain, sample)
        });
        let overlays =
            [(ALLOCATING, chains::CLUSTERS), (ALLOCATING_SUBCLUSTERS, chains::SUBCLUSTERS)];
        for (part, of_overlay) in overlays {
            in_turns(part, options, &peers, &chains, samples, |peer, chain, sample| {
                device::allocating(context, peer, chain, of_overlay, sample)
            });
        }
    }
    if wanted(Part::Restart) {
        println!("\n== restarts");
        in_turns(RESTART, options, &peers[..1], &chains, samples, |peer, chain, sample| {
            restart::killed(context, peer, chain, sample)
        });
    }
    Ok(())
}

/// What is measured in machines.
fn in_guests(options: &Options, context: &Context<'_>, samples: &mut Samples) -> Result<()> {
    let tasks =
        [(Part::Boot, Task::Boot), (Part::Random, Task::Random), (Part::Database, Task::Database)];
    let tasks: Vec<_> = tasks
        .into_iter()
        .filter(|(part, _)| options.parts.contains(part))
        .map(|(_, task)| task)
        .collect();
    let needed = [tools::QEMU_SYSTEM, tools::MKE2FS, tools::FIO, tools::DB_BENCH];
    if tasks.is_empty() || !all_installed(&needed) {
        return Ok(());
    }
    if !machine::parts::are_there() {
        println!("the kernel for machines is MISSING (cargo xtask setup): none is measured");
        return Ok(());
    }
    println!("\n== machines, by {}", machine::accelerator());
    let root = RootDisk::make(context, options.extent.pick(Usual::new(256, 64)) << 10)?;
    let mut chains = Vec::new();
    for layers in options.layers() {
        chains.push(root.spread(context, layers)?);
    }
    machines::in_turns(context, &root, &chains, &tasks, options.extent.repeats(REPEATS), samples);
    Ok(())
}

/// Runs all `peers` on all `chains` in turns, every other time in reverse order.
fn in_turns(
    part: &str,
    options: &Options,
    peers: &[Peer],
    chains: &[Chain],
    samples: &mut Samples,
    measure: impl Fn(&Peer, &Chain, &mut super::samples::Sample) -> Result<()>,
) {
    for repeat in 0..options.extent.repeats(REPEATS) {
        for chain in in_order(chains, repeat) {
            each_once(part, peers, chain.layers, repeat, samples, |peer, sample| {
                measure(peer, chain, sample)
            });
        }
    }
}

fn write(options: &Options, samples: &Samples) -> Result<()> {
    let machine = Machine::query()?;
    let name = format!("{}-guest", machine.date);
    let goals = goals::judge(samples);
    let plots = plots::write(samples, &options.extent.folders.out()?, &name)?;
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "disk_gib": options.extent.gib(GIB),
        "fill": options.fill,
        "quick": options.extent.quick,
        "seconds": options.extent.time(SECONDS).as_secs_f64(),
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.extent.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &plots });
    options.extent.folders.put(&name, &document, &page)
}

//! `cargo xtask bench guest`: the disk as a machine uses it, by the load generator and in guests.

mod device;
mod goals;
mod machines;
mod plots;
mod report;
mod restart;
mod rootfs;

use super::folders::Folders;
use super::machine::Machine;
use super::page::Found;
use super::parts::{self, Chain};
use super::peers::{Peer, all_installed};
use super::samples::Samples;
use super::turns::{each_once, in_order};
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

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// Numbers of layers [default: 1,50,500,1000; quick: 1,50].
    #[arg(long, value_delimiter = ',')]
    layers: Vec<u32>,
    /// Runs of each server, of which the median counts [default: 5; quick: 1].
    #[arg(long)]
    repeats: Option<u32>,
    /// Seconds of each load [default: 1; quick: 0.3].
    #[arg(long)]
    seconds: Option<f64>,
    /// GiB of the disks [default: 8; quick: 1].
    #[arg(long)]
    gib: Option<u64>,
    /// Part of the disk that some layer owns.
    #[arg(long, default_value_t = 0.3)]
    fill: f64,
    /// What to measure.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Few layers, one run of each, short loads: a smoke run, not a result.
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
            [] => self.full_or_quick(vec![1, 50, 500, 1000], vec![1, 50]),
            layers => layers.to_vec(),
        }
    }

    fn repeats(&self) -> u32 {
        self.repeats.unwrap_or(self.full_or_quick(5, 1)).max(1)
    }

    fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(self.full_or_quick(1.0, 0.3))
    }

    fn gib(&self) -> u64 {
        self.gib.unwrap_or(self.full_or_quick(8, 1)).max(1)
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
    parts: parts::Context<'a>,
    /// How long a load lasts.
    limit: Duration,
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
    let work = options.folders.work()?;
    let limit = Duration::from_secs_f64(options.seconds());
    let context = Context {
        parts: parts::Context {
            work: work.path(),
            random: limit,
            sequential: limit,
            spec: ChainSpec {
                disk_bytes: options.gib() << 30,
                fill: options.fill,
                ..ChainSpec::new(work.path())
            },
        },
        limit,
        quick: options.quick,
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
            [(ALLOCATING, parts::CLUSTERS), (ALLOCATING_SUBCLUSTERS, parts::SUBCLUSTERS)];
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
    let root = RootDisk::make(context, options.full_or_quick(256, 64) << 10)?;
    let mut chains = Vec::new();
    for layers in options.layers() {
        chains.push(root.spread(context, layers)?);
    }
    machines::in_turns(context, &root, &chains, &tasks, options.repeats(), samples);
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
    for repeat in 0..options.repeats() {
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
    let plots = plots::write(samples, &options.folders.out()?, &name)?;
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "disk_gib": options.gib(),
        "fill": options.fill,
        "quick": options.quick,
        "seconds": options.seconds(),
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &plots });
    options.folders.put(&name, &document, &page)
}

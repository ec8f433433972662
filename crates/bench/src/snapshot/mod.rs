//! `cargo xtask bench snapshot`: snapshots of served chains beside qemu-storage-daemon: what the
//! caller waits for, what the guest notices, what they take of the disk, and how often something
//! is made durable; and clones beside `qemu-img create -b`.

mod goals;
mod report;

use super::charts::{Chart, Line, Scale};
use super::machine::Machine;
use super::page::Found;
use super::peers::{MICA, Peer, QEMU_STORAGE_DAEMON};
use super::plots::Plots;
use super::samples::{Sample, Samples, median};
use super::turns::{each_once, in_order, note};
use crate::extent::{Extent, Usual};
use crate::live::asking::{self, Asker};
use crate::live::guest::{self, Work, Worker};
use crate::load::{Histogram, ratio};
use anyhow::{Result, ensure};
use clap::Args;
use mica_gen::Manifest;
use mica_tests::{clock, command, mica, shell, tools};
use serde_json::json;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// Lengths of chains.
const LAYERS: Usual<&[u32]> = Usual::new(&[1, 100, 1000], &[1, 100]);
/// Sizes of disks of one layer, in GiB.
const SIZES_GIB: Usual<&[u32]> = Usual::new(&[50, 1024, 8192], &[50, 8192]);
const REPEATS: Usual<u32> = Usual::new(5, 2);
/// Snapshots of each run.
const SNAPSHOTS: Usual<u32> = Usual::new(20, 5);
const GIB: Usual<u64> = Usual::new(50, 50);
/// The share of a disk's clusters that have a place.
const FILL: &str = "0.0005";
/// For the guest to work undisturbed between two snapshots.
const PAUSE: Duration = Duration::from_millis(50);
/// Snapshots whose syncs are counted.
const COUNTED: u32 = 5;

/// The names of the parts.
const BY_LAYERS: &str = "layers";
const BY_SIZE: &str = "sizes";
const SYNCS: &str = "syncs";
const CLONES: &str = "clones";
/// What clones beside mica.
const QEMU_IMG: &str = "qemu-img";

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    /// The longest chains.
    #[arg(long, default_value_t = 1000)]
    layers_max: u32,
    #[command(flatten)]
    extent: Extent,
}

/// A chain without data, and its active layer.
struct Made {
    folder: TempDir,
    top: PathBuf,
}

impl Made {
    fn new(work: &Path, layers: u32, gib: u64) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("chain-").tempdir_in(work)?;
        let (count, size) = (layers.to_string(), format!("{gib}G"));
        let words = ["gen", "chain", "-n", &count, "-s", &size, "--fill", FILL, "--no-data"];
        let done = command::finish(Command::new(mica::binary()).args(words).arg(folder.path()));
        ensure!(done.status.success(), "{done}");
        let top = folder.path().join(Manifest::load(folder.path())?.top);
        Ok(Self { folder, top })
    }

    /// Its layers with an index, as a server would leave them.
    fn indexed(self) -> Result<Self> {
        let build = ["index", "build"];
        let done = command::finish(Command::new(mica::binary()).args(build).arg(&self.top));
        ensure!(done.status.success(), "{done}");
        Ok(self)
    }
}

/// Measures and writes it all.
pub(crate) fn run(options: &Options) -> Result<()> {
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let work = options.extent.folders.work()?;
    let mut samples = Samples::default();
    let repeats = options.extent.repeats(REPEATS);
    let gib = options.extent.gib(GIB);
    for &layers in options.extent.pick(LAYERS).iter().filter(|count| **count <= options.layers_max)
    {
        println!("\n== {layers} layers");
        for repeat in 0..repeats {
            each_once(BY_LAYERS, &peers(), layers, repeat, &mut samples, |peer, sample| {
                taken(options, peer, &Made::new(work.path(), layers, gib)?.indexed()?, sample)
            });
            clones(&Made::new(work.path(), layers, gib)?, layers, repeat, &mut samples);
        }
    }
    for &size in options.extent.pick(SIZES_GIB) {
        println!("\n== {size} GiB");
        for repeat in 0..repeats {
            each_once(BY_SIZE, &peers(), size, repeat, &mut samples, |peer, sample| {
                taken(options, peer, &Made::new(work.path(), 1, size.into())?, sample)
            });
        }
    }
    each_once(SYNCS, &peers(), 1, 0, &mut samples, |peer, sample| {
        synced(peer, &Made::new(work.path(), 1, gib)?, sample)
    });
    write(options, &samples)
}

fn peers() -> Vec<Peer> {
    let mut all = vec![Peer::mica(&[])];
    match tools::QEMU_STORAGE_DAEMON.is_there() {
        true => all.push(Peer::qemu_storage_daemon(&[])),
        false => println!("{QEMU_STORAGE_DAEMON} is NOT INSTALLED and not measured"),
    }
    all
}

/// Takes snapshots while a guest writes, and one when it does not.
fn taken(options: &Options, peer: &Peer, made: &Made, sample: &mut Sample) -> Result<()> {
    let control = made.folder.path().join("control");
    let running = asking::peer(peer, &control).start(&made.top, "qcow2", &[])?;
    let mut asker = Asker::connect(peer, &control, &made.top)?;
    let writer = Worker::start(&running.server, Work::SteadyWrite, 7)?;
    clock::sleep(PAUSE);
    let mut asked = Vec::new();
    for number in 0..options.extent.pick(SNAPSHOTS) {
        let start = clock::now();
        asker.snapshot(&made.folder.path().join(format!("s{number}.qcow2")))?;
        asked.push((start, start.elapsed()));
        clock::sleep(PAUSE);
    }
    let requests = writer.stop()?;
    let (mut idle, mut pauses) = (Histogram::default(), vec![Duration::ZERO; asked.len()]);
    for (start, took) in &requests {
        let end = *start + *took;
        let during = asked.iter().position(|(asked, for_)| *start < *asked + *for_ && *asked < end);
        match during {
            Some(at) => pauses[at] = pauses[at].max(*took),
            None => idle.add(*took),
        }
    }
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let asked = asked.iter().map(|(_, took)| ms(*took));
    sample.put("caller_ms", median(asked.clone()).unwrap_or(f64::NAN));
    sample.put("caller_max_ms", asked.fold(0.0, f64::max));
    sample.put("pause_ms", median(pauses.iter().copied().map(ms)).unwrap_or(f64::NAN));
    sample.put("pause_max_ms", pauses.iter().copied().map(ms).fold(0.0, f64::max));
    sample.put("idle_p50_ms", idle.quantile_us(0.5) / 1e3);
    sample.put("idle_p99_ms", idle.quantile_us(0.99) / 1e3);
    // Nobody writes to this one.
    let last = made.folder.path().join("last.qcow2");
    asker.snapshot(&last)?;
    sample.put("space_kib", ratio(fs::metadata(&last)?.blocks(), 2));
    running.stop()?;
    let check = command::run(QEMU_IMG, ["check".as_ref(), last.as_os_str()]);
    ensure!(check.status.success(), "{check}");
    Ok(())
}

/// Counts how often something is made durable for a snapshot after a write.
fn synced(peer: &Peer, made: &Made, sample: &mut Sample) -> Result<()> {
    let control = made.folder.path().join("control");
    let log = made.folder.path().join("calls");
    let calls = log.display().to_string();
    // As a grandchild, strace leaves the server as our child, which can be stopped. What is asked
    // for through a ring is no system call of its own: nobody gets one.
    let trace = [
        tools::STRACE.program,
        "-D",
        "-f",
        "-qq",
        "-e",
        "trace=fdatasync,fsync,sync_file_range,syncfs",
        "-e",
        "inject=io_uring_setup:error=EPERM",
        "-o",
        &calls,
    ];
    let running = asking::peer(peer, &control).start(&made.top, "qcow2", &trace)?;
    let mut asker = Asker::connect(peer, &control, &made.top)?;
    // Calls that are interrupted have two lines, of which one says how they ended.
    let count = || {
        let text = fs::read_to_string(&log).unwrap_or_default();
        text.lines().filter(|line| line.contains("sync") && line.contains("= 0")).count()
    };
    let mut most = 0;
    for number in 0..COUNTED {
        guest::write_once(&running.server)?;
        // What the background does for the previous one is over.
        clock::sleep(Duration::from_millis(500));
        let before = count();
        asker.snapshot(&made.folder.path().join(format!("s{number}.qcow2")))?;
        most = most.max(count() - before);
    }
    sample.put("syncs", ratio(most as u64, 1));
    running.stop().map(drop)
}

/// Clones by mica, and by `qemu-img create -b`, of one chain.
fn clones(made: &Made, layers: u32, repeat: u32, samples: &mut Samples) {
    for server in in_order(&[MICA, QEMU_IMG], repeat) {
        let mut sample = Sample::new(CLONES, server, layers, repeat);
        let new = made.folder.path().join(format!("{server}.qcow2"));
        note(&mut sample, |sample| {
            let mut clone = match *server {
                MICA => Command::new(mica::binary()),
                _ => Command::new(QEMU_IMG),
            };
            match *server {
                MICA => clone.args(["clone", "-q"]).arg(&made.top).arg(&new),
                _ => clone
                    .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
                    .args([&made.top, &new]),
            };
            let done = command::finish(&mut clone);
            ensure!(done.status.success(), "{done}");
            sample.put("clone_ms", done.wall.as_secs_f64() * 1e3);
            Ok(())
        });
        samples.push(sample);
    }
}

fn write(options: &Options, samples: &Samples) -> Result<()> {
    let machine = Machine::query()?;
    let name = format!("{}-snapshot", machine.date);
    let out = options.extent.folders.out()?;
    let mut plots = Plots::new(&out, &name);
    for (what, part, x, title, metric) in [
        ("caller-layers", BY_LAYERS, "layers", "What the caller waits for", "caller_ms"),
        ("pause-layers", BY_LAYERS, "layers", "The guest's slowest write", "pause_ms"),
        ("caller-sizes", BY_SIZE, "GiB", "What the caller waits for", "caller_ms"),
        ("clones", CLONES, "layers", "A clone", "clone_ms"),
    ] {
        let x = (x, Scale::Log);
        let lines = lines(samples, part, metric);
        plots.put(what, title, Chart { title, x, y: ("ms", Scale::Log), lines }.draw())?;
    }
    let plots = plots.written();
    let goals = goals::judge(samples);
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "quick": options.extent.quick,
        "gib": options.extent.gib(GIB),
        "snapshots": options.extent.pick(SNAPSHOTS),
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.extent.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &plots });
    options.extent.folders.put(&name, &document, &page)
}

/// The medians of a figure, a line for each server.
fn lines(samples: &Samples, part: &str, metric: &str) -> Vec<Line> {
    let of = |server: String| {
        let point =
            |layers: u32| Some([f64::from(layers), samples.median(part, &server, layers, metric)?]);
        let points = samples.layers(part).into_iter().filter_map(point).collect();
        Line { name: server, points }
    };
    samples.servers(part).into_iter().map(of).collect()
}

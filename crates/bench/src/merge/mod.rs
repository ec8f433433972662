//! `cargo xtask bench merge`: merges of the layers of a served chain beside qemu-storage-daemon:
//! what a guest that reads notices, how long they take without a guest and under one that writes as
//! much as it can, and beside `qemu-img convert` of the same chain.

mod goals;
mod report;

use super::machine::Machine;
use super::page::Found;
use super::peers::{Peer, QEMU_STORAGE_DAEMON, Running};
use super::samples::{Sample, Samples};
use super::turns::each_once;
use crate::extent::{Extent, Usual};
use crate::live::asking::{self, Asker};
use crate::live::guest::{Work, Worker};
use crate::load::{Histogram, ratio};
use anyhow::{Result, ensure};
use clap::Args;
use mica_gen::Manifest;
use mica_tests::{clock, command, mica, shell, tools};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const LAYERS: Usual<u32> = Usual::new(30, 5);
const REPEATS: Usual<u32> = Usual::new(3, 1);
const GIB: Usual<u64> = Usual::new(8, 1);
/// The share of a disk's clusters that have a place.
const FILL: &str = "0.3";
/// For how long the guest works undisturbed before the merge.
const QUIET: Usual<f64> = Usual::new(2.0, 0.5);
/// Guests that write as much as they can.
const WRITERS: u64 = 4;

/// The names of the parts.
const STREAM: &str = "stream";
const COMMIT: &str = "commit";
const QEMU_IMG: &str = "qemu-img";

/// What to measure, and how long.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    extent: Extent,
}

/// A chain with data. A merge uses it up.
struct Made {
    folder: TempDir,
    top: PathBuf,
    /// The layer beneath the active one.
    beneath: PathBuf,
}

impl Made {
    fn new(options: &Options, work: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("chain-").tempdir_in(work)?;
        let count = options.extent.pick(LAYERS);
        let (layers, size) = (count.to_string(), format!("{}G", options.extent.gib(GIB)));
        let words = ["gen", "chain", "-n", &layers, "-s", &size, "--fill", FILL];
        let done = command::finish(Command::new(mica::binary()).args(words).arg(folder.path()));
        ensure!(done.status.success(), "{done}");
        let manifest = Manifest::load(folder.path())?;
        let top = folder.path().join(manifest.top);
        let beneath = folder.path().join(format!("layer-{:04}.qcow2", count - 2));
        ensure!(beneath.exists(), "{} is missing", beneath.display());
        Ok(Self { folder, top, beneath })
    }
}

/// Measures and writes it all.
pub(crate) fn run(options: &Options) -> Result<()> {
    shell::run(&mut shell::cargo(["build", "--release", "--package", "mica"]))?;
    let work = options.extent.folders.work()?;
    let mut samples = Samples::default();
    let mut peers = vec![Peer::mica(&[])];
    match tools::QEMU_STORAGE_DAEMON.is_there() {
        true => peers.push(Peer::qemu_storage_daemon(&[])),
        false => println!("{QEMU_STORAGE_DAEMON} is NOT INSTALLED and not measured"),
    }
    let layers = options.extent.pick(LAYERS);
    for repeat in 0..options.extent.repeats(REPEATS) {
        for part in [STREAM, COMMIT] {
            println!("\n== {part}");
            each_once(part, &peers, layers, repeat, &mut samples, |peer, sample| {
                let make = || Made::new(options, work.path());
                let made = make()?;
                sample.put("convert_s", converted(&made)?);
                noticed(options, peer, &made, part, sample)?;
                drop(made);
                let idle = merged(peer, &make()?, part, 0)?;
                let loaded = merged(peer, &make()?, part, WRITERS)?;
                sample.put("idle_s", idle);
                sample.put("loaded_s", loaded);
                sample.put("loaded_ratio", loaded / idle);
                Ok(())
            });
        }
    }
    write(options, &samples)
}

/// Seconds that `qemu-img convert` takes for the chain.
fn converted(made: &Made) -> Result<f64> {
    let flat = made.folder.path().join("flat.qcow2");
    let mut convert = Command::new(QEMU_IMG);
    convert.args(["convert", "-f", "qcow2", "-O", "qcow2"]).args([&made.top, &flat]);
    let done = command::finish(&mut convert);
    ensure!(done.status.success(), "{done}");
    std::fs::remove_file(&flat)?;
    Ok(done.wall.as_secs_f64())
}

/// Merges.
fn merge(asker: &mut Asker, made: &Made, part: &str) -> Result<Duration> {
    let start = clock::now();
    match part {
        STREAM => asker.stream()?,
        _ => asker.commit(&made.beneath)?,
    }
    Ok(start.elapsed())
}

fn started(peer: &Peer, made: &Made) -> Result<(Running, Asker)> {
    let control = made.folder.path().join("control");
    let running = asking::peer(peer, &control).start(&made.top, "qcow2", &[])?;
    let asker = Asker::connect(peer, &control, &made.top)?;
    Ok((running, asker))
}

/// Merges under a guest that reads; and what that notices.
fn noticed(
    options: &Options,
    peer: &Peer,
    made: &Made,
    part: &str,
    sample: &mut Sample,
) -> Result<()> {
    let (running, mut asker) = started(peer, made)?;
    let guest = Worker::start(&running.server, Work::Read, 7)?;
    let quiet = options.extent.time(QUIET);
    clock::sleep(quiet);
    let start = clock::now();
    let took = merge(&mut asker, made, part)?;
    let (mut before, mut meanwhile) = (Histogram::default(), Histogram::default());
    for (at, latency) in guest.stop()? {
        match at + latency < start {
            true => before.add(latency),
            false => meanwhile.add(latency),
        }
    }
    running.stop()?;
    let check = command::run(QEMU_IMG, ["check".as_ref(), made.top.as_os_str()]);
    ensure!(check.status.success(), "{check}");
    let ms = |histogram: &Histogram, part| histogram.quantile_us(part) / 1e3;
    let convert = sample.metrics.get("convert_s").copied().unwrap_or(f64::NAN);
    sample.put("took_s", took.as_secs_f64());
    sample.put("took_ratio", took.as_secs_f64() / convert);
    sample.put("before_p99_ms", ms(&before, 0.99));
    sample.put("p99_ms", ms(&meanwhile, 0.99));
    sample.put("p99_ratio", ms(&meanwhile, 0.99) / ms(&before, 0.99));
    sample.put("max_ms", meanwhile.max_us() / 1e3);
    let before_per_second = ratio(before.total(), 1) / quiet.as_secs_f64();
    let per_second = ratio(meanwhile.total(), 1) / took.as_secs_f64();
    sample.put("reads_ratio", per_second / before_per_second);
    Ok(())
}

/// Seconds that a merge takes while so many guests write as much as they can.
fn merged(peer: &Peer, made: &Made, part: &str, writers: u64) -> Result<f64> {
    let (running, mut asker) = started(peer, made)?;
    let start = |seed| Worker::start(&running.server, Work::Write, seed);
    let guests: Vec<_> = (0..writers).map(start).collect::<Result<_>>()?;
    let took = merge(&mut asker, made, part)?;
    for guest in guests {
        guest.stop()?;
    }
    running.stop()?;
    Ok(took.as_secs_f64())
}

fn write(options: &Options, samples: &Samples) -> Result<()> {
    let machine = Machine::query()?;
    let name = format!("{}-merge", machine.date);
    let goals = goals::judge(samples);
    let document = json!({
        "machine": machine.facts,
        "date": machine.date,
        "quick": options.extent.quick,
        "gib": options.extent.gib(GIB),
        "layers": options.extent.pick(LAYERS),
        "fill": FILL,
        "writers": WRITERS,
        "goals": goals,
        "samples": samples,
    });
    let (machine, quick) = (&machine.facts, options.extent.quick);
    let page = report::page(&Found { machine, quick, samples, goals: &goals, plots: &[] });
    options.extent.folders.put(&name, &document, &page)
}

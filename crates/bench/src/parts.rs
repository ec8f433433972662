//! The parts of the bench: which servers, on what, how often.

use super::chains::{Chain, Context};
use super::measure::{self, Cold};
use super::peers::{MICA, Peer, all_installed};
use super::samples::{Sample, Samples};
use super::turns::{each_once, note};
use crate::load::{null, ratio};
use anyhow::{Context as _, Result};
use clap::ValueEnum;
use mica_gen::{ChainSpec, DataMode};
use mica_tests::{command, tools};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Layers at which budgets are compared: few enough for QEMU to open each by name.
const BUDGET_LAYERS: u32 = 100;
/// Budgets, for the whole chain.
const BUDGETS: &[u64] = &[256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 32 << 20];
/// Open files under which a chain must still work.
const HANDLES_LIMIT: &str = "--nofile=256:256";
/// Length of the raw file and of the null disk.
const CEILING_BYTES: u64 = 4 << 30;
/// Length of the disk on which the paper counts its index.
const LARGE_DISK_BYTES: u64 = 50 << 30;

/// A part of the bench.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// Every server on every chain, warm.
    Warm,
    /// The same with the page cache dropped (root only).
    Cold,
    /// mica on chains that it has never seen.
    First,
    /// Speed by the memory that the map may use.
    Budget,
    /// Under a limit of 256 open files.
    Handles,
    /// Space that the index takes on disk.
    IndexSize,
    /// The most that the protocol and the device allow: raw files, null disks, the load generator.
    Ceiling,
}

/// All that is measured on chains. All lengths are made first, and then measured in turns: a
/// machine whose speed drifts slows every length alike.
pub(super) fn of_chains(
    context: &Context<'_>,
    layers: &[u32],
    repeats: impl Fn(u32) -> u32,
    wanted: impl Fn(Part) -> bool,
    samples: &mut Samples,
) -> Result<()> {
    let on_chain =
        [Part::Warm, Part::Cold, Part::First, Part::Budget, Part::Handles, Part::IndexSize];
    if !on_chain.into_iter().any(&wanted) {
        return Ok(());
    }
    let mut chains = Vec::new();
    for &layers in layers {
        println!("\n== {layers} layers");
        let chain = Chain::make(context, ChainSpec { layers, ..context.spec.clone() })?;
        if wanted(Part::First) {
            first(context, &chain, repeats(layers), samples)?;
        }
        build_index(context, &chain, samples);
        chains.push(chain);
    }
    let peers = Peer::for_chains();
    if wanted(Part::Warm) {
        println!("\n== warm");
        let measure = |peer: &Peer, chain: &Chain, sample: &mut Sample| {
            measure::warm(peer, chain.subject(context), sample)
        };
        in_turns("warm", &peers, &chains, &repeats, samples, measure);
    }
    if wanted(Part::Cold) {
        println!("\n== cold");
        cold(context, &chains, &peers, &repeats, samples);
    }
    let few = |layers| repeats(layers).min(3);
    let for_budgets = chains.iter().find(|chain| chain.layers == BUDGET_LAYERS);
    if let (true, Some(chain)) = (wanted(Part::Budget), for_budgets) {
        println!("\n== budgets");
        budgets(context, chain, few, samples);
    }
    if wanted(Part::Handles) {
        println!("\n== handles");
        let limit = ["prlimit", HANDLES_LIMIT];
        let measure = |peer: &Peer, chain: &Chain, sample: &mut Sample| {
            measure::random_only(peer, chain.subject(context), &limit, sample)
        };
        in_turns("handles", &[Peer::mica(&[])], &chains, few, samples, measure);
    }
    Ok(())
}

/// Rebuilds the index and records what that took.
fn build_index(context: &Context<'_>, chain: &Chain, samples: &mut Samples) {
    let mut build = Sample::new("index", MICA, chain.layers, 0);
    note(&mut build, |sample| {
        chain.index("drop")?;
        sample.put("build_s", chain.index("build")?.as_secs_f64());
        sample.put("index_bytes", ratio(chain.index_bytes()?, 1));
        sample.put("copied_tables_bytes", copied_tables_bytes(&context.spec, chain.layers));
        sample.put("walk_lookups_per_read", chain.walk_lookups());
        Ok(())
    });
    samples.push(build);
}

/// Space that the paper's method takes: a copy of all L2 tables in every layer.
fn copied_tables_bytes(spec: &ChainSpec, layers: u32) -> f64 {
    let clusters = spec.disk_bytes.div_ceil(spec.cluster_bytes);
    let tables = clusters.div_ceil(spec.cluster_bytes / 8);
    ratio(tables * spec.cluster_bytes * u64::from(layers), 1)
}

/// mica on a chain without any index, which it then writes.
fn first(context: &Context<'_>, chain: &Chain, repeats: u32, samples: &mut Samples) -> Result<()> {
    for repeat in 0..repeats.min(3) {
        chain.index("drop")?;
        let mut sample = Sample::new("first", MICA, chain.layers, repeat);
        let subject = chain.subject(context);
        note(&mut sample, |sample| measure::without_index(&Peer::mica(&[]), subject, sample));
        samples.push(sample);
    }
    Ok(())
}

fn cold(
    context: &Context<'_>,
    chains: &[Chain],
    peers: &[Peer],
    repeats: impl Fn(u32) -> u32,
    samples: &mut Samples,
) {
    if let Err(error) = drop_caches() {
        println!("cold: not measured: {error}");
        return;
    }
    in_turns("cold", peers, chains, repeats, samples, |peer, chain, sample| {
        for what in [Cold::Random, Cold::Sequential] {
            drop_caches()?;
            measure::cold(peer, chain.subject(context), what, sample)?;
        }
        Ok(())
    });
}

/// Speed by memory for the map. QEMU has a cache per layer, so its budget is divided.
fn budgets(
    context: &Context<'_>,
    chain: &Chain,
    repeats: impl Fn(u32) -> u32,
    samples: &mut Samples,
) {
    for &budget in BUDGETS {
        let text = budget.to_string();
        let mica = Peer::mica(&["--index-cache", &text]);
        let mut peers = vec![mica];
        // A cache of QEMU's holds at least two slices of 4 KiB.
        let per_layer = (budget / u64::from(chain.layers)).max(8 << 10);
        if per_layer * u64::from(chain.layers) <= budget && all_installed(&[tools::QEMU_NBD]) {
            peers.push(Peer::qemu_nbd(&[]).on_node(&json_chain(chain, per_layer)));
        }
        let part = format!("budget-{budget}");
        let chains = std::slice::from_ref(chain);
        in_turns(&part, &peers, chains, &repeats, samples, |peer, chain, sample| {
            measure::random_only(peer, chain.subject(context), &[], sample)
        });
    }
}

/// The budgets in MiB, and the parts that they are measured in.
pub(super) fn budgets_measured() -> impl Iterator<Item = (f64, String)> {
    BUDGETS.iter().map(|&budget| (ratio(budget, 1 << 20), format!("budget-{budget}")))
}

/// The chain as one QEMU block-device name, each layer with an L2 cache of `bytes`.
fn json_chain(chain: &Chain, bytes: u64) -> String {
    let folder = chain.folder().display();
    (0..chain.layers).fold(String::new(), |below, layer| {
        let backing = if below.is_empty() { "null".to_owned() } else { below };
        format!(
            "{{\"driver\":\"qcow2\",\"l2-cache-size\":{bytes},\"l2-cache-entry-size\":4096,\
             \"file\":{{\"driver\":\"file\",\"filename\":\"{folder}/layer-{layer:04}.qcow2\"}},\
             \"backing\":{backing}}}"
        )
    })
}

/// What the protocol and the device allow: a null disk behind the protocol, and a raw file.
pub(super) fn ceiling(context: &Context<'_>, repeats: u32, samples: &mut Samples) -> Result<()> {
    println!("\n== ceilings");
    for repeat in 0..repeats {
        let mut sample = Sample::new("null", "load generator alone", 1, repeat);
        note(&mut sample, |sample| {
            sample.put("random_32_per_s", null::ceiling(32, context.random)?.per_second());
            Ok(())
        });
        samples.push(sample);
    }
    let size = PathBuf::from(CEILING_BYTES.to_string());
    let mut peers = vec![Peer::mica(&[])];
    if all_installed(&[tools::NBDKIT]) {
        peers.push(Peer::nbdkit(&["null", &CEILING_BYTES.to_string()]));
    }
    for repeat in 0..repeats {
        each_once("null", &peers, 1, repeat, samples, |peer, sample| {
            measure::random_only(peer, context.unverified(&size, "null"), &[], sample)
        });
    }
    raw(context, repeats, samples)
}

/// Random reads of a raw file past the page cache, by servers and by fio on the file itself.
///
/// # Errors
/// If there is no room for the file.
pub(super) fn raw(context: &Context<'_>, repeats: u32, samples: &mut Samples) -> Result<()> {
    let raw = tempfile::Builder::new().prefix("raw-").tempfile_in(context.work)?;
    fill(raw.as_file())?;
    let raw = raw.path();
    let mut peers = vec![Peer::mica(&["--cache", "none"])];
    if all_installed(&[tools::QEMU_NBD]) {
        peers.push(Peer::qemu_nbd(&["--cache=none", "--aio=io_uring"]));
    }
    let fio_there = all_installed(&[tools::FIO]);
    for repeat in 0..repeats {
        // fio takes its turn before and after the servers: devices warm up too.
        let fio_turn = |samples: &mut Samples| {
            let mut sample = Sample::new("raw", "fio on the file", 1, repeat);
            note(&mut sample, |sample| fio(raw, context.random, sample));
            samples.push(sample);
        };
        if fio_there && repeat % 2 == 0 {
            fio_turn(samples);
        }
        each_once("raw", &peers, 1, repeat, samples, |peer, sample| {
            measure::random_only(peer, context.unverified(raw, "raw"), &[], sample)
        });
        if fio_there && repeat % 2 == 1 {
            fio_turn(samples);
        }
    }
    Ok(())
}

/// Random 4 KiB reads by fio with io_uring, past the page cache, 32 in flight.
fn fio(file: &Path, time: Duration, sample: &mut Sample) -> Result<()> {
    let seconds = time.as_secs().max(1);
    let name = format!("--filename={}", file.display());
    let runtime = format!("--runtime={seconds}");
    let arguments = [
        "--name=ceiling",
        &name,
        &runtime,
        "--ioengine=io_uring",
        "--direct=1",
        "--readonly",
        "--rw=randread",
        "--bs=4k",
        "--iodepth=32",
        "--time_based",
        "--norandommap",
        "--randrepeat=0",
        "--output-format=json",
    ];
    let figures = command::run(tools::FIO.program, arguments).json();
    let read = &figures["jobs"][0]["read"];
    sample.put("random_32_per_s", read["iops"].as_f64().unwrap_or(0.0));
    Ok(())
}

/// Fills `file` with bytes that no layer of storage can compress.
fn fill(mut file: &File) -> Result<()> {
    let mut rng = mica_gen::Rng::new(7);
    let mut piece = vec![0; 4 << 20];
    for _ in 0..CEILING_BYTES / piece.len() as u64 {
        for word in piece.as_chunks_mut::<8>().0 {
            *word = rng.next_u64().to_le_bytes();
        }
        file.write_all(&piece)?;
    }
    file.sync_all()?;
    Ok(())
}

/// Space that the index takes for a large disk, without its data.
pub(super) fn index_size(
    context: &Context<'_>,
    layers: &[u32],
    samples: &mut Samples,
) -> Result<()> {
    let Some(&layers) = layers.iter().max() else { return Ok(()) };
    println!("\n== index of a large disk");
    let spec = ChainSpec {
        layers,
        disk_bytes: LARGE_DISK_BYTES,
        data: DataMode::Holes,
        ..context.spec.clone()
    };
    let mut sample = Sample::new("index-50g", MICA, layers, 0);
    note(&mut sample, |sample| {
        let chain = Chain::make(context, spec.clone())?;
        sample.put("build_s", chain.index("build")?.as_secs_f64());
        sample.put("index_bytes", ratio(chain.index_bytes()?, 1));
        sample.put("copied_tables_bytes", copied_tables_bytes(&spec, layers));
        Ok(())
    });
    samples.push(sample);
    Ok(())
}

/// Runs all `peers` on all `chains` in turns, as often as `repeats` says for a length, every other
/// time in reverse order.
fn in_turns(
    part: &str,
    peers: &[Peer],
    chains: &[Chain],
    repeats: impl Fn(u32) -> u32,
    samples: &mut Samples,
    measure: impl Fn(&Peer, &Chain, &mut Sample) -> Result<()>,
) {
    let most = chains.iter().map(|chain| repeats(chain.layers)).max().unwrap_or(0);
    for repeat in 0..most {
        let mut order: Vec<_> = chains.iter().collect();
        if repeat % 2 == 1 {
            order.reverse();
        }
        for chain in order.into_iter().filter(|chain| repeat < repeats(chain.layers)) {
            each_once(part, peers, chain.layers, repeat, samples, |peer, sample| {
                measure(peer, chain, sample)
            });
        }
    }
}

/// Whether the page cache can be dropped here.
pub(super) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    fs::write(Path::new("/proc/sys/vm/drop_caches"), "3").context("dropping the page cache")
}

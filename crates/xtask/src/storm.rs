//! The storm over random chains, from the command line: its options, its progress, and its results.

use crate::setup;
use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, ValueEnum};
use mica_tests::clock;
use mica_tests::shell;
use mica_tests::storm::{self, Kind, Kinds, Summary};
use mica_tests::tools;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

/// How often progress is printed.
const PAUSE: Duration = Duration::from_millis(500);
/// Set if mounts are the program's own.
const ENTERED: &str = "MICA_STORM_NAMESPACE";
/// Lines of a fault that are shown.
const LINES_MAX: usize = 12;

/// Options of the storm.
#[derive(Args)]
pub(crate) struct Options {
    /// Number of chains, each with a seed of its own.
    #[arg(long, default_value_t = 100)]
    chains: u64,
    /// The seed of the first chain; the time by default.
    #[arg(long)]
    seed: Option<u64>,
    /// Start no new chain after this many minutes.
    #[arg(long)]
    minutes: Option<f64>,
    /// Use only these kinds of shapes and events; `--kinds` lists them. Naming only events keeps
    /// all shapes, and vice versa.
    #[arg(long, value_delimiter = ',', value_name = "KINDS")]
    only: Vec<String>,
    /// Leave these kinds out.
    #[arg(long, value_delimiter = ',', value_name = "KINDS")]
    without: Vec<String>,
    /// List the kinds and do nothing.
    #[arg(long)]
    kinds: bool,
    /// Chains at the same time; as many as processors by default.
    #[arg(long)]
    threads: Option<u64>,
    /// Repeat each chain this many times: what happens within a step differs.
    #[arg(long, default_value_t = 1)]
    repeat: u64,
    /// Where the files of chains that went wrong are kept.
    #[arg(long, default_value = "target/storm", value_name = "DIR")]
    keep: PathBuf,
    /// How the result is printed.
    #[arg(long, default_value = "human")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Human,
    Json,
}

/// Runs it; fails if anything was wrong.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.kinds {
        Kind::ALL.iter().for_each(|kind| println!("{:14}{}", kind.name(), kind.about()));
        return Ok(());
    }
    let kinds = Kinds::parse(&options.only, &options.without);
    let kinds = kinds.map_err(|name| anyhow!("unknown kind {name:?}: --kinds lists them"))?;
    if !tools::missing(&storm::TOOLS).is_empty() {
        setup::run()?;
    }
    enter_own_namespace();
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let storm = storm::Options {
        binary: binary()?,
        chains: options.chains.max(1),
        repeat: options.repeat,
        seed: options.seed.map_or_else(seed_of_now, Ok)?,
        limit: options.minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0)),
        kinds,
        threads: options.threads.unwrap_or(processors),
        keep: std::path::absolute(&options.keep)?,
    };
    let (summary, start) = (Summary::default(), clock::now());
    let outcome = watch(&storm, &summary);
    let seconds = start.elapsed().as_secs_f64();
    match options.output {
        Output::Human => print_summary(&storm, &summary, seconds),
        Output::Json => println!("{:#}", as_json(&storm, &summary, seconds)),
    }
    outcome?;
    let faults = summary.findings().len();
    ensure!(faults == 0, "{faults} chains went wrong");
    Ok(())
}

/// Restarts this program with its own mount namespace, so that no mount remains, however it ends.
/// If that is not allowed they are unmounted at its end.
fn enter_own_namespace() {
    if !rustix::process::geteuid().is_root() || std::env::var_os(ENTERED).is_some() {
        return;
    }
    let Ok(program) = std::env::current_exe() else { return };
    let mut again = Command::new("unshare");
    again.args(["--mount", "--propagation", "private", "--"]).arg(program);
    let error = again.args(std::env::args_os().skip(1)).env(ENTERED, "1").exec();
    eprintln!("mounts are seen by others: unshare: {error}");
}

/// The program named by `MICA_BIN`, else the release build, built now.
fn binary() -> Result<PathBuf> {
    if let Some(binary) = std::env::var_os("MICA_BIN") {
        // Servers run elsewhere.
        return std::path::absolute(binary).context("MICA_BIN");
    }
    let build = ["build", "--quiet", "--release", "--package", "mica"];
    let status = shell::cargo(build).status()?;
    ensure!(status.success(), "building mica: {status}");
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    Ok(target.unwrap_or_else(|| shell::root().join("target")).join("release/mica"))
}

fn seed_of_now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs())
}

/// Runs the storm; shows its progress on a terminal, and faults everywhere.
fn watch(storm: &storm::Options, summary: &Summary) -> Result<()> {
    let is_terminal = std::io::stderr().is_terminal();
    let (ended, end) = mpsc::channel();
    let start = clock::now();
    std::thread::scope(|scope| {
        let runner = scope.spawn(move || {
            let outcome = storm::run(storm, summary);
            // The other end stays open for as long as this runs.
            let _ = ended.send(());
            outcome
        });
        let mut told = 0;
        while end.recv_timeout(PAUSE) == Err(mpsc::RecvTimeoutError::Timeout) {
            tell_new(summary, &mut told, is_terminal);
            if is_terminal {
                let counts = &summary.counts;
                eprint!(
                    "\r\x1b[K{} of {} chains, {} lives, {} kills, {} requests, {} faults, {:.0?}",
                    counts.chains.get(),
                    storm.chains * storm.repeat.max(1),
                    counts.lives.get(),
                    counts.kills.get(),
                    counts.requests.get(),
                    told,
                    start.elapsed()
                );
                // A failure to print means that nobody is watching.
                let _ = std::io::stderr().flush();
            }
        }
        tell_new(summary, &mut told, is_terminal);
        if is_terminal {
            eprintln!("\r\x1b[K");
        }
        runner.join().map_err(|_| anyhow!("the storm panicked"))?
    })
}

fn tell_new(summary: &Summary, told: &mut usize, is_terminal: bool) {
    let findings = summary.findings.lock();
    for finding in findings.iter().skip(*told) {
        let clear = if is_terminal { "\r\x1b[K" } else { "" };
        eprintln!("{clear}FAULT {}: {}", finding.wrong.name(), shortened(&finding.what));
        eprintln!("  steps: {}", finding.kept.join("run/steps.log").display());
        eprintln!("  again: {}", finding.replay);
    }
    *told = findings.len();
}

fn shortened(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    let shown = lines.get(..LINES_MAX).unwrap_or(&lines);
    let more = if lines.len() > LINES_MAX { "\n  …" } else { "" };
    shown.join("\n") + more
}

/// Faults by what is wrong.
fn by_kind(summary: &Summary) -> BTreeMap<&'static str, Vec<u64>> {
    let mut kinds: BTreeMap<&'static str, Vec<u64>> = BTreeMap::new();
    for finding in summary.findings() {
        kinds.entry(finding.wrong.name()).or_default().push(finding.seed);
    }
    kinds
}

fn print_summary(storm: &storm::Options, summary: &Summary, seconds: f64) {
    let binary = storm.binary.display();
    println!("{binary}, seeds from {}, {seconds:.0} s", storm.seed);
    for (name, count) in summary.counts.all() {
        println!("{count:>10}  {name}");
    }
    let left_out = summary.left_out.lock();
    left_out.iter().for_each(|what| println!("LEFT OUT: {what}"));
    println!("{:>10}  faults", summary.findings().len());
    for (name, seeds) in by_kind(summary) {
        println!("{:>10}  {name}: seeds {}", seeds.len(), list(&seeds));
    }
}

fn list(seeds: &[u64]) -> String {
    let seeds: Vec<_> = seeds.iter().map(u64::to_string).collect();
    seeds.join(" ")
}

fn as_json(storm: &storm::Options, summary: &Summary, seconds: f64) -> serde_json::Value {
    let counts: serde_json::Map<_, _> = summary
        .counts
        .all()
        .into_iter()
        .map(|(name, count)| (name.to_owned(), json!(count)))
        .collect();
    let findings: Vec<_> = summary
        .findings()
        .iter()
        .map(|finding| {
            json!({
                "seed": finding.seed,
                "wrong": finding.wrong.name(),
                "what": finding.what,
                "replay": finding.replay,
                "kept": Path::new(&finding.kept),
            })
        })
        .collect();
    json!({
        "binary": storm.binary,
        "seed": storm.seed,
        "seconds": seconds,
        "counts": counts,
        "faults": findings.len(),
        "findings": findings,
    })
}

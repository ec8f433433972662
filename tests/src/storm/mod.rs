//! A storm: random chains live through random lives of servers, under clients, with kills (of
//! servers, in takeovers, in resizes), QEMU's own writes, copies put back, failing and full
//! storage, others who look at what is served, and much else ([`Kind`] has all of it); a judge
//! knows what every sector may hold, and which losses somebody has to report (`loss.rs`).
//!
//! A chain follows from its seed, so that the same steps can be had again; what happens within a
//! step is up to the kernel's scheduling, so that a fault may need several runs to come back.
//!
//! ```text
//! run ─▶ threads, each with its places ─▶ chain: build, then a few times
//!          live: start, judge, clients ∥ event, end   life, load, takeover, freeze, served, …
//!          rest: QEMU, copies, timestamps, mica's verbs; judge             rest, layers, copies
//! ```
//!
//! Verbs that are killed on chains at rest, and disks whose layers come and go, have folders of
//! their own (`verbs`, `lineage`), as have volumes, shared addresses and deep chains.
//!
//! Nothing here knows more of mica than its command line and configuration, NBD, what it warns of,
//! and where an image names a log.
//!
//! What it finds was shown by breaking mica on purpose, one break at a time (runs that found it, of
//! all; seeds from 1000 on, two processors, a debug build):
//!
//! | break | `--only` | found | first after |
//! |---|---|---|---|
//! | no sync (`store/src/writable.rs`) | `power-cut` | 12 of 12 | 2 s |
//! | each third sync left out | `power-cut` | 5 of 5 | 2 s |
//! | links synced with their data (`write/commit.rs`) | `power-cut` | 10 of 14 | 2 s |
//! | clients get another export (`nbd/exports.rs`) | `shared` | 30 of 33 | 1 s |
//! | one client in ten does | `shared` | 3 of 13 | 2 s |
//! | `--save` saves nothing (`ctl/saved.rs`) | `shared` | 8 of 16 | 1 s |
//! | commands do not wait for a takeover (`daemon/src/shared.rs`) | `shared` | 14 of 40 | 4 s |
//! | a seal fits whatever its layer became (`index/sidecar.rs`) | `deep` | 11 of 26 | 2 s |
//! | a seal fits whatever the timestamps | `deep` | 9 of 25 | 2 s |
//! | digests of tables are not compared (`index/build.rs`) | `deep` | 4 of 22 | 8 s |
//! | a compacted log lacks a record (`redo/log.rs`) | `chain` | 2 of 13 | 3 s |
//! | it lacks what pages are expected to be | `chain,log-memory,kill` | 1 of 56 | 3 s |
//! | one group in eight lacks a record | `chain` | 5 of 14 | 5 s |
//! | logs are ignored at the start (`redo/recover.rs`) | `chain` | 10 of 15 | 1 s |
//! | the last group of a log is (`redo/found.rs`) | `chain` | 6 of 12 | 2 s |
//! | a close, also for a takeover, writes nothing (`write/commit.rs`) | `chain` | 7 of 14 | 3 s |
//!
//! The same of volumes (`--only volume`, one thread; the first seed is of those that found it):
//!
//! | break | found | first seed |
//! |---|---|---|
//! | a volume is taken without a fence (`volume/src/heads.rs`) | 6 of 14 | 1001 |
//! | a write is answered before the log has it (`volume/src/writing.rs`) | 14 of 21 | 1000 |
//! | collections do not know of clones (`collect/names.rs`) | 3 of 11 | 1002 |
//! | a log goes on whoever wrote the volume since (`volume/src/opening.rs`) | 2 of 11 | 1003 |
//! | a flush with durability=store waits for the log alone (`shared.rs`) | 5 of 14 | 1002 |
//! | a replay leaves the last record out (`volume/src/opening.rs`) | 2 of 8 | 1001 |
//! | a clone is of the last snapshot (`volumes/held.rs`; `volume,live-clone`) | 2 of 12 | 1007 |
//! | a put that failed counts as done (`put.rs`; `volume,sick-store`) | cut short | 1001 |
//!
//! It also found that an import which was killed before it wrote anything left a volume of zeros
//! (seed 1008). Not found was, in 7 seeds, that the part of an image which a later kill leaves is
//! not marked as one.
//!
//! Of layers that come and go (`--only lineage`) it found, in three of its first fifty seeds, that
//! kept states were forgotten by the next server once the layer that they are named after had been
//! merged (`stack/src/keep.rs`).
//!
//! Commands at once found a merge whose client lost sight of it once another one had begun
//! (`cli/src/ctl/merges.rs`; 2 of 57 seeds from 1000 on), and the judge of block status that what
//! lies beyond a short layer had no depth (`daemon/src/contexts.rs`; 5 of these seeds).
//!
//! With keys (`--only lineage,merge,live-snapshot --without siblings,datafile,v2`) one of 40 seeds,
//! 7015, finds a merge that makes a layer name a LUKS image raw (`qcow2/src/layer.rs`).
//!
//! Breaks that these kinds are for (`--only lineage` with them; seeds from 1000 on, a debug build):
//!
//! | break | `--only` | found | first seed |
//! |---|---|---|---|
//! | the base has no depth (`contexts.rs`) | `backup,live-snapshot,block-status` | 7 of 15 | 1000 |
//! | lack of space latches (`write/commit.rs`) | `merge,live-snapshot,full` | 1 of 25 | 1021 |
//! | nobody asks who needs a layer | `merge,backup,live-snapshot,siblings` | 1 of 19 | 1007 |
//! | a snapshot does not see a merge | `merge,live-snapshot,at-once` | 10 of 12 | 1001 |
//! | takeovers leave merges running | `merge,live-snapshot,kill-amid` | 1 of 14 | 1013 |
//!
//! The first of the last three is two breaks: in what serves (`daemon/src/needed.rs`) and in what
//! looks for images (`check_no_overlays`). The second is `check_takes_layers`
//! (`served/merges.rs`), beneath which the chain refuses. The third (`daemon/src/served.rs`) needs
//! that nothing is locked (`rt/src/lock.rs`), and was not found, in 12 chains, while merges ended
//! in milliseconds.
//!
//! Of verbs (`--only verbs,bitmaps,qemu-write,commit-down,overlay`): that a commit does not pass on
//! what bitmaps have (`qcow2/src/chain/merge/bitmaps.rs`), in 4 of 16 chains, the first 1001.
//!
//! Not found are, so far: a log whose place is not noted (`stack/src/redo.rs`; none of 18), a
//! compacted log without its baseline (53), and a record missing from one compaction in eight (56).
//!
//! Not moved is the clock. Linux has namespaces for the time since the start of the machine, but
//! none for the time of day, and setting that would set it for all others here; a library that is
//! put before the system's would miss what does not call it. Timestamps of files are moved
//! instead, which is where the time of day reaches an image.

mod ailments;
mod aim;
mod chain;
mod configured;
mod copies;
mod course;
mod cue;
mod deep;
mod foreign;
mod formats;
mod freeze;
mod judge;
mod keys;
mod kinds;
mod layers;
mod life;
mod lineage;
mod load;
mod log_gone;
mod log_limit;
mod loss;
mod manner;
mod model;
mod parties;
mod peek;
mod place;
mod power_cut;
mod rest;
mod second_disk;
mod served;
mod shape;
mod shared;
mod stamp;
mod state;
mod story;
mod takeover;
mod threads;
mod toml;
mod verbs;
mod volumes;
mod word;
mod world;

pub use kinds::{Kind, Kinds};
pub use story::{Count, Counts, Wrong};

use crate::{clock, command, tools};
use anyhow::{Context, Result, ensure};
use mica_units::Rng;
use parking_lot::Mutex;
use place::Places;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use story::{Fault, Story};
use world::World;

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program under test.
    pub binary: PathBuf,
    /// How many chains; each has a seed of its own, from `seed` on.
    pub chains: u64,
    /// How often each chain is repeated.
    pub repeat: u64,
    /// The seed of the first chain.
    pub seed: u64,
    /// No chain is begun after this.
    pub limit: Option<Duration>,
    /// What may happen.
    pub kinds: Kinds,
    /// Chains at the same time.
    pub threads: u64,
    /// Where the files of chains that went wrong are kept.
    pub keep: PathBuf,
}

/// A chain that went wrong.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Its seed.
    pub seed: u64,
    /// What is wrong, in a word.
    pub wrong: Wrong,
    /// What is wrong, in full.
    pub what: String,
    /// How to have it again.
    pub replay: String,
    /// Where its files and the log of its steps are.
    pub kept: PathBuf,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { wrong, what, replay, kept, .. } = self;
        let steps = kept.join("run").join(story::STORY);
        write!(f, "{}: {what}\n  steps: {}\n  again: {replay}", wrong.name(), steps.display())
    }
}

/// The result of a run.
#[derive(Default, Debug)]
pub struct Summary {
    /// What was done.
    pub counts: Counts,
    /// What went wrong, by seed.
    pub findings: Mutex<Vec<Finding>>,
    /// What could not be done here.
    pub left_out: Mutex<Vec<String>>,
}

impl Summary {
    /// What went wrong so far, by seed.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = self.findings.lock().clone();
        findings.sort_by_key(|finding| finding.seed);
        findings
    }
}

/// The foreign programs that a storm needs.
pub const TOOLS: [tools::Tool; 3] = [tools::QEMU_IMG, tools::QEMU_IO, tools::MKE2FS];

/// Lets the storm go over as many chains as `options` say; `summary` can be looked at meanwhile.
///
/// # Errors
/// If it cannot begin. What goes wrong with a chain is in the summary.
pub fn run(options: &Options, summary: &Summary) -> Result<()> {
    let log_option = log_option(&options.binary)?;
    let (start, next) = (clock::now(), AtomicU64::new(0));
    let all = options.chains * options.repeat.max(1);
    std::thread::scope(|scope| {
        let work = || -> Result<()> {
            let places = Places::new().map_err(|fault| anyhow::anyhow!(fault.what))?;
            tell_left_out(&places, summary);
            course::check(&options.kinds, &places)?;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let is_late = options.limit.is_some_and(|limit| start.elapsed() >= limit);
                if number >= all || is_late {
                    return Ok(());
                }
                let seed = options.seed.wrapping_add(number % options.chains);
                one(options, summary, &places, log_option, seed)?;
            }
        };
        let threads: Vec<_> = (0..options.threads.max(1)).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread of the storm panicked"))??;
        }
        Ok(())
    })
}

fn tell_left_out(places: &Places, summary: &Summary) {
    let mut left_out = summary.left_out.lock();
    if !left_out.is_empty() {
        return;
    }
    if places.grounds().len() < 3 || places.small_log().is_none() {
        let what = "no small file systems can be mounted here: nothing runs full, or freezes";
        left_out.push(what.to_owned());
    }
    if let Some(why) = places.power_lack() {
        left_out.push(format!("no power is cut here, as no disk can be recorded: {why}"));
    }
    if let Some(why) = volumes::second_lack() {
        left_out.push(format!("no other host takes volumes over here: {why}"));
    }
    if !places.limits_threads() {
        left_out.push("no control groups can be made here: no server lacks threads".to_owned());
    }
}

/// One chain; what goes wrong is noted, and its files are kept.
fn one(
    options: &Options,
    summary: &Summary,
    places: &Places,
    log_option: &str,
    seed: u64,
) -> Result<()> {
    places.clear().map_err(|fault| anyhow::anyhow!(fault.what))?;
    let mut rng = Rng::new(seed);
    let ground = rng.choose(&places.grounds());
    let noted = Mutex::new(Vec::new());
    let world = World {
        binary: &options.binary,
        log_option,
        log_limit: None,
        kinds: &options.kinds,
        counts: &summary.counts,
        places,
        story: Story::begin(&places.run())?,
        seed,
        clients: 4,
        run: places.run(),
        log: places.log(),
        images: places.images(ground),
        ground,
        noted: &noted,
    };
    let images = world.images.clone();
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| course::run(world, &mut rng)));
    let outcome = outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(story::trouble(text.unwrap_or_default()))
    });
    summary.counts.chains.add();
    // What ended the chain is most informative.
    let Some(fault) = outcome.err().or_else(|| noted.lock().pop()) else { return Ok(()) };
    let kept = keep(options, places, &images, seed, &fault)?;
    let replay =
        format!("cargo xtask storm --chains 1 --seed {seed}{}", options.kinds.as_options());
    summary.findings.lock().push(Finding {
        seed,
        wrong: fault.wrong,
        what: fault.what,
        replay,
        kept,
    });
    Ok(())
}

/// Keeps what belongs to a chain that went wrong.
fn keep(
    options: &Options,
    places: &Places,
    images: &Path,
    seed: u64,
    fault: &Fault,
) -> Result<PathBuf> {
    std::fs::create_dir_all(&options.keep)?;
    let (mut number, mut kept) = (1, options.keep.join(format!("seed-{seed}")));
    while kept.exists() {
        number += 1;
        kept = options.keep.join(format!("seed-{seed}-{number}"));
    }
    std::fs::create_dir(&kept)?;
    // Another disk of the same servers may be on another file system.
    let ext4 = places.images(place::Ground::Ext4);
    let ext4 = Some(ext4.as_path()).filter(|ext4| *ext4 != images);
    for folder in [images, &places.run(), &places.log()].into_iter().chain(ext4) {
        // Sockets cannot be copied.
        let _ = Command::new("cp")
            .args(["-a", "--sparse=always", "--"])
            .args([folder, &kept])
            .stderr(std::process::Stdio::null())
            .status();
    }
    std::fs::write(kept.join("fault"), format!("{}: {}\n", fault.wrong.name(), fault.what))?;
    Ok(kept)
}

/// The option of `binary` that says where logs of writers are kept.
fn log_option(binary: &Path) -> Result<&'static str> {
    let said = command::finish(Command::new(binary).args(["help", "serve"]));
    ensure!(said.status.success(), "{said}");
    let options = ["--redo-dir", "--handover-dir"];
    let option = options.into_iter().find(|option| said.stdout.contains(option));
    option.context("mica has no option that says where its logs are kept")
}

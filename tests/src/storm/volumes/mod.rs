//! Volumes in a directory: one to three, served by two hosts with and without logs, among kills of
//! servers and of verbs, forced take-overs from a writer that lives, is stopped or dead, snapshots,
//! clones also of what is served, rollbacks, collection, streams to another store, a store that is
//! slow or loses answers, tiny logs, a full file system, and copies of logs and of the store that
//! are put back.
//!
//! Judged (`disk.rs` has the rules): every volume and snapshot, by reads over NBD and by exports;
//! the labels that there are; and after every round `check` and `scrub` of all. At the end each is
//! judged by all of that, also one that could not be served; and by the space that is taken once
//! all snapshots are dropped (`space.rs`).
//!
//! ```text
//! storm ─▶ lives: a server of some volumes (`life.rs`), clients ∥ events (`work.rs`), its end
//!            ─▶ another host takes over (`taking.rs`, `second.rs`)
//!        ─▶ rest: verbs, some of them killed (`verbs.rs`); copies (`copies.rs`); all is checked
//! ```

mod copies;
mod disk;
mod guest;
mod host;
mod life;
mod look;
mod second;
mod space;
mod taking;
mod verbs;
mod work;

use super::kinds::Kind;
use super::model::View;
use super::story::{Fault, Outcome, Wrong, trouble};
use super::world::{World, text};
use crate::clock;
use crate::command::{self, Finished};
use copies::Copies;
use disk::{Disk, Known};
use host::{Log, Site};
use mica_units::Rng;
use parking_lot::Mutex;
use rustix::fs::statvfs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// How often volumes are served, and rest.
const ROUNDS: [u64; 4] = [3, 4, 5, 7];
/// Sectors of a volume: some end within a block.
const SECTORS: [u64; 3] = [4096, 2048, 2051];
/// Lengths of a log: a few segments, which one volume fills at once; and more.
const LOG_SIZES: [&str; 4] = ["100K", "256K", "2M", LOG_SHARED];
/// The least that several volumes share.
const LOG_SHARED: &str = "16M";
/// Free bytes below which is collected.
const SPACE_MIN: u64 = 110 << 20;
/// How long a verb may take.
const VERB_LIMIT: Duration = Duration::from_secs(100);
/// Volumes at once, at most.
const VOLUMES_MAX: usize = 6;

/// Why no other host can take volumes over here, if none can.
pub(super) fn second_lack() -> Option<&'static str> {
    host::second_lack()
}

/// Who had a volume last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    Closed,
    /// This host, which was killed, with its log or without one.
    Left {
        has_log: bool,
    },
    /// The other host, which was killed.
    LeftBySecond,
}

#[derive(Debug)]
struct Entry {
    disk: Arc<Disk>,
    standing: Standing,
}

impl Entry {
    /// What it has to hold when it is opened.
    fn view(&self) -> View {
        let view = match self.standing {
            Standing::Closed | Standing::Left { has_log: true } => View::Kept,
            Standing::Left { has_log: false } | Standing::LeftBySecond => View::Lossy,
        };
        self.disk.known().uncertain.unwrap_or(view)
    }

    /// A server was killed that may have opened it, and did nothing with it.
    fn may_be_open(&mut self, has_log: bool) {
        let view = self.view();
        self.disk.known().uncertain = Some(view);
        self.standing = match self.standing {
            Standing::LeftBySecond => Standing::LeftBySecond,
            Standing::Left { has_log: true } => Standing::Left { has_log: true },
            _ => Standing::Left { has_log },
        };
    }
}

/// The volumes of one seed, and their hosts.
struct Fleet<'a> {
    world: &'a World<'a>,
    entries: Vec<Entry>,
    /// The number of the last write to any of them.
    last: AtomicU64,
    names: u64,
    store: PathBuf,
    /// Where snapshots are sent.
    far: PathBuf,
    logs: [Log; 2],
    copies: Copies,
    /// Clones of served volumes that are not among `entries` yet.
    clones: Mutex<Vec<(String, Known)>>,
}

/// Lets the storm go over volumes.
pub(super) fn storm(world: &World<'_>, rng: &mut Rng) -> Outcome {
    world.counts.volumes.add();
    let log = |name: &str, size: &str| Log { path: world.run.join(name), size: size.to_owned() };
    let count = 1 + rng.below(3);
    let size = if count == 1 { rng.choose(&LOG_SIZES) } else { LOG_SHARED };
    let mut fleet = Fleet {
        world,
        entries: Vec::new(),
        last: AtomicU64::new(0),
        names: 0,
        store: world.images.join("store"),
        far: world.run.join("far"),
        logs: [log("log-a", size), log("log-b", rng.choose(&LOG_SIZES))],
        copies: Copies::default(),
        clones: Mutex::default(),
    };
    for _ in 0..count {
        fleet.create(rng)?;
    }
    for round in 0..rng.choose(&ROUNDS) {
        world.story.tell(format_args!("round {round}: {:?}", fleet.standings()));
        let mut dice = Rng::for_part(world.seed, 2 * round + 1);
        fleet.relieve()?;
        life::live(&mut fleet, &mut dice, work::Course::Random)?;
        let mut dice = Rng::for_part(world.seed, 2 * round + 2);
        verbs::rest(&mut fleet, &mut dice)?;
        copies::put_back(&mut fleet, &mut dice)?;
        fleet.check_all()?;
    }
    world.story.tell("the end");
    for at in 0..fleet.entries.len() {
        life::live(&mut fleet, rng, work::Course::Quiet(at))?;
    }
    look::look_at_all(&mut fleet)?;
    fleet.check_all()?;
    space::nothing_is_left(&fleet)
}

impl<'a> Fleet<'a> {
    fn tell(&self, step: impl std::fmt::Display) {
        self.world.story.tell(step);
    }

    fn stamp(&self) -> u64 {
        self.world.seed & 0xff_ffff
    }

    fn site(&self) -> Site<'_> {
        Site { binary: self.world.binary, run: &self.world.run, store: &self.store }
    }

    fn url(&self, name: &str) -> Outcome<String> {
        Ok(format!("file://{}/{name}", text(&self.store)?))
    }

    fn store_url(&self) -> Outcome<String> {
        Ok(format!("file://{}", text(&self.store)?))
    }

    fn new_name(&mut self, what: &str) -> String {
        self.names += 1;
        format!("{what}-{}", self.names)
    }

    fn standings(&self) -> Vec<(&str, Standing)> {
        self.entries.iter().map(|entry| (&*entry.disk.name, entry.standing)).collect()
    }

    fn create(&mut self, rng: &mut Rng) -> Outcome {
        let (name, sectors) = (self.new_name("volume"), rng.choose(&SECTORS));
        let bytes = (sectors * 512).to_string();
        let url = self.url(&name)?;
        let mut words = vec!["create", "-q", &*url, &bytes];
        if rng.percent(30) {
            words.extend(["--compress", "zstd"]);
        }
        self.verb_ok(&words)?;
        let known = Known::new(self.stamp(), sectors);
        self.add(name, known);
        Ok(())
    }

    fn add(&mut self, name: String, known: Known) {
        let disk = Arc::new(Disk::new(name, known));
        self.entries.push(Entry { disk, standing: Standing::Closed });
    }

    /// Runs `mica volume` to its end, or for as long as `life` says: `None` if it was killed.
    fn verb(&self, words: &[&str], life: Option<Duration>) -> Outcome<Option<Finished>> {
        self.tell(format_args!("  volume {words:?}, {life:?}"));
        let mut mica = Command::new(self.world.binary);
        mica.arg("volume").args(words);
        self.run(mica, life)
    }

    /// Runs a program to its end, or for as long as `life` says: `None` if it was killed.
    fn run(&self, mut program: Command, life: Option<Duration>) -> Outcome<Option<Finished>> {
        let said = match life {
            None => command::finish_within(&mut program, VERB_LIMIT),
            Some(life) => {
                use std::process::Stdio;
                program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                let mut child = program.spawn()?;
                clock::sleep(life);
                child.kill()?;
                child.wait()?;
                self.world.counts.verb_kills.add();
                return Ok(None);
            }
        };
        self.world.counts.verbs.add();
        if said.stderr.contains("panicked") || said.code().is_none() {
            return Err(Fault::new(Wrong::Panicked, said.to_string()));
        }
        Ok(Some(said))
    }

    /// A verb that nobody stops; how it ended.
    fn verb_to_end(&self, words: &[&str]) -> Outcome<Finished> {
        let said = self.verb(words, None)?.ok_or_else(|| trouble("it was not killed"))?;
        if !said.status.success() {
            self.tell(format_args!("    {}", said.stderr.trim_end()));
        }
        Ok(said)
    }

    /// A verb that has to succeed; what it printed.
    fn verb_ok(&self, words: &[&str]) -> Outcome<String> {
        let said = self.verb_to_end(words)?;
        match said.status.success() {
            true => Ok(said.stdout),
            false => Err(Fault::new(Wrong::Failed, said.to_string())),
        }
    }

    /// Whether the run does this, and the dice choose it.
    fn does(&self, rng: &mut Rng, kind: Kind, percent: u64) -> bool {
        self.world.does(rng, kind, percent)
    }

    /// How long a verb lives, if it is to be killed.
    fn fate(&self, rng: &mut Rng) -> Option<Duration> {
        let life = Duration::from_micros(500 + rng.below(60_000));
        self.does(rng, Kind::KillVerb, 30).then_some(life)
    }

    /// What nobody needs goes before it fills a small file system: that is a thing of its own.
    fn relieve(&self) -> Outcome {
        let space = statvfs(&self.world.images).map_err(trouble)?;
        if space.f_bavail * space.f_frsize < SPACE_MIN {
            self.verb_ok(&["gc", "-q", &self.store_url()?])?;
        }
        Ok(())
    }

    /// Everything in the store is whole.
    fn check_all(&self) -> Outcome {
        self.check_whole(&self.store_url()?)
    }

    /// A store, or a volume, is whole.
    fn check_whole(&self, url: &str) -> Outcome {
        for verb in ["check", "scrub"] {
            let said = self.verb_to_end(&[verb, "-q", url])?;
            if !said.status.success() {
                return Err(Fault::new(Wrong::Corrupt, said.to_string()));
            }
            self.world.counts.checks.add();
        }
        Ok(())
    }
}

/// The labels in what `mica` printed about snapshots.
fn labels(json: &str) -> Outcome<Vec<String>> {
    let all: serde_json::Value = serde_json::from_str(json).map_err(trouble)?;
    let all = all.as_array().ok_or_else(|| trouble("no array of snapshots"))?;
    let label = |one: &serde_json::Value| one["label"].as_str().map(str::to_owned);
    Ok(all.iter().filter_map(label).collect())
}

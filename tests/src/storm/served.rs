//! A server of the chain: started with or without patience, taken over from, killed, closed.

use super::chain::{Chain, text};
use super::kinds::Kind;
use super::model::View;
use super::stamp::Seq;
use super::story::{Fault, Outcome, Wrong, trouble};
use super::{foreign, judge};
use crate::clock;
use crate::nbd::{Connection, Wish};
use crate::takeover::Process;
use mica_units::Rng;
use rustix::process::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a server may take until it serves, or to end.
const LIMIT: Duration = Duration::from_secs(40);
/// How long the kernel may take to let go of a killed server's files.
const HELD_LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_micros(300);

/// Where a server keeps its log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LogAt {
    Usual,
    Small,
    Elsewhere,
    Nowhere,
}

/// How a server is started.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    pub(super) log: LogAt,
    queues: u64,
    slow: Option<String>,
    more: Vec<String>,
}

impl Manner {
    pub(super) fn random(chain: &Chain<'_>, rng: &mut Rng) -> Self {
        let world = &chain.world;
        let log = if world.places.small_log().is_some() && world.does(rng, Kind::LogSpace, 8) {
            LogAt::Small
        } else if world.does(rng, Kind::LogPlace, 5) {
            rng.choose(&[LogAt::Elsewhere, LogAt::Nowhere])
        } else {
            LogAt::Usual
        };
        let slow = world.does(rng, Kind::Slow, 25).then(|| {
            let operations = rng.choose(&["read", "write", "sync", "sync", "write+sync", "all"]);
            format!("delay={}us,op={operations}", 50 + rng.below(4000))
        });
        let mut more = Vec::new();
        if rng.percent(10) {
            more.extend(["--aio".to_owned(), "threads".to_owned()]);
        }
        if rng.percent(10) {
            more.extend(["--discard".to_owned(), "ignore".to_owned()]);
        }
        if rng.percent(20) {
            more.extend(["--index".to_owned(), rng.choose(&["off", "read"]).to_owned()]);
        }
        Self { log, queues: rng.choose(&[1, 1, 2]), slow, more }
    }

    fn options(&self, chain: &Chain<'_>) -> Outcome<Vec<String>> {
        let world = &chain.world;
        let log = match self.log {
            LogAt::Usual => world.log.clone(),
            LogAt::Small => world.places.small_log().ok_or_else(|| trouble("no small log"))?,
            LogAt::Elsewhere => world.run.clone(),
            LogAt::Nowhere => PathBuf::from("off"),
        };
        let image = chain.path(&chain.active().name);
        let mut options: Vec<String> = [
            "--nbd",
            "socket",
            "--queues",
            &self.queues.to_string(),
            world.log_option,
            text(&log)?,
        ]
        .map(str::to_owned)
        .to_vec();
        if let Some(slow) = &self.slow {
            options.extend(["--inject".to_owned(), slow.clone()]);
        }
        options.extend_from_slice(&self.more);
        options.push(text(&image)?.to_owned());
        Ok(options)
    }
}

/// A server that was started.
#[derive(Debug)]
pub(super) struct Served {
    process: Process,
    pub(super) socket: PathBuf,
    pub(super) manner: Manner,
}

/// The place of the log, as reported by a server that refuses to start because it looks elsewhere.
fn left_elsewhere(log: &str) -> Option<PathBuf> {
    let (_, rest) = log.split_once("what its last writer left is in ")?;
    let (place, advice) = rest.split_once(": ")?;
    advice.starts_with("pass ").then(|| PathBuf::from(place))
}

impl Served {
    /// Starts one and goes on before it serves.
    pub(super) fn begin(chain: &mut Chain<'_>, manner: &Manner, more: &[&str]) -> Outcome<Self> {
        let options = manner.options(chain)?;
        let options: Vec<_> =
            more.iter().copied().chain(options.iter().map(String::as_str)).collect();
        let name = chain.new_name("server");
        chain.tell(format_args!("  {name} {options:?}"));
        let process = Process::start_binary(chain.world.binary, &chain.world.run, &name, &options);
        let socket = chain.world.run.join("socket");
        Ok(Self { process, socket, manner: manner.clone() })
    }

    /// Starts one and waits until it serves; with patience while a killed one holds the image, but
    /// where that is not to be needed.
    pub(super) fn start(chain: &mut Chain<'_>, rng: &mut Rng, manner: &Manner) -> Outcome<Self> {
        let mut is_instant = chain.state.is_pending && chain.world.does(rng, Kind::Instant, 30);
        let start = clock::now();
        loop {
            let mut served = Self::begin(chain, manner, &[])?;
            if served.wait_until_it_serves()? {
                return Ok(served);
            }
            let log = served.process.log();
            served.look_for_panic()?;
            if let Some(left) = left_elsewhere(&log) {
                // What a person does who wants to go on without it.
                chain.tell(format_args!("  {} is removed", left.display()));
                fs::remove_file(&left)?;
                chain.state.is_lossy |= chain.state.is_pending;
                continue;
            }
            if !foreign::is_held(&log) || start.elapsed() > HELD_LIMIT {
                return Err(Fault::new(Wrong::NotServed, log));
            }
            if std::mem::take(&mut is_instant) {
                chain.note(Fault::new(Wrong::Refused, log));
            }
            chain.world.counts.refused.add();
            clock::sleep(PAUSE * 10);
        }
    }

    /// Waits until it serves; says whether it does, and not, if it has ended.
    pub(super) fn wait_until_it_serves(&mut self) -> Outcome<bool> {
        let process = &mut self.process;
        let served = clock::poll(LIMIT, PAUSE, || {
            let is_running = process.is_running();
            let is_served = is_running && is_served(&self.socket);
            (is_served || !is_running).then_some(is_served)
        });
        served.ok_or_else(|| Fault::new(Wrong::Hang, format!("no start: {}", self.process.log())))
    }

    /// Whether it serves, and lives on.
    pub(super) fn is_well(&mut self) -> bool {
        is_served(&self.socket) && self.is_running()
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    pub(super) fn log(&self) -> String {
        self.process.log()
    }

    /// Kills it and waits until it has ended; it may have, by itself.
    pub(super) fn kill(&mut self) -> Outcome {
        if self.process.is_running() {
            self.process.signal(Signal::KILL);
        }
        self.wait()?;
        self.look_for_panic()
    }

    /// Waits until it has ended; its exit code.
    pub(super) fn wait(&mut self) -> Outcome<Option<i32>> {
        let ended = clock::poll(LIMIT, PAUSE, || (!self.process.is_running()).then_some(()));
        match ended {
            Some(()) => Ok(self.process.ended()),
            None => Err(Fault::new(Wrong::Hang, format!("no end: {}", self.process.log()))),
        }
    }

    /// Asks it to end, and waits until it has.
    pub(super) fn close(&mut self) -> Outcome<Option<i32>> {
        if self.process.is_running() {
            self.process.signal(Signal::TERM);
        }
        let code = self.wait()?;
        self.look_for_panic()?;
        Ok(code)
    }

    pub(super) fn look_for_panic(&self) -> Outcome {
        let log = self.process.log();
        match log.contains("panicked") {
            true => Err(Fault::new(Wrong::Panicked, log)),
            false => Ok(()),
        }
    }

    /// Whether it said that it promises less than usual.
    pub(super) fn is_weak(&self, chain: &Chain<'_>) -> bool {
        chain.shape().is_old || !chain.state.snapshots.is_empty() || self.manner.log != LogAt::Usual
    }

    /// What becomes of the chain's state when this server is killed.
    pub(super) fn was_killed(&self, chain: &mut Chain<'_>) {
        chain.state.is_pending = true;
        chain.state.is_lossy |= self.is_weak(chain);
        chain.state.leaks = None;
    }

    /// Reads the whole disk of a server that just started, judges it, and takes it as decided.
    /// Where unflushed writes may be lost it is as QEMU saw it `before`, or has all of them.
    pub(super) fn judge(&self, chain: &mut Chain<'_>, before: Option<&[Seq]>) -> Outcome {
        // What another place holds is not looked for.
        let is_usual = self.manner.log == LogAt::Usual;
        chain.state.is_lossy |= chain.state.is_pending && !is_usual;
        let view = chain.view();
        let bytes = read_all(&self.socket).map_err(|error| self.explain(&error))?;
        chain.world.counts.reads.add();
        let what = format!("a server that starts ({view:?})");
        let content = judge::disk(&chain.state, &bytes, view, &what)?;
        if let Some(before) = before
            && before.len() == content.len()
            && content != before
            && self.manner.log != LogAt::Small
        {
            let what = "neither what QEMU read before the start, nor all that was acknowledged";
            let judged = judge::disk(&chain.state, &bytes, View::Kept, what);
            judged.map_err(|fault| Fault::new(Wrong::Mixed, fault.what))?;
        }
        let state = &mut chain.state;
        state.model.resize(content.len() as u64);
        state.other_len = None;
        let is_lost = state.model.settle(&content);
        let counts = chain.world.counts;
        if state.is_contested {
            counts.contested.add();
        }
        if is_lost && view == View::Lossy {
            counts.lost.add();
            let log = self.process.log();
            let is_told = log.lines().any(|line| line.contains("WARN") && line.contains("lost"));
            if !is_told && !self.is_weak(chain) {
                counts.silent.add();
            }
            chain.world.story.tell(format_args!("  unflushed writes are lost; told: {is_told}"));
        }
        let state = &mut chain.state;
        (state.is_pending, state.is_lossy, state.is_contested) = (false, false, false);
        Ok(())
    }

    fn explain(&self, error: &anyhow::Error) -> Fault {
        Fault::new(Wrong::Failed, format!("reading all: {error:#}\n{}", self.process.log()))
    }
}

/// What is left of the server after something happened to it.
pub(super) enum Left {
    /// It serves.
    Serving(Served),
    /// It was killed, and no other one serves.
    Killed,
}

/// Whether somebody serves NBD at `socket`.
fn is_served(socket: &Path) -> bool {
    socket.exists() && Connection::open(socket, "", &Wish::default()).is_ok()
}

fn read_all(socket: &Path) -> anyhow::Result<Vec<u8>> {
    Connection::open(socket, "", &Wish::default())?.read_all()
}

//! A server of the chain: started with or without patience, taken over from, killed, closed.

use super::chain::Chain;
use super::cue::Moment;
use super::kinds::Kind;
use super::load::{Phase, Stage};
use super::loss::{Cause, LogAt, Trace};
use super::manner::Manner;
use super::model::View;
use super::stamp::Seq;
use super::story::{Fault, Outcome, Wrong};
use super::world::text;
use super::{foreign, judge, second_disk, word};
use crate::clock;
use crate::nbd::{self, Connection, Wish};
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
/// How often a disk is read again whose reads fail at times.
const READS_MAX: u32 = 20;
/// How a server that is sick on purpose says so.
const INJECTED: &str = "injected";

/// What others did to the log of a server that lives, the worst last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum LogFate {
    Untouched,
    /// It was taken, and is there again when the next server starts.
    Returned,
    /// It is not where it was.
    Taken,
    /// A copy is in its place when the next server starts.
    Replaced,
    /// An older copy was written into it.
    Overwritten,
}

/// A server that was started.
#[derive(Debug)]
pub(super) struct Served {
    process: Process,
    pub(super) socket: PathBuf,
    /// It serves a second disk.
    has_second: bool,
    pub(super) manner: Manner,
    /// It survived a takeover in which the other one was killed: it may still be about to hand
    /// over, and to disconnect its clients for that.
    pub(super) is_shaken: bool,
    /// What others did to its log.
    pub(super) log_fate: LogFate,
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
        let name = chain.new_name("server");
        let options = manner.options(chain, &name)?;
        let options: Vec<_> =
            more.iter().copied().chain(options.iter().map(String::as_str)).collect();
        chain.tell(format_args!("  {name} {options:?}"));
        let process = Process::start_binary(chain.world.binary, &chain.world.run, &name, &options);
        let socket = chain.world.run.join("socket");
        Ok(Self {
            process,
            socket,
            has_second: chain.second.is_some(),
            manner: manner.clone(),
            is_shaken: false,
            log_fate: LogFate::Untouched,
        })
    }

    /// Starts one and waits until it serves; with patience while a killed one holds the image, but
    /// where that is not to be needed.
    pub(super) fn start(chain: &mut Chain<'_>, rng: &mut Rng, manner: &Manner) -> Outcome<Self> {
        let mut manner = manner.clone();
        let mut is_instant = chain.state.is_pending && chain.world.does(rng, Kind::Instant, 30);
        let start = clock::now();
        loop {
            let mut served = Self::begin(chain, &manner, &[])?;
            if served.wait_until_it_serves()? {
                return Ok(served);
            }
            let log = served.process.log();
            served.look_for_panic()?;
            if let Some(left) = left_elsewhere(&log) {
                // What a person does who wants to go on without it.
                chain.tell(format_args!("  {} is removed", left.display()));
                fs::remove_file(&left)?;
                chain.state.endanger(Cause::Elsewhere);
                chain.state.loss.was_told();
                continue;
            }
            if manner.is_sick() && log.contains(INJECTED) {
                chain.tell("  it is too sick to start");
                if manner.may_lose() {
                    chain.state.endanger(Cause::Sick);
                    chain.state.loss.was_told();
                }
                manner.be_well();
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

    /// Waits until it serves all; says whether it does, and not, if it has ended.
    pub(super) fn wait_until_it_serves(&mut self) -> Outcome<bool> {
        let process = &mut self.process;
        let second = self.has_second.then(|| second_disk::socket_beside(&self.socket));
        let served = clock::poll(LIMIT, PAUSE, || {
            let is_running = process.is_running();
            let mut sockets = [Some(&self.socket), second.as_ref()].into_iter().flatten();
            let is_served = is_running && sockets.all(|socket| is_served(socket));
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

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Kills it; it may have ended by itself.
    pub(super) fn send_kill(&mut self) {
        if self.process.is_running() {
            self.process.signal(Signal::KILL);
        }
    }

    /// Kills it and waits until it has ended; it may have, by itself.
    pub(super) fn kill(&mut self) -> Outcome {
        self.send_kill();
        self.wait()?;
        self.look_for_panic()
    }

    /// Kills it at some moment, while clients work.
    pub(super) fn kill_under_load(
        mut self,
        chain: &mut Chain<'_>,
        rng: &mut Rng,
        stage: &Stage,
    ) -> Outcome<Left> {
        let moment = Moment::random(rng);
        chain.tell(format_args!("  killed at {moment:?}"));
        moment.wait(&chain.path(&chain.active().name), stage)?;
        stage.enter(Phase::Ending);
        self.kill()?;
        self.was_killed(chain)?;
        chain.world.counts.kills.add();
        Ok(Left::Killed)
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

    /// Why a kill of this server may lose what was not flushed, whatever happens then.
    pub(super) fn weakness(&self, chain: &Chain<'_>) -> Option<Cause> {
        if self.is_without_log(chain) {
            return Some(Cause::NoLog);
        }
        match self.manner.log {
            _ if self.has_lost() => Some(Cause::Sick),
            _ if self.is_log_gone(chain) => Some(Cause::LogGone),
            LogAt::Small => Some(Cause::SmallLog),
            LogAt::Usual if chain.world.log_limit.is_some() && self.lost_its_log() => {
                Some(Cause::TinyLog)
            }
            LogAt::Elsewhere => Some(Cause::Elsewhere),
            LogAt::Usual | LogAt::Nowhere => None,
        }
    }

    /// Whether it may have no log of its own any more. One that it lost is restarted with a later
    /// group: the image names it then.
    fn is_log_gone(&self, chain: &Chain<'_>) -> bool {
        match self.log_fate {
            LogFate::Untouched => false,
            LogFate::Returned => self.lost_its_log(),
            LogFate::Replaced | LogFate::Overwritten => true,
            LogFate::Taken => {
                !self.manner.trace(chain).is_ok_and(|trace| trace.is_named() && trace.has_log())
            }
        }
    }

    fn is_without_log(&self, chain: &Chain<'_>) -> bool {
        let has_none = chain.shape().is_old || !chain.state.snapshots.is_empty();
        has_none || self.manner.log == LogAt::Nowhere
    }

    /// It reports that it keeps no log, if it does not (L3).
    pub(super) fn look_for_weakness(&self, chain: &Chain<'_>) -> Outcome {
        if !self.is_without_log(chain) {
            return Ok(());
        }
        let status = self.status(chain)?;
        let mut disks = status["disks"].as_array().into_iter().flatten();
        let disk = disks.find(|disk| disk["name"] == chain.disk_name());
        match disk.is_some_and(|disk| disk["weakness"].is_string()) {
            true => Ok(()),
            false => Err(Fault::new(Wrong::Silent, format!("it keeps no log: {status}"))),
        }
    }

    /// What it says of itself, which it must in time.
    pub(super) fn status(&self, chain: &Chain<'_>) -> Outcome<serde_json::Value> {
        let control = chain.world.run.join("control");
        let args = ["ctl", "--control", text(&control)?, "--output", "json", "status"];
        // The control socket is there a moment after those of the disks.
        let ask = || chain.world.mica(&args);
        let told = clock::poll(LIMIT, PAUSE * 10, || match ask() {
            Ok(said) if !said.status.success() => None,
            said => Some(said),
        });
        let said = told.unwrap_or_else(ask)?;
        if !said.status.success() {
            return Err(Fault::new(Wrong::Hang, format!("no status: {said}")));
        }
        serde_json::from_str(&said.stdout)
            .map_err(|error| Fault::new(Wrong::Failed, format!("{error}: {said}")))
    }

    /// What becomes of the chain's state when this server is killed.
    pub(super) fn was_killed(&self, chain: &mut Chain<'_>) -> Outcome {
        let weakness = self.weakness(chain);
        chain.state.was_killed(weakness);
        // Who lost its log says so at once: nobody can know it later.
        let trace = self.manner.trace(chain)?;
        let has_none = match weakness {
            Some(Cause::SmallLog) => !trace.has_log(),
            Some(Cause::LogGone) => !trace.is_named(),
            _ => false,
        };
        if matches!(weakness, Some(Cause::Sick | Cause::TinyLog)) || has_none && self.lost_its_log()
        {
            chain.state.loss.was_told();
        }
        Ok(())
    }

    /// Whether it reported that it has no log, or had none for a while.
    pub(super) fn lost_its_log(&self) -> bool {
        self.log().contains("if this process is killed")
    }

    /// Whether it reported that a sync failed, or something else that can mean a loss.
    pub(super) fn has_lost(&self) -> bool {
        self.manner.may_lose() && self.log().contains(INJECTED)
    }

    /// Reads the whole disk of a server that just started, judges it, and takes it as decided.
    /// Where unflushed writes may be lost it is as QEMU saw it `before`, or has all of them.
    pub(super) fn judge(
        &self,
        chain: &mut Chain<'_>,
        before: Option<&[Seq]>,
        trace: Trace,
    ) -> Outcome {
        // What another place holds is not looked for.
        if chain.state.is_pending {
            chain.state.loss.look_in(self.manner.log);
        }
        let view = chain.view();
        let mut bytes = nbd::read_disk(&self.socket);
        for _ in 0..if self.manner.is_sick() { READS_MAX } else { 0 } {
            bytes = bytes.or_else(|_| nbd::read_disk(&self.socket));
        }
        let bytes = bytes.map_err(|error| self.explain(&error))?;
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
            word::account(chain, trace, &self.process.log());
        }
        chain.state.settled();
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

//! The life of a server: clients work, and something happens to it.

use super::chain::Chain;
use super::freeze;
use super::kinds::Kind;
use super::load::{Load, Mood, Phase, Stage};
use super::log_gone;
use super::loss::LogAt;
use super::manner::Manner;
use super::model::{Model, View};
use super::peek;
use super::place::{Filler, Ground, mount_of};
use super::second_disk::{SecondClients, SecondDisk};
use super::served::{Left, Served};
use super::shape;
use super::stamp::SECTOR;
use super::story::{Fault, Outcome, Wrong, trouble};
use super::takeover;
use super::threads;
use super::world::text;
use crate::clock;
use crate::command;
use mica_units::Rng;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long `mica ctl` may take.
const CTL_LIMIT: Duration = Duration::from_secs(30);

/// Serves the chain, with clients, until the server is closed or killed.
pub(super) fn live(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    chain.world.counts.lives.add();
    let manner = Manner::random(chain, rng);
    if manner.is_sick() {
        chain.world.counts.sick.add();
    }
    if chain.world.does(rng, Kind::KillStart, 12) {
        kill_while_it_starts(chain, rng, &manner)?;
    }
    let mut served = start(chain, rng, &manner)?;
    for _ in 0..1 + rng.below(3) {
        match round(chain, rng, served)? {
            Left::Serving(still) => served = still,
            Left::Killed => return Ok(()),
        }
        if chain.world.does(rng, Kind::Peek, 12) && !served.is_shaken {
            peek::while_idle(chain, rng, &served)?;
        }
    }
    if chain.world.does(rng, Kind::Kill, 30) {
        chain.tell("  killed while nobody asks for anything");
        served.kill()?;
        served.was_killed(chain)?;
        chain.world.counts.kills.add();
        return Ok(());
    }
    close(chain, served)
}

/// Serves the chain once more, without anything happening to it, and closes it.
pub(super) fn live_in_peace(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    let mut manner = Manner::random(chain, rng);
    manner.log = LogAt::Usual;
    manner.be_well();
    let served = start(chain, rng, &manner)?;
    close(chain, served)
}

/// Starts a server and judges what it shows.
fn start(chain: &mut Chain<'_>, rng: &mut Rng, manner: &Manner) -> Outcome<Served> {
    let is_lossy = chain.state.is_pending && chain.state.loss.may_be();
    let before = match is_lossy {
        true => Some(chain.judge_by_qemu(View::Lossy, "before a start")?),
        false => None,
    };
    let trace = manner.trace(chain)?;
    let served = Served::start(chain, rng, manner)?;
    served.judge(chain, before.as_deref(), trace)?;
    if let Some(second) = &mut chain.second {
        second.judge(chain.world.counts)?;
    }
    served.look_for_weakness(chain)?;
    Ok(served)
}

fn close(chain: &mut Chain<'_>, mut served: Served) -> Outcome {
    chain.tell("  closed");
    let code = served.close()?;
    let is_early = served.log().contains("a signal arrived before this process could take over");
    if code != Some(0) && (served.manner.is_sick() || is_early) {
        chain.tell(format_args!("  which fails: {code:?}, taking over still: {is_early}"));
        served.was_killed(chain)?;
        return Ok(());
    }
    if code != Some(0) {
        let what = format!("it ends with {code:?}: {}", served.log());
        return Err(Fault::new(Wrong::Died, what));
    }
    chain.state.model.closed();
    chain.second.iter_mut().for_each(SecondDisk::closed);
    if served.manner.is_sick() {
        chain.state.leaks = None;
    }
    chain.world.counts.closes.add();
    Ok(())
}

fn kill_while_it_starts(chain: &mut Chain<'_>, rng: &mut Rng, manner: &Manner) -> Outcome {
    // What this one may have lost is lost for the next one too.
    if chain.state.is_pending {
        chain.state.loss.look_in(manner.log);
    }
    let mut served = Served::begin(chain, manner, &[])?;
    let pause = Duration::from_micros(rng.below(30_000));
    chain.tell(format_args!("  killed {pause:?} after its start"));
    clock::sleep(pause);
    served.kill()?;
    chain.state.loss.hear(&served.log());
    served.was_killed(chain)?;
    chain.world.counts.kills.add();
    Ok(())
}

/// Clients work for a while, and something may happen meanwhile.
fn round(chain: &mut Chain<'_>, rng: &mut Rng, mut served: Served) -> Outcome<Left> {
    let clients = 1 + rng.below(chain.world.clients.max(1));
    let requests = 10 + rng.below(90);
    let (seed, mood) = (rng.next_u64(), Mood::random(rng));
    let load = Load { clients, requests, seed, aim: chain.aim(), mood, export: String::new() };
    let all = clients * requests;
    let model = std::mem::replace(&mut chain.state.model, Model::new(0, 0));
    let stage = Stage::new(model, chain.stamper.clone());
    stage.board().may_fail = served.manner.is_sick();
    let is_shaken = std::mem::take(&mut served.is_shaken);
    if is_shaken {
        stage.enter(Phase::Moving);
    }
    let socket = served.socket.clone();
    let counts = chain.world.counts;
    let others = chain.second.as_mut().map(|second| second.begin(&stage, rng));
    let all_of_it = || {
        stage.run(&socket, &load, counts, || {
            let moment = rng.below(all * 3 / 4);
            let event = event(chain, rng, &served, is_shaken);
            chain.tell(format_args!(
                "  {clients} clients, {all} requests, {mood:?}; at {moment}: {event:?}"
            ));
            stage.wait_for(moment);
            let round = Round { stage: &stage, others: others.as_ref(), moment };
            match event {
                None => Ok(Left::Serving(served)),
                Some(event) => happen(chain, rng, &round, served, event),
            }
        })
    };
    let left = match &others {
        Some(others) => others.run(counts, all_of_it),
        None => all_of_it(),
    }?;
    if let (Some(second), Some(others)) = (&mut chain.second, others) {
        second.end(others);
    }
    (chain.state.model, chain.stamper) = stage.end();
    if let Left::Serving(served) = &left {
        served.look_for_panic()?;
    }
    Ok(left)
}

/// The clients of a round.
struct Round<'a> {
    stage: &'a Stage,
    others: Option<&'a SecondClients>,
    /// Requests after which something happens.
    moment: u64,
}

fn happen(
    chain: &mut Chain<'_>,
    rng: &mut Rng,
    round: &Round<'_>,
    served: Served,
    event: Kind,
) -> Outcome<Left> {
    let Round { stage, others, moment } = *round;
    match event {
        Kind::Kill => served.kill_under_load(chain, rng, stage),
        Kind::Peek => peek::while_busy(chain, rng).map(|()| Left::Serving(served)),
        Kind::Takeover => takeover::go(chain, stage, served, || {}),
        Kind::KillTakeover => takeover::go_wrong(chain, rng, stage, served),
        Kind::Resize => grow(chain, rng, stage, served),
        Kind::LogSpace => fill_log(chain, rng, stage, served, moment),
        Kind::LogGone => log_gone::take_log(chain, rng, stage, served, moment),
        Kind::Freeze => freeze::freeze(chain, rng, stage, others, served),
        Kind::Threads => threads::refuse(chain, rng, stage, served, moment),
        _ => fill_images(chain, rng, stage, served, moment),
    }
}

fn event(chain: &Chain<'_>, rng: &mut Rng, served: &Served, is_shaken: bool) -> Option<Kind> {
    let world = &chain.world;
    let mut events = world.kinds.of(&[Kind::Kill, Kind::Kill, Kind::Kill, Kind::Peek]);
    // What must succeed does so for servers that are well.
    if !served.manner.is_sick() {
        events.extend(world.kinds.of(&[Kind::Takeover, Kind::KillTakeover, Kind::Resize]));
    }
    if world.ground != Ground::Folder {
        events.extend(world.kinds.of(&[Kind::Space]));
    }
    if served.manner.log == LogAt::Small {
        events.extend(world.kinds.of(&[Kind::LogSpace, Kind::LogSpace, Kind::LogSpace]));
    }
    if served.manner.log == LogAt::Usual {
        events.extend(world.kinds.of(&[Kind::LogGone]));
    }
    // A server that may close for a takeover that came to nothing waits for what is frozen.
    if freeze::is_possible(chain) && !is_shaken {
        events.extend(world.kinds.of(&[Kind::Freeze]));
    }
    if world.places.limits_threads() {
        events.extend(world.kinds.of(&[Kind::Threads]));
    }
    let is_quiet = events.is_empty() || rng.percent(30);
    (!is_quiet).then(|| rng.choose(&events))
}

/// Which process is killed while a disk grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Server,
    /// Who asked for it.
    Client,
}

/// The disk gets longer under its clients; the server may be killed over it.
fn grow(chain: &mut Chain<'_>, rng: &mut Rng, stage: &Stage, mut served: Served) -> Outcome<Left> {
    let len = stage.board().model.len();
    let most = chain.sectors_max();
    let longer = len + 1 + rng.below(len + 4096);
    if longer > most {
        return Ok(Left::Serving(served));
    }
    let name = chain.disk_name().to_owned();
    let control = chain.world.run.join("control");
    let size = (longer * SECTOR as u64).to_string();
    let args = ["ctl", "--control", text(&control)?, "resize", &name, &size];
    let is_killed = chain.world.does(rng, Kind::KillResize, 40);
    let victim = rng.choose(&[Victim::Server, Victim::Server, Victim::Client]);
    let victim = is_killed.then_some(victim);
    chain.tell(format_args!("  {args:?}; killed: {victim:?}"));
    let Some(victim) = victim else {
        let said = chain.world.mica(&args)?;
        match said.status.success() {
            true => stage.board().model.resize(longer),
            false => chain.tell(format_args!("  refused: {}", said.stderr.trim())),
        }
        chain.world.counts.resizes.add();
        return Ok(Left::Serving(served));
    };
    if victim == Victim::Server {
        stage.enter(Phase::Ending);
    }
    let mut ctl = Command::new(chain.world.binary);
    let mut ctl = ctl.args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    chain.world.counts.resize_kills.add();
    clock::sleep(Duration::from_micros(rng.below(12_000)));
    if victim == Victim::Client {
        // It may have ended.
        let _ = ctl.kill();
        ctl.wait()?;
        // The server goes on with it, and the same can be asked for again.
        let said = chain.world.mica(&args)?;
        match said.status.success() {
            true => stage.board().model.resize(longer),
            false => chain.tell(format_args!("  refused: {}", said.stderr.trim())),
        }
        return Ok(Left::Serving(served));
    }
    served.kill()?;
    let status = command::wait(&mut ctl, CTL_LIMIT).ok_or_else(|| trouble("ctl does not end"))?;
    match status.success() {
        true => stage.board().model.resize(longer),
        false => chain.state.other_len = Some(longer),
    }
    served.was_killed(chain)?;
    chain.world.counts.kills.add();
    Ok(Left::Killed)
}

/// The images' file system is full for a while.
fn fill_images(
    chain: &mut Chain<'_>,
    rng: &mut Rng,
    stage: &Stage,
    mut served: Served,
    moment: u64,
) -> Outcome<Left> {
    stage.board().may_fail = true;
    let mount = mount_of(&chain.world.images).to_owned();
    let left = rng.below(1 << 20);
    chain.tell(format_args!("  {left} bytes are left for images"));
    let filler = Filler::new(&mount, left)?;
    chain.world.counts.full.add();
    stage.wait_for(moment + 5 + rng.below(60));
    if chain.world.does(rng, Kind::Kill, 40) {
        let left = served.kill_under_load(chain, rng, stage);
        drop(filler);
        return left;
    }
    if chain.world.does(rng, Kind::Takeover, 10) && !served.is_running() {
        return Err(Fault::new(Wrong::Died, served.log()));
    }
    drop(filler);
    Ok(Left::Serving(served))
}

/// The log's file system is full for a while.
fn fill_log(
    chain: &mut Chain<'_>,
    rng: &mut Rng,
    stage: &Stage,
    served: Served,
    moment: u64,
) -> Outcome<Left> {
    let mount = chain.world.places.small_log().ok_or_else(|| trouble("no small log"))?;
    let left = rng.below(128 << 10);
    chain.tell(format_args!("  {left} bytes are left for the log"));
    let _filler = Filler::new(&mount, left)?;
    chain.world.counts.full.add();
    stage.wait_for(moment + 5 + rng.below(60));
    match chain.world.does(rng, Kind::Kill, 50) {
        true => served.kill_under_load(chain, rng, stage),
        false => Ok(Left::Serving(served)),
    }
}

/// A disk's length for a resize by a verb, in sectors.
pub(super) fn other_len(chain: &Chain<'_>, rng: &mut Rng) -> u64 {
    shape::sectors(rng, chain.sectors_max())
}

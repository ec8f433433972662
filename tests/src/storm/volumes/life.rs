//! A server of some volumes: it starts, all it serves is judged, clients work, things happen to it,
//! and it ends.

use super::disk::Disk;
use super::guest::{self, CLIENTS, End, Stage};
use super::host::{NO_ROOM, Plan, Server, command};
use super::{Fleet, LOG_SHARED, Standing, labels, second};
use crate::clock;
use crate::storm::kinds::Kind;
use crate::storm::model::View;
use crate::storm::place::{Filler, Ground, mount_of};
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use mica_units::Rng;
use rustix::process::Signal;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// How many things happen to a server.
const EVENTS: [u64; 5] = [0, 1, 2, 3, 5];
/// How long clients may go on that have lost their disk to another host.
const FENCED_LIMIT: Duration = Duration::from_secs(30);
const KEEP: &str = "1s/20ms,1h/1s";

/// What a life is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Course {
    Random,
    /// This volume is served, and closed, so that it can be judged.
    Quiet(usize),
}

/// How a server ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Finale {
    Kill,
    Stop,
    /// Another host takes this one of its disks; it is stopped or not meanwhile.
    Taken {
        plan: usize,
        is_stopped: bool,
    },
}

pub(super) type Clients<'scope> = Vec<(usize, ScopedJoinHandle<'scope, Outcome<End>>)>;

/// One life, and what another host does afterwards.
pub(super) fn live(fleet: &mut Fleet<'_>, rng: &mut Rng, course: Course) -> Outcome {
    let chosen = choose(fleet, rng, course);
    if chosen.is_empty() {
        return Ok(());
    }
    let by_force = chosen.iter().any(|at| fleet.entries[*at].standing == Standing::LeftBySecond);
    let plans = plans(fleet, rng, &chosen);
    if !by_force {
        try_without_log(fleet, rng, &chosen)?;
    }
    let name = fleet.new_name("a");
    let told: Vec<_> = plans.iter().map(|p| (&p.disk.name, p.log.is_some(), p.to_store)).collect();
    fleet.tell(format_args!("  {name}: {told:?}, force: {by_force}"));
    let mut server = Server::begin(&fleet.site(), &name, plans, (false, by_force))?;
    fleet.world.counts.lives.add();
    if course == Course::Random && fleet.does(rng, Kind::KillStart, 12) {
        clock::sleep(Duration::from_micros(rng.below(150_000)));
        fleet.world.counts.kills.add();
        return killed_at_its_start(fleet, server, &chosen);
    }
    if !server.serves(&fleet.site())? {
        let said = server.said();
        // Logs that were left take room.
        if !said.contains(NO_ROOM) {
            return Err(Fault::new(Wrong::NotServed, said));
        }
        fleet.tell("    its log has no room");
        return killed_at_its_start(fleet, server, &chosen);
    }
    settle(fleet, &server, &chosen)?;
    let end = match course {
        Course::Quiet(_) => Finale::Stop,
        Course::Random => end(fleet, rng, &server),
    };
    let (server, taken) = work(fleet, rng, server, end, course)?;
    finish(fleet, rng, server, &chosen, (end, taken))
}

/// Whether it opened its disks is not known, but that nobody wrote to them.
fn killed_at_its_start(fleet: &mut Fleet<'_>, server: Server, chosen: &[usize]) -> Outcome {
    let has_logs: Vec<_> = server.plans.iter().map(|plan| plan.log.is_some()).collect();
    server.kill()?;
    for (at, has_log) in chosen.iter().zip(has_logs) {
        fleet.entries[*at].may_be_open(has_log);
    }
    Ok(())
}

fn choose(fleet: &Fleet<'_>, rng: &mut Rng, course: Course) -> Vec<usize> {
    if let Course::Quiet(at) = course {
        return vec![at];
    }
    let mut all: Vec<_> = (0..fleet.entries.len()).collect();
    rng.shuffle(&mut all);
    let left = |at: &usize| fleet.entries[*at].standing == Standing::LeftBySecond;
    // By force only one is served.
    if let Some(first) = all.first().filter(|at| left(at)) {
        return vec![*first];
    }
    all.retain(|at| !left(at));
    let is_tiny = fleet.logs[0].size != LOG_SHARED;
    let most = if is_tiny { 1 } else { 3 };
    let count = usize::try_from(1 + rng.below(3)).unwrap_or(1).min(most);
    all.truncate(count);
    all
}

fn plans(fleet: &Fleet<'_>, rng: &mut Rng, chosen: &[usize]) -> Vec<Plan> {
    let has_keep = fleet.does(rng, Kind::Keep, 20);
    let plan = |at: &usize| {
        let entry = &fleet.entries[*at];
        let has_log = rng.percent(70) || entry.standing == Standing::Left { has_log: true };
        Plan {
            disk: entry.disk.clone(),
            log: has_log.then(|| fleet.logs[0].clone()),
            to_store: rng.percent(40),
            keep: has_keep.then_some(KEEP),
        }
    };
    chosen.iter().map(plan).collect()
}

/// What a killed server had in its log is not left behind without a word.
fn try_without_log(fleet: &mut Fleet<'_>, rng: &mut Rng, chosen: &[usize]) -> Outcome {
    let is_left = |at: &&usize| fleet.entries[**at].standing == Standing::Left { has_log: true };
    let Some(at) = chosen.iter().find(is_left) else { return Ok(()) };
    if !rng.percent(20) || fleet.entries[*at].disk.known().uncertain.is_some() {
        return Ok(());
    }
    let disk = fleet.entries[*at].disk.clone();
    let plan = Plan { disk, log: None, to_store: true, keep: None };
    let name = fleet.new_name("without");
    let mut server = Server::begin(&fleet.site(), &name, vec![plan], (false, false))?;
    if server.serves(&fleet.site())? {
        let what = "a volume is served without the log that it was left with";
        return Err(Fault::new(Wrong::Silent, what));
    }
    match server.said().contains("--log-device") {
        true => Ok(()),
        false => Err(Fault::new(Wrong::Silent, server.said())),
    }
}

/// Judges all that a server shows at its start.
fn settle(fleet: &mut Fleet<'_>, server: &Server, chosen: &[usize]) -> Outcome {
    for (plan, at) in server.plans.iter().zip(chosen) {
        let bytes = server.read(&fleet.site(), plan)?;
        let entry = &mut fleet.entries[*at];
        let view = entry.view();
        let mut known = plan.disk.known();
        if view == View::Lossy {
            known.lost();
        }
        let what = format!("{}, {:?}, as {} begins", plan.disk.name, entry.standing, server.name);
        known.settle(&bytes, view, &what)?;
        known.flushes_to_store = plan.flushes_to_store();
        entry.standing = Standing::Left { has_log: plan.log.is_some() };
        drop(known);
        fleet.world.counts.reads.add();
        let said = ctl(fleet, server, &["--output", "json", "snapshots", &plan.disk.name])?;
        plan.disk.known().settle_labels(&labels(&said)?, &what)?;
    }
    Ok(())
}

/// How it ends.
fn end(fleet: &Fleet<'_>, rng: &mut Rng, server: &Server) -> Finale {
    let has_second = second::is_there();
    if has_second && fleet.does(rng, Kind::Force, 25) {
        let plan = usize::try_from(rng.below(server.plans.len() as u64)).unwrap_or(0);
        return Finale::Taken { plan, is_stopped: rng.percent(40) };
    }
    match fleet.does(rng, Kind::Kill, 65) {
        true => Finale::Kill,
        false => Finale::Stop,
    }
}

/// Clients work, and things happen. Returns the server, unless it was killed, and the one on
/// another host that took one of its disks, with what that showed first.
pub(super) fn work(
    fleet: &Fleet<'_>,
    rng: &mut Rng,
    server: Server,
    end: Finale,
    course: Course,
) -> Outcome<(Option<Server>, Option<second::Taken>)> {
    let stage = Stage {
        is_over: AtomicBool::new(false),
        may_fail: AtomicBool::new(false),
        counts: fleet.world.counts,
        last: &fleet.last,
        stamp: fleet.stamp(),
    };
    let seed = rng.next_u64();
    std::thread::scope(|scope| {
        let mut clients: Clients<'_> = Vec::new();
        for (at, plan) in server.plans.iter().enumerate() {
            for number in 0..CLIENTS {
                let (socket, disk) = (server.socket(&fleet.site(), plan), plan.disk.clone());
                let (stage, seed) = (&stage, seed ^ (at as u64) << 32);
                let work = move || guest::work(stage, &disk, &socket, (number, seed));
                clients.push((at, scope.spawn(work)));
            }
        }
        let mut server = server;
        let happened = events(fleet, rng, &mut server, (&stage, course, end), &clients);
        let ended = happened.and_then(|taken| match end {
            Finale::Kill => {
                fleet.world.counts.kills.add();
                server.kill().map(|()| (None, None))
            }
            _ => Ok((Some(server), taken)),
        });
        stage.is_over.store(true, Ordering::Relaxed);
        let mut fault = None;
        for (at, client) in clients {
            match client.join() {
                Ok(Ok(End::Gone)) if end != Finale::Kill && ended.is_ok() => {
                    let is_taken = matches!(end, Finale::Taken { plan, .. } if plan == at);
                    if !is_taken {
                        fault = Some(Fault::new(Wrong::Died, "a client has lost its server"));
                    }
                }
                Ok(Ok(_)) => {}
                Ok(Err(wrong)) => fault = Some(wrong),
                Err(_) => fault = Some(Fault::new(Wrong::Trouble, "a client panicked")),
            }
        }
        // What a client found is most informative.
        match (fault, ended) {
            (Some(fault), Ok((Some(server), _))) => {
                fleet.tell(format_args!("    {}", server.said()));
                Err(fault)
            }
            (Some(fault), _) => Err(fault),
            (None, ended) => ended,
        }
    })
}

fn events(
    fleet: &Fleet<'_>,
    rng: &mut Rng,
    server: &mut Server,
    (stage, course, end): (&Stage<'_>, Course, Finale),
    clients: &Clients<'_>,
) -> Outcome<Option<second::Taken>> {
    let pause = |rng: &mut Rng| clock::sleep(Duration::from_micros(rng.below(120_000)));
    pause(rng);
    if course != Course::Random {
        return Ok(None);
    }
    for _ in 0..rng.choose(&EVENTS) {
        fleet.relieve()?;
        let at = usize::try_from(rng.below(server.plans.len() as u64)).unwrap_or(0);
        let disk = server.plans[at].disk.clone();
        match rng.below(10) {
            0..3 => snapshot(fleet, server, &disk, rng)?,
            3 => drop_snapshot(fleet, server, &disk, rng)?,
            4 if fleet.does(rng, Kind::Collect, 100) => collect(fleet, rng)?,
            5 => pause_server(rng, server),
            6 => super::verbs::while_served(fleet, rng, &disk)?,
            7 if fleet.does(rng, Kind::Space, 60) => fill(fleet, rng, stage)?,
            8 => fleet.check_all()?,
            _ => {}
        }
        pause(rng);
        server.check()?;
    }
    match end {
        Finale::Taken { plan, is_stopped } => {
            second::take(fleet, rng, server, (plan, is_stopped), stage).and_then(|taken| {
                wait_until_fenced(server, plan, clients)?;
                Ok(Some(taken))
            })
        }
        _ => Ok(None),
    }
}

/// The clients of a disk that another host has learn that.
fn wait_until_fenced(server: &Server, plan: usize, clients: &Clients<'_>) -> Outcome {
    let learn = || {
        let mut own = clients.iter().filter(|(at, _)| *at == plan);
        own.all(|(_, client)| client.is_finished()).then_some(())
    };
    match clock::poll(FENCED_LIMIT, Duration::from_millis(10), learn) {
        Some(()) => Ok(()),
        None => {
            let what = format!("clients of a fenced writer still write: {}", server.said());
            Err(Fault::new(Wrong::Silent, what))
        }
    }
}

/// `mica ctl`, which has to succeed; what it printed.
pub(super) fn ctl(fleet: &Fleet<'_>, server: &Server, words: &[&str]) -> Outcome<String> {
    let said = ctl_to_end(fleet, server, words)?;
    match said.status.success() {
        true => Ok(said.stdout),
        false => Err(Fault::new(Wrong::Failed, said.to_string())),
    }
}

fn ctl_to_end(
    fleet: &Fleet<'_>,
    server: &Server,
    words: &[&str],
) -> Outcome<crate::command::Finished> {
    fleet.tell(format_args!("  ctl {words:?}"));
    let mut ctl = command(fleet.world.binary, &fleet.store, false);
    ctl.args(["ctl", "--control", text(&server.control)?]).args(words);
    fleet.run(ctl, None)?.ok_or_else(|| crate::storm::story::trouble("it was not killed"))
}

/// A snapshot while clients write.
fn snapshot(fleet: &Fleet<'_>, server: &Server, disk: &Disk, rng: &mut Rng) -> Outcome {
    let label = format!("s{}", rng.next_u64() % 1_000_000);
    if disk.known().snapshot(&label).is_some() {
        return Ok(());
    }
    let (moment, mark) = {
        let known = disk.known();
        (known.moment(), known.model.mark())
    };
    ctl(fleet, server, &["snapshot", &disk.name, &label])?;
    let mut known = disk.known();
    known.took(&label, &moment, true);
    // It is as durable as after a flush.
    known.flushed(mark);
    fleet.world.counts.volume_snapshots.add();
    Ok(())
}

fn drop_snapshot(fleet: &Fleet<'_>, server: &Server, disk: &Disk, rng: &mut Rng) -> Outcome {
    let Some(label) = super::verbs::any_label(disk, rng) else { return Ok(()) };
    ctl(fleet, server, &["drop", &disk.name, &label])?;
    disk.known().dropped(&label, true);
    Ok(())
}

/// One or two collections at once.
fn collect(fleet: &Fleet<'_>, rng: &mut Rng) -> Outcome {
    let url = fleet.store_url()?;
    let fates = [fleet.fate(rng), fleet.fate(rng)];
    let count = usize::try_from(1 + rng.below(2)).unwrap_or(1);
    std::thread::scope(|scope| {
        let url = &*url;
        let runs: Vec<_> = fates
            .into_iter()
            .take(count)
            .map(|fate| scope.spawn(move || fleet.verb(&["gc", "-q", url], fate)))
            .collect();
        for run in runs {
            let said =
                run.join().map_err(|_| Fault::new(Wrong::Trouble, "a thread panicked"))??;
            if let Some(said) = said.filter(|said| !said.status.success()) {
                return Err(Fault::new(Wrong::Failed, said.to_string()));
            }
            fleet.world.counts.collections.add();
        }
        Ok(())
    })
}

fn pause_server(rng: &mut Rng, server: &Server) {
    server.signal(Signal::STOP);
    clock::sleep(Duration::from_micros(rng.below(200_000)));
    server.signal(Signal::CONT);
}

/// The store's file system is full for a while.
fn fill(fleet: &Fleet<'_>, rng: &mut Rng, stage: &Stage<'_>) -> Outcome {
    if fleet.world.ground == Ground::Folder {
        return Ok(());
    }
    fleet.tell("  full");
    stage.may_fail.store(true, Ordering::Relaxed);
    fleet.world.counts.full.add();
    let mount: &Path = mount_of(&fleet.world.images);
    let filler = Filler::new(mount, rng.below(1 << 20))?;
    clock::sleep(Duration::from_millis(200 + rng.below(800)));
    drop(filler);
    Ok(())
}

/// The end of a life.
fn finish(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: Option<Server>,
    chosen: &[usize],
    (end, taken): (Finale, Option<second::Taken>),
) -> Outcome {
    if let Some(server) = server {
        let is_killed = matches!(end, Finale::Taken { .. }) && rng.percent(40);
        let code = if is_killed {
            server.kill()?;
            None
        } else {
            let (code, said) = server.stop()?;
            if code != Some(0) && end == Finale::Stop {
                return Err(Fault::new(Wrong::Failed, format!("its end: {code:?}: {said}")));
            }
            fleet.world.counts.closes.add();
            code
        };
        let taken_from = match end {
            Finale::Taken { plan, .. } => Some(chosen[plan]),
            _ => None,
        };
        for at in chosen.iter().filter(|at| Some(**at) != taken_from) {
            let entry = &mut fleet.entries[*at];
            if code == Some(0) {
                entry.disk.known().closed();
                entry.standing = Standing::Closed;
            } else if !is_killed {
                // It failed with another disk. This one may be closed.
                let view = entry.view();
                entry.disk.known().uncertain = Some(view);
            }
        }
    }
    match (taken, end) {
        (Some(taken), Finale::Taken { plan, .. }) => second::after(fleet, rng, chosen[plan], taken),
        (_, Finale::Kill) => second::maybe_takes_from_the_dead(fleet, rng, chosen),
        _ => Ok(()),
    }
}

//! A server of some volumes: it starts, all it serves is judged, clients work, and it ends.

use super::host::{NO_ROOM, Plan, Server};
use super::work::{Course, Finale, ctl, work};
use super::{Entry, Fleet, LOG_SHARED, Standing, labels, second, taking};
use crate::clock;
use crate::storm::kinds::Kind;
use crate::storm::model::View;
use crate::storm::story::{Fault, Outcome, Wrong};
use mica_units::Rng;
use std::time::Duration;

const KEEP: &str = "1s/20ms,1h/1s";
/// What else automatic snapshots are taken after.
const KEPT_PER: [Option<&str>; 4] = [None, None, Some("write"), Some("flush")];
/// What a store may do that no client has to notice: most often leave open what became of a put.
const FAULTS: [&str; 8] = [
    "delay=3ms",
    "late=5%,by=200ms",
    "lost=5%",
    "lost=20%,op=put",
    "slow=5%,by=200ms",
    "error=10%,op=put",
    "error=25%,op=put",
    "throttle=50:5",
];

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
        return match course {
            Course::Random => killed_at_its_start(fleet, server, &chosen),
            Course::Quiet(at) => {
                server.kill()?;
                quiet_without_log(fleet, rng, at)
            }
        };
    }
    goes_on(fleet, rng, server, &chosen, course)
}

fn goes_on(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: Server,
    chosen: &[usize],
    course: Course,
) -> Outcome {
    settle(fleet, &server, chosen)?;
    let end = match course {
        Course::Quiet(_) => Finale::Stop,
        Course::Random => end(fleet, rng, &server),
    };
    let (server, taken) = work(fleet, rng, server, end, course)?;
    let clones = std::mem::take(fleet.clones.get_mut());
    for (name, known) in clones {
        fleet.add(name, known);
    }
    finish(fleet, rng, server, chosen, (end, taken))
}

/// A volume whose log got no room is as it was before: it is served without one. One that was left
/// with a log, which may have nothing, is refused; then what looks at all judges it by the rest.
fn quiet_without_log(fleet: &mut Fleet<'_>, rng: &mut Rng, at: usize) -> Outcome {
    let Entry { disk, standing } = &fleet.entries[at];
    let has_log = *standing == (Standing::Left { has_log: true });
    let by_force = *standing == Standing::LeftBySecond;
    let plan = Plan::plain(disk.clone());
    let name = fleet.new_name("a");
    fleet.tell(format_args!("  {name}: without, force: {by_force}"));
    let mut server = Server::begin(&fleet.site(), &name, vec![plan], (false, by_force))?;
    fleet.world.counts.lives.add();
    if !server.serves(&fleet.site())? {
        return match has_log && server.said().contains("--log-device") {
            true => Ok(()),
            false => Err(Fault::new(Wrong::NotServed, server.said())),
        };
    }
    if has_log && fleet.entries[at].disk.known().uncertain.is_none() {
        let what = "a volume is served without the log that it was left with";
        return Err(Fault::new(Wrong::Silent, what));
    }
    goes_on(fleet, rng, server, &[at], Course::Quiet(at))
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
    let keep = fleet.does(rng, Kind::Keep, 20).then(|| (KEEP, rng.choose(&KEPT_PER)));
    let faults = fleet.does(rng, Kind::SickStore, 40).then(|| rng.choose(&FAULTS));
    let plan = |at: &usize| {
        let entry = &fleet.entries[*at];
        let has_log = rng.percent(70) || entry.standing == Standing::Left { has_log: true };
        Plan {
            disk: entry.disk.clone(),
            log: has_log.then(|| fleet.logs[0].clone()),
            to_store: rng.percent(40),
            keep,
            faults,
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
    let plan = Plan::plain(disk);
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
    let has_second = taking::is_there();
    if has_second && fleet.does(rng, Kind::Force, 25) {
        let plan = usize::try_from(rng.below(server.plans.len() as u64)).unwrap_or(0);
        return Finale::Taken { plan, is_stopped: rng.percent(40) };
    }
    match fleet.does(rng, Kind::Kill, 65) {
        true => Finale::Kill,
        false => Finale::Stop,
    }
}

/// The end of a life.
fn finish(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: Option<Server>,
    chosen: &[usize],
    (end, taken): (Finale, Option<taking::Taken>),
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

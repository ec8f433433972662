//! The other host: it takes volumes over by force, or is handed them.

use super::guest::Stage;
use super::host::{Plan, Server};
use super::life::{Course, Finale, ctl, work};
use super::{Fleet, Standing, host, labels};
use crate::storm::kinds::Kind;
use crate::storm::model::View;
use crate::storm::story::{Fault, Outcome, Wrong};
use mica_units::Rng;
use rustix::process::Signal;
use std::sync::atomic::Ordering;

/// A server there, and what its disk showed first.
pub(super) struct Taken {
    server: Server,
    bytes: Vec<u8>,
}

/// Whether there is one.
pub(super) fn is_there() -> bool {
    host::second_lack().is_none()
}

fn plan(fleet: &Fleet<'_>, rng: &mut Rng, disk: &std::sync::Arc<super::disk::Disk>) -> Plan {
    let log = rng.percent(60).then(|| fleet.logs[1].clone());
    Plan { disk: disk.clone(), log, to_store: rng.percent(40), keep: None }
}

fn begin(fleet: &Fleet<'_>, rng: &mut Rng, plan: Plan, by_force: bool) -> Outcome<Taken> {
    let name = format!("b-{}", rng.next_u64() % 100_000_000);
    let told = (&plan.disk.name, plan.log.is_some(), plan.to_store);
    fleet.tell(format_args!("  {name}: {told:?}, force: {by_force}"));
    fleet.world.counts.lives.add();
    let site = fleet.site();
    let mut server = Server::begin(&site, &name, vec![plan.clone()], (true, by_force))?;
    if !server.serves(&site)? {
        return Err(Fault::new(Wrong::NotServed, server.said()));
    }
    let bytes = server.read(&site, &plan)?;
    Ok(Taken { server, bytes })
}

/// It takes one disk of a server that lives, or is stopped meanwhile.
pub(super) fn take(
    fleet: &Fleet<'_>,
    rng: &mut Rng,
    from: &Server,
    (at, is_stopped): (usize, bool),
    stage: &Stage<'_>,
) -> Outcome<Taken> {
    fleet.world.counts.forced.add();
    stage.may_fail.store(true, Ordering::Relaxed);
    fleet.tell(format_args!("  taken, stopped: {is_stopped}"));
    if is_stopped {
        from.signal(Signal::STOP);
    }
    let plan = plan(fleet, rng, &from.plans[at].disk);
    let taken = begin(fleet, rng, plan, true);
    if is_stopped {
        from.signal(Signal::CONT);
    }
    taken
}

/// What it does with a disk that it has by force, until nobody has it, or it is killed.
pub(super) fn after(fleet: &mut Fleet<'_>, rng: &mut Rng, at: usize, taken: Taken) -> Outcome {
    fleet.entries[at].disk.known().lost();
    go_on(fleet, rng, at, taken, View::Lossy)
}

fn go_on(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    at: usize,
    Taken { server, bytes }: Taken,
    view: View,
) -> Outcome {
    let plan = server.plans[0].clone();
    let what = format!("{} on the second host", plan.disk.name);
    {
        let mut known = plan.disk.known();
        known.settle(&bytes, view, &what)?;
        known.flushes_to_store = plan.flushes_to_store();
    }
    fleet.world.counts.reads.add();
    let said = ctl(fleet, &server, &["--output", "json", "snapshots", &plan.disk.name])?;
    plan.disk.known().settle_labels(&labels(&said)?, &what)?;
    fleet.entries[at].standing = Standing::LeftBySecond;
    let is_killed = fleet.does(rng, Kind::Kill, 40);
    let end = if is_killed { Finale::Kill } else { Finale::Stop };
    let (server, _) = work(fleet, rng, server, end, Course::Quiet(at))?;
    match server {
        Some(server) => close(fleet, at, server),
        None if rng.percent(60) => {
            // It comes back by itself: with its log, it lacks nothing.
            let view = if plan.log.is_some() { View::Kept } else { View::Lossy };
            let Taken { server, bytes } = begin(fleet, rng, plan.clone(), false)?;
            if view == View::Lossy {
                plan.disk.known().lost();
            }
            plan.disk.known().settle(&bytes, view, &what)?;
            close(fleet, at, server)
        }
        None => Ok(()),
    }
}

fn close(fleet: &mut Fleet<'_>, at: usize, server: Server) -> Outcome {
    let (code, said) = server.stop()?;
    if code != Some(0) {
        return Err(Fault::new(Wrong::Failed, format!("its end: {code:?}: {said}")));
    }
    fleet.world.counts.closes.add();
    let entry = &mut fleet.entries[at];
    entry.disk.known().closed();
    entry.standing = Standing::Closed;
    Ok(())
}

/// It takes what a dead server of the first host had.
pub(super) fn maybe_takes_from_the_dead(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    chosen: &[usize],
) -> Outcome {
    if !is_there() || !fleet.does(rng, Kind::Force, 20) {
        return Ok(());
    }
    let at = rng.choose(chosen);
    fleet.world.counts.forced.add();
    fleet.tell("  taken from the dead");
    let plan = plan(fleet, rng, &fleet.entries[at].disk);
    let taken = begin(fleet, rng, plan, true)?;
    after(fleet, rng, at, taken)
}

/// A volume that nobody has is handed to it: nobody else opens it then.
pub(super) fn is_handed(fleet: &mut Fleet<'_>, rng: &mut Rng, at: usize) -> Outcome {
    let disk = fleet.entries[at].disk.clone();
    let url = fleet.url(&disk.name)?;
    fleet.verb_ok(&["handover", "-q", &url, host::SECOND])?;
    if rng.percent(40) {
        let own = Plan { disk: disk.clone(), log: None, to_store: true, keep: None };
        let name = fleet.new_name("not-the-heir");
        let mut server = Server::begin(&fleet.site(), &name, vec![own], (false, false))?;
        if server.serves(&fleet.site())? {
            let what = "a volume that was handed to another host is served";
            return Err(Fault::new(Wrong::Looked, what));
        }
    }
    let plan = plan(fleet, rng, &disk);
    let taken = begin(fleet, rng, plan, false)?;
    go_on(fleet, rng, at, taken, View::Kept)
}

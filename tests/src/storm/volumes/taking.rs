//! Another host takes a volume: from a server that lives, or is stopped meanwhile, by force; or
//! from nobody.

use super::Fleet;
use super::disk::Disk;
use super::guest::Stage;
use super::host::{self, NO_ROOM, Plan, Server};
use crate::clock;
use crate::storm::kinds::Kind;
use crate::storm::story::{Fault, Outcome, Wrong};
use mica_units::Rng;
use rustix::process::Signal;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A server there, and what its disk showed first.
pub(super) struct Taken {
    pub(super) server: Server,
    pub(super) bytes: Vec<u8>,
}

/// Whether there is one.
pub(super) fn is_there() -> bool {
    host::second_lack().is_none()
}

pub(super) fn plan(fleet: &Fleet<'_>, rng: &mut Rng, disk: &Arc<Disk>) -> Plan {
    let log = rng.percent(60).then(|| fleet.logs[1].clone());
    Plan { log, to_store: rng.percent(40), ..Plan::plain(disk.clone()) }
}

pub(super) fn begin(
    fleet: &Fleet<'_>,
    rng: &mut Rng,
    plan: Plan,
    by_force: bool,
) -> Outcome<Taken> {
    let name = format!("b-{}", rng.next_u64() % 100_000_000);
    let told = (&plan.disk.name, plan.log.is_some(), plan.to_store);
    fleet.tell(format_args!("  {name}: {told:?}, force: {by_force}"));
    fleet.world.counts.lives.add();
    let site = fleet.site();
    if by_force && fleet.does(rng, Kind::Kill, 30) {
        // Before it has it, or just after, and with nothing written.
        let first =
            Server::begin(&site, &format!("{name}-first"), vec![plan.clone()], (true, true))?;
        let pause = Duration::from_micros(rng.below(150_000));
        fleet.tell(format_args!("    the first one is killed after {pause:?}"));
        clock::sleep(pause);
        fleet.world.counts.kills.add();
        first.kill()?;
    }
    let mut plan = plan;
    let mut server = Server::begin(&site, &name, vec![plan.clone()], (true, by_force))?;
    if !server.serves(&site)? {
        let said = server.said();
        // Logs that were left take room.
        if plan.log.is_none() || !said.contains(NO_ROOM) {
            return Err(Fault::new(Wrong::NotServed, said));
        }
        fleet.tell("    its log has no room");
        plan.log = None;
        let name = format!("{name}-without");
        server = Server::begin(&site, &name, vec![plan.clone()], (true, by_force))?;
        if !server.serves(&site)? {
            return Err(Fault::new(Wrong::NotServed, server.said()));
        }
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

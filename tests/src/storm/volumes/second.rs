//! The other host: it takes volumes over by force, or is handed them.

use super::disk::Disk;
use super::host::{self, Plan, Server};
use super::taking::{Taken, begin, is_there, plan};
use super::work::{Course, Finale, ctl, work};
use super::{Fleet, Standing, VOLUMES_MAX, labels};
use crate::command::Finished;
use crate::storm::kinds::Kind;
use crate::storm::model::View;
use crate::storm::story::{Fault, Outcome, Wrong};
use mica_units::Rng;
use std::sync::Arc;

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
        let own = Plan::plain(disk.clone());
        let name = fleet.new_name("not-the-heir");
        let mut server = Server::begin(&fleet.site(), &name, vec![own], (false, false))?;
        if server.serves(&fleet.site())? {
            let what = "a volume that was handed to another host is served";
            return Err(Fault::new(Wrong::Looked, what));
        }
    }
    if fleet.does(rng, Kind::Handed, 60) {
        for _ in 0..1 + rng.below(3) {
            if between(fleet, rng, &disk)? == Left::ToAll {
                return Ok(());
            }
        }
    }
    let plan = plan(fleet, rng, &disk);
    let taken = begin(fleet, rng, plan, false)?;
    go_on(fleet, rng, at, taken, View::Kept)
}

/// Whose a volume is that was handed over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    ToItsHeir,
    ToAll,
}

/// One thing that is done with a volume before its heir opens it. Whatever it is, the volume keeps
/// its content and its snapshots, and its heir, unless the hand-over is ended on purpose.
fn between(fleet: &mut Fleet<'_>, rng: &mut Rng, disk: &Arc<Disk>) -> Outcome<Left> {
    let url = fleet.url(&disk.name)?;
    match rng.below(5) {
        0 => refused(&fleet.verb_to_end(&["snapshot", "-q", &url, "between"])?)?,
        1 => fleet.verb_ok(&["gc", "-q", &fleet.store_url()?]).map(drop)?,
        2 if fleet.entries.len() < VOLUMES_MAX => {
            let name = fleet.new_name("clone");
            let said = fleet.verb_to_end(&["clone", "-q", &url, &fleet.url(&name)?])?;
            match said.status.success() {
                true => {
                    let known = disk.known().without_snapshots();
                    fleet.add(name, known);
                }
                false => refused(&said)?,
            }
        }
        3 => {
            fleet.verb_ok(&["handover", "-q", "--cancel", &url])?;
            return Ok(Left::ToAll);
        }
        4 => {
            taken_by_force(fleet, disk)?;
            return Ok(Left::ToAll);
        }
        _ => {}
    }
    Ok(Left::ToItsHeir)
}

/// A verb has left the volume to its heir, and says so.
fn refused(said: &Finished) -> Outcome {
    match !said.status.success() && said.stderr.contains("was handed over") {
        true => Ok(()),
        false => Err(Fault::new(Wrong::Looked, said.to_string())),
    }
}

/// A host that is not its heir takes it by force: it has all of it.
fn taken_by_force(fleet: &mut Fleet<'_>, disk: &Arc<Disk>) -> Outcome {
    let own = Plan::plain(disk.clone());
    let name = fleet.new_name("by-force");
    fleet.world.counts.forced.add();
    let mut server = Server::begin(&fleet.site(), &name, vec![own.clone()], (false, true))?;
    if !server.serves(&fleet.site())? {
        return Err(Fault::new(Wrong::NotServed, server.said()));
    }
    let bytes = server.read(&fleet.site(), &own)?;
    let what = format!("{}, by force from its heir", disk.name);
    disk.known().settle(&bytes, View::Kept, &what)?;
    let (code, said) = server.stop()?;
    if code != Some(0) {
        return Err(Fault::new(Wrong::Failed, format!("its end: {code:?}: {said}")));
    }
    disk.known().flushes_to_store = true;
    disk.known().closed();
    Ok(())
}

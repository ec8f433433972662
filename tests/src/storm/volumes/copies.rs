//! Copies that are put back: of the store, as it was when nobody had a volume open; and of a log,
//! or the log is gone.

use super::disk::{Disk, Known};
use super::host::{NO_ROOM, Plan, Server};
use super::{Entry, Fleet, Standing};
use crate::storm::kinds::Kind;
use crate::storm::model::View;
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use mica_units::Rng;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// What was copied.
#[derive(Default)]
pub(super) struct Copies {
    store: Option<Vec<(String, Known)>>,
    /// Whether there is a copy of the first host's log.
    has_log: bool,
}

/// Makes copies, and puts them back.
pub(super) fn put_back(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    if fleet.world.kinds.has(Kind::StoreCopy) {
        store(fleet, rng)?;
    }
    if fleet.world.kinds.has(Kind::LogCopy) {
        log(fleet, rng)?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Outcome {
    let status = Command::new("cp").args(["-a", "--sparse=always", "--"]).args([from, to]).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        _ => Err(trouble(format!("{} is not copied", from.display()))),
    }
}

fn store(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    let place = fleet.world.run.join("store-copy");
    let Some(known) = &fleet.copies.store else {
        let is_settled =
            |entry: &Entry| entry.standing == Standing::Closed && entry.disk.known().is_known();
        if fleet.entries.iter().all(is_settled) && rng.percent(30) {
            fleet.tell("  the store is copied");
            copy(&fleet.store, &place)?;
            let known = |entry: &Entry| (entry.disk.name.clone(), entry.disk.known().clone());
            fleet.copies.store = Some(fleet.entries.iter().map(known).collect());
        }
        return Ok(());
    };
    if !rng.percent(35) {
        return Ok(());
    }
    fleet.tell("  the copy of the store is put back");
    fleet.world.counts.copies.add();
    let entry = |(name, known): &(String, Known)| Entry {
        disk: Arc::new(Disk::new(name.clone(), known.clone())),
        standing: Standing::Closed,
    };
    let entries = known.iter().map(entry).collect();
    fs::remove_dir_all(&fleet.store)?;
    copy(&place, &fleet.store)?;
    fleet.entries = entries;
    Ok(())
}

fn log(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    let (log, place) = (fleet.logs[0].path.clone(), fleet.world.run.join("log-copy"));
    if !log.exists() {
        return Ok(());
    }
    let is_gone = rng.percent(6);
    if !is_gone && (!fleet.copies.has_log || rng.percent(60)) {
        if rng.percent(40) {
            fleet.tell("  the log is copied");
            copy(&log, &place)?;
            fleet.copies.has_log = true;
        }
        return Ok(());
    }
    fs::remove_file(&log)?;
    if is_gone {
        fleet.tell("  the log is gone");
    } else {
        fleet.tell("  the copy of the log is put back");
        copy(&place, &log)?;
    }
    fleet.world.counts.copies.add();
    for at in 0..fleet.entries.len() {
        if fleet.entries[at].standing == (Standing::Left { has_log: true }) {
            open_with_another_log(fleet, at)?;
        }
    }
    Ok(())
}

/// A volume whose server was killed is opened with a log that is not its own any more: it is
/// refused, or opened with a word about what is lost. By force it is opened; without that log, if
/// what the copy has of other volumes leaves no room.
fn open_with_another_log(fleet: &mut Fleet<'_>, at: usize) -> Outcome {
    let disk = fleet.entries[at].disk.clone();
    let mut has_room = true;
    for (by_force, with_log) in [(false, true), (true, true), (true, false)] {
        if with_log && !has_room {
            continue;
        }
        let log = with_log.then(|| fleet.logs[0].clone());
        let plan = Plan { log, ..Plan::plain(disk.clone()) };
        let name = fleet.new_name("copied");
        let site = fleet.site();
        let mut server = Server::begin(&site, &name, vec![plan.clone()], (false, by_force))?;
        if !server.serves(&site)? {
            has_room &= !server.said().contains(NO_ROOM);
            if by_force && (has_room || !with_log) {
                return Err(Fault::new(Wrong::NotServed, server.said()));
            }
            fleet.tell(format_args!("    refused: {}", server.said()));
            continue;
        }
        let bytes = server.read(&site, &plan)?;
        let said = server.said();
        let what = format!("{}, with a copy of its log", disk.name);
        let view = fleet.entries[at].view();
        let is_whole = disk.known().clone().settle(&bytes, view, &what).is_ok();
        // By force it is known that something is given up.
        let is_told = by_force || said.contains("WARN");
        disk.known().lost();
        disk.known().settle(&bytes, View::Lossy, &what)?;
        if !is_whole && !is_told {
            return Err(Fault::new(Wrong::Silent, format!("{what}: {said}")));
        }
        let (code, said) = server.stop()?;
        if code != Some(0) {
            return Err(Fault::new(Wrong::Failed, format!("its end: {code:?}: {said}")));
        }
        disk.known().flushes_to_store = true;
        disk.known().closed();
        fleet.entries[at].standing = Standing::Closed;
        return Ok(());
    }
    Ok(())
}

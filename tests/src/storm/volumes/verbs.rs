//! Verbs, on volumes that nobody serves; some are killed.

use super::disk::{Content, Disk, Known};
use super::look::{EXPORT, any_label, content, exported_to, look_at_snapshots};
use super::{Entry, Fleet, Standing, VOLUMES_MAX, second, taking};
use crate::storm::kinds::Kind;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use mica_units::Rng;
use std::fs;

const VERBS: [u64; 5] = [0, 1, 2, 4, 6];

/// Things that are done while nobody serves anything.
pub(super) fn rest(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    for _ in 0..rng.choose(&VERBS) {
        let at = usize::try_from(rng.below(fleet.entries.len() as u64)).unwrap_or(0);
        let is_settled = fleet.entries[at].is_settled();
        let disk = fleet.entries[at].disk.clone();
        match rng.below(13) {
            0 | 1 if is_settled => snapshot(fleet, rng, &disk)?,
            2 if is_settled => drop_one(fleet, rng, &disk)?,
            3 | 4 if is_settled => rollback(fleet, rng, &disk)?,
            5 | 6 => clone(fleet, rng, at)?,
            7 if fleet.entries.len() > 1 && is_settled => delete(fleet, rng, at)?,
            8 => import(fleet, rng, &disk)?,
            9 if fleet.does(rng, Kind::Stream, 100) => send(fleet, rng, &disk)?,
            10 if is_settled && taking::is_there() && fleet.does(rng, Kind::Force, 60) => {
                second::is_handed(fleet, rng, at)?;
            }
            11 if is_settled => keep(fleet, rng, &disk)?,
            _ if fleet.does(rng, Kind::Collect, 100) => {
                let (url, fate) = (fleet.store_url()?, fleet.fate(rng));
                must(fleet.verb(&["gc", "-q", &url], fate)?)?;
                fleet.world.counts.collections.add();
            }
            _ => {}
        }
        if rng.percent(30) {
            look_at_snapshots(fleet, at.min(fleet.entries.len() - 1))?;
        }
    }
    Ok(())
}

impl Entry {
    /// Nobody has it, and what it may hold is what its model says.
    fn is_settled(&self) -> bool {
        self.standing == Standing::Closed && self.disk.known().is_known()
    }
}

fn must(said: Option<crate::command::Finished>) -> Outcome<bool> {
    match said {
        None => Ok(false),
        Some(said) if said.status.success() => Ok(true),
        Some(said) => Err(Fault::new(Wrong::Failed, said.to_string())),
    }
}

fn snapshot(fleet: &Fleet<'_>, rng: &mut Rng, disk: &Disk) -> Outcome {
    let (url, label) = (fleet.url(&disk.name)?, format!("r{}", rng.next_u64() % 1_000_000));
    let is_done = must(fleet.verb(&["snapshot", "-q", &url, &label], fleet.fate(rng))?)?;
    let mut known = disk.known();
    let moment = known.moment();
    known.flushes_to_store = true;
    known.took(&label, &moment, is_done);
    Ok(())
}

fn drop_one(fleet: &Fleet<'_>, rng: &mut Rng, disk: &Disk) -> Outcome {
    let Some(label) = any_label(disk, rng) else { return Ok(()) };
    let url = format!("{}@{label}", fleet.url(&disk.name)?);
    let is_done = must(fleet.verb(&["drop", "-q", &url], fleet.fate(rng))?)?;
    let mut known = disk.known();
    known.flushes_to_store = true;
    known.dropped(&label, is_done);
    Ok(())
}

fn rollback(fleet: &Fleet<'_>, rng: &mut Rng, disk: &Disk) -> Outcome {
    let Some(label) = any_label(disk, rng) else { return Ok(()) };
    let Some(content) = content(fleet, disk, &label)? else { return Ok(()) };
    let url = format!("{}@{label}", fleet.url(&disk.name)?);
    let is_done = must(fleet.verb(&["rollback", "-q", &url], fleet.fate(rng))?)?;
    let mut known = disk.known();
    match is_done {
        true => known.model.set_content(&content),
        false => known.or_else.push(content),
    }
    Ok(())
}

fn clone(fleet: &mut Fleet<'_>, rng: &mut Rng, at: usize) -> Outcome {
    if fleet.entries.len() >= VOLUMES_MAX {
        return Ok(());
    }
    let disk = fleet.entries[at].disk.clone();
    let (mut source, mut known) = (fleet.url(&disk.name)?, None);
    if let Some(label) = any_label(&disk, rng).filter(|_| rng.percent(80)) {
        let Some(content) = content(fleet, &disk, &label)? else { return Ok(()) };
        source = format!("{source}@{label}");
        known = Some(Known::with_content(fleet.stamp(), &content));
    } else if fleet.entries[at].is_settled() {
        known = Some(disk.known().without_snapshots());
    }
    let Some(known) = known else { return Ok(()) };
    let name = fleet.new_name("clone");
    let target = fleet.url(&name)?;
    let words = ["clone", "-q", &source, &target];
    let fate = fleet.fate(rng);
    if let Some(said) = fleet.verb(&words, fate)? {
        match said.status.success() {
            true => fleet.add(name, known),
            // A snapshot of a volume that was not closed may not be in a head yet.
            false if said.stderr.contains("try again") => {}
            false => return Err(Fault::new(Wrong::Failed, said.to_string())),
        }
        return Ok(());
    }
    // What is left of it is nobody's.
    discard(fleet, &target)
}

/// Deletes what a verb that was killed may have left.
fn discard(fleet: &Fleet<'_>, url: &str) -> Outcome {
    let said = fleet.verb_to_end(&["delete", "-q", "--force", url])?;
    let is_gone = said.status.success() || said.stderr.contains("there is no volume");
    if is_gone { Ok(()) } else { Err(Fault::new(Wrong::Failed, said.to_string())) }
}

fn delete(fleet: &mut Fleet<'_>, rng: &mut Rng, at: usize) -> Outcome {
    let url = fleet.url(&fleet.entries[at].disk.name)?;
    let fate = fleet.fate(rng);
    if !must(fleet.verb(&["delete", "-q", &url], fate)?)? {
        discard(fleet, &url)?;
    }
    fleet.entries.remove(at);
    Ok(())
}

fn import(fleet: &mut Fleet<'_>, rng: &mut Rng, disk: &Disk) -> Outcome {
    let Some(label) = any_label(disk, rng).filter(|_| fleet.entries.len() < VOLUMES_MAX) else {
        return Ok(());
    };
    let Some(content) = content(fleet, disk, &label)? else { return Ok(()) };
    let file = fleet.world.run.join(EXPORT);
    let name = fleet.new_name("import");
    let url = fleet.url(&name)?;
    let words = ["import", "-q", "-f", "raw", text(&file)?, &url];
    let fate = fleet.fate(rng);
    if !must(fleet.verb(&words, fate)?)? {
        // Half an image is not shown as one.
        if let Ok(bytes) = exported_to(fleet, &url, "half.raw")? {
            let seen = disk.known().seen(&bytes, &url)?;
            if seen != content {
                let what = format!("{url} has a part of an image, and can be read");
                return Err(Fault::new(Wrong::Looked, what));
            }
        }
        discard(fleet, &url)?;
        fleet.verb_ok(&words)?;
    }
    let mut known = Known::with_content(fleet.stamp(), &content);
    known.add_snapshot(EXPORT, true, Content::Seen(content));
    fleet.add(name, known);
    Ok(())
}

/// One or two snapshots go to another store.
fn send(fleet: &mut Fleet<'_>, rng: &mut Rng, disk: &Disk) -> Outcome {
    let all: Vec<_> = {
        let known = disk.known();
        let certain = known.snapshots.iter().filter(|snapshot| snapshot.is_certain);
        certain.map(|snapshot| snapshot.label.clone()).collect()
    };
    if all.is_empty() {
        return Ok(());
    }
    let first = usize::try_from(rng.below(all.len() as u64)).unwrap_or(0);
    let name = fleet.new_name("far");
    let far = format!("file://{}/{name}", text(&fleet.far)?);
    let url = fleet.url(&disk.name)?;
    let mut since: Option<&String> = None;
    for label in all.iter().skip(first).take(2) {
        let Some(wanted) = content(fleet, disk, label)? else { return Ok(()) };
        let file = fleet.world.run.join(fleet.stream_name(label));
        let _ = fs::remove_file(&file);
        let (from, file) = (format!("{url}@{label}"), text(&file)?.to_owned());
        let mut words = vec!["send", "-q", &from, &file];
        if let Some(since) = since {
            words.extend(["--since", since]);
        }
        fleet.verb_ok(&words)?;
        let words = ["receive", "-q", &far, &file];
        let fate = fleet.fate(rng);
        if !must(fleet.verb(&words, fate)?)? {
            let again = fleet.verb_to_end(&words)?;
            if again.stderr.contains("is incomplete") && since.is_none() {
                // Of a whole one a part was left.
                discard(fleet, &far)?;
                fleet.verb_ok(&words)?;
            } else if !again.status.success() {
                return Err(Fault::new(Wrong::Failed, again.to_string()));
            }
        }
        for url in [far.clone(), format!("{far}@{label}")] {
            let bytes = exported_to(fleet, &url, "far.raw")?;
            let bytes = bytes.map_err(|said| Fault::new(Wrong::Failed, said))?;
            if disk.known().seen(&bytes, &url)? != wanted {
                let what = format!("{url} is not what was sent of {from}");
                return Err(Fault::new(Wrong::Snapshot, what));
            }
        }
        since = Some(label);
        fleet.world.counts.streams.add();
    }
    fleet.verb_ok(&["check", "-q", &format!("file://{}", text(&fleet.far)?)]).map(drop)
}

impl Fleet<'_> {
    fn stream_name(&self, label: &str) -> String {
        format!("{label}-{}.stream", self.names)
    }
}

fn keep(fleet: &Fleet<'_>, rng: &mut Rng, disk: &Disk) -> Outcome {
    let (url, fate) = (fleet.url(&disk.name)?, fleet.fate(rng));
    must(fleet.verb(&["keep", "-q", &url, "1ms/1ms"], fate)?).map(drop)
}

//! What volumes and snapshots show that nobody serves, or beside a server: exports are judged.

use super::disk::{Content, Disk};
use super::{Fleet, Standing, labels};
use crate::storm::model::View;
use crate::storm::stamp::Seq;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use mica_units::Rng;
use std::fs;

/// The file of the last export.
pub(super) const EXPORT: &str = "export.raw";
/// What says that a snapshot is not in the store yet.
const NOT_YET: [&str; 2] = ["no snapshot", "try again"];

/// What says that what a volume has may be in its log only.
const NEEDS_LOG: &str = "was not closed, and its log";

/// The label of a snapshot that has to be there.
pub(super) fn any_label(disk: &Disk, rng: &mut Rng) -> Option<String> {
    let known = disk.known();
    let certain = known.snapshots.iter().filter(|snapshot| snapshot.is_certain);
    let labels: Vec<_> = certain.map(|snapshot| &snapshot.label).collect();
    (!labels.is_empty()).then(|| rng.choose(&labels).clone())
}

/// All bytes of what `url` names, through a file of this name, or why it could not be read.
pub(super) fn exported_to(
    fleet: &Fleet<'_>,
    url: &str,
    name: &str,
) -> Outcome<Result<Vec<u8>, String>> {
    let file = fleet.world.run.join(name);
    // There may be none.
    let _ = fs::remove_file(&file);
    let said = fleet.verb_to_end(&["export", "-q", "-O", "raw", url, text(&file)?])?;
    match said.status.success() {
        true => Ok(Ok(fs::read(&file)?)),
        false => Ok(Err(said.stderr)),
    }
}

/// All bytes of what `url` names, or why it could not be read. They stay in a file.
fn exported(fleet: &Fleet<'_>, url: &str) -> Outcome<Result<Vec<u8>, String>> {
    exported_to(fleet, url, EXPORT)
}

/// What a snapshot has, which is judged; `None` if it is not in the store yet.
pub(super) fn content(fleet: &Fleet<'_>, disk: &Disk, label: &str) -> Outcome<Option<Vec<Seq>>> {
    let url = format!("{}@{label}", fleet.url(&disk.name)?);
    let bytes = match exported(fleet, &url)? {
        Ok(bytes) => bytes,
        Err(said) if NOT_YET.iter().any(|text| said.contains(text)) => return Ok(None),
        Err(said) => return Err(Fault::new(Wrong::Failed, format!("{url}: {said}"))),
    };
    let mut known = disk.known();
    known.settle_snapshot(label, &bytes, &url)?;
    fleet.world.counts.reads.add();
    match known.snapshot(label).map(|snapshot| snapshot.content.clone()) {
        Some(Content::Seen(content)) => Ok(Some(content)),
        _ => Ok(None),
    }
}

pub(super) fn look_at_snapshots(fleet: &Fleet<'_>, at: usize) -> Outcome {
    let entry = &fleet.entries[at];
    if entry.standing != Standing::Closed {
        return Ok(());
    }
    let url = fleet.url(&entry.disk.name)?;
    let said = fleet.verb_ok(&["snapshots", "--output", "json", &url])?;
    let mut known = entry.disk.known();
    known.settle_labels(&labels(&said)?, &url)?;
    known.closed();
    let all: Vec<_> = known.snapshots.iter().map(|snapshot| snapshot.label.clone()).collect();
    drop(known);
    for label in all {
        if content(fleet, &entry.disk, &label)?.is_none() {
            let what = format!("{url}@{label} is listed, and cannot be read");
            return Err(Fault::new(Wrong::Snapshot, what));
        }
    }
    Ok(())
}

/// Snapshots of a volume that was not closed: those that are in the store, with what they have.
fn look_at_snapshots_left(fleet: &Fleet<'_>, at: usize) -> Outcome {
    let disk = &fleet.entries[at].disk;
    let url = fleet.url(&disk.name)?;
    let said = fleet.verb_ok(&["snapshots", "--output", "json", &url])?;
    let there = labels(&said)?;
    // What only its log has comes when it is opened.
    let mut in_store = disk.known().clone();
    in_store.lost();
    in_store.settle_labels(&there, &format!("{url}, which was not closed"))?;
    for label in there.iter().filter(|label| !label.is_empty()) {
        content(fleet, disk, label)?;
    }
    Ok(())
}

/// Judges each volume by its snapshots, by `check` and `scrub` of itself, and by an export. Some
/// were not served since a verb or a server was killed, as a log had no room: these hold what the
/// first to open them could have shown.
pub(super) fn look_at_all(fleet: &mut Fleet<'_>) -> Outcome {
    for at in 0..fleet.entries.len() {
        let entry = &fleet.entries[at];
        let url = fleet.url(&entry.disk.name)?;
        match entry.standing {
            Standing::Closed => look_at_snapshots(fleet, at)?,
            Standing::Left { .. } | Standing::LeftBySecond => look_at_snapshots_left(fleet, at)?,
        }
        fleet.check_whole(&url)?;
        let bytes = match exported(fleet, &url)? {
            Ok(bytes) => bytes,
            // Nobody reads it without that: as it should be.
            Err(said)
                if entry.standing == (Standing::Left { has_log: true })
                    && said.contains(NEEDS_LOG) =>
            {
                continue;
            }
            Err(said) => return Err(Fault::new(Wrong::Failed, said)),
        };
        let view = entry.view();
        entry.disk.known().settle(&bytes, view, &url)?;
    }
    Ok(())
}

/// Things that others do while `disk` is served.
pub(super) fn while_served(fleet: &Fleet<'_>, rng: &mut Rng, disk: &Disk) -> Outcome {
    if rng.percent(40) {
        let url = fleet.url(&disk.name)?;
        let moment = disk.known().moment();
        let bytes = exported(fleet, &url)?.map_err(|said| Fault::new(Wrong::Failed, said))?;
        let known = disk.known();
        let allowed = known.allowed_since(&moment, View::Lossy);
        return known.judge_reading(&bytes, &allowed, &format!("{url}, while it is served"));
    }
    match any_label(disk, rng) {
        Some(label) => content(fleet, disk, &label).map(drop),
        None => Ok(()),
    }
}

//! What becomes of the layers of disks that nobody serves: mica's verbs merge them, or are killed
//! while they do, QEMU merges the active one into the one beneath it, and disks grow.

use super::asking::ending_of;
use super::fleet::Fleet;
use super::frozen::Frozen;
use super::order::{Before, Ending, What};
use super::state_in;
use crate::clock;
use crate::command;
use crate::storm::foreign;
use crate::storm::formats::{format_of, is_qcow2, is_raw};
use crate::storm::kinds::Kind;
use crate::storm::model::Model;
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use mica_units::Rng;
use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long a verb may take.
const LIMIT: Duration = Duration::from_secs(60);
/// Why a disk may not grow that is served.
pub(super) const NOT_WHILE_USED: &str = "with a data file can grow only while nobody uses it";
/// Sectors by which a disk grows at most, and its length at most.
const GROWTH_MAX: u64 = 600;
const LEN_MAX: u64 = 6 << 11;

/// How the server ended that had them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ended {
    Closed,
    Killed,
}

/// Nobody serves the disks of the `fleet`, and what became of all commands is known.
pub(super) fn change(fleet: &mut Fleet<'_>, rng: &mut Rng, ended: Ended) -> Outcome {
    for number in 0..fleet.disks.len() {
        if fleet.world.does(rng, Kind::Merge, 30) {
            merge(fleet, rng, (number, ended))?;
        }
        if fleet.world.does(rng, Kind::Resize, 20) {
            grow(fleet, rng, number)?;
        }
        // QEMU does not know what a killed server left.
        if ended == Ended::Closed && fleet.world.does(rng, Kind::CommitDown, 25) {
            commit_by_qemu(fleet, rng, number)?;
        }
    }
    Ok(())
}

/// How long the disk of `model` is to be, in sectors.
pub(super) fn longer(model: &Model, rng: &mut Rng) -> Option<u64> {
    let longer = model.len() + 1 + rng.below(GROWTH_MAX);
    (longer <= LEN_MAX).then_some(longer)
}

fn grow(fleet: &mut Fleet<'_>, rng: &mut Rng, number: usize) -> Outcome {
    let Fleet { world, disks, .. } = fleet;
    let disk = &mut disks[number];
    let Some(longer) = longer(&disk.model, rng) else { return Ok(()) };
    let len = (longer * SECTOR as u64).to_string();
    world.story.tell(format_args!("  {} gets {longer} sectors", disk.name));
    let (active, format) = (disk.active(), format_of(disk.active()));
    let said = world.mica(&["resize", "-q", "--format", format, active, &len])?;
    if !said.status.success() {
        return Err(Fault::new(Wrong::Failed, format!("a resize: {said}")));
    }
    disk.model.resize(longer);
    world.counts.resizes.add();
    Ok(())
}

/// Layers of a disk are merged, up into the active one or down from it. That is refused while it
/// has an internal snapshot, which shows what is beneath.
fn merge(fleet: &mut Fleet<'_>, rng: &mut Rng, (number, ended): (usize, Ended)) -> Outcome {
    let disk = &fleet.disks[number];
    let frozen = disk.chain.len() - 1;
    if frozen == 0 {
        return Ok(());
    }
    let at = usize::try_from(rng.below(frozen as u64)).expect("few");
    let base = disk.chain[at].clone();
    let active = disk.active().to_owned();
    let (what, args) = match rng.below(5) {
        0 | 1 => {
            let args = vec!["rebase", "-q", "-F", format_of(&base), "-b", &base, &active];
            (What::Stream { base: Some(at), drops_states: true }, args)
        }
        2 => {
            let args = vec!["rebase", "-q", "-b", "", &active];
            (What::Stream { base: None, drops_states: true }, args)
        }
        _ => {
            let mut args = vec!["commit", "-q", "-b", &base, &active];
            args.extend(disk.of_gone(rng));
            (What::Commit { top: None, base: at }, args)
        }
    };
    fleet.tell(format_args!("  {args:?}"));
    // Then only the name changes, if that.
    let keeps_base =
        args[0] == "rebase" && base == disk.chain[frozen - 1] && args.contains(&&*base);
    let wants_snapshot = fleet.world.does(rng, Kind::Snapshot, 25) && ended == Ended::Closed;
    let ending = match wants_snapshot && !is_raw(&active) && !keeps_base {
        true => run_with_snapshot(fleet, rng, (&args, &active))?,
        false => run(fleet, rng, &args)?,
    };
    settle(fleet, number, (&what, ending))
}

/// Runs a verb while the `active` layer has an internal snapshot, if it can have one: then it is
/// refused.
fn run_with_snapshot(
    fleet: &Fleet<'_>,
    rng: &mut Rng,
    (args, active): (&[&str], &str),
) -> Outcome<Ending> {
    let snapshot = |deed| fleet.world.mica(&["snapshot", "-q", deed, "between", active]);
    let made = snapshot("-c")?;
    if !made.status.success() {
        // Its refcounts may be too narrow.
        fleet.tell(format_args!("  without a snapshot: {made}"));
        return run(fleet, rng, args);
    }
    fleet.world.counts.snapshots.add();
    let said = fleet.world.mica(args)?;
    let ending = ending_of(said.status.success(), &said.to_string())?;
    if ending != Ending::Refused {
        let what = format!("{args:?} was {ending:?} beneath an internal snapshot: {said}");
        return Err(Fault::new(Wrong::Snapshot, what));
    }
    let deleted = snapshot("-d")?;
    match deleted.status.success() {
        true => Ok(ending),
        false => Err(Fault::new(Wrong::Failed, format!("deleting a snapshot: {deleted}"))),
    }
}

/// Runs a verb, which may be killed.
fn run(fleet: &Fleet<'_>, rng: &mut Rng, args: &[&str]) -> Outcome<Ending> {
    let world = &fleet.world;
    let is_killed = world.does(rng, Kind::Kill, 40);
    let most = rng.choose(&[3_000, 20_000, 80_000]);
    let pause = Duration::from_micros(rng.below(most));
    if !is_killed {
        let said = world.mica(args)?;
        return ending_of(said.status.success(), &said.to_string());
    }
    fleet.tell(format_args!("  which is killed after {pause:?}"));
    let said = world.run.join("verb.log");
    let mut verb = Command::new(world.binary);
    verb.current_dir(&world.images).args(args).args(world.image_args()).stdin(Stdio::null());
    let mut verb = verb.stdout(Stdio::null()).stderr(File::create(&said)?).spawn()?;
    clock::sleep(pause);
    // It may have ended.
    let _ = verb.kill();
    let status = command::wait(&mut verb, LIMIT);
    let status = status.ok_or_else(|| Fault::new(Wrong::Hang, "a killed verb does not end"))?;
    let said = std::fs::read_to_string(&said)?;
    if said.contains("panicked") {
        return Err(Fault::new(Wrong::Panicked, said));
    }
    match status.code() {
        None => {
            world.counts.kills.add();
            Ok(Ending::Open)
        }
        Some(code) => ending_of(code == 0, &said),
    }
}

/// What became of a disk whose layers a verb was to merge.
fn settle(fleet: &mut Fleet<'_>, number: usize, (what, ending): (&What, Ending)) -> Outcome {
    let Fleet { world, disks, .. } = fleet;
    let disk = &mut disks[number];
    let chain = disk.read_chain(world, &world.images.join(disk.active()))?;
    let (old, new) = (disk.chain.clone(), what.leads_to(disk));
    let is_done = match ending {
        Ending::Done => true,
        Ending::Refused => false,
        Ending::Open => chain == new && chain != old,
    };
    if chain != if is_done { &*new } else { &*old } {
        let what = format!(
            "{what:?} was {ending:?}, and {} has the layers {chain:?}, not {old:?} or {new:?}",
            disk.name
        );
        return Err(Fault::new(Wrong::Layers, what));
    }
    let before = Before { model: disk.model.clone(), sent: Vec::new() };
    what.settle(disk, before, ending, is_done);
    disk.chain = chain;
    if !disk.is_named_by(&disk.chain) {
        disk.name_active();
    }
    match ending {
        Ending::Done => world.counts.merges.add(),
        Ending::Refused => world.counts.layers_refused.add(),
        Ending::Open => world.counts.merges_cancelled.add(),
    }
    fleet.write_config()?;
    fleet.tidy(&[(number, old)])
}

/// QEMU merges the active layer into the one beneath it, and perhaps leaves it as it is.
fn commit_by_qemu(fleet: &mut Fleet<'_>, rng: &mut Rng, number: usize) -> Outcome {
    let shares = |file: &String| fleet.sharer(number, file).is_some();
    let is_shared = fleet.disks[number].chain.iter().any(shares);
    let Fleet { world, disks, .. } = fleet;
    let disk = &mut disks[number];
    let [.., base, active] = &*disk.chain else { return Ok(()) };
    let is_state = state_in(base).is_some();
    // It knows nothing of who else needs the base.
    if !disk.clones.is_empty() || is_shared || is_state && !world.kinds.has(Kind::CommitState) {
        return Ok(());
    }
    let (base, active) = (base.clone(), active.clone());
    let is_short = disk.frozen.get(&base).is_none_or(|frozen| frozen.len() < disk.model.len());
    // It makes that longer, and what is new of it is noise.
    if is_short && format_of(&base) == "luks" {
        return Ok(());
    }
    let keep = if rng.percent(50) { &["-d"][..] } else { &[] };
    let (options, active) = foreign::opened(&world.images, "qcow2", &active)?;
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    let args = [&["commit", "-q"], &options[..], keep, &[&active]].concat();
    world.story.tell(format_args!("  qemu-img {args:?}"));
    foreign::img(&world.images, &args)?;
    world.counts.commits.add();
    let len = disk.frozen.get(&base).map_or(0, Frozen::len);
    // It leaves what is beyond the end of the disk as it was, and mica makes that zeros.
    let now = Frozen::as_now(&disk.model).in_a_file_of(len);
    disk.frozen.insert(base.clone(), now);
    *disk.merges.entry(base.clone()).or_default() += 1;
    if is_state {
        disk.target.note_change(&base);
    }
    if is_qcow2(&base) {
        let (corruptions, leaks) = foreign::check(&world.images, &base)?;
        if corruptions > 0 {
            let what = format!("{base}: {corruptions} corruptions, {leaks} leaks");
            return Err(Fault::new(Wrong::Corrupt, what));
        }
    }
    Ok(())
}

/// A disk that is served grows.
pub(super) fn grow_served(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    parties: &[super::Party],
) -> Outcome {
    let number = usize::try_from(rng.below(fleet.disks.len() as u64)).expect("few");
    let Some(longer) = fleet.with_model(number, parties, |model| longer(model, rng)) else {
        return Ok(());
    };
    let name = fleet.disks[number].name.clone();
    let len = (longer * SECTOR as u64).to_string();
    fleet.tell(format_args!("  {name} gets {longer} sectors"));
    let args = ["ctl", "--control", text(&fleet.control)?, "resize", &name, &len];
    let said = fleet.world.mica(&args)?;
    if said.stderr.contains(NOT_WHILE_USED) {
        fleet.tell(format_args!("    refused: {}", said.stderr.trim()));
        return Ok(());
    }
    if !said.status.success() {
        return Err(Fault::new(Wrong::Failed, format!("a resize: {said}")));
    }
    fleet.with_model(number, parties, |model| model.resize(longer));
    fleet.world.counts.resizes.add();
    Ok(())
}

//! Several commands at once: about the layers of one disk, or of all, and about its length, its
//! export, and the merge that is under way.
//!
//! What is answered with success is true: some order of these commands, one after the other, leads
//! to the layers that the disk has then. Of two that exclude each other one is refused, in one line
//! that says why. Which of them comes first is up to the server, so that a seed gives the same
//! commands, and not always the same end. A merge that rests excludes others for sure.

use super::asked;
use super::asking::{Asking, ending_of};
use super::disk::Disk;
use super::fleet::Fleet;
use super::giving::{self, Amid};
use super::jobs;
use super::order::{Asked, Before, Ending, Order, What};
use super::server::{Left, Server};
use crate::clock;
use crate::storm::foreign;
use crate::storm::formats::format_of;
use crate::storm::kinds::Kind;
use crate::storm::model::Model;
use crate::storm::parties::Party;
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use crate::storm::world::text;
use mica_units::Rng;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// Commands about layers at once, at most.
const ORDERS_MAX: u64 = 3;
/// How fast a merge is that is to rest: it begins with a step of a mebibyte.
const RATE: &str = "1M";
/// How a merge excludes another one, and anything else.
const MERGES: [&str; 2] = ["is being merged already", "has merge "];
/// How else a command may be refused since another one was carried out at the same time.
const OTHERS: [&str; 12] = [
    "has no backup under way",
    "exists: --reuse",
    "holds the image for writing",
    "of this server already",
    "it is not an overlay of the active layer",
    "already has data, or is in use",
    "its length differs from that of the active layer",
    "is not a layer of the chain",
    "the base is not beneath the top",
    "no state",
    "cannot grow while",
    super::apart::NOT_WHILE_USED,
];
/// How a command about a merge says that none is under way.
const NO_MERGE: &str = "are being merged";

/// A command that was given.
struct Given {
    order: Order,
    asking: Asking,
}

/// A merge that rests.
struct Resting {
    order: Order,
    job: u64,
    /// If it has not ended before that.
    is_held: bool,
}

/// What became of one.
struct Ended {
    order: Order,
    ending: Ending,
    said: String,
}

/// What disks were when the commands were given.
type Befores = BTreeMap<usize, Model>;

/// Gives some.
pub(super) fn give(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    mut server: Server,
    parties: &[Party],
) -> Outcome<Left> {
    let number = usize::try_from(rng.below(fleet.disks.len() as u64)).expect("few");
    let mut befores = Befores::new();
    let resting = match rng.percent(40) {
        true => begin_resting(fleet, rng, (number, parties), &mut befores)?,
        false => None,
    };
    let orders = orders(fleet, rng, number);
    for (disk, _) in orders.iter().flat_map(|order| &order.disks) {
        note(fleet, *disk, parties, &mut befores);
    }
    let given = begin_all(fleet, rng, orders, parties)?;
    let grows = fleet.world.does(rng, Kind::Resize, 25);
    let growing = if grows { begin_growing(fleet, rng, (number, parties))? } else { None };
    let goes_on = rng.percent(50) || resting.as_ref().is_none_or(|resting| !resting.is_held);
    control(fleet, rng, number, goes_on)?;
    let mut all = Vec::new();
    for Given { order, asking } in given {
        let (is_done, said) = asking.end()?;
        let ending = ending_amid(is_done, &said)?;
        fleet.tell(format_args!("    {:?} was {ending:?}: {}", order.disks, said.trim()));
        fleet.judge_needed(&order, ending, &said)?;
        all.push(Ended { order, ending, said });
    }
    if let Some(Resting { order, job, .. }) = resting {
        if !goes_on && is_resting(fleet, job)? {
            judge_held(&all, number)?;
        }
        jobs::resume(fleet, number)?;
        let ending = jobs::wait_for_numbered(fleet, job)?;
        fleet.tell(format_args!("    {:?} was {ending:?}", order.disks));
        all.push(Ended { order, ending, said: String::new() });
    }
    judge_exclusion(&all)?;
    let mut grown = None;
    if let Some((longer, asking)) = growing {
        let (is_done, said) = asking.end()?;
        fleet.tell(format_args!("    a resize: {}", said.trim()));
        if !is_done && ending_amid(is_done, &said)? != Ending::Refused {
            return Err(Fault::new(Wrong::Failed, format!("a resize: {said}")));
        }
        if is_done {
            fleet.with_model(number, parties, |model| model.resize(longer));
            fleet.world.counts.resizes.add();
            grown = Some((number, longer));
        }
    }
    server.look()?;
    fleet.world.counts.at_once.add();
    for (disk, model) in befores {
        let sent = fleet.with_model(disk, parties, Model::recorded);
        settle(fleet, disk, &all, &Before { model, sent })?;
        if let Some((_, longer)) = grown.filter(|(grown, _)| *grown == disk) {
            lengthen(fleet, disk, longer)?;
        }
        take_export(fleet, disk)?;
    }
    fleet.follow_layers()?;
    Ok(Left::Serving(server))
}

/// What is known of disk `number` now is remembered, if it is not yet.
fn note(fleet: &mut Fleet<'_>, number: usize, parties: &[Party], befores: &mut Befores) {
    let record = || fleet.with_model(number, parties, Model::record);
    befores.entry(number).or_insert_with(record);
}

/// Gives the commands. What some of them take is made before any of them begins.
fn begin_all(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    orders: Vec<Order>,
    parties: &[Party],
) -> Outcome<Vec<Given>> {
    let mut lines = Vec::new();
    for order in &orders {
        lines.push(giving::args_of(fleet, rng, order, (Amid::Nothing, parties))?);
    }
    let mut given = Vec::new();
    for (at, (order, args)) in orders.into_iter().zip(lines).enumerate() {
        fleet.tell(format_args!("  at once: {args:?}"));
        given.push(Given { asking: Asking::begin(fleet, &format!("ctl{at}.log"), &args)?, order });
    }
    Ok(given)
}

/// A merge of disk `number` begins, and rests unless it ends before that.
fn begin_resting(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    (number, parties): (usize, &[Party]),
    befores: &mut Befores,
) -> Outcome<Option<Resting>> {
    let merges: Vec<_> = asked(fleet).into_iter().filter(|asked| asked.is_merge()).collect();
    if merges.is_empty() {
        return Ok(None);
    }
    let wanted = (rng.choose(&merges), number);
    let Some(order) = Order::of(&mut fleet.disks, rng, wanted) else { return Ok(None) };
    note(fleet, number, parties, befores);
    let mut args = giving::args_of(fleet, rng, &order, (Amid::Nothing, parties))?;
    args.extend(["--background", "--rate", RATE, "--output", "json"].map(str::to_owned));
    fleet.tell(format_args!("  {args:?}"));
    let (is_done, said) = Asking::begin(fleet, "ctl.log", &args)?.end()?;
    let ending = ending_of(is_done, &said)?;
    fleet.judge_needed(&order, ending, &said)?;
    if ending == Ending::Refused {
        fleet.tell(format_args!("    Refused: {}", said.trim()));
        return Ok(None);
    }
    let begun: Value = serde_json::from_str(&said).map_err(trouble)?;
    let job = begun["number"].as_u64().ok_or_else(|| trouble("a merge has no number"))?;
    let name = fleet.disks[number].name.clone();
    fleet.world.mica(&["ctl", "--control", text(&fleet.control)?, "pause", &name])?;
    let is_held = is_resting(fleet, job)?;
    fleet.tell(format_args!("    which rests: {is_held}"));
    Ok(Some(Resting { order, job, is_held }))
}

/// Whether the merge with this number rests. One with nothing left to copy may end all the same.
fn is_resting(fleet: &Fleet<'_>, job: u64) -> Outcome<bool> {
    let jobs = fleet.ctl_json(&["jobs"])?;
    let mut jobs = jobs.as_array().into_iter().flatten();
    Ok(jobs.any(|found| found["number"] == job && found["state"] == "paused"))
}

/// Commands that are given at once: about disk `number`, some of them twice, and about another one.
fn orders(fleet: &mut Fleet<'_>, rng: &mut Rng, number: usize) -> Vec<Order> {
    let kinds = asked(fleet);
    let mut orders: Vec<Order> = Vec::new();
    if kinds.is_empty() {
        return orders;
    }
    for _ in 0..2 + rng.below(ORDERS_MAX - 1) {
        let is_other = rng.percent(20);
        let count = fleet.disks.len() as u64;
        let of = if is_other { usize::try_from(rng.below(count)).expect("few") } else { number };
        let wanted = (rng.choose(&kinds), of);
        match (orders.last(), rng.percent(25)) {
            (Some(last), true) => orders.push(last.clone()),
            _ => orders.extend(Order::of(&mut fleet.disks, rng, wanted)),
        }
    }
    orders
}

/// The disk `number` is to grow.
fn begin_growing(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    (number, parties): (usize, &[Party]),
) -> Outcome<Option<(u64, Asking)>> {
    let longer = fleet.with_model(number, parties, |model| super::apart::longer(model, rng));
    let Some(longer) = longer else { return Ok(None) };
    let len = (longer * SECTOR as u64).to_string();
    let args = ["resize", &fleet.disks[number].name, &len].map(str::to_owned);
    fleet.tell(format_args!("  at once: {args:?}"));
    Ok(Some((longer, Asking::begin(fleet, "resize.log", &args)?)))
}

/// Commands about the merge of disk `number`, if there is one. It goes on at their end, unless it
/// is not to.
fn control(fleet: &Fleet<'_>, rng: &mut Rng, number: usize, goes_on: bool) -> Outcome {
    let name = &fleet.disks[number].name;
    for _ in 0..rng.below(4) {
        let pause = Duration::from_micros(rng.below(4_000));
        let verb = rng.choose(&["pause", "resume", "cancel", "jobs"]);
        if !goes_on && (verb == "resume" || verb == "cancel") {
            continue;
        }
        clock::sleep(pause);
        fleet.tell(format_args!("  at once: {verb}"));
        let args = [&["ctl", "--control", text(&fleet.control)?, verb][..]].concat();
        let of = (verb != "jobs").then_some(&**name);
        let said = fleet.world.mica(&args.into_iter().chain(of).collect::<Vec<_>>())?;
        if !said.status.success() && !said.stderr.contains(NO_MERGE) {
            return Err(Fault::new(Wrong::Failed, format!("{verb}: {said}")));
        }
    }
    match goes_on {
        true => jobs::resume(fleet, number),
        false => Ok(()),
    }
}

/// How a command ended that may have met another one.
fn ending_amid(is_done: bool, said: &str) -> Outcome<Ending> {
    let mut excluding = MERGES.iter().chain(&OTHERS);
    match !is_done && excluding.any(|why| said.contains(why)) {
        true if said.trim().lines().count() != 1 => {
            Err(Fault::new(Wrong::Failed, format!("a refusal in several lines: {said}")))
        }
        true => Ok(Ending::Refused),
        false => ending_of(is_done, said),
    }
}

/// While the merge of disk `number` rested nothing else changed its layers.
fn judge_held(all: &[Ended], number: usize) -> Outcome {
    for Ended { order, ending, said } in all {
        let is_it = |(disk, what): &(usize, What)| *disk == number && what.changes_layers();
        if *ending != Ending::Refused && order.disks.iter().any(is_it) {
            let what = format!("{:?} was {ending:?} beside a merge: {said}", order.disks);
            return Err(Fault::new(Wrong::Layers, what));
        }
    }
    Ok(())
}

/// Not all of them are refused for the sake of each other.
fn judge_exclusion(all: &[Ended]) -> Outcome {
    let is_excluded = |ended: &Ended| {
        ended.ending == Ending::Refused && MERGES.iter().any(|why| ended.said.contains(why))
    };
    for Ended { order, said, .. } in all.iter().filter(|ended| is_excluded(ended)) {
        let (number, _) = &order.disks[0];
        let is_of_it = |disk: &usize| order.disks.iter().any(|(of, _)| of == disk);
        let merges = |(disk, what): &(usize, What)| is_of_it(disk) && what.is_merge();
        let has_merge =
            all.iter().any(|other| !is_excluded(other) && other.order.disks.iter().any(merges));
        if !has_merge {
            let what = format!("disk {number} is refused for nothing: {said}");
            return Err(Fault::new(Wrong::Failed, what));
        }
    }
    Ok(())
}

/// The layers that disk `number` has are explained by what its commands said.
fn settle(fleet: &mut Fleet<'_>, number: usize, all: &[Ended], before: &Before) -> Outcome {
    let chain = fleet.chain_of(number)?;
    let of_disk = all.iter().filter(|ended| ended.ending != Ending::Refused);
    let wanted: Vec<_> = of_disk
        .flat_map(|ended| ended.order.disks.iter().map(move |of| (of, ended.ending)))
        .filter(|((disk, _), _)| *disk == number)
        .map(|((_, what), ending)| (what.clone(), ending))
        .collect();
    let disk = &fleet.disks[number];
    let old = disk.chain.clone();
    let Some(settled) = explain(disk, &old, &wanted, before, &chain) else {
        let what = format!("{wanted:?} lead in no order from {old:?} to {chain:?}");
        return Err(Fault::new(Wrong::Layers, what));
    };
    fleet.disks[number] = settled;
    fleet.tidy(&[(number, old)])
}

/// The disk after the `wanted` commands, in an order that leads to `chain`.
fn explain(
    disk: &Disk,
    old: &[String],
    wanted: &[(What, Ending)],
    before: &Before,
    chain: &[String],
) -> Option<Disk> {
    if wanted.is_empty() {
        return (disk.chain == chain).then(|| disk.clone());
    }
    for (at, (what, ending)) in wanted.iter().enumerate() {
        let mut rest = wanted.to_vec();
        rest.remove(at);
        let of_now = what.of_changed(old, &disk.chain);
        if *ending == Ending::Open {
            // Also one that would leave the layers as they are: nobody knows what it did.
            let mut next = disk.clone();
            if let Some(what) = &of_now {
                what.settle(&mut next, before.clone(), Ending::Open, false);
            }
            if let Some(found) = explain(&next, old, &rest, before, chain) {
                return Some(found);
            }
        }
        if let Some(what) = &of_now {
            let mut next = disk.clone();
            let after = what.leads_to(&next);
            what.settle(&mut next, before.clone(), *ending, true);
            next.chain = after;
            if let Some(found) = explain(&next, old, &rest, before, chain) {
                return Some(found);
            }
        }
    }
    None
}

/// Disk `number` became `longer` at some instant meanwhile: what was frozen before that is as long
/// as it was.
fn lengthen(fleet: &mut Fleet<'_>, number: usize, longer: u64) -> Outcome {
    let Fleet { world, disks, .. } = fleet;
    for (file, frozen) in &mut disks[number].frozen {
        let path = world.images.join(file);
        let len = match format_of(file) {
            _ if !path.exists() => continue,
            "qcow2" => foreign::len(&world.images, file)?,
            "raw" => path.metadata()?.len(),
            _ => continue,
        };
        if len == longer * SECTOR as u64 {
            *frozen = frozen.clone().in_a_file_of(longer);
        }
    }
    Ok(())
}

/// The state that is exported is what the server says: a backup may have begun before another one
/// ended, or after it.
fn take_export(fleet: &mut Fleet<'_>, number: usize) -> Outcome {
    let name = fleet.disks[number].name.clone();
    let listed = fleet.ctl_json(&["backup", "list", &name])?;
    let file = listed["backup"]["file"].as_str().map(Path::new);
    let file = file.and_then(|file| Some(file.file_name()?.to_str()?.to_owned()));
    fleet.disks[number].exported = file;
    Ok(())
}

impl Asked {
    fn is_merge(self) -> bool {
        matches!(self, Self::Stream | Self::Commit | Self::Drop)
    }
}

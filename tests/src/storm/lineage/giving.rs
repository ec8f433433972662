//! A command is given: alone, as a merge that rests and may be cancelled, or while its server is
//! killed or taken over from.

use super::asking::{Asking, ending_of};
use super::fleet::{Fleet, Given};
use super::forms::{Form, is_old};
use super::jobs;
use super::order::{Ending, Order, Pace, What};
use super::server::{Left, Server};
use super::twice;
use crate::clock;
use crate::storm::kinds::Kind;
use crate::storm::parties::Party;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use mica_units::Rng;
use std::time::Duration;

/// How often it is the new server that is killed, in a hundred.
const NEW_KILLED_PERCENT: u64 = 75;
/// How a server says that the image has left by which a disk is named.
const LEFT: &str = "has left its chain";
/// What happens while it is carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Amid {
    Nothing,
    /// It rests, goes on, and may be cancelled.
    Rest,
    Kill,
    Takeover,
    /// Either server is killed in a takeover.
    KillTakeover,
    /// So it is when the command has just been carried out.
    KillTakeoverAfter,
}

/// Gives `order` to the server.
pub(super) fn give(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    mut server: Server,
    parties: &[Party],
    (order, amid): (Order, Amid),
) -> Outcome<Left> {
    let kills_either = matches!(amid, Amid::KillTakeover | Amid::KillTakeoverAfter);
    // Where nothing may be lost in that.
    let amid = if kills_either && fleet.keeps_no_log()? { Amid::Nothing } else { amid };
    let args = args_of(fleet, rng, &order, (amid, parties))?;
    // Nor where the command puts such a layer on top.
    let amid = if kills_either && gets_no_log(fleet, &order)? { Amid::Nothing } else { amid };
    fleet.tell(format_args!("  {args:?} amid {amid:?}"));
    let most = rng.choose(&[1_000, 20_000, 60_000]);
    let pause = Duration::from_micros(rng.below(most));
    let (number, what) = order.disks[0].clone();
    let mut given = fleet.note(order, parties);
    let asking = Asking::begin(fleet, "ctl.log", &args)?;
    if matches!(amid, Amid::Kill | Amid::Takeover | Amid::KillTakeover) {
        fleet.tell(format_args!("  after {pause:?}"));
        clock::sleep(pause);
    }
    match amid {
        Amid::Kill => {
            server.kill(fleet, parties)?;
            let (is_done, said) = asking.end()?;
            fleet.tell(format_args!("  the client said: {}", said.trim()));
            fleet.end_note(&mut given, parties);
            // What was answered stays done.
            let ending = if is_done { Ending::Done } else { Ending::Open };
            fleet.open = Some((given, ending));
            return Ok(Left::Killed);
        }
        Amid::Takeover => {
            let left = Left::Serving(server.take_over(fleet, parties)?);
            return after_takeover(fleet, parties, (given, asking, number), left);
        }
        Amid::KillTakeover => {
            let left = server.take_over_and_kill(fleet, rng, (parties, NEW_KILLED_PERCENT))?;
            let left = after_takeover(fleet, parties, (given, asking, number), left)?;
            twice::judge(fleet, matches!(left, Left::Serving(_)))?;
            return Ok(left);
        }
        Amid::Nothing | Amid::Rest | Amid::KillTakeoverAfter => {}
    }
    let (is_done, said) = asking.end()?;
    let mut ending = ending_of(is_done, &said)?;
    fleet.judge_needed(&given.order, ending, &said)?;
    if ending != Ending::Done {
        fleet.tell(format_args!("  {ending:?}: {}", said.trim()));
    }
    if amid == Amid::Rest && what.is_merge() && ending == Ending::Done {
        ending = rest(fleet, rng, number)?;
    }
    fleet.end_note(&mut given, parties);
    server.look()?;
    count(fleet, &what, ending);
    let is_unnamed = fleet.settle(given, ending, "after a command")?;
    if is_unnamed && !server.log().contains(LEFT) {
        let what = format!("nobody says that the image of a disk has left it: {}", server.log());
        return Err(Fault::new(Wrong::Silent, what));
    }
    if amid == Amid::KillTakeoverAfter {
        let left = server.take_over_and_kill(fleet, rng, (parties, NEW_KILLED_PERCENT))?;
        twice::judge(fleet, matches!(left, Left::Serving(_)))?;
        return Ok(left);
    }
    Ok(Left::Serving(server))
}

/// What became of a command in a takeover, in which one of the servers may have been killed.
fn after_takeover(
    fleet: &mut Fleet<'_>,
    parties: &[Party],
    (mut given, asking, number): (Given, Asking, usize),
    left: Left,
) -> Outcome<Left> {
    let (is_done, said) = asking.end()?;
    fleet.tell(format_args!("  the client said: {}", said.trim()));
    // What was answered stays done.
    let ending = if is_done { Ending::Done } else { Ending::Open };
    if let Left::Killed = &left {
        fleet.end_note(&mut given, parties);
        fleet.open = Some((given, ending));
        return Ok(left);
    }
    jobs::wait_for_job(fleet, number)?;
    fleet.end_note(&mut given, parties);
    fleet.settle(given, ending, "after a takeover")?;
    interrupt(fleet, number)?;
    Ok(left)
}

fn count(fleet: &Fleet<'_>, what: &What, ending: Ending) {
    let counts = fleet.world.counts;
    match (ending, what) {
        (Ending::Refused, _) => counts.layers_refused.add(),
        (Ending::Open, _) => counts.merges_cancelled.add(),
        (_, What::Snapshot { .. }) => counts.layers.add(),
        (_, What::Begin { .. }) => counts.states.add(),
        (_, What::End) => {}
        (_, What::Stream { .. } | What::Commit { .. } | What::Drop { .. }) => counts.merges.add(),
    }
}

/// The arguments of `mica ctl` for `order`, of which something happens amid.
pub(super) fn args_of(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    order: &Order,
    (amid, parties): (Amid, &[Party]),
) -> Outcome<Vec<String>> {
    if let [(number, what)] = &*order.disks {
        let takes = match what {
            What::Snapshot { file } => make_layer(fleet, rng, (*number, file), parties)?,
            _ => false,
        };
        let disk = &fleet.disks[*number];
        let socket = fleet.world.run.join(format!("{}.backup", disk.name));
        let pace = match amid {
            Amid::Rest => Pace::Background,
            // A server has to start before it takes over: most merges end before that.
            Amid::KillTakeover if rng.percent(75) => Pace::Slow,
            _ => Pace::Fast,
        };
        let mut args = what.args(disk, text(&socket)?, rng, pace);
        args.extend(takes.then(|| "--reuse".to_owned()));
        return Ok(args);
    }
    let mut args = vec!["snapshot".to_owned(), "--group".to_owned()];
    for (number, what) in &order.disks {
        if let What::Snapshot { file } = what {
            args.push(format!("{}={file}", fleet.disks[*number].name));
        }
    }
    Ok(args)
}

/// Whether a disk gets a layer by `order` that keeps no log of what is written to it.
fn gets_no_log(fleet: &Fleet<'_>, order: &Order) -> Outcome<bool> {
    for (_, what) in &order.disks {
        if let What::Snapshot { file } = what
            && is_old(&fleet.world.images, file)?
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Perhaps makes the layer `file` of disk `number`, of another form than mica would; whether it is
/// there.
fn make_layer(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    (number, file): (usize, &str),
    parties: &[Party],
) -> Outcome<bool> {
    let has_forms = [Kind::Old, Kind::DataFile].iter().any(|kind| fleet.world.kinds.has(*kind));
    let is_there = fleet.world.images.join(file).exists();
    if !has_forms || is_there {
        return Ok(is_there);
    }
    let Some(form) = Form::random(&fleet.world, rng, 25) else { return Ok(false) };
    let sectors = fleet.with_model(number, parties, |model| model.len());
    form.make(&fleet.world, (file, fleet.disks[number].active()), sectors)?;
    Ok(true)
}

/// The merge of disk `number` rests, goes on, and is perhaps cancelled.
fn rest(fleet: &Fleet<'_>, rng: &mut Rng, number: usize) -> Outcome<Ending> {
    let name = fleet.disks[number].name.clone();
    for _ in 0..rng.below(3) {
        clock::sleep(Duration::from_millis(rng.below(30)));
        let verb = rng.choose(&["pause", "resume", "cancel", "jobs"]);
        fleet.tell(format_args!("  {verb}"));
        let args = [&["ctl", "--control", text(&fleet.control)?, verb][..]].concat();
        let name = (verb != "jobs").then_some(&*name);
        // It may have ended.
        fleet.world.mica(&args.into_iter().chain(name).collect::<Vec<_>>())?;
    }
    jobs::resume(fleet, number)?;
    jobs::wait_for_job(fleet, number)
}

/// After a takeover nobody knows whether the old server exported something, or the new one does.
fn interrupt(fleet: &mut Fleet<'_>, number: usize) -> Outcome {
    let name = fleet.disks[number].name.clone();
    let listed = fleet.ctl_json(&["backup", "list", &name])?;
    if !listed["backup"].is_null() {
        fleet.ctl_json(&["backup", "end", &name])?;
    }
    fleet.disks[number].exported = None;
    Ok(())
}

/// Something that happens amid `order`, if the run has it: most kills in takeovers are amid merges.
pub(super) fn amid(fleet: &Fleet<'_>, rng: &mut Rng, order: &Order) -> Amid {
    let is_merge = order.disks.iter().any(|(_, what)| what.is_merge());
    let all = [(Amid::Nothing, None, 10), (Amid::Rest, None, 6)];
    let more = [
        (Amid::Kill, Some(Kind::Kill), 5),
        (Amid::Takeover, Some(Kind::Takeover), 2),
        (Amid::KillTakeover, Some(Kind::KillAmid), if is_merge { 9 } else { 1 }),
        (Amid::KillTakeoverAfter, Some(Kind::KillAmid), 3),
    ];
    let all = all.into_iter().chain(more);
    let has = |kind: &Option<Kind>| kind.is_none_or(|kind| fleet.world.kinds.has(kind));
    let all: Vec<_> = all
        .filter(|(_, kind, _)| has(kind))
        .flat_map(|(amid, _, share)| std::iter::repeat_n(amid, share))
        .collect();
    rng.choose(&all)
}

//! A command is given: alone, as a merge that rests and may be cancelled, or while its server is
//! killed or taken over from.

use super::fleet::Fleet;
use super::order::{Ending, Order, What};
use super::server::{Left, Server};
use crate::clock;
use crate::command;
use crate::storm::kinds::Kind;
use crate::storm::parties::Party;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use mica_units::Rng;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long a command may take, and a merge.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);
/// Why a server may refuse a command: what is in its way is there.
const REFUSALS: [&str; 11] = [
    // States.
    "would no longer have the states",
    "keeps its state",
    "keeps the state",
    "has the backup",
    "that was ended",
    // Clones, and what left the chain.
    "stands on",
    "need",
    "is not older than",
    // A merge that was killed, or cancelled.
    "an earlier merge was interrupted",
    // What is beneath an internal snapshot shows through it.
    "has internal snapshots",
    // Nothing is on top of it yet.
    "is a raw image",
];
/// How a server says that the image has left by which a disk is named.
const LEFT: &str = "has left its chain";
/// How a client says that a merge did not come to its end.
const CANCELLED: &str = "the merge was cancelled";

/// What happens while it is carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Amid {
    Nothing,
    /// It rests, goes on, and may be cancelled.
    Rest,
    Kill,
    Takeover,
}

/// A client of the control socket.
struct Asking {
    child: Child,
    said: PathBuf,
}

impl Asking {
    fn begin(fleet: &Fleet<'_>, args: &[String]) -> Outcome<Self> {
        let world = &fleet.world;
        let said = world.run.join("ctl.log");
        let file = File::create(&said)?;
        let mut ctl = Command::new(world.binary);
        ctl.current_dir(&world.images).args(["ctl", "--control", text(&fleet.control)?]);
        ctl.args(args).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        Ok(Self { child: ctl.spawn()?, said })
    }

    /// How it ended, and what it said.
    fn end(mut self) -> Outcome<(bool, String)> {
        let status = command::wait(&mut self.child, LIMIT);
        let said = std::fs::read_to_string(&self.said)?;
        let Some(status) = status else {
            // It has not ended.
            let _ = self.child.kill();
            let _ = self.child.wait();
            return Err(Fault::new(Wrong::Hang, format!("a command does not end: {said}")));
        };
        if status.code().is_none() || said.contains("panicked") {
            return Err(Fault::new(Wrong::Panicked, said));
        }
        Ok((status.success(), said))
    }
}

/// Gives `order` to the server.
pub(super) fn give(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    mut server: Server,
    parties: &[Party],
    (order, amid): (Order, Amid),
) -> Outcome<Left> {
    let args = args_of(fleet, rng, &order, amid)?;
    fleet.tell(format_args!("  {args:?} amid {amid:?}"));
    let most = rng.choose(&[1_000, 20_000, 60_000]);
    let pause = Duration::from_micros(rng.below(most));
    let (number, what) = order.disks[0].clone();
    let mut given = fleet.note(order, parties);
    let asking = Asking::begin(fleet, &args)?;
    if matches!(amid, Amid::Kill | Amid::Takeover) {
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
            server = server.take_over(fleet, parties)?;
            let (is_done, said) = asking.end()?;
            fleet.tell(format_args!("  the client said: {}", said.trim()));
            wait_for_job(fleet, number)?;
            fleet.end_note(&mut given, parties);
            let ending = if is_done { Ending::Done } else { Ending::Open };
            fleet.settle(given, ending, "after a takeover")?;
            interrupt(fleet, number)?;
            return Ok(Left::Serving(server));
        }
        Amid::Nothing | Amid::Rest => {}
    }
    let (is_done, said) = asking.end()?;
    let mut ending = ending_of(is_done, &said)?;
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
    Ok(Left::Serving(server))
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

fn args_of(fleet: &Fleet<'_>, rng: &mut Rng, order: &Order, amid: Amid) -> Outcome<Vec<String>> {
    if let [(number, what)] = &*order.disks {
        let disk = &fleet.disks[*number];
        let socket = fleet.world.run.join(format!("{}.backup", disk.name));
        return Ok(what.args(disk, text(&socket)?, rng, amid == Amid::Rest));
    }
    let mut args = vec!["snapshot".to_owned(), "--group".to_owned()];
    for (number, what) in &order.disks {
        if let What::Snapshot { file } = what {
            args.push(format!("{}={file}", fleet.disks[*number].name));
        }
    }
    Ok(args)
}

pub(super) fn ending_of(is_done: bool, said: &str) -> Outcome<Ending> {
    match is_done {
        true => Ok(Ending::Done),
        false if said.contains(CANCELLED) => Ok(Ending::Open),
        false if REFUSALS.iter().any(|why| said.contains(why)) => Ok(Ending::Refused),
        false => Err(Fault::new(Wrong::Failed, format!("a command: {said}"))),
    }
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
    let args = ["ctl", "--control", text(&fleet.control)?, "resume", &name];
    fleet.world.mica(&args)?;
    wait_for_job(fleet, number)
}

/// Waits until no merge of disk `number` is under way.
fn wait_for_job(fleet: &Fleet<'_>, number: usize) -> Outcome<Ending> {
    let name = &fleet.disks[number].name;
    let ended = clock::poll(LIMIT, PAUSE, || {
        let jobs = match fleet.ctl_json(&["jobs"]) {
            Ok(jobs) => jobs,
            Err(fault) => return Some(Err(fault)),
        };
        let job = jobs.as_array()?.iter().find(|job| job["disk"] == **name).cloned();
        match job.as_ref().and_then(|job| job["state"].as_str()) {
            Some("running" | "paused" | "cancelling") => None,
            Some("failed") => Some(Err(Fault::new(
                Wrong::Failed,
                format!("a merge: {}", job.unwrap_or_default()),
            ))),
            Some("done") => Some(Ok(Ending::Done)),
            _ => Some(Ok(Ending::Open)),
        }
    });
    ended.ok_or_else(|| Fault::new(Wrong::Hang, "a merge does not end"))?
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

/// Whether the run has what happens amid a command.
pub(super) fn amid(fleet: &Fleet<'_>, rng: &mut Rng) -> Amid {
    let all = [(Amid::Nothing, None, 10), (Amid::Rest, None, 6)];
    let more = [(Amid::Kill, Some(Kind::Kill), 5), (Amid::Takeover, Some(Kind::Takeover), 2)];
    let all = all.into_iter().chain(more);
    let has = |kind: &Option<Kind>| kind.is_none_or(|kind| fleet.world.kinds.has(kind));
    let all: Vec<_> = all
        .filter(|(_, kind, _)| has(kind))
        .flat_map(|(amid, _, share)| std::iter::repeat_n(amid, share))
        .collect();
    rng.choose(&all)
}

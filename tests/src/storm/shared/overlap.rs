//! `mica ctl` while another server takes over: each command is carried out, by the server that was
//! or by the one that comes, or refused in one line. None hangs, and none loses a disk.

use super::command::{self, Order};
use super::disk::{Source, Standing};
use super::fleet::Fleet;
use super::server::Server;
use crate::clock;
use crate::command::{self as program, Finished};
use crate::storm::parties::Party;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use mica_units::Rng;
use std::process::Command;
use std::time::Duration;

/// How long one may take.
const LIMIT: Duration = Duration::from_secs(40);
/// Orders at once, each on a disk of its own.
const ORDERS_MAX: u64 = 3;
const QUESTIONS_MAX: u64 = 2;
/// How long after the new server's start the last of them is given.
const PAUSE_US_MAX: u64 = 150_000;
/// How a server says that it may have done what it was told.
const UNANSWERED: &str = "without an answer";

/// Another server takes over while some are given.
pub(super) fn take_over(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: Server,
    parties: &[Party],
) -> Outcome<Server> {
    let orders = orders(fleet, rng);
    fleet.tell("  and while another server takes over:");
    let mut lines = orders.iter().map(|order| order.args(fleet)).collect::<Outcome<Vec<_>>>()?;
    for _ in 0..rng.below(QUESTIONS_MAX + 1) {
        let args = ["ctl", "--control", text(&fleet.control)?, "status"];
        lines.push(args.map(str::to_owned).to_vec());
    }
    let pause = || Duration::from_micros(rng.below(PAUSE_US_MAX));
    let pauses = std::iter::repeat_with(pause);
    let lines: Vec<_> = pauses.zip(lines).collect();
    fleet.moves(parties);
    orders.iter().for_each(|order| order.warn(parties));
    let (mut server, said) = server.take_over_amid(fleet, |fleet| all(fleet, &lines))?;
    for said in &said {
        fleet.world.counts.overlaps.add();
        fleet.tell(format_args!("    {}: {}", said.status, said.stderr.trim()));
        judge_answer(said)?;
    }
    for (order, said) in orders.iter().zip(&said) {
        settle(fleet, *order, said)?;
    }
    fleet.judge_members("after commands in a takeover")?;
    fleet.judge_config("after commands in a takeover")?;
    // Whose a disk is, the configuration's or a command's, depends on which came first.
    command::read_again(fleet, &mut server, parties)?;
    Ok(server)
}

/// Orders that can be given at once.
fn orders(fleet: &Fleet<'_>, rng: &mut Rng) -> Vec<Order> {
    let mut orders: Vec<Order> = Vec::new();
    for _ in 0..1 + rng.below(ORDERS_MAX) {
        let order = Order::random(fleet, rng);
        // Nobody knows whether an ephemeral disk that came back is the one from before.
        let is_ephemeral = fleet.disks[order.disk].is_ephemeral();
        if is_ephemeral || orders.iter().any(|other| other.disk == order.disk) {
            continue;
        }
        // The configuration keeps a disk if all of them are carried out.
        let removals = orders.iter().filter(|other| other.is_saved_removal()).count();
        let may_save = !order.is_saved_removal() || fleet.listed.len() > removals + 1;
        orders.push(if may_save { order } else { order.unsaved() });
    }
    orders
}

/// Gives all of them at once, each after a pause of its own.
fn all(fleet: &Fleet<'_>, lines: &[(Duration, Vec<String>)]) -> Outcome<Vec<Finished>> {
    let (binary, images) = (fleet.world.binary, &fleet.world.images);
    std::thread::scope(|scope| {
        let run = |pause: Duration, args: &[String]| {
            clock::sleep(pause);
            program::finish_within(Command::new(binary).current_dir(images).args(args), LIMIT)
        };
        let threads: Vec<_> =
            lines.iter().map(|(pause, args)| scope.spawn(move || run(*pause, args))).collect();
        let said = threads.into_iter().map(|thread| {
            thread.join().map_err(|_| Fault::new(Wrong::Hang, "a command in a takeover hangs"))
        });
        said.collect()
    })
}

/// It succeeds, or fails with one line.
fn judge_answer(said: &Finished) -> Outcome {
    let lines = said.stderr.lines().filter(|line| !line.trim().is_empty()).count();
    let is_one_line = lines == 1 && said.code().is_some();
    match said.status.success() || is_one_line {
        true => Ok(()),
        false => Err(Fault::new(Wrong::Failed, format!("no plain refusal: {said}"))),
    }
}

/// The disk of `order` is as the order makes it or, if that failed, as it was.
fn settle(fleet: &mut Fleet<'_>, order: Order, said: &Finished) -> Outcome {
    let mut allowed = Vec::new();
    if said.status.success() || said.stderr.contains(UNANSWERED) {
        allowed.extend_from_slice(order.standings());
    }
    if said.status.success() {
        fleet.world.counts.members.add();
        order.note_saved(fleet);
    } else {
        allowed.push(fleet.disks[order.disk].standing);
    }
    let now = fleet.standing_of(order.disk)?;
    let disk = &mut fleet.disks[order.disk];
    if !allowed.contains(&now) {
        let what = format!("{} is {now:?} after a takeover, not one of {allowed:?}", disk.name);
        return Err(Fault::new(Wrong::Members, format!("{what}: {said}")));
    }
    if disk.standing == Standing::Absent && !fleet.listed.contains(&disk.name) {
        disk.source = Source::Command;
    }
    disk.standing = now;
    Ok(())
}

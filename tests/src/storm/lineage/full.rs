//! The file system of the images is full while a command is carried out, and has room again later.
//!
//! A guest's changes may fail then, for lack of space and for nothing else, and reads may not. A
//! command that finds no space says so, and leaves the layers as they were, or as they were to be.
//! Once there is room again all goes on: changes succeed, and so does the same command.

use super::asked;
use super::asking::{Asking, ending_of};
use super::fleet::Fleet;
use super::giving::{self, Amid};
use super::order::{Ending, Order};
use super::server::{Left, Server};
use crate::clock;
use crate::storm::kinds::Kind;
use crate::storm::parties::Party;
use crate::storm::place::{Filler, Ground, mount_of};
use crate::storm::story::{Fault, Outcome, Wrong};
use mica_units::Rng;
use std::time::Duration;

/// How much room may be left, in bytes.
const LEFT: [u64; 4] = [1, 64 << 10, 512 << 10, 2 << 20];
/// How long requests that were sent before there was room may take.
const LIMIT: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_micros(500);
/// More requests than clients have in flight.
const IN_FLIGHT_MAX: u64 = 64;
/// How anybody says it.
const NO_SPACE: &str = "No space left";

/// A command is carried out meanwhile.
pub(super) fn fill(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    mut server: Server,
    parties: &[Party],
) -> Outcome<Left> {
    let kinds = asked(fleet);
    let order = Order::random(&mut fleet.disks, rng, &kinds);
    let Some(order) = order.filter(|_| fleet.world.ground != Ground::Folder) else {
        return Ok(Left::Serving(server));
    };
    let args = giving::args_of(fleet, rng, &order, (Amid::Nothing, parties))?;
    let most = rng.choose(&LEFT);
    let left = rng.below(most);
    fleet.tell(format_args!("  {left} bytes are left amid {args:?}"));
    lack_space(parties, true);
    let filler = Filler::new(mount_of(&fleet.world.images), left)?;
    fleet.world.counts.full.add();
    let mut given = fleet.note(order.clone(), parties);
    let asking = Asking::begin(fleet, "ctl.log", &args)?;
    let pause = Duration::from_micros(rng.below(60_000));
    if fleet.world.does(rng, Kind::Kill, 20) {
        clock::sleep(pause);
        server.kill(fleet, parties)?;
        let (is_done, said) = asking.end()?;
        fleet.tell(format_args!("  the client said: {}", said.trim()));
        drop(filler);
        fleet.end_note(&mut given, parties);
        fleet.open = Some((given, if is_done { Ending::Done } else { Ending::Open }));
        return Ok(Left::Killed);
    }
    let filler = match rng.percent(40) {
        // There is room again before its end.
        true => {
            clock::sleep(pause);
            drop(filler);
            None
        }
        false => Some(filler),
    };
    let (is_done, said) = asking.end()?;
    clock::sleep(pause);
    drop(filler);
    let ending = match said.contains(NO_SPACE) {
        true if !is_done => Ending::Open,
        _ => ending_of(is_done, &said)?,
    };
    fleet.tell(format_args!("    {ending:?}: {}", said.trim()));
    await_room(parties)?;
    server.look()?;
    fleet.end_note(&mut given, parties);
    let before: Vec<_> = order.disks.iter().map(|(number, _)| chain(fleet, *number)).collect();
    fleet.settle(given, ending, "after a file system was full")?;
    let mut compared = order.disks.iter().zip(before);
    let is_as_before = compared.all(|((number, _), before)| chain(fleet, *number) == before);
    match ending == Ending::Open && is_as_before {
        true => giving::give(fleet, rng, server, parties, (order, Amid::Nothing)),
        false => Ok(Left::Serving(server)),
    }
}

fn chain(fleet: &Fleet<'_>, number: usize) -> Vec<String> {
    fleet.disks[number].chain.clone()
}

fn lack_space(parties: &[Party], lacks: bool) {
    parties.iter().for_each(|party| party.stage.board().lacks_space = lacks);
}

/// There is room again: what was sent before may fail still, and nothing later.
fn await_room(parties: &[Party]) -> Outcome {
    for party in parties {
        let sent = party.stage.board().requests_sent();
        let answered = clock::poll(LIMIT, PAUSE, || {
            let board = party.stage.board();
            (board.is_idle() || board.requests_done() >= sent + IN_FLIGHT_MAX).then_some(())
        });
        if answered.is_none() {
            return Err(Fault::new(Wrong::Hang, "requests wait though there is room again"));
        }
    }
    lack_space(parties, false);
    Ok(())
}

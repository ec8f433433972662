//! Several disks at one or two addresses, told apart by their names: they come and go by command
//! and by configuration under their clients, among kills and takeovers.
//!
//! Some are ephemeral: what was written to them is there until they or their server end, also if
//! their settings change while they are drained, and never in their images.
//!
//! Judged: which disks are served, and where; that no byte of one disk shows at another; that what
//! was acknowledged is there, whether its server was killed or its disk drained; that a client that
//! chooses a disk that is not served is refused; and that the configuration on disk has exactly
//! what was saved, whoever was killed over it.

mod command;
mod disk;
mod fleet;
mod overlap;
mod server;

use super::kinds::Kind;
use super::load::Phase;
use super::parties::{self, Of, Party};
use super::story::Outcome;
use super::world::World;
use command::Order;
use disk::Standing;
use fleet::Fleet;
use mica_units::Rng;
use server::{Left, Server};

/// How often the disks are served.
const LIVES: [u64; 4] = [2, 3, 4, 5];

/// What may happen under clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Order,
    KilledClient,
    Bounce,
    Reload,
    Replace,
    Grow,
    Write,
    Takeover,
    Overlap,
    KillTakeover,
    KillInOrder,
    Kill,
}

/// Lets a storm go over them.
pub(super) fn storm(world: World<'_>, rng: &mut Rng) -> Outcome {
    world.counts.shared.add();
    let seed = world.seed;
    let mut fleet = Fleet::create(world, rng)?;
    for number in 0..rng.choose(&LIVES) {
        fleet.tell(format_args!("life {number}"));
        let mut dice = Rng::for_part(seed, 2 * number + 1);
        live(&mut fleet, &mut dice)?;
    }
    fleet.tell("the end");
    fleet.judge_config("at the end")?;
    let server = Server::start(&mut fleet)?;
    server.close(&mut fleet)?;
    // What the configuration does not list may have been killed with its server.
    let listed = fleet.disks.iter().filter(|disk| fleet.listed.contains(&disk.name));
    listed.into_iter().try_for_each(|disk| disk.look(&fleet.world, "at the end"))
}

fn live(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    fleet.world.counts.lives.add();
    let mut server = Server::start(fleet)?;
    for _ in 0..1 + rng.below(3) {
        match round(fleet, rng, server)? {
            Left::Serving(still) => server = still,
            Left::Killed => return fleet.judge_config("after a kill"),
        }
        server.look()?;
        fleet.judge_members("after a round")?;
        fleet.judge_config("after a round")?;
        if fleet.world.does(rng, Kind::Read, 40) {
            fleet.judge_disks("after a round")?;
        }
    }
    if fleet.world.does(rng, Kind::Kill, 40) {
        server.kill(fleet)?;
    } else {
        server.close(fleet)?;
        let served = fleet.disks.iter().filter(|disk| disk.standing != Standing::Absent);
        let look = |disk: &disk::Disk| disk.look(&fleet.world, "after a close");
        served.into_iter().try_for_each(look)?;
    }
    if fleet.world.does(rng, Kind::Members, 30) {
        command::change_config(fleet, rng)?;
    }
    fleet.judge_config("after a life")
}

/// Clients of some disks work, and something happens meanwhile, once or more often.
fn round(fleet: &mut Fleet<'_>, rng: &mut Rng, server: Server) -> Outcome<Left> {
    let serving = fleet.disks.iter_mut().enumerate().filter(|(_, disk)| disk.is_serving());
    let parties = serving.filter_map(|(number, disk)| {
        let mut dice = Rng::new(rng.next_u64());
        rng.percent(70).then(|| {
            let (aim, stamper, name) = (disk.aim(), disk.stamper.clone(), disk.name.clone());
            let socket = disk.sockets[disk::index(&mut dice, disk.sockets.len())].clone();
            let of = Of { model: &mut disk.model, stamper, aim, name, socket };
            Party::begin(number, of, &mut dice)
        })
    });
    let parties: Vec<_> = parties.collect();
    let events: Vec<_> = (0..1 + rng.below(3)).filter_map(|_| event(fleet, rng)).collect();
    let names: Vec<_> = parties.iter().map(|party| &*fleet.disks[party.disk].name).collect();
    fleet.tell(format_args!("  clients of {names:?}; {events:?}"));
    let mut server = Some(server);
    let counts = fleet.world.counts;
    let outcome = parties::run(&parties, counts, &mut || {
        let mut left = Left::Serving(server.take().expect("this is called once"));
        for event in &events {
            let Left::Serving(server) = left else { break };
            if let Some(party) = parties.first() {
                let moment = rng.below(party.requests() / 2);
                party.stage.wait_for(moment);
            }
            left = happen(fleet, rng, server, &parties, *event)?;
        }
        Ok(left)
    });
    for party in parties {
        let disk = &mut fleet.disks[party.disk];
        let (model, stamper) = party.stage.end();
        (disk.model, disk.stamper) = (model, stamper);
    }
    fleet.disks.iter_mut().filter(|disk| disk.is_thrown_away).for_each(disk::Disk::throw_away);
    outcome
}

fn event(fleet: &Fleet<'_>, rng: &mut Rng) -> Option<Event> {
    let kinds = fleet.world.kinds;
    let all = [
        (Event::Order, Kind::Members, 8),
        (Event::KilledClient, Kind::Members, 2),
        (Event::Bounce, Kind::Members, 2),
        (Event::Reload, Kind::Members, 3),
        (Event::Replace, Kind::Members, 3),
        (Event::Grow, Kind::Resize, 2),
        (Event::Write, Kind::Write, 2),
        (Event::Takeover, Kind::Takeover, 4),
        (Event::Overlap, Kind::Overlap, 3),
        (Event::KillTakeover, Kind::KillTakeover, 2),
        (Event::KillInOrder, Kind::Kill, 3),
        (Event::Kill, Kind::Kill, 3),
    ];
    let events = all.into_iter().filter(|(_, kind, _)| kinds.has(*kind));
    let events: Vec<_> =
        events.flat_map(|(event, _, share)| std::iter::repeat_n(event, share)).collect();
    (!events.is_empty()).then(|| rng.choose(&events))
}

/// QEMU writes to the image of a disk that the server was told to leave alone.
fn write_what_is_absent(fleet: &mut Fleet<'_>, rng: &mut Rng, parties: &[Party]) -> Outcome {
    let has_party = |number: usize| parties.iter().any(|party| party.disk == number);
    let free = fleet
        .disks
        .iter()
        .enumerate()
        // An ephemeral disk that is drained still stands on its image.
        .filter(|(_, disk)| !disk.is_ephemeral() || disk.standing == Standing::Absent)
        .filter(|(number, disk)| !disk.is_serving() && !disk.is_pending && !has_party(*number));
    let free: Vec<_> = free.map(|(number, _)| number).collect();
    if free.is_empty() {
        return Ok(());
    }
    let disk = &mut fleet.disks[rng.choose(&free)];
    fleet.world.story.tell(format_args!("  QEMU writes to {}", disk.name));
    disk.foreign_write(&fleet.world, rng)
}

fn happen(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    mut server: Server,
    parties: &[Party],
    event: Event,
) -> Outcome<Left> {
    match event {
        Event::Order => Order::random(fleet, rng).give(fleet, &mut server, parties)?,
        Event::KilledClient => {
            let order = Order::random(fleet, rng);
            order.give_and_kill_the_client(fleet, rng, &mut server, parties)?;
        }
        Event::Bounce => command::bounce(fleet, rng, &mut server, parties)?,
        Event::Reload => command::reload(fleet, rng, &mut server, parties)?,
        Event::Replace => command::replace(fleet, rng, &mut server, parties)?,
        Event::Grow => command::grow(fleet, rng, &mut server, parties)?,
        Event::Write => write_what_is_absent(fleet, rng, parties)?,
        Event::Takeover => {
            return server.take_over(fleet, parties).map(Left::Serving);
        }
        Event::Overlap => {
            return overlap::take_over(fleet, rng, server, parties).map(Left::Serving);
        }
        Event::KillTakeover => {
            server.killed_in_takeover(fleet, rng, parties)?;
            return Ok(Left::Killed);
        }
        Event::KillInOrder => {
            parties::enter(parties, Phase::Ending);
            let order = Order::random(fleet, rng);
            order.give_and_kill_the_server(fleet, rng, server)?;
            return Ok(Left::Killed);
        }
        Event::Kill => {
            parties::enter(parties, Phase::Ending);
            server.kill(fleet)?;
            return Ok(Left::Killed);
        }
    }
    Ok(Left::Serving(server))
}

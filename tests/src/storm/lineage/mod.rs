//! The life of chains: layers come and go under clients that write, among kills and takeovers, and
//! servers are started by the names of the first images.
//!
//! Layers come by snapshots of one disk or of all at one instant, and by states that are kept for
//! backups and exported; they go by merges up and down, which rest or are cancelled on their way,
//! and by states that are dropped. Clones stand on frozen layers meanwhile, in the same folder and
//! in another one, are moved to a third one, and disks grow. Between two servers QEMU reads all of
//! it, writes, and merges the active layer down, into kept states too; copies of single layers are
//! put back; mica's verbs merge layers then, and are killed while they do.
//!
//! Some layers are of version 2, or have their data in a file of their own; some disks have lower
//! layers in common. Commands are given one by one and several at once, while the file system is
//! full, and while servers take over from each other and one of the two is killed.
//!
//! Judged: which layers a disk has after each command; that it shows what was acknowledged; that
//! each frozen layer and each clone holds what its disk held at an instant while the command was
//! carried out, the same for all of a group, and that it stays so; that an export is its state,
//! also once it was backed up and restored, and that what has changed since another one is told;
//! that what one disk does changes nothing for another one; that block status is what the disk
//! holds, and QEMU says the same; and that nothing frozen changes between two reads, whatever
//! became of a takeover.

mod apart;
mod asking;
mod at_once;
mod clones;
mod copied;
mod disk;
mod exported;
mod fleet;
mod folder;
mod forms;
mod frozen;
mod full;
mod giving;
mod jobs;
mod moved;
mod order;
mod server;
mod status;
mod target;
mod twice;

use super::kinds::Kind;
use super::parties::{self, Of, Party};
use super::story::Outcome;
use super::world::World;
use apart::Ended;
use copied::Copied;
use fleet::Fleet;
use giving::Amid;
use mica_units::Rng;
use order::{Asked, Order};
use server::{Left, Server};

/// The name of a state in that of its file.
fn state_in(file: &str) -> Option<&str> {
    file.split_once('@')?.1.strip_suffix(".qcow2")
}

/// How often the disks are served.
const LIVES: [u64; 4] = [2, 3, 4, 6];

/// What may happen under clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Order,
    Clone,
    Grow,
    Takeover,
    KillTakeover,
    Kill,
    AtOnce,
    Full,
}

/// Lets a storm go over them.
pub(super) fn storm(world: World<'_>, rng: &mut Rng) -> Outcome {
    world.counts.lineages.add();
    let seed = world.seed;
    let mut fleet = Fleet::create(world, rng)?;
    for number in 0..rng.choose(&LIVES) {
        fleet.tell(format_args!("life {number}"));
        // A step's dice do not depend on what came of the steps before.
        live(&mut fleet, &mut Rng::for_part(seed, number + 1))?;
    }
    fleet.tell("the end");
    let server = Server::start(&mut fleet)?;
    server.close(&mut fleet)?;
    fleet.look("at the end")
}

fn live(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    fleet.world.counts.lives.add();
    let mut server = Server::start(fleet)?;
    let mut copied = copied::aside(fleet, rng)?;
    for _ in 0..1 + rng.below(4) {
        match round(fleet, rng, server)? {
            Left::Serving(still) => server = still,
            Left::Killed => return rest(fleet, rng, (Ended::Killed, copied)),
        }
        server.look()?;
        if rng.percent(60) {
            fleet.judge("after a round")?;
        }
        exported::judge(fleet, rng)?;
        status::judge(fleet, rng)?;
        copied = copied::aside(fleet, rng)?.or(copied);
    }
    if fleet.world.does(rng, Kind::Kill, 30) {
        server.kill(fleet, &[])?;
        return rest(fleet, rng, (Ended::Killed, copied));
    }
    let depths = status::depths(fleet, rng)?;
    server.close(fleet)?;
    depths.judge(fleet)?;
    if rng.percent(70) {
        fleet.look("after a close")?;
    }
    if fleet.world.does(rng, Kind::Write, 50) {
        let Fleet { world, disks, .. } = fleet;
        for disk in disks {
            disk.write_by_qemu(world, rng)?;
            disk.write_to_clone(world, rng)?;
        }
        copied = None;
    }
    rest(fleet, rng, (Ended::Closed, copied))
}

/// Nobody serves the disks.
fn rest(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    (mut ended, copied): (Ended, Option<Copied>),
) -> Outcome {
    // Only the next server tells what became of it.
    if fleet.open.is_some() {
        return Ok(());
    }
    fleet.decide_losses()?;
    if let Some(copied) = copied
        && copied.put_back(fleet, rng)?
    {
        ended = Ended::Killed;
    }
    apart::change(fleet, rng, ended)
}

/// Clients of all disks work, and something happens meanwhile, once or more often.
fn round(fleet: &mut Fleet<'_>, rng: &mut Rng, server: Server) -> Outcome<Left> {
    let parties = fleet.disks.iter_mut().enumerate().map(|(number, disk)| {
        let (aim, stamper) = (disk.aim(), disk.stamper.clone());
        let (name, socket) = (disk.name.clone(), disk.socket.clone());
        Party::begin(number, Of { model: &mut disk.model, stamper, aim, name, socket }, rng)
    });
    let parties: Vec<_> = parties.collect();
    let events: Vec<_> = (0..1 + rng.below(4)).filter_map(|_| event(fleet, rng)).collect();
    fleet.tell(format_args!("  {events:?}"));
    let (mut server, counts) = (Some(server), fleet.world.counts);
    let outcome = parties::run(&parties, counts, &mut || {
        let mut left = Left::Serving(server.take().expect("this is called once"));
        for event in &events {
            let Left::Serving(server) = left else { break };
            if let Some(party) = parties.first() {
                party.stage.wait_for(rng.below(party.requests() / 2));
            }
            left = happen(fleet, rng, server, &parties, *event)?;
        }
        Ok(left)
    });
    for party in parties {
        let disk = &mut fleet.disks[party.disk];
        (disk.model, disk.stamper) = party.stage.end();
    }
    outcome
}

fn event(fleet: &Fleet<'_>, rng: &mut Rng) -> Option<Event> {
    let all = [
        (Event::Order, None, 12),
        (Event::Clone, Some(Kind::Clone), 2),
        (Event::Grow, Some(Kind::Resize), 2),
        (Event::Takeover, Some(Kind::Takeover), 1),
        (Event::KillTakeover, Some(Kind::KillTakeover), 1),
        (Event::Kill, Some(Kind::Kill), 1),
        (Event::AtOnce, Some(Kind::AtOnce), 6),
        (Event::Full, Some(Kind::Full), 4),
    ];
    let kinds = fleet.world.kinds;
    let events = all.into_iter().filter(|(_, kind, _)| kind.is_none_or(|kind| kinds.has(kind)));
    let events: Vec<_> =
        events.flat_map(|(event, _, share)| std::iter::repeat_n(event, share)).collect();
    (!events.is_empty()).then(|| rng.choose(&events))
}

/// What the run may ask servers for.
fn asked(fleet: &Fleet<'_>) -> Vec<Asked> {
    let all = [
        (Asked::Snapshot, Kind::LiveSnapshot),
        (Asked::Snapshot, Kind::LiveSnapshot),
        (Asked::Group, Kind::LiveSnapshot),
        (Asked::Stream, Kind::Merge),
        (Asked::Commit, Kind::Merge),
        (Asked::Backup, Kind::Backup),
        (Asked::Backup, Kind::Backup),
        (Asked::Drop, Kind::Backup),
    ];
    let kinds = fleet.world.kinds;
    all.into_iter().filter(|(_, kind)| kinds.has(*kind)).map(|(asked, _)| asked).collect()
}

fn happen(
    fleet: &mut Fleet<'_>,
    rng: &mut Rng,
    server: Server,
    parties: &[Party],
    event: Event,
) -> Outcome<Left> {
    match event {
        Event::Order => {
            let asked = asked(fleet);
            let Some(order) = Order::random(&mut fleet.disks, rng, &asked) else {
                return Ok(Left::Serving(server));
            };
            let amid = giving::amid(fleet, rng, &order);
            let is_at_rest = amid == Amid::Nothing || amid == Amid::Rest;
            let left = giving::give(fleet, rng, server, parties, (order.clone(), amid))?;
            if is_at_rest {
                exported::judge_group(fleet, &order)?;
            }
            Ok(left)
        }
        Event::Clone => clones::change(fleet, rng).map(|()| Left::Serving(server)),
        Event::Grow => apart::grow_served(fleet, rng, parties).map(|()| Left::Serving(server)),
        Event::Takeover => server.take_over(fleet, parties).map(Left::Serving),
        Event::KillTakeover if fleet.keeps_no_log()? => Ok(Left::Serving(server)),
        Event::KillTakeover => server.take_over_and_kill(fleet, rng, (parties, 50)),
        Event::Kill => server.kill(fleet, parties).map(|()| Left::Killed),
        Event::Full => full::fill(fleet, rng, server, parties),
        Event::AtOnce => at_once::give(fleet, rng, server, parties),
    }
}

//! The file system of one disk takes no writes for a while (`fsfreeze`), as before a snapshot of
//! the storage beneath. Requests to that disk may wait; those to another disk of the same server
//! are answered meanwhile, and so is `mica ctl status`. The server may be killed, or another one
//! may take over, before the file system is itself again.

use super::chain::Chain;
use super::kinds::Kind;
use super::load::{Phase, Stage};
use super::place::{Ground, mount_of};
use super::second_disk::SecondClients;
use super::served::{Left, Served};
use super::story::{Fault, Outcome, Wrong};
use super::takeover;
use crate::clock;
use crate::mounts::Frozen;
use mica_units::Rng;
use std::time::Duration;

/// How long another disk may take to answer.
const LIMIT: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_micros(500);
/// Answers that show that another disk goes on.
const PROGRESS: u64 = 8;

/// What happens to the server meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Nothing,
    Killed,
    TakenOver,
}

/// Whether a disk of the chain's server is on a file system that can be frozen.
pub(super) fn is_possible(chain: &Chain<'_>) -> bool {
    let has_ext4 = chain.world.places.grounds().contains(&Ground::Ext4);
    has_ext4 && (chain.world.ground == Ground::Ext4 || chain.second.is_some())
}

/// Freezes it.
pub(super) fn freeze(
    chain: &mut Chain<'_>,
    rng: &mut Rng,
    stage: &Stage,
    others: Option<&SecondClients>,
    mut served: Served,
) -> Outcome<Left> {
    let world = &chain.world;
    let mut fates = vec![Fate::Nothing, Fate::Nothing];
    if world.kinds.has(Kind::Kill) {
        fates.extend([Fate::Killed, Fate::Killed]);
    }
    if world.kinds.has(Kind::Takeover) && !served.manner.is_sick() {
        fates.push(Fate::TakenOver);
    }
    let fate = rng.choose(&fates);
    let [before, after] = [rng.below(200_000), rng.below(80_000)].map(Duration::from_micros);
    let is_short = world.does(rng, Kind::Threads, 15) && world.places.limits_threads();
    let more = is_short.then(|| rng.below(3));
    chain.tell(format_args!("  frozen; {more:?} more threads; after {before:?}: {fate:?}"));
    let images = chain.world.places.images(Ground::Ext4);
    let frozen = Frozen::new(mount_of(&images))?;
    chain.world.counts.frozen.add();
    // Where there are no threads, a request that waits may hold up all others.
    let limit =
        more.map(|more| chain.world.places.limit_threads(served.pid(), more)).transpose()?;
    let is_chain = chain.world.ground == Ground::Ext4;
    let other = if is_chain { others.map(|others| &others.stage) } else { Some(stage) };
    let other = other.filter(|_| limit.is_none());
    for pause in [Duration::ZERO, before] {
        // Requests to what is frozen add up meanwhile.
        clock::sleep(pause);
        other.map_or(Ok(()), |other| is_served_on(other, &served))?;
    }
    if limit.is_none() {
        served.status(chain)?;
    }
    match fate {
        Fate::Nothing => {
            drop(frozen);
            Ok(Left::Serving(served))
        }
        Fate::Killed => {
            stage.enter(Phase::Ending);
            served.send_kill();
            clock::sleep(after);
            drop(frozen);
            served.kill()?;
            served.was_killed(chain)?;
            chain.world.counts.kills.add();
            Ok(Left::Killed)
        }
        Fate::TakenOver => takeover::go(chain, stage, served, || {
            clock::sleep(after);
            drop(frozen);
        }),
    }
}

/// Waits until clients of a disk have answers to what they ask from now on, or ask for no more.
fn is_served_on(stage: &Stage, served: &Served) -> Outcome {
    let before = stage.board().requests_sent();
    let went = clock::poll(LIMIT, PAUSE, || {
        let board = stage.board();
        (board.is_idle() || board.requests_done() >= before + PROGRESS).then_some(())
    });
    went.ok_or_else(|| {
        let what = "a disk waits for another one, whose file system is frozen";
        Fault::new(Wrong::Hang, format!("{what}: {}", served.log()))
    })
}

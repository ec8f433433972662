//! The file system of one disk takes no writes for a while (`fsfreeze`), as before a snapshot of
//! the storage beneath. Requests to that disk may wait; those to another disk of the same server
//! are answered meanwhile, and so is `mica ctl status`. The server may be killed, or another one
//! may take over, before the file system is itself again.

use super::beside::Company;
use super::chain::Chain;
use super::kinds::Kind;
use super::load::{Phase, Stage};
use super::place::{Ground, mount_of};
use super::served::{Left, Served};
use super::story::{Fault, Outcome, Wrong};
use super::takeover;
use super::world::text;
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
    has_ext4 && (chain.world.ground == Ground::Ext4 || chain.beside.is_some())
}

/// Freezes it.
pub(super) fn freeze(
    chain: &mut Chain<'_>,
    rng: &mut Rng,
    stage: &Stage,
    company: Option<&Company>,
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
    let more = world.does(rng, Kind::Threads, 15).then(|| rng.below(3));
    chain.tell(format_args!("  frozen; {more:?} more threads; after {before:?}: {fate:?}"));
    let images = chain.world.places.images(Ground::Ext4);
    let frozen = Frozen::new(mount_of(&images))?;
    chain.world.counts.frozen.add();
    // Where there are no threads, a request that waits may hold up all others.
    let limit =
        more.map(|more| chain.world.places.limit_threads(served.pid(), more)).transpose()?;
    if limit.is_none() {
        let is_chain = chain.world.ground == Ground::Ext4;
        if let Some(other) = if is_chain { company.map(|other| &other.stage) } else { Some(stage) }
        {
            goes_on(other, &served)?;
        }
        answers(chain)?;
    }
    clock::sleep(before);
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

/// Waits until clients of a disk have answers, or none of them waits for any.
fn goes_on(stage: &Stage, served: &Served) -> Outcome {
    let before = stage.board().requests_done();
    let went = clock::poll(LIMIT, PAUSE, || {
        let board = stage.board();
        (board.is_idle() || board.requests_done() >= before + PROGRESS).then_some(())
    });
    went.ok_or_else(|| {
        let what = "a disk waits for another one, whose file system is frozen";
        Fault::new(Wrong::Hang, format!("{what}: {}", served.log()))
    })
}

/// The server says how it is.
fn answers(chain: &Chain<'_>) -> Outcome {
    let control = chain.world.run.join("control");
    let args = ["ctl", "--control", text(&control)?, "status"];
    let start = clock::now();
    let said = chain.world.mica(&args)?;
    match said.status.success() && start.elapsed() < LIMIT {
        true => Ok(()),
        false => Err(Fault::new(Wrong::Failed, said.to_string())),
    }
}

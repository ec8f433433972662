//! A server takes over from another one under its clients; either may be killed over it.

use super::chain::Chain;
use super::load::{Phase, Stage};
use super::loss::Cause;
use super::served::{Left, Served};
use super::story::{Fault, Outcome, Wrong};
use crate::clock;
use mica_units::Rng;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(40);
const PAUSE: Duration = Duration::from_micros(500);
/// Requests that show that clients go on.
const PROGRESS: u64 = 4;

/// A takeover that has to succeed; `after_start` is done when the new server has started.
pub(super) fn go(
    chain: &mut Chain<'_>,
    stage: &Stage,
    mut old: Served,
    after_start: impl FnOnce(),
) -> Outcome<Left> {
    stage.enter(Phase::Moving);
    let manner = old.manner.clone();
    let mut new = Served::begin(chain, &manner, &["--takeover"])?;
    after_start();
    let ended = clock::poll(LIMIT, PAUSE, || {
        let states = (old.is_running(), new.is_running());
        (states != (true, true)).then_some(states)
    });
    let failed = |wrong, old: &Served, new: &Served| {
        Err(Fault::new(wrong, format!("old: {}\nnew: {}", old.log(), new.log())))
    };
    match ended {
        None => return failed(Wrong::Hang, &old, &new),
        Some((_, false)) => return failed(Wrong::Takeover, &old, &new),
        Some(_) => {}
    }
    let code = old.wait()?;
    if code != Some(0) || !new.wait_until_it_serves()? {
        return failed(Wrong::Takeover, &old, &new);
    }
    old.look_for_panic()?;
    chain.world.counts.takeovers.add();
    Ok(Left::Serving(new))
}

/// Which process is killed in a takeover.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Old,
    New,
    Both,
}

/// A takeover in which a server is killed.
pub(super) fn go_wrong(
    chain: &mut Chain<'_>,
    rng: &mut Rng,
    stage: &Stage,
    mut old: Served,
) -> Outcome<Left> {
    // Where a kill may lose what was acknowledged, clients cannot go on with what they know.
    let weakness = old.weakness(chain);
    let victims = [Victim::New, Victim::Both, Victim::Old];
    let victim = rng.choose(if weakness.is_some() { &victims[..2] } else { &victims });
    stage.enter(Phase::Moving);
    let manner = old.manner.clone();
    let mut new = Served::begin(chain, &manner, &["--takeover"])?;
    let pause = Duration::from_micros(rng.below(50_000));
    chain.tell(format_args!("  kills {victim:?} after {pause:?}"));
    clock::sleep(pause);
    chain.world.counts.takeover_kills.add();
    let lost_its_log = old.lost_its_log() || new.lost_its_log();
    chain.state.leaks = None;
    let survivor = match victim {
        Victim::Both => {
            stage.enter(Phase::Ending);
            old.kill()?;
            new.kill()?;
            None
        }
        Victim::New => {
            new.kill()?;
            goes_on(stage, old)?
        }
        Victim::Old => {
            old.kill()?;
            goes_on(stage, new)?
        }
    };
    match survivor {
        Some(mut served) => {
            served.is_shaken = true;
            Ok(Left::Serving(served))
        }
        None => {
            stage.enter(Phase::Ending);
            chain.state.was_killed(weakness);
            if lost_its_log && chain.world.log_limit.is_some() {
                chain.state.loss.add(Cause::TinyLog);
            }
            // Where the image names a log it is told by the next one, or there is one.
            if lost_its_log && !manner.trace(chain)?.is_named() {
                chain.state.loss.was_told();
            }
            Ok(Left::Killed)
        }
    }
}

/// Waits until clients go on with `served`, or it has ended, as it may: who was killed had the
/// sockets, or was needed for them.
fn goes_on(stage: &Stage, mut served: Served) -> Outcome<Option<Served>> {
    let before = stage.board().requests_done();
    let state = clock::poll(LIMIT, PAUSE, || {
        if !served.is_running() {
            return Some(false);
        }
        let board = stage.board();
        let (is_idle, done) = (board.is_idle(), board.requests_done());
        drop(board);
        // Answers of who was killed may still arrive: only a new connection shows who serves.
        ((done >= before + PROGRESS || is_idle) && served.is_well()).then_some(true)
    });
    served.look_for_panic()?;
    match state {
        None => Err(Fault::new(Wrong::Hang, served.log())),
        Some(true) => Ok(Some(served)),
        Some(false) => Ok(None),
    }
}

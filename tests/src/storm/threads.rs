//! The server gets no more threads for a while, as in a container with a limit: what it would have
//! given to a thread is done all the same.

use super::chain::Chain;
use super::kinds::Kind;
use super::load::Stage;
use super::served::{Left, Served};
use super::story::Outcome;
use super::takeover;
use mica_units::Rng;

/// Refuses threads to `served` for some requests, or for as long as it lives.
pub(super) fn refuse(
    chain: &mut Chain<'_>,
    rng: &mut Rng,
    stage: &Stage,
    served: Served,
    moment: u64,
) -> Outcome<Left> {
    let more = rng.below(3);
    chain.tell(format_args!("  it gets {more} more threads"));
    let places = chain.world.places;
    let limit = places.limit_threads(served.pid(), more)?;
    chain.world.counts.threadless.add();
    stage.wait_for(moment + 5 + rng.below(60));
    let is_killed = chain.world.does(rng, Kind::Kill, 40);
    let is_sick = served.manner.is_sick();
    let is_taken_over = chain.world.does(rng, Kind::Takeover, 30) && !is_sick;
    let left = match (is_killed, is_taken_over) {
        (true, _) => served.kill_under_load(chain, rng, stage),
        (_, true) => takeover::go(chain, stage, served, || {}),
        _ => Ok(Left::Serving(served)),
    };
    drop(limit);
    left
}

//! What a seed is about. Most are about a chain; the others have worlds of their own.

use super::kinds::{Kind, Kinds};
use super::place::Places;
use super::story::Outcome;
use super::world::World;
use super::{chain, deep, life, lineage, power_cut, rest, shared, verbs, volumes};
use anyhow::{Result, ensure};
use mica_units::Rng;

/// How many seeds of a hundred are about what, if a run has all of it.
const SHARES: [(Kind, usize); 4] =
    [(Kind::Chain, 76), (Kind::Shared, 14), (Kind::PowerCut, 4), (Kind::Deep, 6)];
/// And how many of all are about volumes: what the others are about does not depend on that.
const VOLUMES_PERCENT: u64 = 12;
/// And how many are about layers that come and go.
const LINEAGES_PERCENT: u64 = 11;
/// And how many are about verbs.
const VERBS_PERCENT: u64 = 11;
/// And beneath how many of those about volumes the power is cut.
const VOLUMES_CUT_PERCENT: u64 = 15;
/// How often a chain is served.
const LIVES: [u64; 5] = [2, 3, 3, 4, 6];
/// The random numbers of a seed that only this choice uses.
const PART: u64 = 1 << 32;

/// What the seed is about.
fn of(seed: u64, kinds: &Kinds) -> Kind {
    let has_others = SHARES.iter().any(|(kind, _)| kinds.has(*kind));
    let (has_lineages, has_verbs) = (kinds.has(Kind::Lineage), kinds.has(Kind::Verbs));
    let is_lone = !has_others && !has_lineages && !has_verbs;
    let is_volume = Rng::for_part(seed, PART + 1).percent(VOLUMES_PERCENT) || is_lone;
    if is_volume && kinds.has(Kind::Volume) {
        return Kind::Volume;
    }
    let is_lone = !has_others && !has_verbs;
    let is_lineage = Rng::for_part(seed, PART + 3).percent(LINEAGES_PERCENT) || is_lone;
    if is_lineage && has_lineages {
        return Kind::Lineage;
    }
    let is_of_verbs = Rng::for_part(seed, PART + 4).percent(VERBS_PERCENT) || !has_others;
    if is_of_verbs && has_verbs {
        return Kind::Verbs;
    }
    let all = SHARES.into_iter().filter(|(kind, _)| kinds.has(*kind));
    let all: Vec<_> = all.flat_map(|(kind, share)| std::iter::repeat_n(kind, share)).collect();
    if all.is_empty() { Kind::Chain } else { Rng::for_part(seed, PART).choose(&all) }
}

/// Whether this system lets a run with these `kinds` do anything that it is about.
pub(super) fn check(kinds: &Kinds, places: &Places) -> Result<()> {
    let is_possible = |kind: Kind| kind != Kind::PowerCut || places.power_lack().is_none();
    let has_course = SHARES.iter().any(|(kind, _)| kinds.has(*kind) && is_possible(*kind))
        || [Kind::Volume, Kind::Lineage, Kind::Verbs].iter().any(|kind| kinds.has(*kind));
    let why = places.power_lack().unwrap_or("all courses are left out");
    ensure!(has_course, "nothing to do: {why}");
    Ok(())
}

/// Lets the storm go over it.
pub(super) fn run(world: World<'_>, rng: &mut Rng) -> Outcome {
    let course = of(world.seed, world.kinds);
    world.story.tell(format_args!("seed {}, on {:?}: {}", world.seed, world.ground, course.name()));
    match course {
        Kind::PowerCut if world.places.power_lack().is_none() => power_cut::storm(&world, rng),
        Kind::Deep => deep::storm(&world, rng),
        Kind::Shared => shared::storm(world, rng),
        Kind::Lineage => lineage::storm(world, rng),
        Kind::Verbs => verbs::storm(world, rng),
        Kind::Volume if cuts_power(&world) => power_cut::storm_of_volume(&world, rng),
        Kind::Volume => volumes::storm(&world, rng),
        _ => of_chain(world, rng),
    }
}

/// Whether a seed about volumes is about one beneath which the power is cut.
fn cuts_power(world: &World<'_>) -> bool {
    let is_chosen = Rng::for_part(world.seed, PART + 2).percent(VOLUMES_CUT_PERCENT);
    is_chosen && world.kinds.has(Kind::CutVolume) && world.places.power_lack().is_none()
}

fn of_chain(world: World<'_>, rng: &mut Rng) -> Outcome {
    let seed = world.seed;
    let mut chain = chain::build(world, rng)?;
    for number in 0..rng.choose(&LIVES) {
        chain.tell(format_args!("life {number}"));
        // A step's dice do not depend on what came of the steps before.
        let mut dice = Rng::for_part(seed, 2 * number + 1);
        life::live(&mut chain, &mut dice)?;
        let mut dice = Rng::for_part(seed, 2 * number + 2);
        rest::rest(&mut chain, &mut dice)?;
    }
    chain.tell("the end");
    life::live_in_peace(&mut chain, rng)?;
    if let Some(second) = &chain.second {
        second.look(&chain.world)?;
    }
    rest::look(&mut chain, rng, "the end")
}

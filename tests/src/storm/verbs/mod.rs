//! Verbs on chains that nobody serves, of all shapes that images have, each of which is killed at
//! some instant, or comes to its end; QEMU writes in between.
//!
//! ```text
//! build ─▶ a few times: QEMU writes ─▶ a verb, perhaps killed ─▶ look ─▶ the verb again ─▶ look
//! ```
//!
//! Judged, after a kill: QEMU's check finds no corruption in any layer, the disk is what it was or
//! what the verb makes of it, and so are its layers and its snapshots; what a verb makes elsewhere
//! is not there, or complete. After the end: the disk is what the verb makes of it, and no layer
//! has more leaks than before. Always: what has changed since a dirty bitmap was made is in it.

mod bitmaps;
mod choice;
mod deed;
mod killed;
mod look;
mod target;

use super::chain::{self, Chain};
use super::keys;
use super::kinds::Kind;
use super::layers;
use super::state::Layer;
use super::story::Outcome;
use super::world::World;
use bitmaps::{Bitmaps, By};
use deed::Deed;
use killed::Ending;
use look::{After, Leaks};
use mica_units::Rng;
use std::fs;

/// How many verbs there are in a chain's life.
const VERBS: [u64; 4] = [4, 8, 12, 16];
/// Layers from which on no more are added.
const LAYERS_MAX: usize = 5;

/// What was seen of the layers.
#[derive(Default, Debug)]
struct Seen {
    leaks: Leaks,
    bitmaps: Bitmaps,
}

impl Seen {
    /// QEMU finds nothing wrong in any of them.
    fn look(&mut self, chain: &mut Chain<'_>, (after, by): (After, By), what: &str) -> Outcome {
        self.leaks.look(chain, after, what)?;
        self.bitmaps.look(chain, by, what)
    }

    /// A verb may have changed what bitmaps say, or has.
    fn mark(&mut self, chain: &Chain<'_>, deed: &Deed, is_done: bool) {
        let marking = deed.marking.iter();
        marking.for_each(|marking| self.bitmaps.mark(&chain.active().name, marking, is_done));
    }
}

/// Lets the storm go over one.
pub(super) fn storm(world: World<'_>, rng: &mut Rng) -> Outcome {
    world.counts.at_rest.add();
    let seed = world.seed;
    if world.does(rng, Kind::Encrypted, 30) {
        keys::allow(&world.images)?;
    }
    let mut chain = chain::build_at_rest(world, rng)?;
    let mut seen = Seen::default();
    for number in 0..rng.choose(&VERBS) {
        // A step's dice do not depend on what came of the steps before.
        let rng = &mut Rng::for_part(seed, number + 1);
        chain.tell(format_args!("step {number}"));
        prepare(&mut chain, rng, &mut seen)?;
        seen.look(&mut chain, (After::Anything, By::Recorded), "before a verb")?;
        let deed = choice::choose(&mut chain, rng)?;
        let before = chain.state.layers.clone();
        perform(&mut chain, rng, &deed, &mut seen)?;
        remove_gone(&chain, &before)?;
    }
    Ok(())
}

/// What QEMU does before the next verb.
fn prepare(chain: &mut Chain<'_>, rng: &mut Rng, seen: &mut Seen) -> Outcome {
    let is_encrypted = keys::secret(&chain.world.images).is_some();
    if chain.state.layers.len() < LAYERS_MAX && chain.world.does(rng, Kind::Overlay, 30) {
        layers::add_overlay(chain, rng)?;
    }
    if chain.world.does(rng, Kind::Snapshot, 20) && !is_encrypted {
        layers::snapshot(chain, rng)?;
        seen.bitmaps.look(chain, By::Silent, "what QEMU did to snapshots")?;
    }
    if chain.world.does(rng, Kind::Write, 70) {
        write(chain, rng)?;
    }
    Ok(())
}

fn write(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    let (name, aim, count) = (chain.active().name.clone(), chain.aim(), 1 + rng.below(6));
    chain.world.counts.foreign.add();
    chain.qemu_writes(rng, &name, &aim, count)
}

/// Removes the files of layers that were there `before`.
fn remove_gone(chain: &Chain<'_>, before: &[Layer]) -> Outcome {
    let is_there = |layer: &Layer| chain.state.layers.iter().any(|now| now.name == layer.name);
    let gone: Vec<_> = before.iter().filter(|layer| !is_there(layer)).cloned().collect();
    for file in layers::files(&gone) {
        // A copy of a layer has no data file of its own.
        let _ = fs::remove_file(chain.path(&file));
    }
    Ok(())
}

/// Carries it out, and again if it was killed.
fn perform(chain: &mut Chain<'_>, rng: &mut Rng, deed: &Deed, seen: &mut Seen) -> Outcome {
    let is_killed = chain.world.does(rng, Kind::Kill, 65);
    let ending = killed::run(chain, rng, deed, is_killed)?;
    let what = format!("{:?}, {ending:?}", deed.args);
    chain.tell(format_args!("    {ending:?}"));
    let counts = chain.world.counts;
    match ending {
        Ending::Done => {
            counts.verbs_at_rest.add();
            deed.judge_done(chain, &what)?;
            seen.mark(chain, deed, true);
            return seen.look(chain, (deed.after_end(), deed.by()), &what);
        }
        Ending::Refused => {
            counts.verbs_at_rest_refused.add();
            deed.judge_refused(chain, &what)?;
            return seen.look(chain, (After::End, By::Recorded), &what);
        }
        Ending::Killed => counts.verbs_at_rest_killed.add(),
    }
    seen.leaks.look(chain, deed.after_kill(), &what)?;
    if deed.judge_killed(chain, &what)? {
        counts.verbs_at_rest_late.add();
    }
    seen.mark(chain, deed, false);
    seen.bitmaps.look(chain, By::Broken, &what)?;
    if chain.world.does(rng, Kind::Write, 25) {
        write(chain, rng)?;
        seen.look(chain, (After::Anything, By::Broken), "what QEMU wrote after a kill")?;
        look::decide(chain)?;
    }
    let ending = killed::run(chain, rng, deed, false)?;
    let what = format!("{:?} again, {ending:?}", deed.args);
    chain.tell(format_args!("    again: {ending:?}"));
    if ending == Ending::Refused && !deed.was_done_says(chain)? {
        deed.judge_refused(chain, &what)?;
        return seen.look(chain, (After::Kill, By::Broken), &what);
    }
    counts.verbs_at_rest.add();
    // What the killed one had made is not made again.
    let deed = if ending == Ending::Done { &deed.again(chain) } else { deed };
    deed.judge_done(chain, &what)?;
    seen.mark(chain, deed, true);
    seen.look(chain, (deed.after_end(), deed.by()), &what)
}

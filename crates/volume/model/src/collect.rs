//! A collector: lists extents, reads heads, deletes what nothing names. It takes part in nothing
//! else, and any number of them may run.

use crate::rules::Rule;
use crate::store::{Body, Kind, NAMES, Place, Put, Sequence, Volume, Writer};
use crate::world::{Collector, CollectorPhase, Collects, Delivery, Pass, Setup, World};

/// The next step of collector `id` that is not a deletion.
pub(crate) fn step(setup: &Setup, world: &mut World, id: usize, delivery: Delivery) -> Option<()> {
    let phase = world.collectors[id].phase.clone();
    let next = match phase {
        CollectorPhase::Idle => begin(setup, world, id)?,
        CollectorPhase::ReadHeads { listed, pass, before } => {
            let pass = read_head(setup, world, pass);
            after_read(setup, world, id, listed, pass, before)
        }
        CollectorPhase::ListLate { pass } => sweep(setup, world, id, listed(setup, world), &pass),
        CollectorPhase::PutBoundary(below) => match world.send(Put::Boundary(below), delivery) {
            None => return Some(()),
            Some(_) => CollectorPhase::SweepClaims(below),
        },
        CollectorPhase::SweepClaims(below) => {
            // It may begin again when it is done.
            let is_left = world.store.claims.range(..below).next().is_some();
            if is_left || collector(world, id).rounds == 0 {
                return None;
            }
            CollectorPhase::Idle
        }
        CollectorPhase::Sweep { .. } => return None,
    };
    world.collectors[id].phase = next;
    Some(())
}

/// What collector `id` may delete next.
pub(crate) fn deletions(world: &World, id: usize, mut each: impl FnMut(Deletion)) {
    match &world.collectors[id].phase {
        CollectorPhase::Sweep { dead, heads } => {
            for bit in (0..u64::BITS).filter(|bit| dead >> bit & 1 == 1) {
                each(Deletion::Extent(bit));
            }
            heads.iter().for_each(|&(volume, n)| each(Deletion::Head(volume, n)));
        }
        CollectorPhase::SweepClaims(below) => {
            world
                .store
                .claims
                .range(..below)
                .for_each(|(&writer, _)| each(Deletion::Claim(writer)));
            let lower = world.store.boundaries.range(..below);
            lower.for_each(|&writer| each(Deletion::Boundary(writer)));
        }
        _ => {}
    }
}

/// A delete, which may happen long after it was decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Deletion {
    Extent(u32),
    Head(Volume, u8),
    Claim(Writer),
    Boundary(Writer),
}

/// Deletes something.
pub(crate) fn delete(world: &mut World, id: usize, deletion: Deletion) {
    let store = &mut world.store;
    let collector = &mut world.collectors[id];
    match deletion {
        Deletion::Extent(bit) => {
            store.extents.retain(|&(writer, sequence), _| self::bit(writer, sequence) != bit);
            collector.has_freed = true;
        }
        Deletion::Head(volume, n) => {
            store.heads.remove(&(volume, n));
            store.strays.remove(&(volume, n));
        }
        Deletion::Claim(writer) => drop(store.claims.remove(&writer)),
        Deletion::Boundary(writer) => drop(store.boundaries.remove(&writer)),
    }
    if let CollectorPhase::Sweep { dead, heads } = &mut collector.phase {
        match deletion {
            Deletion::Extent(bit) => *dead &= !(1 << bit),
            Deletion::Head(volume, n) => heads.retain(|head| *head != (volume, n)),
            Deletion::Claim(_) | Deletion::Boundary(_) => {}
        }
        if *dead == 0 && heads.is_empty() {
            collector.phase = CollectorPhase::Idle;
        }
    }
}

fn begin(setup: &Setup, world: &mut World, id: usize) -> Option<CollectorPhase> {
    collector(world, id).rounds = collector(world, id).rounds.checked_sub(1)?;
    if setup.collectors[id].collects == Collects::Claims {
        let (last, _) = world.store.claims.last_key_value()?;
        let below = last + 1;
        let is_first = setup.rules.hold(Rule::BoundaryFirst);
        let boundary = CollectorPhase::PutBoundary(below);
        return Some(if is_first { boundary } else { CollectorPhase::SweepClaims(below) });
    }
    let is_early = setup.rules.hold(Rule::ListBeforeHeads);
    let listed = if is_early { listed(setup, world) } else { 0 };
    Some(CollectorPhase::ReadHeads { listed, pass: Pass::default(), before: None })
}

fn collector(world: &mut World, id: usize) -> &mut Collector {
    &mut world.collectors[id]
}

/// Extents that are there. A fence is told from an extent by its length.
fn listed(setup: &Setup, world: &World) -> u64 {
    let is_listed = |body: &Body| *body != Body::Fence || !setup.rules.hold(Rule::FencesStay);
    let extents = world.store.extents.iter().filter(|(_, body)| is_listed(body));
    extents.fold(0, |bits, (&(writer, sequence), _)| bits | 1 << bit(writer, sequence))
}

fn bit(writer: Writer, sequence: Sequence) -> u32 {
    assert!(writer < NAMES && sequence < NAMES, "the model is bounded");
    u32::from(writer * NAMES + sequence)
}

/// Reads the head of the next volume.
fn read_head(setup: &Setup, world: &World, mut pass: Pass) -> Pass {
    let at = u8::try_from(pass.numbers.len()).expect("few volumes");
    let volume = setup.read_at(at);
    let found = world.store.highest(volume);
    pass.numbers.push(found.map_or(0, |(n, _)| n));
    pass.identities.push(found.map_or(0, |(_, head)| head.identity + 1));
    let Some((_, head)) = found.filter(|(_, head)| head.kind != Kind::Deleted) else {
        return pass;
    };
    let is_from_head = setup.rules.hold(Rule::MarkFromHeads);
    let (state, walked) = if is_from_head { (head.state, 0) } else { world.store.walk(&head) };
    let mark = |keep, place: Place| keep | 1 << bit(place.writer, place.sequence);
    pass.keep = state.places().fold(pass.keep, mark);
    if let (Kind::Open { writer, sequence }, true) =
        (head.kind, setup.rules.hold(Rule::AboveHeadStays))
    {
        let above = sequence.max(walked) + 1..NAMES;
        pass.keep = above.fold(pass.keep, |keep, sequence| keep | 1 << bit(writer, sequence));
    }
    pass
}

/// What follows when `pass` has one more head.
fn after_read(
    setup: &Setup,
    world: &World,
    id: usize,
    listed: u64,
    pass: Pass,
    before: Option<Pass>,
) -> CollectorPhase {
    if pass.numbers.len() < usize::from(setup.volumes) {
        return CollectorPhase::ReadHeads { listed, pass, before };
    }
    let is_once = setup.volumes == 1 || !setup.rules.hold(Rule::ReadHeadsTwice);
    let pass = match before {
        // What a volume names now, it named then, or has put since.
        Some(before) if before.identities == pass.identities => before,
        _ if is_once => pass,
        _ => {
            let (before, pass) = (Some(pass), Pass::default());
            return CollectorPhase::ReadHeads { listed, pass, before };
        }
    };
    if setup.rules.hold(Rule::ListBeforeHeads) {
        sweep(setup, world, id, listed, &pass)
    } else {
        CollectorPhase::ListLate { pass }
    }
}

/// What is to be deleted after `pass`.
fn sweep(setup: &Setup, world: &World, id: usize, listed: u64, pass: &Pass) -> CollectorPhase {
    let collects = setup.collectors[id].collects;
    let dead = if collects == Collects::Heads { 0 } else { listed & !pass.keep };
    let mut heads = Vec::new();
    if collects != Collects::Extents {
        let stays = setup.rules.hold(Rule::HighestHeadStays);
        for (&(volume, n), head) in &world.store.heads {
            let highest = pass.numbers[usize::from(setup.read_at(volume))];
            if n < highest || n == highest && head.kind == Kind::Deleted && !stays {
                heads.push((volume, n));
            }
        }
    }
    if dead == 0 && heads.is_empty() {
        return CollectorPhase::Idle;
    }
    CollectorPhase::Sweep { dead, heads }
}

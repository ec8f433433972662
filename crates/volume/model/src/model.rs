//! The model as the checker sees it: states, actions, properties.

use crate::collect::{self, Deletion};
use crate::open;
use crate::properties as p;
use crate::rules::Rule;
use crate::store::HostId;
use crate::world::{CollectorPhase, Delivery, Phase, Setup, World};
use crate::write;
use stateright::{Model, Property};

/// What must be possible in a scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Possible {
    TakeOver,
    HandOver,
    LostRace,
    OpenAfterClose,
    Freed,
    Clone,
    NoClone,
    Reuse,
    Replay,
    ClaimAboveBoundary,
}

/// A scenario: a bounded world, and what must be possible in it.
#[derive(Clone, Debug)]
pub(crate) struct Protocol {
    pub(crate) setup: Setup,
    pub(crate) possible: Vec<Possible>,
}

/// One step of one process, or the arrival of something that no process waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    Step(HostId, Delivery),
    EarlyExtent(HostId),
    Restart(HostId),
    Build(HostId),
    PutExtent(HostId, u8, Delivery),
    Checkpoint(HostId),
    PutHead(HostId, Delivery),
    Close(HostId),
    Collect(usize, Delivery),
    Delete(usize, Deletion),
    Arrive(usize),
}

impl Model for Protocol {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.setup)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        for (id, host) in (0..).zip(&world.hosts) {
            self.host_actions(world, id, &host.phase, actions);
        }
        for (id, collector) in world.collectors.iter().enumerate() {
            let is_put = matches!(collector.phase, CollectorPhase::PutBoundary(_));
            let deliveries = if is_put { world.deliveries() } else { &[Delivery::Answered] };
            let steps = deliveries.iter().map(|&delivery| Action::Collect(id, delivery));
            actions.extend(steps);
            collect::deletions(world, id, |it| actions.push(Action::Delete(id, it)));
        }
        let mut before = None;
        for (at, put) in world.late.iter().enumerate() {
            if before.replace(put) != Some(put) {
                actions.push(Action::Arrive(at));
            }
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let setup = &self.setup;
        let mut next = world.clone();
        let world = &mut next;
        match action {
            Action::Step(id, delivery) => open::step(setup, world, id, delivery)?,
            Action::EarlyExtent(id) => open::early_extent(setup, world, id)?,
            Action::Restart(id) => open::restart(setup, world, id)?,
            Action::Build(id) => write::build(setup, world, id)?,
            Action::PutExtent(id, at, delivery) => {
                write::put_extent(setup, world, id, at, delivery)?;
            }
            Action::Checkpoint(id) => write::checkpoint(setup, world, id)?,
            Action::PutHead(id, delivery) => write::put_head(setup, world, id, delivery)?,
            Action::Close(id) => write::close(setup, world, id)?,
            Action::Collect(id, delivery) => collect::step(setup, world, id, delivery)?,
            Action::Delete(id, deletion) => collect::delete(world, id, deletion),
            Action::Arrive(at) => {
                let put = world.late.remove(at);
                world.store.put(put);
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = always();
        properties.extend(self.possible.iter().map(|&possible| sometimes(possible)));
        properties
    }
}

impl Protocol {
    fn host_actions(&self, world: &World, id: HostId, phase: &Phase, actions: &mut Vec<Action>) {
        let deliveries = world.deliveries();
        match phase {
            Phase::Over(_) => {}
            Phase::Waiting => actions.push(Action::Restart(id)),
            Phase::Active(session) => {
                actions.extend([Action::Build(id), Action::Checkpoint(id), Action::Close(id)]);
                for &delivery in deliveries {
                    let under_way = (0..).zip(&session.recent).filter(|(_, (.., done))| !done);
                    let puts = under_way.map(|(at, _)| Action::PutExtent(id, at, delivery));
                    actions.extend(puts);
                    actions.extend(session.head_put.map(|_| Action::PutHead(id, delivery)));
                }
            }
            phase => {
                let deliveries =
                    if open::is_put(phase) { deliveries } else { &[Delivery::Answered] };
                actions.extend(deliveries.iter().map(|&delivery| Action::Step(id, delivery)));
                if !self.setup.rules.hold(Rule::HeadBeforeExtents) {
                    actions.push(Action::EarlyExtent(id));
                }
            }
        }
    }
}

/// Names of the properties that must always hold.
pub(crate) mod name {
    pub(crate) const KEPT: &str = "what was acknowledged is kept";
    pub(crate) const PREFIX: &str = "states are prefixes";
    pub(crate) const COUNTS: &str = "nothing counts after a head";
    pub(crate) const REACHABLE: &str = "nothing reachable is deleted";
    pub(crate) const FOREIGN: &str = "nothing foreign is read";
    pub(crate) const NUMBERS: &str = "numbers are used once";
    pub(crate) const LEARNS: &str = "a fenced writer learns it";
    pub(crate) const LOG: &str = "what the log had is kept";
}

fn always() -> Vec<Property<Protocol>> {
    vec![
        Property::always(name::KEPT, |m: &Protocol, w| {
            p::what_was_acknowledged_is_kept(&m.setup, w)
        }),
        Property::always(name::PREFIX, |m: &Protocol, w| p::states_are_prefixes(&m.setup, w)),
        Property::always(name::COUNTS, |m: &Protocol, w| {
            p::nothing_counts_after_a_head(&m.setup, w)
        }),
        Property::always(name::REACHABLE, |m: &Protocol, w| {
            p::nothing_reachable_is_deleted(&m.setup, w)
        }),
        Property::always(name::FOREIGN, |m: &Protocol, w| p::nothing_foreign_is_read(&m.setup, w)),
        Property::always(name::NUMBERS, |m: &Protocol, w| p::numbers_are_used_once(&m.setup, w)),
        Property::always(name::LEARNS, |m: &Protocol, w| p::a_fenced_writer_learns_it(&m.setup, w)),
        Property::always(name::LOG, |m: &Protocol, w| p::what_the_log_had_is_kept(&m.setup, w)),
    ]
}

fn sometimes(possible: Possible) -> Property<Protocol> {
    let (name, condition): (_, fn(&Protocol, &World) -> bool) = match possible {
        Possible::TakeOver => ("a take-over succeeds", |m, w| p::a_take_over_succeeds(&m.setup, w)),
        Possible::HandOver => ("a hand-over succeeds", |m, w| p::a_hand_over_succeeds(&m.setup, w)),
        Possible::OpenAfterClose => {
            ("what was closed is opened", |m, w| p::what_was_closed_is_opened(&m.setup, w))
        }
        Possible::LostRace => ("a race has a loser", |m, w| p::a_race_has_a_loser(&m.setup, w)),
        Possible::Freed => ("something is freed", |m, w| p::something_is_freed(&m.setup, w)),
        Possible::Clone => ("a clone succeeds", |m, w| p::a_clone_succeeds(&m.setup, w)),
        Possible::NoClone => ("a clone is refused", |m, w| p::a_clone_is_refused(&m.setup, w)),
        Possible::Reuse => ("a name is used again", |m, w| p::a_name_is_used_again(&m.setup, w)),
        Possible::Replay => ("a log is replayed", |m, w| p::a_log_is_replayed(&m.setup, w)),
        Possible::ClaimAboveBoundary => ("a number is claimed above a boundary", |m, w| {
            p::a_number_is_claimed_above_a_boundary(&m.setup, w)
        }),
    };
    Property::sometimes(name, condition)
}

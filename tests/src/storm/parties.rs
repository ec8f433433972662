//! The clients of several disks of one server, each choosing its disk by name.

use super::disk::{Disk, index};
use crate::storm::load::{Load, Mood, Phase, Stage};
use crate::storm::model::Model;
use crate::storm::story::{Counts, Outcome};
use mica_units::Rng;
use std::path::PathBuf;

/// The clients of one disk, for one round.
#[derive(Debug)]
pub(super) struct Party {
    /// Its place among the disks.
    pub(super) disk: usize,
    pub(super) stage: Stage,
    socket: PathBuf,
    load: Load,
}

impl Party {
    /// Clients for disk number `disk`; what is known of it is theirs until the end of the round.
    pub(super) fn begin(disk: usize, of: &mut Disk, rng: &mut Rng) -> Self {
        let load = Load {
            clients: 1 + rng.below(2),
            requests: 10 + rng.below(90),
            seed: rng.next_u64(),
            aim: of.aim(),
            mood: Mood::random(rng),
            export: of.name.clone(),
        };
        let model = std::mem::replace(&mut of.model, Model::new(0, 0));
        let stage = Stage::new(model, of.stamper.clone());
        Self { disk, stage, socket: of.sockets[index(rng, of.sockets.len())].clone(), load }
    }

    /// How many requests they send.
    pub(super) fn requests(&self) -> u64 {
        self.load.clients * self.load.requests
    }
}

/// Lets all of them work while `meanwhile` does something to their server.
pub(super) fn run<T>(
    parties: &[Party],
    counts: &Counts,
    meanwhile: &mut dyn FnMut() -> Outcome<T>,
) -> Outcome<T> {
    let Some((first, rest)) = parties.split_first() else { return meanwhile() };
    first.stage.run(&first.socket, &first.load, counts, || run(rest, counts, meanwhile))
}

/// All of them have to expect this from now on.
pub(super) fn enter(parties: &[Party], phase: Phase) {
    parties.iter().for_each(|party| party.stage.enter(phase));
}

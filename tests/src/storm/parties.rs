//! The clients of several disks of one server, each choosing its disk by name.

use super::aim::Aim;
use super::load::{Load, Mood, Phase, Stage};
use super::model::Model;
use super::stamp::Stamper;
use super::story::{Counts, Outcome};
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

/// A disk, for its clients.
pub(super) struct Of<'a> {
    pub(super) model: &'a mut Model,
    pub(super) stamper: Stamper,
    pub(super) aim: Aim,
    pub(super) name: String,
    pub(super) socket: PathBuf,
}

impl Party {
    /// Clients for disk number `disk`; what is known of it is theirs until the end of the round.
    pub(super) fn begin(disk: usize, of: Of<'_>, rng: &mut Rng) -> Self {
        let Of { model, stamper, aim, name, socket } = of;
        let load = Load {
            clients: 1 + rng.below(2),
            requests: 10 + rng.below(90),
            seed: rng.next_u64(),
            aim,
            mood: Mood::random(rng),
            export: name,
        };
        let model = std::mem::replace(model, Model::new(0, 0));
        Self { disk, stage: Stage::new(model, stamper), socket, load }
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

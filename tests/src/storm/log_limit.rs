//! Logs whose memory is tiny, so that they are compacted, and wrap, all the time: an option of
//! `--inject` that all programs get that open a chain's images.

use super::kinds::Kind;
use super::world::World;
use mica_units::Rng;

/// How many bytes a log has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LogLimit(u64);

impl LogLimit {
    /// For the logs of one chain in four.
    pub(super) fn random(world: &World<'_>, rng: &mut Rng) -> Option<Self> {
        let limit = Self(rng.choose(&[16, 32, 64, 64, 128, 256]) << 10);
        let is_small = world.does(rng, Kind::LogMemory, 25);
        is_small.then(|| {
            world.counts.small_logs.add();
            limit
        })
    }

    /// What a server is told.
    pub(super) fn option(self) -> String {
        format!("redo-memory={}K", self.0 >> 10)
    }

    /// What the name of such a log ends in.
    pub(super) fn name_end(self) -> String {
        format!("-{}", self.0)
    }
}
